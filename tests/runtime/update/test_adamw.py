"""AdamW by a kernel is torch's: groups, schedules, missing gradients, clipping, overflow, state."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.fusion import choose
from autopar.runtime.update.adamw import AdamW, takes
from autopar.runtime.update.optimizer import fusable
from tests.support.mixed import ADAMW, error, net

SHAPES = ((5, 3), (7,), (2, 3, 4))


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def torchs(given: list[nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {"params": given[:2], "lr": 1e-2, "weight_decay": 0.3},
        {"params": given[2:], "betas": (0.8, 0.99), "eps": 1e-6},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


def gradients(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def steps(optimizer: torch.optim.Optimizer, given: list[nn.Parameter], numbers: range) -> None:
    """Steps whose rate falls; the second parameter has no gradient in every third."""
    for number in numbers:
        for place, (parameter, gradient) in enumerate(zip(given, gradients(number), strict=True)):
            parameter.grad = None if place == 1 and number % 3 == 1 else gradient.to(parameter)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def farthest(mine: list[nn.Parameter], theirs: list[nn.Parameter]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(mine, theirs, strict=True))


def test_twelve_steps_are_torchs() -> None:
    mine, theirs = parameters(), parameters()
    ours, other = AdamW(torchs(mine), {}), torchs(theirs)
    steps(ours, mine, range(12))
    steps(other, theirs, range(12))
    assert farthest(mine, theirs) < 1e-13
    counts = [[float(o.state[p]["step"]) for p in ps] for o, ps in ((ours, mine), (other, theirs))]
    assert counts[0] == counts[1] == [12, 8, 12]
    # Those that have made as many steps share a count, for all of which one kernel prepares.
    assert len({id(ours.state[p]["step"]) for p in mine[:2]}) == 2


def test_state_goes_on_in_either() -> None:
    mine, theirs = parameters(), parameters()
    ours, other = AdamW(torchs(mine), {}), torchs(theirs)
    steps(ours, mine, range(3))
    steps(other, theirs, range(3))
    saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(other.state_dict())
    ours.load_state_dict(saved[1])  # a count for each parameter
    other.load_state_dict(saved[0])
    for group in other.param_groups:
        group["capturable"] = False
    steps(ours, mine, range(3, 6))
    steps(other, theirs, range(3, 6))
    assert farthest(mine, theirs) < 1e-13
    assert ours.state[mine[0]]["step"] is not ours.state[mine[2]]["step"]  # of two groups


@pytest.mark.parametrize("bound", [None, 0.5])
def test_it_unscales_clips_and_leaves_out_what_overflowed(bound: float | None) -> None:
    mine, theirs = parameters(), parameters()
    held = {id(p): torch.zeros_like(p, dtype=torch.bfloat16) for p in mine[:2]}
    ours, other = AdamW(torchs(mine), held), torchs(theirs)
    for number in range(5):
        bad = number == 2
        before = copy.deepcopy([ours.state[p] for p in mine]), [p.clone() for p in mine]
        for place, gradient in enumerate(gradients(number)):
            mine[place].grad, theirs[place].grad = 64 * gradient, gradient.clone()
        if bad:
            mine[2].grad[0, 1, 1] = torch.nan
        norm = torch.stack([p.grad.norm() for p in mine]).norm()
        assert bool(ours.take(norm, bound, 64.0)) is not bad
        ours.step()
        if bad:
            for old, parameter in zip(before[0], mine, strict=True):
                state = ours.state[parameter]
                assert all(torch.equal(old[key], state[key]) for key in old)
            assert farthest(mine, before[1]) == 0
            continue
        if bound is not None:
            nn.utils.clip_grad_norm_(theirs, bound)
        other.step()
        assert farthest(mine, theirs) < 1e-12
        for parameter in mine[:2]:
            assert torch.equal(held[id(parameter)], parameter.to(torch.bfloat16))


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_stages_update_by_the_kernel_as_well(precision: str | None) -> None:
    """Two microbatches of a clipped step with an average, by the kernel and by torch."""
    model, batch = net(torch.float64 if precision is None else torch.float32)
    how = {"precision": precision, "clip_norm": 0.5, "ema": 0.9, "microbatches": 2}
    runs = []
    for fuse in ((), ("adamw",)):
        program = autopar.compile(
            model, "cpu: gpu=1", optimizer=ADAMW, example_inputs=batch, fuse=fuse, **how
        )
        assert isinstance(program.plan, autopar.Plan)
        assert isinstance(program.optimizer, AdamW) == bool(fuse)
        losses = [program.step(**batch).item() for _ in range(3)]
        norm = float(program.grad_norm)
        runs.append((losses, norm, program.state_dict(), program.ema_state_dict()))
    (losses, norm, state, average), (others, other, again, means) = runs
    # What is held in 16 bits is rounded alike, but for masters that lie between two.
    exact = 1e-12 if precision is None else 1e-3
    assert losses == pytest.approx(others, rel=exact)
    assert norm == pytest.approx(other, rel=max(exact, 1e-2 * (precision is not None)))
    assert error(again, state) < exact
    assert error(means, average) < exact


def test_other_optimizers_are_left_alone() -> None:
    given = parameters()
    assert takes(torchs(given))
    assert not takes(torch.optim.Adam(given))
    assert not takes(torch.optim.AdamW(given, amsgrad=True))
    assert not takes(torch.optim.AdamW(given, maximize=True))
    assert not takes(torch.optim.AdamW(parameters(torch.bfloat16)))
    assert not takes(AdamW(torchs(given), {}))
    names = choose(True)
    assert fusable(partial(torch.optim.AdamW, lr=1.0), names) == names
    assert fusable(torch.optim.SGD, names) == names[:-1]
    assert fusable(torch.optim.SGD, ("gelu",)) == ("gelu",)
