"""Trains random models on several ranks under random plans, and compares with one process."""

from __future__ import annotations

import importlib
import random
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing import ProcessExitedException

import autopar
from autopar.capture.capture import Captured
from autopar.cost.model import AnalyticModel
from autopar.errors import PinError
from autopar.intra_op.build import build, layouts
from autopar.intra_op.problem import FORBIDDEN, Problem
from autopar.intra_op.solvers import solve
from autopar.intra_op.work.kernel_work import works
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel, fsdp
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import Settings, run, tasks
from autopar.stage_plan import StagePlan
from tests.fuzz.programs import Random
from tests.support.ranks import run_ranks

STEPS, RATE, TOLERANCE = 2, 1e-2, 1e-9
SLOW = "cpu[1GFLOP/s 64GiB 1GB/s]"
MESHES = (
    f"{SLOW}: x=2 @10GB/s 1us",
    f"{SLOW}: x=4 @10GB/s 1us",
    f"{SLOW}: x=3 @10GB/s 1us",
    f"{SLOW}: x=2 @10GB/s 1us, y=2 @10GB/s 1us",
    f"{SLOW}: x=2 @100MB/s 100us, y=2 @10GB/s 1us",
)
PLANS = ("solver", "legal", "legal", "legal", "data", "fsdp")
Run = list[Tensor] | str  # losses and final state, or a traceback


@dataclass(frozen=True)
class Job:
    """A model, its graph and the plan under which it trains; a traceback in place of the two."""

    seed: int
    mesh: str
    how: str
    captured: Captured | None = None
    plan: StagePlan | None = None
    error: str = ""

    @classmethod
    def of(cls, seed: int) -> Job:
        """The job of a seed."""
        picks = random.Random(seed)
        mesh, how = MESHES[seed % len(MESHES)], picks.choice(PLANS)
        model = Random(seed)
        try:
            captured = capture_graph(model, (), model.batch, Options(), Trace(None))
            plan = planned(captured, Mesh.parse(mesh), how, picks)
        except Exception:
            return cls(seed, mesh, how, error=traceback.format_exc())
        return cls(seed, mesh, how, captured, plan)

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.mesh).size


def planned(captured: Captured, mesh: Mesh, how: str, picks: random.Random) -> StagePlan:
    """A plan of the solver, of pins, or of layouts that are drawn among all legal ones.

    It is simulated, too, so that nothing in it is beyond the simulator.
    """
    graph, table, prices = captured.graph, Options().table, AnalyticModel(mesh)
    plan = None
    if how != "legal":
        axes = [axis.name for axis in mesh.axes]
        pins = {"data": [data_parallel(*axes)], "fsdp": [fsdp(*axes)]}.get(how)
        try:
            made = make_plan(graph, mesh, Options(pins=pins), Trace(None))
            assert isinstance(made, StagePlan)
            plan = made
        except PinError:  # it has no batch that splits
            pass
    if plan is None:
        built = build(graph, mesh, prices, table)
        choice = random_choice(built.problem, picks)
        plan = StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice))
    run(tasks(graph, plan, works(graph, plan, table), prices, Settings()), prices, 1.0)
    return plan


def random_choice(problem: Problem, picks: random.Random) -> tuple[int, ...]:
    """A choice that nothing forbids: the cheapest where random prices outweigh all others."""
    prices = [float(edge.cost[edge.cost < FORBIDDEN].max()) for edge in problem.edges]
    most = max(prices, default=1.0) or 1.0
    nodes = (
        replace(node, cost=tuple(cost + 100 * most * picks.random() for cost in node.cost))
        for node in problem.nodes
    )
    return solve(replace(problem, nodes=tuple(nodes)), "greedy").choice


def whole(seed: int) -> list[Tensor]:
    """Losses and final state in one process."""
    model = Random(seed)
    updates, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    torch.manual_seed(seed)
    for _ in range(STEPS):
        updates.zero_grad()
        output = model(**model.batch)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        updates.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


def train(jobs: list[Job]) -> list[Run]:
    """The runs of this rank."""
    compiler = importlib.import_module("autopar.session.compiler")
    found: list[Run] = []
    for job in jobs:
        model = Random(job.seed)
        try:
            with patch.object(compiler, "capture_parts", lambda *_, job=job: job.captured):
                program = autopar.compile(
                    model,
                    job.mesh,
                    optimizer=lambda p: torch.optim.SGD(p, lr=RATE),
                    example_inputs=model.batch,
                    plan=job.plan and Plan.of(job.plan),
                )
            torch.manual_seed(job.seed)
            losses = [program.step(**model.batch) for _ in range(STEPS)]
            found.append([*losses, *program.state_dict().values()])
        except Exception:
            found.append(traceback.format_exc())
    return found


def fault(job: Job, runs: Iterable[Run]) -> str:
    """What is wrong with the runs of a job, "" for nothing."""
    if job.error:
        return job.error
    expected, worst = whole(job.seed), 0.0
    if not all(torch.isfinite(value).all() and value.abs().max() < 1e6 for value in expected):
        return ""  # float64 cannot judge it
    for found in runs:
        if isinstance(found, str):
            return found
        for mine, its in zip(found, expected, strict=True):
            scale = max(float(its.abs().max()), 1.0)
            worst = max(worst, float((mine - its).abs().max()) / scale)
    return "" if worst <= TOLERANCE else f"off by {worst:.2g}"


def judge(seeds: Iterable[int], together: int = 50, start: str = "forkserver") -> dict[int, str]:
    """What is wrong, by seed; the ranks of so many models are started together."""
    wrong: dict[int, str] = {}
    with warnings.catch_warnings(action="ignore"):
        jobs = [Job.of(seed) for seed in seeds]
        wrong.update((job.seed, fault(job, ())) for job in jobs if job.error)
        for count in sorted({job.ranks for job in jobs}):
            alike = [job for job in jobs if job.ranks == count and not job.error]
            for place in range(0, len(alike), together):
                wrong |= _faults(alike[place : place + together], count, start)
    return wrong


def _faults(jobs: list[Job], count: int, start: str) -> dict[int, str]:
    """What is wrong with jobs of so many ranks, by seed; where processes die, each by itself."""
    try:
        ranks = run_ranks(train, jobs, count=count, start=start)
    except ProcessExitedException as error:
        if len(jobs) == 1:
            return {jobs[0].seed: f"the processes died: {error}"}
        return {seed: said for job in jobs for seed, said in _faults([job], count, start).items()}
    judged = ((job.seed, fault(job, runs)) for job, *runs in zip(jobs, *ranks, strict=True))
    return {seed: said for seed, said in judged if said}
