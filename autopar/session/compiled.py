"""Compiled: a captured model, its plan and the programs of its stages, as one value.

capture -> plan -> emit make it; `start` loads it on the devices, see `session.py`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.codegen.emit import emit
from autopar.errors import PlanError, ProgramError
from autopar.inter_op.complete import complete
from autopar.inter_op.gantt import gantt
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.intra_op import legal
from autopar.intra_op.node_choices import input_layout
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.ir.pipeline_step import Wiring
from autopar.lower.literals import printable
from autopar.lower.lowered_text import format_lowered
from autopar.lower.program import lower
from autopar.plan import Plan
from autopar.planning.options import GLOBAL, Options
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.pipelines.wiring import wiring_of
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.runtime import folder
from autopar.runtime.executor import Executor
from autopar.runtime.generated import Generated
from autopar.runtime.inductor import loaded
from autopar.runtime.outer.local_updates import LocalUpdates
from autopar.runtime.pipeline.folder import program_source, stage_files
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.ranks.processes import local_device
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.runtime import Runtime
from autopar.runtime.trained import Program
from autopar.runtime.update.update import Training
from autopar.session import compiled_folder
from autopar.session.call_texts import text_of_program
from autopar.session.compiled_folder import Contents

_COLUMNS = 88  # of the schedule's picture


@dataclass(frozen=True)
class Running:
    """How a compiled program runs; `autopar.compile` describes both.

    Attributes:
        backend: "eager", "aot_eager" or "inductor".
        cuda_graph: whether the step is captured and replayed.
        shapes: for batches of how many shapes the session compiles programs that train.
    """

    backend: str = "eager"
    cuda_graph: bool = False
    shapes: int = 1


@dataclass(frozen=True)
class Compiled:
    """A model that is planned and emitted.

    Attributes:
        plan: how it runs.
        captured: the model; for a pipeline on one microbatch, its graph normalised only.
        sources: the generated Python of every stage.
        facts: of the model that was captured; see `model_facts.py`.
    """

    plan: Plan
    captured: Captured
    sources: tuple[str, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        captured: Captured,
        plan: Plan,
        options: Options,
        trace: Trace,
        facts: Mapping[str, str] | None = None,
    ) -> Compiled:
        """Emit the programs of a plan.

        Args:
            captured: the model, for a pipeline on one microbatch.
            plan: for it.
            options: whose rules the layouts follow, and whose prices stand in the comments.
            trace: keeps the sources.
            facts: of the model.

        Raises:
            PlanMismatchError: the plan is for another model or mesh.
            PlanError: a layout that the rules do not allow.
        """
        sources = []
        prices = {stage.mesh: cost_model(stage.mesh, options).collective for stage in plan.stages}
        for number, graph in enumerate(graphs_of(captured.graph, plan)):
            stage = plan.stages[number]
            stage.check(fingerprint(graph), {node.name for node in graph.folded}, stage.mesh)
            legal.check(graph, stage, options.table)
            program = lower(graph, stage, prices[stage.mesh])
            source = emit(graph, stage, prices[stage.mesh], program)
            before = f"stage_{number}_" if plan.is_pipeline else ""
            trace(f"{before}lower.txt", partial(format_lowered, program, graph))
            name = f"stage_{number}.py" if plan.is_pipeline else "program.py"
            trace(name, lambda source=source: source)  # type: ignore[misc]
            sources.append(source)
        return cls(plan, captured, tuple(sources), facts or {})

    @property
    def source(self) -> str:
        """The generated Python of all stages."""
        return "\n\n".join(self.sources)

    @property
    def fingerprint(self) -> str:
        """What tells it from others: a digest of graph, plan and sources."""
        text = "\n".join(
            [
                fingerprint(self.captured.graph),
                self.plan.without_solver().to_toml(),
                *map(text_of_program, self.sources),
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def placement(self) -> Placement:
        """Where the stages of a pipeline run, and when; raises as `placement_of`."""
        return placement_of(self.plan, wiring_of(graphs_of(self.captured.graph, self.plan)))

    @property
    def tied(self) -> dict[str, str]:
        """Further names of parameters -> the name that holds them."""
        return {k: v for k, v in self.captured.parameter_names.items() if k != v}

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of one microbatch: name -> dtype, global shape and layout."""
        return {
            leaf.target: f"{leaf.type.dtype}{input_layout(leaf).format(leaf.type.shape)}"
            for leaf in self.captured.graph.leaves("input")
        }

    def start(self, values: Mapping[str, Tensor], training: Training, running: Running) -> Program:
        """Load it on this rank's device; every rank calls it.

        Args:
            values: every parameter and buffer by name, whole; the first rank's count.
            training: how the parameters are updated.
            running: how it runs.

        Raises:
            ProgramError: the optimizer or the way of running do not fit it.
            StateError: `values` does not fit it.
        """
        modules, outer, mesh = self.modules(running.backend), self.plan.outer, self.plan.mesh
        if outer is None:
            return self._started(modules, values, training, running, Peers.here())
        peers = Peers.here().within(outer.replicas(mesh))
        program = self._started(modules, values, training, running, peers)
        sliced = self.plan.stages[0].asked.batches == GLOBAL
        return LocalUpdates(program, outer, mesh, peers, sliced)

    def _started(
        self,
        modules: Sequence[Generated],
        values: Mapping[str, Tensor],
        training: Training,
        running: Running,
        peers: Peers,
    ) -> Executor | Pipeline:
        """The program of all ranks, or of the replica that `peers` are."""
        plan = self.plan.inner
        if not plan.is_pipeline:
            runtime = Runtime(plan.mesh, local_device(), peers=peers)
            return Executor(
                modules[0], runtime, values, training, tied=self.tied,
                cuda_graph=running.cuda_graph,
            )  # fmt: skip
        placement = self.placement.on(peers.ranks)
        refuse_for_stages(plan, placement, running)
        return Pipeline(
            modules, placement, self.inputs, local_device(), values, training, tied=self.tied,
            peers=peers, cuda_graph=running.cuda_graph,
        )  # fmt: skip

    def modules(self, backend: str) -> list[Generated]:
        """Returns the loaded program of every stage; ProgramError if one cannot be loaded."""
        return [
            loaded(source, self._name(number, source), backend)
            for number, source in enumerate(self.sources)
        ]

    def save(self, path: str | Path) -> Path:
        """Write a folder that `autopar.load` reads on any number of processes.

        Returns:
            The folder.

        Raises:
            ProgramError: the batch or the results hold what cannot be saved as data, or the folder
                cannot be written.
        """
        contents = Contents(self.plan, self.captured, self.sources, self.facts, self.fingerprint)
        return compiled_folder.write(contents, path)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Compiled:
        """Read a folder that `save` wrote.

        Args:
            path: the folder. Its sources are code: load none whose author you do not trust.
            model: built as the compiled one was; its values may differ.

        Raises:
            ProgramError: the folder is missing, damaged or edited, or is for another model or
                version of torch; says what differs.
            PlanError: its plan is damaged.
        """
        found = compiled_folder.read(path, model)
        compiled = cls(found.plan, found.captured, found.sources, found.facts)
        if compiled.fingerprint != found.fingerprint:
            raise ProgramError(
                "the files of the compiled program do not belong together",
                where=str(path),
                why="they do not have the fingerprint that was written with them",
                todo="compile the model again, and save it; a program to edit is what "
                "Session.save writes",
            )
        return compiled

    def files(self, training: Training) -> dict[str, str]:
        """The text files of a folder that runs by itself; see `runtime/folder.py`."""
        common = {
            "plan.toml": self.plan.to_toml(),
            "graph.txt": format_graph(self.captured.graph),
            folder.MARKER: folder.settings(self.tied, training),
        }
        if not self.plan.is_pipeline:
            return {"program.py": folder.standalone(self.sources[0]), **common}
        files, names = stage_files(self.sources)
        plan = self.plan
        schedule = schedule_of(plan.schedule, groups_of(plan), plan.microbatches)
        picture = gantt(simulate(schedule, [StageCost()] * schedule.stages), _COLUMNS)
        program = program_source(
            f"{self.captured.graph.name} in {len(plan.stages)} stages on {plan.mesh}",
            names,
            self.placement,
            self.inputs,
            [line.plain for line in picture],
        )
        return {**files, "program.py": program, **common}

    def _name(self, number: int, source: str) -> str:
        """A name of its own for every source: tracebacks look the lines up by it."""
        code = zlib.crc32(source.encode())
        where = f"stage {number}" if self.plan.is_pipeline else str(self.plan.mesh)
        return printable(f"<autopar {self.captured.graph.name}, {where}, {code:08x}>")


