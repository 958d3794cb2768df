"""Recomputation chosen with the layouts, against every number of blocks of either kind."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.recompute import KINDS, Recompute
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import Planner
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.support import models
from tests.support.ranks import run_ranks

MESH = Mesh.parse("cpu: gpu=4")
LAYERS = 2


@functools.cache
def graph() -> Graph:
    torch.manual_seed(0)
    model, batch = models.MODELS["gpt2"](layers=LAYERS, batch=8, seq=32)
    return capture_graph(model, (), batch, Options(), Trace(None)).graph


@functools.cache
def planner(recompute: str) -> Planner:
    return Planner(graph(), MESH, Options(recompute=recompute), Trace(None))


def planned(limit: float, recompute: str = "auto") -> StagePlan:
    return planner(recompute).plan(limit)


@functools.cache
def free() -> StagePlan:
    return planned(1e15)


def every(limit: float) -> list[StagePlan]:
    """The plans of all ways to recompute that fit."""
    found = []
    ways = ["none", *(f"{kind} {count}" for kind in KINDS for count in range(1, LAYERS + 1))]
    for way in ways:
        try:
            found.append(planned(limit, way))
        except InfeasibleError:
            continue
    return found


@pytest.mark.parametrize("share", [0.6, pytest.param(0.7, marks=pytest.mark.slow)])
def test_no_way_to_recompute_is_faster(share: float) -> None:
    limit = share * free().predicted.peak_bytes
    chosen, all_of_them = planned(limit), every(limit)
    best = min(plan.predicted.step_seconds for plan in all_of_them)
    assert chosen.recompute
    assert chosen.predicted.peak_bytes <= limit
    assert chosen.predicted.step_seconds == pytest.approx(best, rel=1e-6)


def test_nothing_is_recomputed_where_memory_suffices() -> None:
    assert not planned(1.01 * free().predicted.peak_bytes).recompute
    assert not free().recompute


def test_what_does_not_fit_even_so_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        planned(0.05 * free().predicted.peak_bytes)
    with pytest.raises(PlanError, match="not a valid recomputation"):
        planned(1e15, "half")


def test_a_plan_keeps_what_is_recomputed(tmp_path: Path) -> None:
    made = planned(1e15, "selective 2")
    assert made.recompute == {"transformer.h": Recompute("selective", 2)}
    Plan.of(made).save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml").stage == made


def trained(ways: list[str]) -> list[list[float]]:
    """Losses of a model with dropout under the same layouts."""
    losses, plan = [], None
    for way in ways:
        torch.manual_seed(0)
        sizes = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
        model, batch = models.MODELS["gpt2"](layers=LAYERS, **sizes)
        mesh = "cpu: data=2"
        if plan is None:
            plan = autopar.plan(model, mesh, example_inputs=batch)
        told = {} if way == "none" else {"transformer.h": Recompute.parse(way)}
        torch.manual_seed(1)
        program = autopar.compile(
            model, mesh, plan=Plan.of(replace(plan.stage, recompute=told)), example_inputs=batch
        )
        assert ("= checkpoint(" in program.source) == (way != "none")
        losses.append([program.step(**batch).item() for _ in range(3)])
    return losses


def test_recomputing_changes_no_bit() -> None:
    """Random masks included."""
    for losses in run_ranks(trained, ["none", "full 2", "selective 1"], count=2):
        assert losses[0] == losses[1] == losses[2]
