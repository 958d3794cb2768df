"""Sharded training equals unsharded: losses and parameters of 10 AdamW steps, on four ranks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.parity import Case, Run, Sharded, unsharded
from tests.support.patterns import FAMILIES, Axes, communication, expected, parameters
from tests.support.ranks import run_ranks

FLAT, GRID, ROW = "gpu=4", "data=2, tensor=2", "data=1, tensor=4"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def quick_cases(name: str) -> list[Case]:
    """Every forced plan, dtype and dropout once; free plans are in test_program and test_families.

    The positions of ViT are 17 with the class token: parts that differ by one.
    """
    if name == "llama":
        return [Case(GRID, "sequence")]
    if name == "gpt2":
        return [Case(GRID, "tensor", dropout=0.1), Case(FLAT, "zero", torch.float32)]
    cases = [Case(GRID, "sequence"), Case(GRID, dtype=torch.float32)]
    return [*cases, Case(FLAT), *([Case(GRID, "tensor", dropout=0.1)] if name == "bert" else [])]


def all_cases(name: str) -> list[Case]:
    """All others. Llama's two heads of keys do not split four ways."""
    refused = ("tensor", "sequence") if name == "llama" else ()
    dropouts = (0.0, 0.1) if name in ("gpt2", "bert") else (0.0,)
    plans = ("free", "data", "zero", "tensor", "sequence")
    cases = [
        Case(mesh, plan, dtype, dropout)
        for mesh, plan, dtype, dropout in product((FLAT, GRID, ROW), plans, TOLERANCE, dropouts)
        if (mesh == GRID or plan not in refused) and (dtype == torch.float64 or not dropout)
    ]
    return [case for case in cases if case not in quick_cases(name)]


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "vit"))]
)
def test_training(name: str, tmp_path: Path) -> None:
    check(name, quick_cases(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_training_by_every_plan_on_every_mesh(name: str, tmp_path: Path) -> None:
    check(name, all_cases(name), tmp_path)


def check(name: str, cases: list[Case], folder: Path) -> None:
    """Trains all cases in one process group, and checks each of them."""
    jobs = Sharded(name, cases)
    whole = {key[:2]: unsharded(name, *key[:2]) for key in jobs.captured}
    ranks = run_ranks(jobs.train)
    wrong = {}
    for number, case in enumerate(cases):
        runs, reference = [rank[number] for rank in ranks], whole[case.dtype, case.dropout]
        error = max(run.error(reference) for run in runs)
        if not error <= TOLERANCE[case.dtype]:
            wrong[case] = f"off by {error:.2g}"
        elif any(run.losses != runs[0].losses for run in runs):
            wrong[case] = "the ranks report different losses"
        elif fault := not_as_forced(jobs, number, runs[0], reference):
            wrong[case] = fault
        (folder / f"program_{number}.py").write_text(runs[0].source, encoding="utf-8")
        if name == "gpt2":
            state = runs[0].state
            tied = state["model.transformer.wte.weight"], state["model.lm_head.weight"]
            assert torch.equal(*tied)
    assert not wrong, "\n".join(f"{case}: {fault}" for case, fault in wrong.items())
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", str(folder)]
    found = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def one_by_one(steps: Counter[tuple[str, Axes]]) -> Counter[tuple[str, str]]:
    """The same steps along one axis at a time: small gradients are summed so, which is as well."""
    found: Counter[tuple[str, str]] = Counter()
    for (name, axes), count in steps.items():
        found.update({(name, axis): count for axis in axes})
    return found


def not_as_forced(jobs: Sharded, number: int, run: Run, whole: Run) -> str:
    """How a program is not what its case forces; nothing if it is."""
    case, graph, plan = jobs.cases[number], jobs.graph(jobs.cases[number]), jobs.plans[number]
    if plan is None:
        return "" if run.held < whole.held else "nothing is sharded"
    *batch, tensor = case.axes
    found = communication(run.source)
    wanted = expected(case.plan, graph, FAMILIES[jobs.name], tensor, tuple(batch))
    if one_by_one(found) != one_by_one(wanted):
        return f"it communicates {found}, not {wanted}"
    if case.plan not in ("data", "zero"):
        return ""
    for node in parameters(graph):
        (share,) = graph.users[node.name]
        layout = plan.stage.nodes[share].results[0][1]
        if (set(layout.varying), layout.sharded_axes) != (set(case.axes), ()):
            return f"%{node.name} is used as {layout}"
    ((_, leaving),) = graph.repeats[0].carried
    if plan.stage.nodes[leaving].results[0][1].dims != (case.axes, (), ()):
        return f"the block leaves {plan.stage.nodes[leaving]}"
    parts = 1 if case.plan == "data" else 4
    return "" if run.held * parts == whole.held else f"{run.held} of {whole.held} are stored"
