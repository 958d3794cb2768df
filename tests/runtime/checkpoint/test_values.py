"""The values in a checkpoint: boxes of tensors, and their text."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from autopar.errors import CheckpointError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.runtime.checkpoint.boxes import Box, box_of
from autopar.runtime.checkpoint.values import decode, encode
from autopar.runtime.parameters.pieces import Piece

# Boxes -------------------------------------------------------------------------------------------


def array_split(whole: np.ndarray, layout: Layout, mesh: Mesh, place: dict[str, int]) -> np.ndarray:
    """Returns what a device holds, by numpy's array_split, one axis inside the other."""
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            whole = np.array_split(whole, mesh.axis_size(axis), dim)[place[axis]]
    return whole


@pytest.mark.parametrize("piece", [None, Piece(0, 5, 13), Piece(1, 3, 11)])
def test_a_box_is_what_array_split_gives_the_device(piece: Piece | None) -> None:
    mesh = Mesh.parse("cpu: a=2, b=3")
    splits = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]
    full = np.arange(20 * 17).reshape(20, 17)
    held = full
    if piece is not None:
        held = np.take(full, range(piece.start, piece.start + piece.length), piece.dim)
    layouts = [
        Layout(dims)
        for dims in itertools.product(splits, splits)
        if not set(dims[0]) & set(dims[1])
    ]
    assert len(layouts) > 10
    for layout in layouts:
        seen = np.zeros_like(full)
        for rank in range(mesh.size):
            place = mesh.coordinate(rank)
            box = box_of(layout, held.shape, mesh, place, piece)
            assert np.array_equal(full[box.slices], array_split(held, layout, mesh, place))
            assert box.inside(full.shape)
            seen[box.slices] += 1
        replicas = mesh.size // math.prod(mesh.axis_size(a) for a in layout.sharded_axes)
        inside = np.isin(full, held)
        assert (seen[inside] == replicas).all()
        assert not seen[~inside].any()


def test_a_box_outside_is_told() -> None:
    assert Box((0, 2), (3, 2)).inside((3, 4))
    assert not Box((0, 3), (3, 2)).inside((3, 4))
    assert not Box((-1, 0), (2, 2)).inside((3, 4))
    assert not Box((0,), (3,)).inside((3, 4))


# Values ------------------------------------------------------------------------------------------


def test_values_come_back_as_they_were() -> None:
    value = {
        "plain": [None, True, 3, 0.1, 1e-310, "text"],
        "odd": [math.inf, -math.inf, -0.0],
        "pair": (1, (2.5,), []),
        7: {(1, 2): Counter({4: 2, 9: 1})},
        "sets": [{1, 2}, frozenset({"a"})],
        "bytes": bytes(range(256)),
    }
    assert decode(encode(value, "it")) == value
    assert math.isnan(decode(encode(math.nan, "it")))
    assert isinstance(decode(encode(value, "it"))[7][1, 2], Counter)
    tensors = [
        torch.tensor([0.1, math.inf, math.nan], dtype=torch.float32),
        torch.randn(3, 2).to(torch.bfloat16),
        torch.tensor(2**62 + 1),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64),
        torch.empty(0, 3),
    ]
    for tensor in tensors:
        found = decode(encode(tensor, "it"))
        assert found.dtype == tensor.dtype
        torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)


def test_other_values_are_refused_where_they_stand() -> None:
    with pytest.raises(CheckpointError, match=r"it\['f'\]\[1\] cannot be saved") as caught:
        encode({"f": [1, len]}, "it")
    assert "builtin_function_or_method" in caught.value.why
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode({"code": "print()"})
