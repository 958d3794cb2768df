"""Gradients that are moved beside the backward are those that are moved within it."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.codegen.collectives import Communicator
from autopar.codegen.gradients import Gradients
from autopar.ir.mesh import Mesh
from tests.ranks import run_ranks

MESH = Mesh.parse("cpu: data=2, tensor=2")


def loss_of(comm: Communicator, whole: Tensor, part: Tensor) -> Tensor:
    """Reads one parameter by an all_reduce of its gradient, the other by a reduce_scatter of it."""
    scale = 1.0 + comm.rank
    shared = comm.to_varying(comm.to_varying(whole, axis="data"), axis="tensor")
    gathered = comm.all_gather(part, dim=0, axis=("data", "tensor"))
    hidden = (shared * gathered.sum(1) * scale).sin()
    return comm.all_reduce(hidden.sum(), axis=("data", "tensor"))


def both_ways() -> list[tuple[Tensor, Tensor]]:
    """The gradients of two steps: moved within the backward, and beside it."""
    comm, found = Communicator(MESH), []
    for gradients in (None, Gradients(torch.device("cpu"))):
        comm.gradients = gradients
        whole = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
        part = (torch.arange(6.0, dtype=torch.float64).view(2, 3) + comm.rank).requires_grad_()
        for _ in range(2):  # the second adds to the first, as gradient accumulation does
            torch.autograd.backward(loss_of(comm, whole, part))
            if gradients is not None:
                gradients.collect()
        assert whole.grad is not None
        assert part.grad is not None
        found.append((whole.grad, part.grad))
    return found


def only_when_collected() -> tuple[bool, bool, bool]:
    """Whether there is a gradient after a backward, after `drop` and `collect`, after another."""
    comm, gradients, there = Communicator(MESH), Gradients(torch.device("cpu")), []
    comm.gradients = gradients
    whole = torch.ones(4, requires_grad=True)
    torch.autograd.backward(comm.to_varying(whole, axis="data").sum())
    there.append(whole.grad is not None)
    gradients.drop()
    gradients.collect()
    there.append(whole.grad is not None)
    torch.autograd.backward(comm.to_varying(whole, axis="data").sum())
    gradients.collect()
    there.append(whole.grad is not None)
    return there[0], there[1], there[2]


def both() -> tuple[list[tuple[Tensor, Tensor]], tuple[bool, bool, bool]]:
    return both_ways(), only_when_collected()


def test_the_gradients_are_the_same_and_stored_at_the_end() -> None:
    for (within, beside), stored in run_ranks(both):
        for one, other in zip(within, beside, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            assert one.abs().sum() > 0
        assert stored == (False, False, True)
