"""Offloading is chosen only if memory requires it, and beats every other choice."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from autopar.cli.explain import explained
from autopar.cost.device import device
from autopar.errors import InfeasibleError, PlanError, PlanMismatchError, ProgramError
from autopar.explain import Explanation
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.offload import NOTHING, Offload, left_of, offloaded_runs
from autopar.ir.precision import Precision
from autopar.ir.recompute import Recompute
from autopar.plan import Plan
from autopar.planning import planner as planner_module
from autopar.planning.capturing import capture_graph
from autopar.planning.offloading import parse_offload
from autopar.planning.options import Options
from autopar.planning.planner import Planner
from autopar.planning.trace import Trace
from autopar.runtime.update.optimizer import refuse_what_steps_break
from autopar.stage_plan import StagePlan
from tests.support import models

GPUS = Mesh.parse("A100-80: gpu=2")
RUN, LAYERS = "transformer.h", 3


@functools.cache
def graph() -> Graph:
    torch.manual_seed(0)
    model, batch = models.MODELS["gpt2"](layers=LAYERS, batch=8, seq=32)
    return capture_graph(model, (), batch, Options(), Trace(None)).graph


@functools.cache
def planner(offload: str, recompute: str = "none") -> Planner:
    return Planner(graph(), GPUS, Options(offload=offload, recompute=recompute), Trace(None))


def planned(limit: float, offload: str, recompute: str = "none") -> StagePlan:
    return planner(offload, recompute).plan(limit)


@functools.cache
def free() -> StagePlan:
    return planned(1e15, "none")


@functools.cache
def explanation(offload: str) -> tuple[Explanation, StagePlan]:
    plan = planned(1e15, offload)
    return explained(graph(), plan, 1e15), plan


@pytest.mark.slow
def test_nothing_is_offloaded_where_memory_suffices() -> None:
    assert planned(1.01 * free().predicted.peak_bytes, "auto").offload == NOTHING


@pytest.mark.slow
def test_of_what_may_be_offloaded_the_fastest_that_fits_is_chosen() -> None:
    """Beneath what any plan needs that offloads nothing."""
    least = planned_least()
    limit = 0.9 * least
    with pytest.raises(InfeasibleError):
        planned(limit, "none")
    chosen = planned(limit, "auto")
    assert chosen.offload
    assert chosen.predicted.peak_bytes <= limit
    others = []
    for blocks, optimizer in product((0, 2, 3), (False, True)):
        words = ["optimizer"] * optimizer + [f"activations {blocks}"] * bool(blocks)
        try:
            others.append(planned(limit, "+".join(words) or "none").predicted.step_seconds)
        except InfeasibleError:
            continue
    assert chosen.predicted.step_seconds == pytest.approx(min(others), rel=1e-2)


@functools.cache
def planned_least() -> float:
    """About the least memory of a plan that offloads nothing."""
    high = free().predicted.peak_bytes
    low = 0.0
    while high - low > 0.05 * high:
        middle = (low + high) / 2
        try:
            high = planned(middle, "none").predicted.peak_bytes
        except InfeasibleError:
            low = middle
    return high


@pytest.mark.parametrize("words", ["optimizer", "activations 2", "optimizer+activations"])
def test_copies_cost_what_the_link_takes(words: str) -> None:
    """The figures of the plan, from the bytes and the device's link alone, and as explained."""
    found, plan = explanation(words)
    said, chip = plan.predicted, device(GPUS)
    states = 2.0 * sum(
        plan.storage(
            graph().template[leaf.name], graph().template[graph().users[leaf.name][0]]
        ).updated.local_bytes(leaf.type, GPUS)
        for leaf in graph().leaves("param")
        if leaf.requires_grad
    )
    activations = said.host_bytes - (states if plan.offload.optimizer else 0.0)
    rate = chip.host_bandwidth * chip.host_efficiency
    copied = (states if plan.offload.optimizer else 0.0) + 2 * activations
    assert (activations > 0) == bool(plan.offload.blocks)
    assert said.host_seconds >= copied / rate * (1 - 1e-9)
    operators = sum(len(r.iterations[0]) for r in graph().repeats)
    launches = 2 * LAYERS * operators * chip.launch
    assert said.host_seconds <= copied / rate * (1 + 1e-9) + launches
    assert found.host == pytest.approx(said.host_bytes, rel=1e-9)
    assert found.copies == pytest.approx(said.host_seconds, rel=1e-9)
    assert found.step == pytest.approx(said.step_seconds, rel=1e-9)
    assert found.memory["activations"] == pytest.approx(said.activation_bytes, rel=1e-9)
    assert not found.stale


