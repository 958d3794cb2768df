"""Gradients reduced asynchronously equal those reduced within the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.shards import Weights
from autopar.runtime.runtime import Runtime, stored
from tests.support.ranks import run_ranks

MESH = Mesh.parse("cpu: data=2, tensor=2")
TABLE = [
    stored("whole", "f64[8] => [8] -sum(data, tensor)"),
    stored("part", "f64[8@data@tensor, 3] => [8, 3] -sum(data, tensor)"),
]


def loss_of(comm: Communicator, whole: Tensor, part: Tensor, number: int) -> Tensor:
    """Reads one parameter by an all_reduce of its gradient, the other by a reduce_scatter of it."""
    scale = 1.0 + comm.rank + number
    shared = comm.to_varying(whole, axis=("data", "tensor"))
    gathered = comm.all_gather(part, dim=0, axis=("data", "tensor"))
    hidden = (shared * gathered.sum(1) * scale).sin()
    return comm.all_reduce(hidden.sum(), axis=("data", "tensor"))


def both_ways(rounds: int, bucket: int) -> list[tuple[Tensor, Tensor]]:
    """The gradients of two steps: moved in the backward, and asynchronously."""
    found = []
    for beside in (False, True):
        comm = Runtime(MESH, torch.device("cpu"))
        whole = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))
        part = nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3) + comm.rank)
        gradients = None
        if beside:
            weights = Weights(comm, TABLE, [whole, part], bucket)
            gradients = comm.gradients = Gradients(weights, torch.device("cpu"), rounds)
            comm.fetch.add(weights.all, bucket)
        for step in range(2):  # the second adds to the first
            for number in range(rounds):
                torch.autograd.backward(loss_of(comm, whole, part, 2 * step + number))
                if gradients is not None:
                    gradients.end_of_backward()
            if gradients is not None:
                gradients.collect()
        assert whole.grad is not None
        assert part.grad is not None
        found.append((whole.grad, part.grad))
    return found


def only_when_collected() -> tuple[bool, ...]:
    """Whether there is a gradient after a backward of what is held in parts; of what is held whole
    after `drop`, after `collect`, after another."""
    comm, there = Runtime(MESH, torch.device("cpu")), []
    whole = nn.Parameter(torch.ones(8, dtype=torch.float64))
    part = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    weights = Weights(comm, TABLE, [whole, part])
    gradients = comm.gradients = Gradients(weights, torch.device("cpu"))
    comm.fetch.add(weights.all, 1)
    torch.autograd.backward(loss_of(comm, whole, part, 0))
    there.append(part.grad is not None)
    gradients.drop()
    there.append(whole.grad is not None)
    gradients.collect()
    there.append(whole.grad is not None)
    torch.autograd.backward(loss_of(comm, whole, part, 0))
    gradients.collect()
    there.append(whole.grad is not None)
    return tuple(there)


def both() -> tuple[list[list[tuple[Tensor, Tensor]]], tuple[bool, ...]]:
    cases = [(1, 1), (3, 1), (3, 2**20)]
    return [both_ways(*case) for case in cases], only_when_collected()


def test_the_gradients_are_the_same_and_stored_at_the_end() -> None:
    for found, there in run_ranks(both):
        for within, beside in found:
            for one, other in zip(within, beside, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
                assert one.abs().sum() > 0
        assert there == (False, False, False, True)


def test_states_that_do_not_follow_from_one_another_are_refused() -> None:
    for text, more in (
        ("f32[8@data, 4] => [8, 4] -sum(tensor)", {}),
        ("f32[8, 4@data] => [8, 4] -sum(data)", {"updated": "[8@data, 4]"}),
        ("f32[8@data, 4] => [8, 4] -sum(data)", {"grads": "[8, 4]", "updated": "[8, 4]"}),
    ):
        with pytest.raises(LayoutError):
            stored("w", text, **more)
