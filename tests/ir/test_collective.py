"""Resharding: steps executed on numpy shards equal the definition of the target layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.ir.collective import Collective, Step
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout, TensorType

MESH = Mesh.parse("cpu: node=2, gpu=2")
TENSOR = TensorType("f64", (4, 8))


def price(call: Collective) -> float:
    return 1e-6 + call.nbytes * (4e-9 if "node" in call.axes else 1e-9)


def layouts() -> list[Layout]:
    """Every layout of a matrix on two axes."""
    found = []
    for node, gpu in itertools.product(("0", "1", "P", "V", "R"), repeat=2):
        dims: list[tuple[str, ...]] = [(), ()]
        for axis, kind in (("node", node), ("gpu", gpu)):
            if kind in "01":
                dims[int(kind)] = (*dims[int(kind)], axis)
        pairs = (("node", node), ("gpu", gpu))
        found.append(
            Layout(
                tuple(dims),
                tuple(a for a, k in pairs if k == "P"),
                tuple(a for a, k in pairs if k == "V"),
            )
        )
    return found


def block(whole: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """The part of `whole` that `layout` puts on `rank`, by the definition of the notation."""
    position = MESH.coordinate(rank)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            whole = np.split(whole, MESH.axis_size(axis), axis=dim)[position[axis]]
    return whole


def distribute(whole: np.ndarray, layout: Layout, seed: int) -> list[np.ndarray]:
    """Shards of `whole`; along a partial axis they are random and sum to it."""
    generator = np.random.default_rng(seed)
    parts = [generator.normal(size=whole.shape) for _ in range(MESH.size)]
    for group in MESH.groups(layout.partial):
        last = group[-1]
        parts[last] = whole - sum(parts[rank] for rank in group if rank != last)
    for group in MESH.groups(tuple(n for n in MESH.names if n not in layout.partial)):
        for rank in group:  # the same random parts wherever the value is not partial
            parts[rank] = parts[group[0]]
    return [block(parts[rank], layout, rank) for rank in range(MESH.size)]


def collect(shards: list[np.ndarray], layout: Layout) -> np.ndarray | None:
    """The whole value that shards in `layout` stand for; None if replicas disagree."""
    whole = np.zeros(TENSOR.shape)
    for rank, shard in enumerate(shards):
        position = MESH.coordinate(rank)
        other = [n for n in MESH.names if n not in (*layout.sharded_axes, *layout.partial)]
        twin = next(
            r
            for r in range(MESH.size)
            if all(MESH.coordinate(r)[n] == (0 if n in other else position[n]) for n in MESH.names)
        )
        if not np.allclose(shards[twin], shard):
            return None
        if twin == rank:
            block(whole, layout, rank)[...] += shard
    return whole


def run(step: Step, shards: list[np.ndarray]) -> list[np.ndarray]:
    """One forward step on all ranks at once, with numpy."""
    result: list[np.ndarray] = [np.empty(0)] * MESH.size
    for group in MESH.groups(step.axes):
        parts = [shards[rank] for rank in group]
        for index, rank in enumerate(group):
            first = all(MESH.coordinate(rank)[a] == 0 for a in step.axes)
            dim, count = step.dim or 0, len(group)
            if step.op == "all_reduce":
                result[rank] = sum(parts[1:], parts[0])
            elif step.op in ("to_varying", "from_varying"):
                result[rank] = parts[index]
            elif step.op == "to_partial":
                result[rank] = parts[index] * first
            elif step.op == "reduce_scatter":
                result[rank] = np.split(sum(parts[1:], parts[0]), count, axis=dim)[index]
            elif step.op.startswith("all_gather"):
                result[rank] = np.concatenate(parts, axis=dim)
            elif step.op.startswith("slice"):
                result[rank] = np.split(parts[index], count, axis=dim)[index]
            else:
                assert step.to_dim is not None
                pieces = [np.split(part, count, axis=step.to_dim)[index] for part in parts]
                result[rank] = np.concatenate(pieces, axis=dim)
    return result


@pytest.mark.parametrize("src", layouts(), ids=lambda x: x.format(TENSOR.shape))
def test_any_layout_reaches_any_other(src: Layout) -> None:
    resharder = Resharder(MESH, price)
    whole = np.random.default_rng(0).normal(size=TENSOR.shape)
    for number, dst in enumerate(layouts()):
        shards = distribute(whole, src, number)
        at = src
        steps = resharder.steps(TENSOR, src, dst)
        for step in steps:
            assert step.src == at
            shards, at = run(step, shards), step.dst
        assert at == dst
        held = collect(shards, dst)
        assert held is not None
        np.testing.assert_allclose(held, whole, rtol=1e-12, atol=1e-12)
        total = sum(price(call) for step in steps for call in step.collectives)
        assert resharder.cost(TENSOR, src, dst) == pytest.approx(total, rel=1e-12)


def test_cost_obeys_the_triangle_inequality() -> None:
    resharder = Resharder(MESH, price)
    for a, b, c in itertools.product(layouts(), repeat=3):
        direct = resharder.cost(TENSOR, a, c)
        assert direct <= resharder.cost(TENSOR, a, b) + resharder.cost(TENSOR, b, c) + 1e-15


def test_well_known_pairs() -> None:
    resharder = Resharder(MESH, price)
    whole = Layout.replicated(2)
    owed = Layout(whole.dims, partial=("gpu",))
    varying = Layout(whole.dims, varying=("gpu",))
    rows = Layout((("gpu",), ()))

    def calls(src: Layout, dst: Layout, grad: bool = True) -> list[str]:
        steps = resharder.steps(TENSOR, src, dst, grad)
        return [call.kind for step in steps for call in step.collectives]

    assert calls(whole, varying) == ["all_reduce"]  # data parallelism's gradient
    assert calls(rows, varying) == ["all_gather", "reduce_scatter"]  # ZeRO-3
    assert calls(owed, rows) == ["reduce_scatter", "all_gather"]  # sequence parallelism
    assert calls(whole, rows, grad=False) == []
    assert calls(whole, varying, grad=False) == []
