"""Plans that commands open: the file, the graphs that it is for, and its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import click

from autopar.capture.capture import Captured
from autopar.cli.common.console import Stages
from autopar.cli.common.model_options import capture_model, is_data
from autopar.cli.common.price_model import prices
from autopar.cost.device import device
from autopar.errors import PlanError, PlanMismatchError
from autopar.intra_op import legal
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.passes.shares import remove_shares
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.pipelines.schedule_names import held_beside, in_flight, schedule_of
from autopar.planning.pipelines.simulated import Simulated, simulated
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from autopar.zoo import load


@dataclass(frozen=True)
class PlanFile:
    """A plan file, and what the command line says of it.

    Attributes:
        path: of the file.
        model: in place of the one that the plan names.
        sizes: in place of those that the plan names.
        rules: sharding rules by operator.
        calibration: a file of measured prices.
    """

    path: Path
    model: str | None
    sizes: ModelSpec
    rules: dict[str, OpRule]
    calibration: Path | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan; PlanError if the file is none."""
        return Plan.load(self.path)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model as the command line spells it, or else the plan.

        Raises:
            PlanError: it names code to run.
            UnknownDeviceError: there is no such device as it is for.
        """
        device(self.plan.mesh)
        said = {**self.plan.model.table(), **self.sizes.table()}
        return ModelSpec(**{**said, "source": self.model or self._source()})  # type: ignore[arg-type]

    @cached_property
    def options(self) -> Options:
        """The plan's own options, with these rules and prices."""
        whole = self.plan.mesh if self.plan.is_pipeline else None
        return Options.like(
            self.plan.stages[0], table=self.rules, calibration=self.calibration,
            fuse=self.plan.fuse, whole=whole,
        )  # fmt: skip

    def stage(self, number: int | None) -> None:
        """UsageError where the plan has no stage of that number."""
        if number is None:
            return
        if not self.plan.is_pipeline:
            raise click.UsageError("--stage is for plans of pipelines")
        if number >= len(self.plan.stages):
            last = len(self.plan.stages) - 1
            raise click.UsageError(f"there is no stage {number}, only 0 to {last}")

    def open(self, told: Callable[[str], None]) -> Opened:
        """The plan with the graphs that it is for.

        Args:
            told: is told what is done.

        Raises:
            PlanError: it names code to run, or has layouts that are not possible.
            PlanMismatchError: it is for another model.
            CalibrationError: see `prices`.
        """
        plan = self.plan
        if not plan.is_pipeline:
            whole = capture_model(self.spec, self.options, Stages(None, told))
            graphs: tuple[Graph, ...] = (whole,)
            told("strategies")
        else:
            prices(plan.stages[0], self.calibration, plan.mesh)
            graph = self._microbatch_graph(told)
            plan.check(graph, plan.mesh)
            told("strategies")
            graphs = stage_graphs(graph, plan.ends, Trace(None))
        for graph, stage in zip(graphs, plan.stages, strict=True):
            stage.check(fingerprint(graph), {node.name for node in graph.folded}, stage.mesh)
            legal.check(graph, stage, self.rules)
        return Opened(plan, graphs, self.options)

    def captured(self, told: Callable[[str], None]) -> Captured:
        """The model that the plan is for, every block traced; raises what `open` does."""
        spec = self.spec
        module, inputs = load(spec.source, batch=spec.batch, seq=spec.seq, layers=spec.layers)
        count = self.plan.microbatches if self.plan.is_pipeline else None
        trace = Stages(None, told)
        captured = capture_call(Call(module, (), inputs), self.options, trace, count)
        self.plan.check(captured.graph, self.plan.mesh)
        return captured

    def _microbatch_graph(self, told: Callable[[str], None]) -> Graph:
        """The model on one microbatch; of a deep one of known batch a few blocks are traced."""
        spec, count = self.spec, self.plan.microbatches
        if spec.batch is None:
            return self.captured(told).graph
        if spec.batch % count:
            raise PlanMismatchError(
                f"a batch of {spec.batch} does not divide into the plan's microbatches",
                why=f"there are {count} of them",
                todo="leave out --batch, or plan for this batch",
            )
        part = replace(spec, batch=spec.batch // count)
        return remove_shares(capture_model(part, self.options, Stages(None, told)))

    def _source(self) -> str:
        """The model that the plan names, if it is data: a name of the zoo or a configuration."""
        source = self.plan.model.source
        if is_data(source):
            return source
        raise PlanError(
            "the plan does not say by itself which model it is for",
            where=str(self.path),
            why=f"it names {source!r}, and a plan is data: nothing that it names is run"
            if source
            else "it has no entry [model]",
            todo=f"say it: --model {source or 'file.py:function'}",
        )


@dataclass(frozen=True)
class Stage:
    """One stage of a plan.

    Attributes:
        plan, graph: its own.
        whole: the mesh of all stages.
        repeated: in a pipeline, how often it runs in a step, and beside how many equal ones.
    """

    plan: StagePlan
    graph: Graph
    whole: Mesh
    repeated: Repeated | None


@dataclass(frozen=True)
class Opened:
    """A plan whose layouts are known to be possible.

    Attributes:
        plan: the plan.
        graphs: of its stages.
        options: its own, with the rules and prices of the command line.
    """

    plan: Plan
    graphs: tuple[Graph, ...]
    options: Options

    @cached_property
    def step(self) -> Simulated:
        """A simulated step of a pipeline."""
        return simulated(self.graphs, self.plan, self.options)

    def stage(self, number: int = 0) -> Stage:
        """One of its stages."""
        plan, repeated = self.plan, None
        if plan.is_pipeline:
            groups = len({start for stage in plan.stages for start in stage.starts})
            schedule = schedule_of(plan.schedule, groups, plan.microbatches)
            beside = held_beside(schedule, number)
            late = plan.stages[number].late_loss
            repeated = Repeated(
                plan.microbatches, in_flight(schedule, number), beside, late_loss=late
            )
        return Stage(plan.stages[number], self.graphs[number], plan.mesh, repeated)
