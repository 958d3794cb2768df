"""Kernels as programs use them: through torch's operators, with gradients, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.update.adamw import AdamW
from autopar_kernels.linear_cross_entropy import (
    parallel_cross_entropy,
    parallel_linear_cross_entropy,
)
from autopar_kernels.registry import KernelError, KernelWarning, operators, register
from autopar_kernels.registry.draw import Draw
from tests.kernels.checks import error
from tests.support.ranks import run_ranks

ours = torch.ops.autopar_kernels
ALL = operators()
T, K, V, P = 6, 20, 90, 2
# Forks of this process, without the imports of captures that one rank would make for all.
ALONE: dict[str, Any] = {"count": P, "start": "fork", "captures": True}


def test_gradients_pass_through_a_kernel() -> None:
    draw = Draw(torch.float32)
    given = [draw.normal(3, 70), draw.normal(3, 70), draw.normal(70)]
    grads = draw.normal(3, 70), draw.normal(3, 70)
    leaves = [t.clone().requires_grad_() for t in given]
    y, h, _ = ours.add_rms_norm(*leaves, 0.1)
    found = torch.autograd.grad((y, h), leaves, grads)
    wide = [t.double().requires_grad_() for t in given]
    h64 = wide[0] + wide[1]
    judged = F.rms_norm(h64, (70,), wide[2], 0.1), h64
    wanted = torch.autograd.grad(judged, wide, [g.double() for g in grads])
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 2e-6


def test_chunks_of_linear_and_cross_entropy() -> None:
    draw = Draw(torch.float32)
    x, weight = draw.normal(T, K), draw.normal(V, K)
    target = draw.integers(V, T)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    loss = ours.linear_cross_entropy(*leaves, target, -100, 0.0, 4, True)[0]
    found = torch.autograd.grad(loss * 3, leaves)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    judged = F.cross_entropy(wide[0] @ wide[1].T, target, reduction="sum")
    assert abs(loss.item() / judged.item() - 1) < 1e-6
    for a, b in zip(found, torch.autograd.grad(judged * 3, wide), strict=True):
        assert error(a, b) < 2e-6


def test_nan_in_a_row_stays_there() -> None:
    x = Draw(torch.bfloat16).normal(4, 150)
    x[1, 70] = torch.nan
    x[2, :] = -torch.inf
    x[2, 5] = 1.0  # all words but one are masked out
    target = torch.tensor([3, 4, 5, 6])
    loss, lse = ours.cross_entropy(x, target, -100, 0.0)
    assert loss.isnan().tolist() == [False, True, False, False]
    assert loss[2] == 0
    d = ours.cross_entropy_backward(x, target, lse, torch.ones(4), 0, -100, 0.0)
    assert d[1].isnan().all()
    assert d[[0, 2, 3]].isfinite().all()
    quiet = ours.cross_entropy_backward(x, target, lse, torch.ones(4), 0, 4, 0.0)
    assert torch.equal(quiet[1], torch.zeros(150, dtype=x.dtype))


def test_a_skipped_step_leaves_every_bit() -> None:
    args = list(ALL["adamw_"].samples(Draw(torch.bfloat16)))[1]
    assert args[-1][-1].isnan()
    before = [t.clone() for t in args[:3]]
    ours.adamw_(*args)
    for was, now in zip(before, args, strict=False):
        assert torch.equal(was, now)
    assert torch.equal(args[4], args[0].bfloat16())


def test_an_optimizer_on_flat_buffers_is_torchs() -> None:
    """As programs use it: parts of different parameters, clipped, rounded, one step left out."""
    draw = Draw(torch.float32)
    mine = [torch.nn.Parameter(draw.normal(*shape)) for shape in ((5, 30), (9,), (4, 20))]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in mine]
    held = {id(p): torch.nn.Parameter(p.detach().bfloat16()) for p in mine}
    how: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    ours_, judged = AdamW(torch.optim.AdamW(mine, **how), held), torch.optim.AdamW(theirs, **how)
    for step in range(4):
        gradients = [draw.normal(*p.shape) for p in mine]
        if step == 2:
            gradients[1][3] = torch.nan
        for parameter, other, gradient in zip(mine, theirs, gradients, strict=True):
            parameter.grad, other.grad = gradient * 8, gradient.double()
        ours_.prepare()
        squares = ours_.squares([p.grad for p in mine if p.grad is not None])
        ours_.take(squares.sqrt(), 0.5, 8.0)
        ours_.step()
        if step != 2:
            torch.nn.utils.clip_grad_norm_(theirs, 0.5)
            judged.step()
        for parameter, other in zip(mine, theirs, strict=True):
            assert error(parameter.detach(), other.detach()) < 2e-6
            assert torch.equal(held[id(parameter)], parameter.bfloat16())
    assert len({p.untyped_storage().data_ptr() for p in mine}) == 1


def test_what_a_kernel_does_not_take_goes_to_the_reference_with_a_warning() -> None:
    draw = Draw(torch.float32)
    strided, weight = draw.normal(8, 6).T, draw.normal(8)
    norm = ALL["rms_norm"]
    with pytest.warns(KernelWarning, match=r"rms_norm does not take x with strides \(1, 6\)"):
        y, _ = norm.run(strided, weight, 1e-6)
    torch.testing.assert_close(y, F.rms_norm(strided, (8,), weight, 1e-6))
    assert register() is register(strict=True)  # as conftest.py says; programs ask for no more
    with pytest.raises(KernelError, match=r"x with strides"):
        ours.rms_norm(strided, weight, 1e-6)  # registered as strict here


def test_nothing_is_launched_where_there_is_nothing() -> None:
    assert ours.square_sum(torch.ones(0)) == 0
    y, rstd = ours.rms_norm(torch.ones(0, 8), torch.ones(8), 1e-6)
    assert y.shape == (0, 8)
    assert rstd.shape == (0,)


def gathered(stats: Tensor) -> Tensor:
    """(devices, rows, 3): one all_gather of three numbers a row."""
    out = stats.new_empty((P, *stats.shape))
    dist.all_gather_into_tensor(out.flatten(0, 1), stats.contiguous())
    return out


def losses_and_gradients(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Any, ...]:
    """Returns the results of one of two ranks with its half of the vocabulary."""
    own = weight.chunk(P)[dist.get_rank()].clone().requires_grad_()
    given = x.clone().requires_grad_()
    rest: dict[str, Any] = {"start": dist.get_rank() * V // P, "vocabulary": V, "z_loss": 1e-2}
    logits = given @ own.T
    losses = parallel_cross_entropy(logits, target, gather=gathered, **rest)
    one = torch.autograd.grad(losses.sum(), (given, own))
    total = parallel_linear_cross_entropy(given, own, target, gather=gathered, chunk=4, **rest)
    two = torch.autograd.grad(total, (given, own))
    return losses.detach(), one, total.detach(), two


def test_cross_entropy_on_two_ranks() -> None:
    draw = Draw(torch.float32)
    x, weight, target = draw.normal(T, K), draw.normal(V, K), draw.integers(V, T)
    target[2] = -100
    made = run_ranks(losses_and_gradients, x, weight, target, **ALONE)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    logits = wide[0] @ wide[1].T
    judged = F.cross_entropy(logits, target, reduction="none")
    judged = judged + 1e-2 * logits.logsumexp(1) ** 2 * (target != -100)
    dx, dweight = torch.autograd.grad(judged.sum(), wide)
    for losses, _, total, _ in made:
        assert error(losses, judged.detach()) < 1e-6
        assert abs(total.item() / judged.sum().item() - 1) < 1e-6
    for which in (1, 3):
        assert error(sum(rank[which][0] for rank in made), dx) < 2e-6
        assert error(torch.cat([rank[which][1] for rank in made]), dweight) < 2e-6


def exchanged(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Sends one rank's rows of all heads to the ranks of those heads, and back."""
    rows = slice(dist.get_rank() * 5, dist.get_rank() * 5 + 5)
    own = [t[:, rows] for t in (q, k, v)]
    packed = ours.rotary_pack(*own, cos[rows], sin[rows], P)
    arrived, back = torch.empty_like(packed), torch.empty_like(packed)
    dist.all_to_all_single(arrived, packed)
    dist.all_to_all_single(back, arrived)
    return arrived.flatten(0, 1), *ours.rotary_unpack(back, cos[rows], sin[rows], 4, 2)


