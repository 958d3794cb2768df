"""Transfers between two meshes send every element once, and gathers give the wanted layout."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.errors import LayoutError, MeshError
from autopar.ir.crossing import Crossing, Side, crossing
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType

Values = NDArray[np.int64]
MESHES = ["gpu=1", "gpu=2", "gpu=3", "gpu=4", "node=2, gpu=2", "node=2, gpu=3", "a=2, b=1, c=2"]


def layouts(mesh: Mesh, shape: tuple[int, ...], chance: random.Random) -> Layout:
    """Some layout of splits and wholes that fits."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    axes = [axis.name for axis in mesh.axes]
    chance.shuffle(axes)
    for axis in axes:
        dim = chance.randrange(len(shape) + 1)
        if dim < len(shape):
            ways = math.prod(mesh.axis_size(name) for name in (*dims[dim], axis))
            if ways <= shape[dim]:
                dims[dim] = (*dims[dim], axis)
    return Layout(tuple(dims))


def part(value: Values, side: Side, rank: int, layout: Layout | None = None) -> Values:
    spans = side.part(value.shape, side.ranks.index(rank), layout)
    return value[tuple(slice(start, start + length) for start, length in spans)]


def arrived(value: Values, way: Crossing, source: Side, target: Side) -> dict[int, Values]:
    """What every receiver holds after all boxes were copied; -1 where nothing was put."""
    held = {rank: np.full_like(part(value, target, rank, way.arrival), -1) for rank in target.ranks}
    for box in way.boxes:
        taken = tuple(slice(start, start + length) for start, length in box.taken)
        put = tuple(slice(start, start + length) for start, length in box.put)
        there = held[box.receiver][put]
        assert (there == -1).all(), "an element arrives twice"
        held[box.receiver][put] = part(value, source, box.sender)[taken]
    return held


@pytest.mark.parametrize("seed", range(60))
def test_everything_arrives(seed: int) -> None:
    chance = random.Random(seed)
    one, other = (Mesh.parse(f"cpu: {chance.choice(MESHES)}") for _ in range(2))
    shape = tuple(chance.choice([1, 2, 3, 4, 6, 7, 8, 13]) for _ in range(chance.randrange(4)))
    start = chance.choice([0, one.size, max(one.size - 1, 0)])  # ranks apart, or some shared
    source = Side(one, tuple(range(one.size)), layouts(one, shape, chance))
    ranks = tuple(range(start, start + other.size))
    target = Side(other, ranks, layouts(other, shape, chance))
    value = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    way = crossing(TensorType("f32", shape), source, target)
    for rank, held in arrived(value, way, source, target).items():
        np.testing.assert_array_equal(held, part(value, target, rank, way.arrival))
    # The gathers lead on to what is wanted, by steps that only gather.
    layout = way.arrival
    for step in way.gathers:
        assert step.op == "all_gather_invariant"
        assert step.src == layout
        layout = step.dst
    assert layout == target.layout
    if all(ranks_apart not in source.ranks for ranks_apart in ranks):
        assert way.moved == sum(box.numel for box in way.boxes)
        spread = math.prod(other.axis_size(axis) for axis in way.arrival.sharded_axes)
        assert way.moved * spread == value.size * other.size


def test_each_element_crosses_once_where_sizes_allow() -> None:
    tensor = TensorType("f32", (8, 6))
    for a, b in itertools.product(MESHES, repeat=2):
        one, other = Mesh.parse(f"cpu: {a}"), Mesh.parse(f"cpu: {b}")
        whole = Layout.replicated(2)
        source = Side(one, tuple(range(one.size)), whole)
        target = Side(other, tuple(range(10, 10 + other.size)), whole)
        way = crossing(tensor, source, target)
        assert way.moved == tensor.numel
        # All holders share the sending as evenly as the receivers' parts allow.
        loads = [sum(box.numel for box in way.boxes if box.sender == rank) for rank in source.ranks]
        parts = -(-other.size // one.size)
        assert max(loads) <= parts * -(-8 // min(other.size, 8)) * 6


def test_ranks_keep_what_they_hold() -> None:
    mesh = Mesh.parse("cpu: gpu=4")
    side = Side(mesh, (0, 1, 2, 3), Layout((("gpu",), ())))
    assert crossing(TensorType("f32", (8, 6)), side, side).moved == 0


def test_a_scalar_goes_to_every_device() -> None:
    mesh = Mesh.parse("cpu: gpu=2")
    whole = Layout.replicated(0)
    way = crossing(TensorType("f32", ()), Side(mesh, (0, 1), whole), Side(mesh, (2, 3), whole))
    assert [(box.sender, box.receiver) for box in way.boxes] == [(0, 2), (1, 3)]
    assert way.gathers == ()


def test_refusals() -> None:
    mesh, tensor = Mesh.parse("cpu: gpu=2"), TensorType("f32", (4,))
    whole = Side(mesh, (0, 1), Layout.replicated(1))
    with pytest.raises(LayoutError, match="cannot cross"):
        crossing(tensor, Side(mesh, (0, 1), Layout(((),), partial=("gpu",))), whole)
    with pytest.raises(MeshError, match="has 2 devices"):
        crossing(tensor, whole, Side(mesh, (2,), Layout.replicated(1)))
