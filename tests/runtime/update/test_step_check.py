"""Non-finite steps: handled in the same way on all ranks, losing only the step itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import NonFiniteError, ProgramError
from autopar.runtime.parameters.gradients import Gradients
from tests.support.ranks import run_ranks

MESH = "toy[1TFLOP/s 64GiB 1TB/s]: gpu=2 @10GB/s 1us"
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
STEPS, BAD = 5, 2
Batch = dict[str, Tensor]


class Net(nn.Module):
    """Linears with a batch norm between them, whose statistics are buffers; plain ones without."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        # A bias before a batch norm has no gradient but rounding's, which AdamW would magnify.
        self.first, self.second = nn.Linear(8, 8, bias=plain), nn.Linear(8, 8)
        linears = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = linears if plain else nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))).square().mean()


def net(dtype: torch.dtype = torch.float64, plain: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Net(plain).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Batch:
    """That of a step; it has a NaN in the second half of the bad one's."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    if step == BAD:
        x[6, 3] = torch.nan
    return {"x": x.to(dtype)}


@dataclass
class Run:
    """What a run leaves."""

    state: dict[str, Tensor]
    moments: list[Tensor] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)
    bad: int = 0
    error: str = ""


def skipping(how: dict[str, Any], bad: Callable[[int], bool] = lambda step: step == BAD) -> Run:
    """The same steps without the bad one in plain torch."""
    model = net(plain=how.get("stages", 1) > 1)
    optimizer = ADAMW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    count, norm, mean = how.get("microbatches", 1), how.get("clip_norm"), how.get("ema")
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        if not bad(step):
            optimizer.zero_grad()
            clean = batch(step + 100 * (step == BAD))
            for part in clean["x"].chunk(count):
                (model(part) / count).backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            for name, parameter in model.named_parameters() if mean else ():
                means[name].lerp_(parameter.detach(), 1 - mean)
        schedule.step()  # the user's, which counts steps that were left out too
    state = {name: value.detach() for name, value in model.state_dict().items()}
    moments = [m for p in model.parameters() for m in _moments(optimizer, p)]
    return Run(state, moments, means if mean else {})


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    state = optimizer.state[parameter]
    return [state[name] for name in ("exp_avg", "exp_avg_sq", "step")]


def sums(run: Run) -> list[float]:
    """What moments of shards and of wholes have in common, but for the count."""
    return [float(sum(m.double().sum() for m in run.moments[kind::3])) for kind in (0, 1)]


# Ways of going wrong, each on rank 1 only but for the batch's ------------------------------------


def bad_batch(program: Any) -> ExitStack:
    return ExitStack()


def bad_gradient(program: Any) -> ExitStack:
    """One element of one gradient of the last rank, whose loss is finite."""
    stack, last = ExitStack(), dist.get_rank() == dist.get_world_size() - 1
    collect = Gradients.collect

    def broken(self: Gradients) -> None:
        collect(self)
        weight = program.optimizer.param_groups[0]["params"][-1]
        if last and program._step_number == BAD:
            weight.grad.view(-1)[0] = torch.inf

    stack.enter_context(patch.object(Gradients, "collect", broken))
    return stack


def train(how: dict[str, Any], breaks: Callable[[Any], ExitStack]) -> Run:
    """The steps on this rank, one of them bad."""
    clean = breaks is not bad_batch
    model, given = net(plain=how.get("stages", 1) > 1), {**how}
    late, policy = given.pop("late", False), given.get("on_nonfinite", "raise")
    program: Any = autopar.compile(model, MESH, optimizer=ADAMW, example_inputs=batch(0), **given)
    program._executor.update.check.late = late
    schedule = torch.optim.lr_scheduler.ExponentialLR(program.optimizer, 0.9)
    error = ""
    with breaks(program):
        for step in range(STEPS):
            program._step_number = step
            try:
                program.step(**batch(step + 100 * (clean and step == BAD)))
            except NonFiniteError as caught:
                error = " ".join(str(caught).split())
                if late:  # the step before; this one was left out with it
                    program.step(**batch(step))
            schedule.step()
    assert bool(error) == (policy == "raise")
    moments = [
        m
        for group in program.optimizer.param_groups
        for p in group["params"]
        if p.numel()
        for m in _moments(program.optimizer, p)
    ]
    average = program.ema_state_dict() if given.get("ema") else {}
    return Run(program.state_dict(), moments, average, program.nonfinite_steps, error)


SKIP = {"on_nonfinite": "skip"}
FREE = autopar.pins.data_parallel("gpu")
WAYS: dict[str, dict[str, Any]] = {
    "data parallel": {"pins": FREE, "state": "ddp"},
    "skip": {**SKIP, "pins": FREE, "state": "ddp"},
    "zero3": {**SKIP, "pins": FREE, "state": "zero3", "ema": 0.9},
    "clipped": {**SKIP, "clip_norm": 0.01, "pins": FREE},
    "kernel": {"fuse": ["adamw"], "pins": FREE, "ema": 0.9},
    "kernel, clipped, late": {**SKIP, "fuse": ["adamw"], "clip_norm": 0.01, "late": True},
    "kernel, late": {"fuse": ["adamw"], "ema": 0.9, "late": True, "pins": FREE},
    "offloaded": {**SKIP, "offload": "optimizer", "ema": 0.9, "pins": FREE},
    "accumulated": {**SKIP, "microbatches": 2, "clip_norm": 0.01},
    "stages": {"stages": 2, "microbatches": 2, "ema": 0.9},
    "stages, skip": {**SKIP, "stages": 2, "microbatches": 4, "schedule": "zb_h1"},
}  # fmt: skip
BREAKS = (bad_batch, bad_gradient)
# The others combine these options, or run stages by another schedule.
QUICK = ("data parallel", "zero3", "kernel, clipped, late", "offloaded", "accumulated", "stages")
Runs = list[dict[tuple[str, str], Run]]


def every(names: Iterable[str]) -> dict[tuple[str, str], Run]:
    """These ways with all breaks on this rank."""
    return {
        (name, breaks.__name__): train(WAYS[name], breaks) for name in names for breaks in BREAKS
    }


@pytest.fixture(scope="module")
def quick() -> Runs:
    return run_ranks(every, QUICK, count=2)


@pytest.fixture(scope="module")
def full() -> Runs:
    return run_ranks(every, [*WAYS.keys() - set(QUICK)], count=2)


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("name", QUICK)
def test_a_step_that_is_not_finite_changes_nothing(
    name: str, breaks: Callable[..., Any], quick: Runs
) -> None:
    check(name, breaks, quick)


@pytest.mark.slow
@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("name", sorted(WAYS.keys() - set(QUICK)))
def test_a_step_that_is_not_finite_changes_nothing_in_further_programs(
    name: str, breaks: Callable[..., Any], full: Runs
) -> None:
    check(name, breaks, full)


def check(name: str, breaks: Callable[..., Any], runs: Runs) -> None:
    how, key = WAYS[name], (name, breaks.__name__)
    wanted = skipping(how)
    for rank in runs:
        run = rank[key]
        assert run.bad == 1
        for tensor, value in wanted.state.items():
            torch.testing.assert_close(run.state[tensor], value, rtol=1e-12, atol=1e-12)
        for tensor, value in wanted.average.items():
            torch.testing.assert_close(run.average[tensor], value, rtol=1e-12, atol=1e-12)
        if run.error:
            assert f"step {BAD + 1} is not finite" in run.error
            assert run.error == runs[0][key].error  # alike on all ranks
            if not how.get("late"):
                assert ("the input 'x' has NaN" in run.error) == (breaks is bad_batch)
                assert "the gradient of" in run.error
                assert breaks is bad_batch or "on rank 1" in run.error
    if how.get("state") == "ddp":
        assert sums(runs[0][key]) == pytest.approx(sums(wanted), rel=1e-12)


# One process --------------------------------------------------------------------------------------


def alone(**how: Any) -> Any:
    how = {"optimizer": ADAMW, "example_inputs": batch(0), **how}
    return autopar.compile(net(), "cpu: gpu=1", **how)


def test_on_request_training_goes_on_as_torchs_does() -> None:
    for fuse in ((), ("adamw",)):
        program = alone(on_nonfinite="continue", fuse=fuse)
        program.step(**batch(BAD))
        assert program.nonfinite_steps == 1
        assert not any(p.isfinite().all() for p in program.optimizer.param_groups[0]["params"][:2])


def test_an_infinite_norm_of_finite_gradients_and_bad_parameters_are_told_apart() -> None:
    program, collect = alone(), Gradients.collect

    def large(self: Gradients) -> None:
        collect(self)
        program.optimizer.param_groups[0]["params"][0].grad.fill_(1e200)

    with (
        patch.object(Gradients, "collect", large),
        pytest.raises(NonFiniteError, match="norm of its gradients inf") as caught,
    ):
        program.step(**batch(0))
    assert "exceed the range of their dtype" in str(caught.value)
    state = program.state_dict()
    state["second.bias"][3] = torch.inf
    program.load_state_dict(state)
    with pytest.raises(NonFiniteError) as caught:
        program.step(**batch(0))
    assert "the parameter 'second.bias' has NaN or infinite values before" in str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_rate_that_is_not_finite_is_refused_before_it_is_used(value: float) -> None:
    program = alone()
    before = {name: tensor.clone() for name, tensor in program.state_dict().items()}
    program.optimizer.param_groups[0]["lr"] = value
    with pytest.raises(NonFiniteError, match="lr of the optimizer's group 0"):
        program.step(**batch(0))
    assert all(torch.equal(v, before[k]) for k, v in program.state_dict().items())


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ProgramError, match="on_nonfinite"):
        alone(on_nonfinite="ignore")


def test_a_late_error_is_raised_by_whatever_is_called_next() -> None:
    for ask in ("state_dict", "step", "call", "save_checkpoint"):
        program = alone(fuse=["adamw"])
        program._executor.update.check.late = True
        program.step(**batch(BAD))
        calls: dict[str, Callable[[], Any]] = {
            "state_dict": program.state_dict,
            "step": lambda program=program: program.step(**batch(0)),
            "call": lambda program=program: program(**batch(0)),
            "save_checkpoint": lambda program=program: program.save_checkpoint("nowhere"),
        }
        with pytest.raises(NonFiniteError, match="step 1 is not finite"):
            calls[ask]()
        assert program.step(**batch(0)).isfinite()
        assert program.state_dict()["norm.running_mean"].isfinite().all()


def test_the_scale_of_float16_is_sought_without_an_error_until_it_has_no_purpose() -> None:
    model, x = net(torch.float32, plain=True), batch(0, torch.float32)
    program: Any = autopar.compile(model, "cpu: gpu=1", precision="fp16", example_inputs=x)
    program.scaler.factor.fill_(2.0**40)
    program.step(**x)
    assert program.scaler.skipped
    assert program.nonfinite_steps == 0
    while program.scaler.skipped:
        program.step(**x)
    assert program.nonfinite_steps == 0
    with pytest.raises(NonFiniteError):  # the loss itself: no scale would help
        program.step(x=x["x"] * torch.nan)
    take = Gradients.take
    with patch.object(Gradients, "take", lambda self, w, g: take(self, w, g * torch.nan)):
        program.scaler.factor.fill_(3e-4)
        program.step(**x)
        program.step(**x)
        assert program.scaler.skipped
        with pytest.raises(NonFiniteError):
            program.step(**x)


def test_the_count_of_steps_goes_on_with_a_checkpoint(tmp_path: Any) -> None:
    program = alone(on_nonfinite="skip")
    program.step(**batch(BAD))
    program.step(**batch(0))
    program.save_checkpoint(tmp_path / "here")
    other = alone()
    other.load_checkpoint(tmp_path / "here")
    assert other.nonfinite_steps == 1
    with pytest.raises(NonFiniteError, match="step 3 is not finite"):
        other.step(**batch(BAD))