def graphs_of(graph: Graph, plan: Plan) -> tuple[Graph, ...]:
    """The graphs of a plan's stages; StageError if it cannot be cut so."""
    return stage_graphs(graph, plan.ends, Trace(None)) if plan.is_pipeline else (graph,)


def groups_of(plan: Plan) -> int:
    """The number of groups of ranks that do a row of the schedule each."""
    return len({start for stage in plan.stages for start in stage.starts})


def placement_of(plan: Plan, wiring: Wiring) -> Placement:
    """Where the stages of a plan run, and when.

    Args:
        plan: of a pipeline.
        wiring: of its stages.

    Raises:
        ScheduleError: there is no such schedule for the plan's sizes.
        PlanError: the schedule wants the stages elsewhere.
    """
    groups = groups_of(plan)
    schedule = schedule_of(plan.schedule, groups, plan.microbatches)
    wanted = [
        tuple(copy[number] for copy in schedule.placement) for number in range(schedule.stages)
    ]
    given = [stage.starts for stage in plan.stages]
    pairs = {
        pair
        for places, starts in zip(wanted, given, strict=False)
        for pair in zip(places, starts, strict=False)
    }
    alike = [len(starts) for starts in given] == [len(places) for places in wanted]
    if not alike or len(pairs) != groups:
        raise PlanError(
            f"the plan's stages do not stand as the schedule {plan.schedule!r} wants them",
            why=f"their first ranks are {given}; groups of ranks with the numbers {wanted} do them",
            todo="correct the entries `ranks`, or plan again",
        )
    ranks = tuple(
        tuple(stage.ranks(copy) for stage in plan.stages) for copy in range(schedule.copies)
    )
    first = None
    if schedule.first is not None:
        periods, flushed = schedule.first
        first = periods, complete(flushed, wiring).rows
    rows = complete(schedule, wiring).rows
    return Placement(ranks, rows, plan.microbatches, schedule.adjustment, first)


