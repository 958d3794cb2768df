"""Step time against memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError, OptionError
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.plan_entries import Prediction
from autopar.planning.frontier import fastest_together, frontier
from autopar.planning.options import Options
from autopar.planning.planner import Planner
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.planning.test_recomputation import MESH, graph

# Peak and time of the plans that there are; the third is never the fastest.
PLANS = ((100.0, 1.0), (60.0, 2.0), (55.0, 4.0), (40.0, 3.0), (20.0, 9.0))


def fastest(limit: float) -> StagePlan:
    fitting = [(time, peak) for peak, time in PLANS if peak <= limit]
    if not fitting:
        raise InfeasibleError("nothing fits")
    time, peak = min(fitting)
    plan = StagePlan("graph", Mesh.parse("cpu: gpu=2"), {})
    return replace(plan, predicted=Prediction(time, peak))


def test_all_plans_that_no_other_beats() -> None:
    found = [
        (plan.predicted.peak_bytes, plan.predicted.step_seconds) for plan in frontier(fastest, 0.99)
    ]
    assert found == [(100.0, 1.0), (60.0, 2.0), (40.0, 3.0), (20.0, 9.0)]


def test_less_memory_takes_longer() -> None:
    planned = Planner(graph(), MESH, Options(), Trace(None)).plan
    found = [plan.predicted for plan in frontier(planned, 0.6)]
    assert len(found) > 1
    for one, other in itertools.pairwise(found):
        assert other.peak_bytes <= 0.6 * one.peak_bytes * (1 + 1e-9)
        assert other.step_seconds > one.step_seconds
    with pytest.raises(InfeasibleError):
        planned(0.6 * found[-1].peak_bytes)


Figures = tuple[float, float, float]  # seconds, peak bytes, and bytes between steps


def chooser(figures: list[Figures]) -> Callable[[float], Plan]:
    """The fastest of some plans within a limit."""

    def plan(limit: float) -> Plan:
        fitting = [each for each in figures if each[1] <= limit]
        if not fitting:
            raise InfeasibleError("nothing fits")
        seconds, peak, kept = min(fitting)
        stage = StagePlan("graph", Mesh.parse("cpu: gpu=2"), {})
        predicted = Prediction(seconds, peak, parameter_bytes=kept)
        return Plan.of(replace(stage, predicted=predicted))

    return plan


def best_by_trial(models: list[list[Figures]], calls: list[float], limit: float) -> float | None:
    """The least time of all choices of one plan for each model that fit together."""
    times = [
        sum(often * seconds for (seconds, _, _), often in zip(choice, calls, strict=True))
        for choice in itertools.product(*models)
        if sum(kept for *_, kept in choice) + max(peak - kept for _, peak, kept in choice) <= limit
    ]
    return min(times, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_several_models_share_memory_as_well_as_any_choice_of_plans(seed: int) -> None:
    draw = random.Random(seed)
    models = []
    for _ in range(3):
        # Less memory, more time; and no two peaks so near that the frontier would skip one.
        peaks = sorted((2.0**n * draw.uniform(1.3, 1.5) for n in range(5)), reverse=True)
        seconds = sorted(draw.uniform(1, 9) for _ in peaks)
        models.append([(s, p, p * draw.random()) for s, p in zip(seconds, peaks, strict=True)])
    calls, limit = [draw.choice([0.5, 1.0, 8.0]) for _ in models], draw.uniform(3, 60)
    best = best_by_trial([[p for p in m if p[1] <= limit] for m in models], calls, limit)
    names = ["actor", "critic", "reward"]
    plans = dict(zip(names, map(chooser, models), strict=True))
    often = dict(zip(names, calls, strict=True))
    if best is None:
        with pytest.raises(InfeasibleError):
            fastest_together(plans, often, limit)
        return
    found = fastest_together(plans, often, limit)
    total = sum(often[name] * plan.predicted.step_seconds for name, plan in found.items())
    assert total == pytest.approx(best)


def test_a_job_of_two_models_fits_where_their_fastest_plans_do_not() -> None:
    batch = torch.zeros(64, 64)

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))

    def mean(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    models = {
        "actor": {"model": layers(), "example_inputs": batch, "loss_fn": mean, "clip_norm": 1.0},
        "reference": {"model": layers().requires_grad_(False), "example_inputs": batch},
    }
    roomy = autopar.plan_together(models, "H100: gpu=2")
    held = {name: plan.predicted.parameter_bytes for name, plan in roomy.items()}
    assert held["reference"] < held["actor"] / 3  # neither gradients nor states
    peak = sum(held.values()) + max(
        plan.predicted.peak_bytes - held[name] for name, plan in roomy.items()
    )
    tight = autopar.plan_together(models, "H100: gpu=2", memory=0.8 * peak)
    kept = sum(plan.predicted.parameter_bytes for plan in tight.values())
    more = max(p.predicted.peak_bytes - p.predicted.parameter_bytes for p in tight.values())
    assert kept + more <= 0.8 * peak
    with pytest.raises(InfeasibleError, match="the model 'actor'"):
        autopar.plan_together(models, "H100: gpu=2", memory=0.3 * peak)
    with pytest.raises(OptionError, match="critic"):
        autopar.plan_together(models, "H100: gpu=2", calls={"critic": 2})
