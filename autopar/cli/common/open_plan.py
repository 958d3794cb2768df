"""Opens a plan file, captures its model, and gives commands the graphs of its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click

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
from autopar.passes.observations import NOTHING, Observations, observations
from autopar.passes.shares import remove_shares
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan

if TYPE_CHECKING:
    from autopar.capture.capture import Captured
    from autopar.planning.capturing import Call
    from autopar.planning.pipelines.simulated import Simulated


@dataclass(frozen=True)
class PlanFile:
    """A plan file and the command line's options for it.

    Attributes:
        path: path of the file.
        model: the model, in place of the plan's.
        sizes: batch, sequence length and layers, in place of the plan's.
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
        """The plan; raises PlanError if the file is not a plan."""
        return Plan.load(self.path)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model and its sizes: those of the command line, else the plan's.

        Raises:
            PlanError: only the plan names the model, and it is code to run.
            UnknownDeviceError: the plan's device is unknown.
        """
        for part in self.plan.mesh.parts:
            device(part)
        sizes = {**self.plan.model.table(), **self.sizes.table()}
        return ModelSpec(**{**sizes, "source": self.model or self._source()})  # type: ignore[arg-type]

    @cached_property
    def options(self) -> Options:
        """The plan's own options, with the command line's rules and prices."""
        whole = self.plan.mesh if self.plan.is_pipeline else None
        return Options.like(
            self.plan.stages[0], table=self.rules, calibration=self.calibration,
            fuse=self.plan.fuse, whole=whole,
        )  # fmt: skip

    def stage(self, number: int | None) -> None:
        """Raises UsageError if the plan has no stage of that number."""
        if number is None:
            return
        if not self.plan.is_pipeline:
            raise click.UsageError("--stage is for pipelines")
        if number >= len(self.plan.stages):
            last = len(self.plan.stages) - 1
            raise click.UsageError(f"there is no stage {number}, only 0 to {last}")

    def open(self, progress: Callable[[str], None]) -> CheckedPlan:
        """Captures the model and checks the plan's layouts.

        Args:
            progress: reports what is being done.

        Returns:
            The plan with the prepared graphs of its stages.

        Raises:
            PlanError: the plan names code to run, or has impossible layouts.
            PlanMismatchError: the plan is for another model.
            CalibrationError: see `prices`.
        """
        plan = self.plan
        if not plan.is_pipeline:
            whole = capture_model(self.spec, self.options, Stages(None, progress))
            graphs: tuple[Graph, ...] = (whole,)
            progress("strategies")
        else:
            from autopar.planning.pipelines.stages import stage_graphs

            prices(plan.stages[0], self.calibration, plan.mesh)
            graph, observed = self.microbatch_graph(progress)
            plan.check(graph, plan.mesh)
            progress("strategies")
            graphs = stage_graphs(graph, plan.ends, Trace(None), observed)
        for graph, stage in zip(graphs, plan.stages, strict=True):
            stage.check(fingerprint(graph), {node.name for node in graph.folded}, stage.mesh)
            legal.check(graph, stage, self.rules)
        return CheckedPlan(plan, graphs, self.options)

    @cached_property
    def call(self) -> Call:
        """The model and its example inputs; raises the errors of `zoo.load`."""
        from autopar.planning.capturing import Call
        from autopar.zoo import load

        spec = self.spec
        module, inputs = load(spec.source, batch=spec.batch, seq=spec.seq, layers=spec.layers)
        return Call(module, (), inputs)

    def captured(self, progress: Callable[[str], None]) -> Captured:
        """Captures the plan's model, tracing every block; raises the errors of `open`."""
        from autopar.planning.capturing import capture_call

        count = self.plan.microbatches if self.plan.is_pipeline else None
        captured = capture_call(self.call, self.options, Stages(None, progress), count)
        self.plan.check(captured.graph, self.plan.mesh)
        return captured

    def microbatch_graph(self, progress: Callable[[str], None]) -> tuple[Graph, Observations]:
        """Captures the model for one microbatch; of a deep model, traces only a few blocks.

        Returns also what autograd saves in it, as far as known. Raises the errors of `open`.
        """
        spec, count = self.spec, self.plan.microbatches
        if spec.batch is None:
            return self.captured(progress).graph, NOTHING
        if spec.batch % count:
            raise PlanMismatchError(
                f"a batch of {spec.batch} does not divide into the plan's microbatches",
                why=f"the plan has {count} microbatches",
                todo="omit --batch, or plan for this batch",
            )
        part = replace(spec, batch=spec.batch // count)
        whole = capture_model(part, self.options, Stages(None, progress))
        return remove_shares(whole), observations(whole)

    def _source(self) -> str:
        """Returns the plan's model if it is data: a name of the zoo or a configuration."""
        source = self.plan.model.source
        if is_data(source):
            return source
        raise PlanError(
            "the plan's model must be named on the command line",
            where=str(self.path),
            why=f"the plan names {source!r}, and code that a plan names is not run"
            if source
            else "the plan has no entry [model]",
            todo=f"pass --model {source or 'file.py:function'}",
        )


@dataclass(frozen=True)
class Stage:
    """One stage of a plan.

    Attributes:
        plan, graph: plan and graph of this stage.
        whole: the mesh of all stages.
        repeated: for a pipeline, how often the stage runs in a step; None otherwise.
    """

    plan: StagePlan
    graph: Graph
    whole: Mesh
    repeated: Repeated | None


@dataclass(frozen=True)
class CheckedPlan:
    """A plan whose layouts have been checked.

    Attributes:
        plan: the plan.
        graphs: the prepared graphs of its stages.
        options: the plan's own options, with the command line's rules and prices.
    """

    plan: Plan
    graphs: tuple[Graph, ...]
    options: Options

    @cached_property
    def step(self) -> Simulated:
        """The simulated step of a pipeline."""
        from autopar.planning.pipelines.simulated import simulated

        return simulated(self.graphs, self.plan, self.options)

    def stage(self, number: int = 0) -> Stage:
        """Returns one of its stages."""
        repeated = self._repeated(number) if self.plan.is_pipeline else None
        return Stage(self.plan.stages[number], self.graphs[number], self.plan.mesh, repeated)

    def _repeated(self, number: int) -> Repeated:
        """Returns how often a stage of a pipeline runs in a step."""
        from autopar.planning.pipelines.schedule_names import in_flight, schedule_of, stages_of_rank
        from autopar.planning.pipelines.streaming import copies_of, taken
        from autopar.planning.pipelines.wiring import wiring_of

        plan = self.plan
        groups = len({start for stage in plan.stages for start in stage.starts})
        schedule = schedule_of(plan.schedule, groups, plan.microbatches)
        own, wiring = plan.stages[number], wiring_of(self.graphs, [s.mesh for s in plan.stages])
        return Repeated(
            plan.microbatches,
            in_flight(schedule, number),
            stages_of_rank(schedule, number),
            copies_of(schedule, wiring)[number],
            own.precision,
            taken(schedule),
            own.late_loss,
        )
