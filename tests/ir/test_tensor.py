"""Layout notation round trips, and misfits are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError, LayoutError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType

MESH = Mesh.parse("cpu: node=2, gpu=4")


@pytest.mark.parametrize(
    "text",
    ["[]", "[8, 1024@gpu, 2048] +sum(node)", "[64@node@gpu] ", "[8, 16] +sum(gpu) -sum(node)",
     "[7] -sum(node, gpu)"],
)  # fmt: skip
def test_layouts_read_back(text: str) -> None:
    shape, layout = Layout.parse(text)
    assert layout.format(shape) == text.strip()


def test_local_shape_and_bytes() -> None:
    shape, layout = Layout.parse("[8, 64@node@gpu, 3]")
    tensor = TensorType("bf16", shape)
    assert layout.local_shape(shape, MESH) == (8, 8, 3)
    assert layout.local_bytes(tensor, MESH) == tensor.nbytes // 8


@pytest.mark.parametrize("text", ["8, 4", "[8@]", "[x]", "[8@gpu, 8@gpu]", "[8] +max(gpu)"])
def test_bad_layout_texts_are_named(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("[3@gpu]", (3,)), ("[8, 8]", (8,)), ("[8@rack]", (8,)), ("[8@node@gpu]", (7,))],
)
def test_layouts_that_do_not_fit_are_named(text: str, shape: tuple[int, ...]) -> None:
    layout = Layout.parse(text)[1]
    with pytest.raises(AutoparError):
        layout.check(shape, MESH)


@given(st.integers(1, 60), st.permutations(["a", "b", "c"]), st.integers(0, 3))
def test_parts_are_those_of_numpy_one_split_inside_the_other(
    size: int, axes: list[str], depth: int
) -> None:
    mesh = Mesh.parse("cpu: a=2, b=3, c=5")
    layout = Layout((tuple(axes[:depth]),))
    if math.prod(mesh.axis_size(axis) for axis in axes[:depth]) > size:
        with pytest.raises(LayoutError):
            layout.check((size,), mesh)
        return
    layout.check((size,), mesh)
    lengths = []
    for rank in range(mesh.size):
        position, held = mesh.coordinate(rank), np.arange(size)
        for axis in axes[:depth]:
            held = np.array_split(held, mesh.axis_size(axis))[position[axis]]
        assert layout.bounds((size,), mesh, position) == ((held[0], len(held)),)
        lengths.append(len(held))
    assert layout.local_shape((size,), mesh) == (max(lengths),)
    assert layout.is_even((size,), mesh) == (len(set(lengths)) == 1)


@pytest.mark.parametrize("text", ["f32", "q8[2]", "f32[a]", "f32[2"])
def test_bad_tensor_types_are_named(text: str) -> None:
    with pytest.raises(LayoutError):
        TensorType.parse(text)
