"""Every resharding step on four gloo ranks, against the definition of a layout.

`hold` distributes a global value to the ranks by a layout, `read` reassembles it and checks that
copies agree; both follow from the notation's definition alone. A step is the identity of the global
value, so its adjoint is the identity of the global gradient; the gradient of a value has the layout
with partial and varying exchanged.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import LayoutError, MeshError
from autopar.ir.collective import Step, moves
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.runtime.communication.communicator import Communicator, mesh_of
from tests.support.ranks import run_ranks

MESH = Mesh.parse("cpu: node=2, gpu=2")
SHAPES = ((4, 8), (5, 7))  # parts of one length, and of several
Array = NDArray[np.float64]


def layouts() -> list[Layout]:
    """Every layout of a matrix on two axes, both orders of two axes on one dimension included."""
    found = []
    for node, gpu in itertools.product(("0", "1", "P", "V", "R"), repeat=2):
        kinds = {"node": node, "gpu": gpu}
        dims = tuple(tuple(a for a in kinds if kinds[a] == d) for d in "01")
        partial = tuple(a for a in kinds if kinds[a] == "P")
        varying = tuple(a for a in kinds if kinds[a] == "V")
        found.append(Layout(dims, partial, varying))
        if node == gpu and node in "01":
            found.append(Layout(tuple(d[::-1] for d in dims), partial, varying))
    return found


def all_steps() -> list[tuple[tuple[int, ...], Step]]:
    return [
        (shape, step)
        for shape in SHAPES
        for layout in layouts()
        for step in moves(layout, TensorType("f64", shape), MESH)
    ]


def adjoint(layout: Layout) -> Layout:
    return Layout(layout.dims, layout.varying, layout.partial)


def block(shape: tuple[int, ...], layout: Layout, rank: int) -> tuple[slice, ...]:
    """Which part of the global tensor `rank` holds: parts as equal as can be, longer ones first."""
    coordinate = MESH.coordinate(rank)
    found = []
    for size, axes in zip(shape, layout.dims, strict=True):
        held = np.arange(size)
        for axis in axes:
            held = np.array_split(held, MESH.axis_size(axis))[coordinate[axis]]
        found.append(slice(int(held[0]), int(held[-1]) + 1))
    return tuple(found)


def key(layout: Layout, rank: int) -> tuple[int, ...]:
    """The position of `rank` along the axes that owe a sum."""
    return tuple(MESH.coordinate(rank)[axis] for axis in layout.partial)


def hold(value: Array, layout: Layout, rank: int) -> Array:
    """The local part; partial sums are random numbers that add up to the value."""
    positions = list(itertools.product((0, 1), repeat=len(layout.partial)))
    draw = np.random.default_rng(7)
    parts = {position: draw.normal(size=value.shape) for position in positions[1:]}
    parts[positions[0]] = value - sum(parts.values(), np.zeros_like(value))
    return parts[key(layout, rank)][block(value.shape, layout, rank)]


def read(parts: list[Array], layout: Layout, shape: tuple[int, ...]) -> Array:
    """The global value that the ranks hold; replicas must agree to the bit."""
    sums: dict[tuple[int, ...], Array] = {}
    for rank, part in enumerate(parts):
        whole = sums.setdefault(key(layout, rank), np.full(shape, np.nan))
        where = block(shape, layout, rank)
        assert part.shape == whole[where].shape
        assert np.isnan(whole[where]).all() or np.array_equal(whole[where], part)
        whole[where] = part
    return sum(sums.values(), np.zeros(shape))


def strided(array: Array) -> Tensor:
    """A leaf with the same numbers whose memory is not contiguous."""
    padded = torch.zeros(*array.shape, 2, dtype=torch.float64)
    padded[..., 0] = torch.from_numpy(array)
    return padded[..., 0]


VALUES = {shape: np.random.default_rng(0).normal(size=shape) for shape in SHAPES}
GRADIENTS = {shape: np.random.default_rng(1).normal(size=shape) for shape in SHAPES}


def perform_steps(comm: Communicator) -> list[tuple[Array, Array]]:
    results = []
    for shape, step in all_steps():
        x = strided(hold(VALUES[shape], step.src, comm.rank)).requires_grad_()
        before = x.detach().clone()
        y = comm.apply(step, x, shape)
        y.backward(strided(hold(GRADIENTS[shape], adjoint(step.dst), comm.rank)))
        assert torch.equal(x, before)
        assert x.grad is not None
        results.append((y.detach().numpy(), x.grad.numpy()))
    return results


TUPLES = tuple(itertools.product(SHAPES, (("node", "gpu"), ("gpu", "node"))))


def perform_tuples(comm: Communicator) -> list[dict[str, Array]]:
    """The calls over two axes at once, in both orders."""
    results = []
    for shape, axes in TUPLES:
        split, columns = Layout(((), axes)), shape[1]
        x = torch.from_numpy(hold(VALUES[shape], split, comm.rank))
        owed = torch.from_numpy(hold(VALUES[shape], Layout(((), ()), axes), comm.rank))
        whole = torch.from_numpy(VALUES[shape].copy())
        results.append(
            {
                "gather": comm.all_gather(x, 1, axes, size=columns).numpy(),
                "scatter": comm.reduce_scatter(owed, -1, axes).numpy(),
                "slice": comm.slice_invariant(whole, -1, axes).numpy(),
                "turn": comm.all_to_all(x, -1, 0, axes, size=columns).numpy(),
                "shard": comm.shard(whole, split).numpy(),
                "unshard": comm.unshard(x, split, shape).numpy(),
            }
        )
    return results


def on_rank() -> dict[str, Any]:
    comm = Communicator(MESH)
    found: dict[str, Any] = {"steps": perform_steps(comm), "tuples": perform_tuples(comm)}
    found["mesh"] = mesh_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "cpu")
    thin = Communicator(Mesh.parse("cpu: one=1, all=4"))
    x = torch.arange(6.0).reshape(2, 3)
    found["free"] = all(
        result is x
        for result in (
            thin.all_reduce(x, "one"),
            thin.all_gather(x, 0, "one"),
            thin.group("all") and x,
        )
    )
    found["thin"] = thin.all_reduce(x, ("one", "all")).numpy()
    found["flags"] = comm.all_gather(torch.tensor([comm.rank == 1]), 0, "gpu").tolist()
    for name, error, call in (
        ("few", LayoutError, lambda: comm.slice_invariant(x, 1, ("node", "gpu"))),
        ("size", MeshError, lambda: Communicator(Mesh.parse("cpu: gpu=8"))),
        ("nameless", MeshError, lambda: mesh_of(init_device_mesh("cpu", (4,)), "cpu")),
        ("axis", MeshError, lambda: comm.all_reduce(x, "tpu")),
    ):
        with pytest.raises(error) as caught:
            call()
        found[name] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_rank)


def test_every_step_is_the_identity_of_the_value(ranks: list[dict[str, Any]]) -> None:
    steps = all_steps()
    assert {step.op for _, step in steps} >= {"all_reduce", "all_to_all", "slice_varying"}
    for number, (shape, step) in enumerate(steps):
        value = read([r["steps"][number][0] for r in ranks], step.dst, shape)
        np.testing.assert_allclose(value, VALUES[shape], rtol=0, atol=1e-14, err_msg=str(step))


def test_every_step_is_the_identity_of_the_gradient(ranks: list[dict[str, Any]]) -> None:
    for number, (shape, step) in enumerate(all_steps()):
        found = read([r["steps"][number][1] for r in ranks], adjoint(step.src), shape)
        np.testing.assert_allclose(found, GRADIENTS[shape], rtol=0, atol=1e-14, err_msg=str(step))


@pytest.mark.parametrize(("number", "case"), list(enumerate(TUPLES)))
def test_several_axes_split_outermost_first(
    ranks: list[dict[str, Any]], number: int, case: tuple[tuple[int, ...], tuple[str, ...]]
) -> None:
    shape, axes = case
    got = {name: [r["tuples"][number][name] for r in ranks] for name in ranks[0]["tuples"][number]}
    columns, rows = Layout(((), axes)), Layout((axes, ()))
    for name, layout in (
        ("gather", Layout(((), ()))),
        ("scatter", columns),
        ("slice", columns),
        ("turn", rows),
        ("shard", columns),
        ("unshard", Layout(((), ()))),
    ):
        value = read(got[name], layout, shape)
        np.testing.assert_allclose(value, VALUES[shape], rtol=0, atol=1e-14)


def test_axes_of_size_one_are_free(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["free"]
        assert np.array_equal(rank["thin"], 4 * np.arange(6.0).reshape(2, 3))


def test_booleans_are_gathered(ranks: list[dict[str, Any]]) -> None:
    assert [r["flags"] for r in ranks] == [
        [False, True],
        [False, True],
        [False, False],
        [False, False],
    ]


def test_a_device_mesh_is_read(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["mesh"] == Mesh.parse("cpu: a=2, b=2")


def test_refusals_say_what_does_not_fit(ranks: list[dict[str, Any]]) -> None:
    assert "3 does not split 4 ways" in ranks[0]["few"]
    assert "8 devices" in ranks[0]["size"]
    assert "4 processes" in ranks[0]["size"]
    assert "mesh_dim_names" in ranks[0]["nameless"]
    assert "'tpu'" in ranks[0]["axis"]
