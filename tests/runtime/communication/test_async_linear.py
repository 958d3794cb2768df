"""Linears that overlap with a collective, against the two run separately, on torch's reference.

torch implements these operators for CUDA, with a reference implementation (`_fused_*_fallback`).
The reference replaces them here on the CPU, after a check of what the CUDA kernels require.
"""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.communication import communicator as collectives
from autopar.runtime.communication.communicator import Communicator
from tests.support.ranks import run_ranks

Called = Counter[str]
BATCH, ROWS, WIDTH, OUT = 3, 4, 6, (10, 2, 4)


def with_torch_s_operators(called: Called) -> torch.library.Library:
    """torch's operators for the CPU, as long as the library lives; counts their calls."""

    def gather(
        x: Tensor, matrices: list[Tensor], dim: int, group: str, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        called["gather"] += 1
        check(x, matrices, dim)
        rows = x.movedim(dim, 0).flatten(0, -2)
        assert rows.is_contiguous(), "rows are copied to a neighbour as they lie"
        return symmetric_memory._fused_all_gather_matmul_fallback(
            x, matrices, dim, group, return_A=return_A
        )

    def scatter(x: Tensor, matrix: Tensor, reduce_op: str, dim: int, group: str) -> Tensor:
        called["scatter"] += 1
        check(x, [matrix], dim)
        assert x.shape[dim] % dist.get_world_size() == 0
        return symmetric_memory._fused_matmul_reduce_scatter_fallback(
            x, matrix, reduce_op, dim, group
        )

    def check(x: Tensor, matrices: list[Tensor], dim: int) -> None:
        assert 0 <= dim < x.dim() - 1
        assert {matrix.dim() for matrix in matrices} == {2}
        assert {matrix.dtype for matrix in matrices} == {x.dtype}

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
    return library


def made(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def compared(results: list[Tensor], others: list[Tensor], leaves: list[Tensor]) -> float:
    """The largest difference of results and of gradients under one upstream gradient."""
    worst = 0.0
    upstream = [made(tuple(result.shape), 7).detach() for result in results]
    found = [torch.autograd.grad(each, leaves, upstream) for each in (results, others)]
    for mine, its in zip((*results, *found[0]), (*others, *found[1]), strict=True):
        assert mine.shape == its.shape
        assert mine.is_contiguous()
        worst = max(worst, float((mine - its).abs().max()))
    return worst


def both_ways(direct: bool) -> tuple[float, dict[str, int]]:
    """The worst difference on this rank over dimensions, numbers of linears and biases."""
    comm, worst, called = Communicator(Mesh.parse("cpu: gpu=2")), 0.0, Called()
    library = with_torch_s_operators(called)
    with patch.object(collectives, "reach_one_another", lambda group: direct):
        for dim in (0, 1):
            for count in (1, 3):
                for bias in (False, True):
                    x = made((BATCH, ROWS, WIDTH), 1)
                    weights = [made((out, WIDTH), 2 + out) for out in OUT[:count]]
                    biases = [made((out,), 20 + out) if bias else None for out in OUT[:count]]
                    mine = comm.all_gather_linear(x, weights, biases, dim=dim, axis="gpu")
                    whole = comm.all_gather(x, dim=dim, axis="gpu")
                    its = [F.linear(whole, *pair) for pair in zip(weights, biases, strict=True)]
                    leaves = [x, *weights, *(b for b in biases if b is not None)]
                    worst = max(worst, compared(list(mine), its, leaves))
            for bias in (False, True):
                x, weight = made((4, ROWS, WIDTH), 3), made((8, WIDTH), 4)
                added = made((8,), 5) if bias else None
                if added is not None:  # all ranks have one
                    dist.broadcast(added.detach(), 0)
                mine = comm.linear_reduce_scatter(x, weight, added, dim=dim, axis="gpu")
                owed = None if added is None else comm.to_partial(added, axis="gpu")
                other = comm.reduce_scatter(F.linear(x, weight, owed), dim=dim, axis="gpu")
                leaves = [x, weight] + ([] if added is None else [added])
                worst = max(worst, compared([mine], [other], leaves))
    del library
    return worst, dict(called)


def without_some_gradients() -> bool:
    """What is frozen has no gradient, and the rest has its own."""
    comm = Communicator(Mesh.parse("cpu: gpu=2"))
    x, weight = made((2, 4, WIDTH), 1), made((8, WIDTH), 2).detach()
    (mine,) = comm.all_gather_linear(x, [weight], dim=1, axis="gpu")
    other = F.linear(comm.all_gather(x, dim=1, axis="gpu"), weight)
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (mine, other)]
    return torch.allclose(*gradients)


@pytest.mark.parametrize("direct", [False, True])
def test_results_and_gradients_are_those_of_the_two_apart(direct: bool) -> None:
    ranks = run_ranks(both_ways, direct, count=2)
    assert max(worst for worst, _ in ranks) <= 1e-12
    # Of each dimension four of the one kind and two of the other, each the other's backward.
    calls = {"gather": 12, "scatter": 12} if direct else {}
    assert [called for _, called in ranks] == [calls, calls]


def test_frozen_weights() -> None:
    assert all(run_ranks(without_some_gradients, count=2))


def shapes_on_an_accelerator() -> list[tuple[int, ...]]:
    """What torch's own rules of shapes say of our calls, whatever runs them."""
    with patch.object(collectives, "reach_one_another", lambda group: True):
        comm = Communicator(Mesh.parse("cpu: gpu=2"))

        def given(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

        x, weights = given(2, 8, 32), [given(64, 32), given(16, 32)]
        up, gate = comm.all_gather_linear(x, weights, [given(64), None], dim=1, axis="gpu")
        down = comm.linear_reduce_scatter(up, given(32, 64), given(32), dim=1, axis="gpu")
        gradients = torch.autograd.grad([down, gate], [x, *weights], [down, gate])
        return [tuple(tensor.shape) for tensor in (up, gate, down, *gradients)]


def test_torch_s_rules_of_shapes_take_the_calls() -> None:
    expected = [(2, 16, 64), (2, 16, 16), (2, 8, 32), (2, 8, 32), (64, 32), (16, 32)]
    assert run_ranks(shapes_on_an_accelerator, count=2) == [expected, expected]