def exchanged_in_a_program(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same of q alone, by what programs call, and the gradient of a sum of squares, halved."""
    rows = slice(dist.get_rank() * 5, dist.get_rank() * 5 + 5)
    own = q[:, rows].clone().requires_grad_()
    mesh = Communicator(Mesh.parse("cpu: gpu=2"))
    arrived = mesh.rotary_all_to_all(own, cos[rows], sin[rows], axis="gpu")
    (gradient,) = torch.autograd.grad(arrived, own, arrived.detach())
    return arrived.detach(), gradient


def test_rotary_and_ulysses_on_two_ranks() -> None:
    draw = Draw(torch.bfloat16)
    q, k, v = draw.normal(2, 10, 4, 16), draw.normal(2, 10, 2, 16), draw.normal(2, 10, 2, 16)
    angle = draw.normal(10, 8, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    made = run_ranks(exchanged, q, k, v, cos, sin, **ALONE)
    c, s = (torch.cat([t.double()] * 2, 1)[:, None] for t in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        first, second = x.double().chunk(2, -1)
        return x * c + torch.cat([-second, first], -1) * s

    whole = [turned(q), turned(k), v.double()]
    for rank, (arrived, *back) in enumerate(made):
        heads = torch.cat([t.chunk(P, 2)[rank] for t in whole], 2)
        assert error(arrived, heads.transpose(0, 1)) < 2e-3  # rounded to bf16 once
        for found, wanted in zip(back, (q, k, v), strict=True):
            assert error(found, wanted[:, rank * 5 : rank * 5 + 5]) < 4e-3
    alone = run_ranks(exchanged_in_a_program, q, cos, sin, **ALONE)
    for rank, (arrived, gradient) in enumerate(alone):
        assert error(arrived, whole[0].chunk(P, 2)[rank]) < 2e-3
        # A rotation leaves squares as they are.
        assert error(gradient, q[:, rank * 5 : rank * 5 + 5]) < 4e-3