def refuse_for_stages(plan: Plan, placement: Placement, running: Running) -> None:
    """ProgramError where stages cannot run as they shall."""
    schedule = plan.schedule
    if running.cuda_graph and not (len(plan.stages) == 1 and placement.flushes):
        refuse_graphs_of_stages()
    if not placement.flushes and running.backend != "eager":
        raise ProgramError(
            f"stages under the schedule {schedule!r} are not compiled",
            why="a compiled segment keeps parameters for its backward, which may need other"
            " versions of them by then",
            todo='pass backend="eager", or a schedule that flushes',
        )
    again = [n for n, stage in enumerate(plan.stages) if stage.recompute]
    if again and not schedule_of(schedule, groups_of(plan), plan.microbatches).stashes:
        raise ProgramError(
            f"blocks of stage {again[0]} are not computed again under the schedule {schedule!r}",
            why="its backward runs on newer weights than its forward, and so would they",
            todo='pass recompute="none", or a schedule that stashes weights ("2bw", "pipedream")',
        )
    halves = any(action.kind == "W" for row in placement.rows for action in row)
    if halves and running.backend != "eager":
        raise ProgramError(
            f"stages under the schedule {schedule!r} are not compiled",
            why="its backward comes in two halves, and that of a compiled segment in one",
            todo='pass backend="eager", or a schedule with whole backwards ("1f1b", '
            '"interleaved_1f1b chunks=2")',
        )


def refuse_graphs_of_stages() -> NoReturn:
    """ProgramError: a step of microbatches is no CUDA graph."""
    raise ProgramError(
        "the step cannot be a CUDA graph",
        why="the host follows the schedule of a pipeline and waits for its messages",
        todo="leave cuda_graph out",
    )


def values_of(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """The model's parameters and buffers by the names of the graph's leaves."""
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    found = {
        name: parameter.detach()
        for name, parameter in parameters.items()
        if captured.parameter_names[name] == name
    }
    return {**found, **captured.buffers}
