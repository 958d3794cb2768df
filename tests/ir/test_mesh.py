"""Mesh text round trips, rank arithmetic against torch's row-major order, and bad texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.ir.mesh import Axis, Mesh, format_quantity, parse_quantity

positive = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)


@given(value=positive, unit=st.sampled_from(["B/s", "s", "FLOP/s"]))
def test_quantities_read_back_exactly(value: float, unit: str) -> None:
    assert parse_quantity(format_quantity(value, unit), unit) == value


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    bandwidth=st.none() | positive,
    latency=st.none() | positive,
)
def test_mesh_text_reads_back(
    sizes: list[int], bandwidth: float | None, latency: float | None
) -> None:
    axes = tuple(Axis(f"axis{i}", size, bandwidth, latency) for i, size in enumerate(sizes))
    mesh = Mesh("H100", axes)
    assert Mesh.parse(str(mesh)) == mesh


def test_a_described_device_reads_back() -> None:
    mesh = Mesh.parse("mychip[400TFLOP/s 64GiB 1.6TB/s]: gpu=4 @100GB/s 5us")
    assert mesh.description is not None
    assert mesh.description.memory == 64 * 2**30
    assert Mesh.parse(str(mesh)) == mesh


def test_ranks_are_numbered_row_major() -> None:
    mesh = Mesh.parse("cpu: a=2, b=3, c=4")
    grid = np.arange(24).reshape(2, 3, 4)
    for rank in range(24):
        position = mesh.coordinate(rank)
        assert grid[position["a"], position["b"], position["c"]] == rank
    by_hand = {tuple(grid[:, j, :].ravel().tolist()) for j in range(3)}
    assert set(mesh.groups(("a", "c"))) == by_hand


def test_unlike_parts_read_back_and_number_ranks_one_after_another() -> None:
    text = "H100: node=2 @5e+10B/s, gpu=8 + mychip[400TFLOP/s 64GiB 1.6TB/s]: gpu=4 + H100: gpu=2"
    mesh = Mesh.parse(text)
    assert Mesh.parse(str(mesh)) == mesh
    assert [part.size for part in mesh.parts] == [16, 4, 2]
    assert mesh.size == 22
    assert [mesh.part_of(rank) for rank in (0, 15, 16, 19, 20, 21)] == [
        (0, 0), (0, 0), (1, 16), (1, 16), (2, 20), (2, 20),
    ]  # fmt: skip
    assert mesh.spans_parts(12, 8)
    assert not mesh.spans_parts(8, 8)
    with pytest.raises(MeshError, match="A100-80: gpu=0"):
        Mesh.parse("H100: gpu=2 + A100-80: gpu=0")
    for refused in (lambda: mesh.part_of(22), lambda: mesh.coordinate(0), lambda: mesh.axis("gpu")):
        with pytest.raises(MeshError):
            refused()


@pytest.mark.parametrize(
    "text",
    ["", "H100", "H100 gpu=4", "H100: gpu=0", "H100: gpu", "H100: gpu=2, gpu=2", "H100: gpu=-1",
     "H100: gpu=2 @0GB/s", "H100: gpu=2 @nanGB/s", "H100: gpu=2 @5", "chip[4 5]: gpu=2",
     "H100: gpu=2 3parsec", "H100: 2gpu=2"],
)  # fmt: skip
def test_bad_mesh_texts_are_named(text: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.parse(text)
    assert text in str(caught.value)