def test_masters_are_offloaded_with_the_rest_of_the_state() -> None:
    """Of a parameter in bf16 a float32 and AdamW's two moments of it, 12 bytes."""
    options = Options(offload="optimizer", recompute="none", precision=Precision.read("bf16"))
    torch.manual_seed(0)
    model, batch = models.MODELS["gpt2"](layers=LAYERS, batch=8, seq=32)
    mixed = capture_graph(model, (), batch, options, Trace(None)).graph
    plan = Planner(mixed, GPUS, options, Trace(None)).plan(1e15)
    states = 0.0
    for leaf in mixed.leaves("param"):
        share = mixed.template[mixed.users[leaf.name][0]]
        storage = plan.storage(mixed.template[leaf.name], share)
        elements = storage.updated.local_bytes(leaf.type, GPUS) / leaf.type.nbytes
        states += 12 * elements * math.prod(leaf.type.shape)
    chip, found = device(GPUS), explained(mixed, plan, 1e15)
    assert plan.predicted.host_bytes == pytest.approx(states)
    seconds = states / (chip.host_bandwidth * chip.host_efficiency)
    assert plan.predicted.host_seconds == pytest.approx(seconds)
    assert (found.host, found.copies) == pytest.approx((states, seconds))


def test_a_plan_keeps_what_is_offloaded(tmp_path: Path) -> None:
    _, plan = explanation("optimizer+activations")
    assert plan.offload == Offload(True, {RUN: LAYERS})
    Plan.of(plan).save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml").stage == plan
    text = Plan.of(plan).to_toml()
    for damage in ('optimizer = "yes"', "optimizer = true\nstates = true"):
        with pytest.raises(PlanError, match="damaged entry"):
            Plan.from_toml(text.replace("optimizer = true", damage, 1))


def test_blocks_that_are_computed_again_are_not_offloaded() -> None:
    again = {RUN: Recompute("full", 2)}
    left = left_of(graph(), parse_offload(graph(), "activations"), again)
    assert left == Offload(False, {RUN: 1})
    assert offloaded_runs(graph(), left, again) == ((2, 3),)
    assert left_of(graph(), left, {RUN: Recompute("full", 3)}) == NOTHING
    for wrong, blocks in ((RUN, 2), ("transformer.g", 1)):
        with pytest.raises(PlanMismatchError, match="offloads activations"):
            offloaded_runs(graph(), Offload(False, {wrong: blocks}), again)


def test_what_cannot_be_offloaded_is_refused() -> None:
    for words in ("weights", "optimizer 2", "activations 0", "activations many", "auto+optimizer"):
        with pytest.raises(PlanError, match="cannot offload"):
            Options(offload=words)
    chip = replace(device(GPUS), host_memory=1.0)
    with (
        patch.object(planner_module, "device", lambda _: chip),
        pytest.raises(InfeasibleError, match="host memory is too small"),
    ):
        planned(1e15, "optimizer")


class Counting(torch.optim.SGD):
    """Counts its steps over all parameters together."""

    count = 0

    def step(self, closure: None = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step()


def test_an_optimizer_that_counts_its_steps_is_refused() -> None:
    with pytest.raises(ProgramError, match="state of Counting cannot lie in host memory"):
        refuse_what_steps_break(Counting)
    for kind in (torch.optim.AdamW, torch.optim.Adafactor, partial(torch.optim.SGD, momentum=0.9)):
        refuse_what_steps_break(kind)
