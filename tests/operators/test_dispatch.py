"""Rows are sent to the devices of their experts and back, even under uneven load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.intra_op.proofs.thread_ranks import ThreadDevice, on_all_devices
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.sharded_operators import ShardedOperators
from autopar.runtime.communication.communicator import Communicator
from tests.support.ranks import run_ranks

TOKENS, WIDTH, INNER, EXPERTS, CHOICES = 11, 4, 6, 5, 2
Ids = Callable[[], Tensor]
Results = list[Tensor]


def _mixed() -> Tensor:
    return torch.randint(0, EXPERTS, (TOKENS, CHOICES), generator=torch.manual_seed(3))


LOADS: dict[str, Ids] = {
    "mixed": _mixed,
    "all to the last expert": lambda: torch.full((TOKENS, CHOICES), EXPERTS - 1),
    "all to the first": lambda: torch.zeros(TOKENS, CHOICES, dtype=torch.int64),
    "none to the second": lambda: _mixed().masked_fill(_mixed() == 1, 3),
    "some to none": lambda: _mixed().masked_fill(_mixed() == 1, -1),
    "all to none": lambda: torch.full((TOKENS, CHOICES), -1),
    "the first tokens to the last expert": lambda: _mixed().sort(0, descending=True).values,
}
# Axes that split the experts, hops of rows.
WAYS: dict[str, tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "one axis": ("cpu: x=3", ("x",), (("x",),)),
    "two axes": ("cpu: y=2, x=2", ("y", "x"), (("y", "x"),)),
    "inside first": ("cpu: y=2, x=2", ("y", "x"), (("x",), ("y",))),
    "outside first": ("cpu: y=2, x=2", ("y", "x"), (("y",), ("x",))),
    "partial sums along the outer axis": ("cpu: y=2, x=2", ("y", "x"), (("x",),)),
    "partial sums along the inner axis": ("cpu: y=2, x=2", ("y", "x"), (("y",),)),
    "replicas along the outer axis": ("cpu: y=2, x=2", ("x",), (("x",),)),
    "inner axis outermost": ("cpu: y=2, x=2", ("x", "y"), (("x", "y"),)),
}


def operands(ids: Tensor, experts: int = EXPERTS) -> Results:
    """Parameters of the experts, tokens, their experts and the weights of these."""
    draw, tokens = torch.manual_seed(0), len(ids)
    shapes = [(experts, INNER, WIDTH)] * 2 + [(experts, WIDTH, INNER), (tokens, WIDTH)]
    *tensors, scores, cotangent = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in (*shapes, tuple(ids.shape), (tokens, WIDTH))
    )
    return [*tensors, ids, scores, cotangent]


def one_by_one(given: Results) -> Results:
    """The sum over tokens and their experts, and the gradients of all but the last operand."""
    *leaves, cotangent = given
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in leaves]
    gate, up, down, x, ids, scores = leaves
    rows = []
    for token, chosen in enumerate(ids.tolist()):
        parts = [
            scores[token, place] * (down[e] @ (torch.relu(gate[e] @ x[token]) * (up[e] @ x[token])))
            for place, e in enumerate(chosen)
            if e >= 0
        ]
        rows.append(sum(parts, 0 * (x[token] + scores[token].sum())))
    out = torch.stack(rows)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(out, wanted, cotangent, materialize_grads=True)
    return [out.detach(), *gradients]


def layouts(axes: tuple[str, ...], hops: tuple[tuple[str, ...], ...]) -> tuple[Layout, Layout]:
    """Returns the layouts of experts and tokens."""
    moved = {axis for hop in hops for axis in hop}
    tokens = tuple(axis for axis in ("y", "x") if axis in moved)
    return Layout((axes, (), ())), Layout((tokens, ()))


def part(x: Tensor, layout: Layout, mesh: Mesh, at: dict[str, int]) -> Tensor:
    for dim, (start, length) in enumerate(layout.bounds(tuple(x.shape), mesh, at)):
        x = x.narrow(dim, start, length)
    return x.clone()


def on_device(
    device: ShardedOperators, given: Results, way: str, trained: tuple[int, ...] = (0, 1, 2, 3, 5)
) -> list[Tensor | None]:
    """Returns the results of one device from its parts; None for gradients of what is frozen.

    Args:
        device: the device.
        given: the whole operands.
        way: one of `WAYS`.
        trained: numbers of the operands that have gradients.
    """
    _, axes, hops = WAYS[way]
    experts, tokens = layouts(axes, hops)
    split = [experts] * 3 + [tokens] * 4
    local = [
        part(x, layout, device.mesh, device.coordinate)
        for x, layout in zip(given, split, strict=True)
    ]
    *leaves, cotangent = (x.requires_grad_(at in trained) for at, x in enumerate(local))
    over = hops[0] if len(hops) == 1 else hops
    out = device.mixture(*leaves, "relu", axis=axes, size=len(given[0]), over=over)
    found = dict(
        zip(
            trained,
            torch.autograd.grad(out, [leaves[at] for at in trained], cotangent),
            strict=True,
        )
    )
    return [out.detach(), *(found.get(at) for at in (0, 1, 2, 3, 5))]


def check(found: list[list[Tensor | None]], given: Results, way: str) -> None:
    """Sums what devices owe, and compares every device's part."""
    text, axes, hops = WAYS[way]
    mesh, (experts, tokens) = Mesh.parse(text), layouts(axes, hops)
    owed = tuple(axis for axis in axes if axis not in tokens.dims[0])
    replicas = tuple(axis for axis in mesh.names if axis not in axes)
    whole = one_by_one(given)
    for place, (value, layout, summed) in enumerate(
        zip(
            whole,
            [tokens, *[experts] * 3, tokens, tokens],
            [owed, *[replicas] * 3, owed, owed],
            strict=True,
        )
    ):
        # Replicas of experts see the same tokens here, so that each has the whole gradient.
        groups = mesh.groups(summed if summed is owed else ())
        for group in groups:
            parts = [x for x in (found[rank][place] for rank in group) if x is not None]
            if not parts:
                continue
            total = torch.stack(parts).sum(0)
            mine = part(value, layout, mesh, mesh.coordinate(group[0]))
            torch.testing.assert_close(total, mine, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("load", LOADS)
def test_devices_compute_their_parts(load: str, way: str) -> None:
    given = operands(LOADS[load]())

    def run(rank: int, device: ThreadDevice) -> list[Tensor | None]:
        return on_device(device, given, way)

    check(list(on_all_devices(Mesh.parse(WAYS[way][0]), run)), given, way)


# Numbers of experts, of tokens, and of a token's experts; and the operands that have gradients.
SIZES = {
    "fewer experts than devices": (2, 11, 1),
    "one expert": (1, 5, 1),
    "every expert": (3, 4, 3),
    "fewer tokens than devices": (5, 2, 2),
    "one token": (5, 1, 2),
}
TRAINED = {"experts": (0, 1, 2), "one matrix": (2,), "tokens": (3, 5), "router": (5,)}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("size", SIZES)
def test_devices_without_experts_or_tokens_and_frozen_operands(size: str, trained: str) -> None:
    """All devices take part in the exchanges of the backward, even if nothing of theirs has one."""
    experts, tokens, k = SIZES[size]
    draw = torch.manual_seed(1)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:k] for _ in range(tokens)])
    given = operands(ids, experts)
    for way in ("one axis", "inside first", "two axes"):

        def run(rank: int, device: ThreadDevice, way: str = way) -> list[Tensor | None]:
            return on_device(device, given, way, TRAINED[trained])

        check(list(on_all_devices(Mesh.parse(WAYS[way][0]), run)), given, way)


def _every_load() -> dict[tuple[str, str], list[Tensor | None]]:
    """The results of this rank."""
    found = {}
    for way, (text, _, _) in WAYS.items():
        if Mesh.parse(text).size == 4:
            comm = Communicator(Mesh.parse(text))
            for load, ids in LOADS.items():
                found[load, way] = on_device(comm, operands(ids()), way)
            comm.close()
    return found


def test_ranks_compute_their_parts() -> None:
    ranks = run_ranks(_every_load)
    for load, way in ranks[0]:
        check([rank[load, way] for rank in ranks], operands(LOADS[load]()), way)
