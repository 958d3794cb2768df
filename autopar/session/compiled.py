"""Compiled: a captured model, its plan and the programs of its stages, as one value.

`session/compiler.py` produces it by capture, plan and emit; `start` loads it on the devices.
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
from autopar.errors import PlanError, ProgramError
from autopar.inter_op.complete import complete
from autopar.inter_op.gantt import gantt
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.intra_op.node_choices import input_layout
from autopar.ir.graph import COUNTS
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.ir.pipeline_step import Wiring
from autopar.lower.literals import printable
from autopar.plan import Plan
from autopar.planning.options import GLOBAL, Options
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.pipelines.wiring import wiring_of
from autopar.planning.stored import graphs_of
from autopar.planning.trace import Trace
from autopar.runtime import folder
from autopar.runtime.executor import Executor
from autopar.runtime.generated import Generated
from autopar.runtime.inductor import loaded
from autopar.runtime.outer.local_updates import LocalUpdates
from autopar.runtime.pipeline.folder import program_source, stage_files
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.ranks.processes import from_first_rank, local_device
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.runtime import Runtime
from autopar.runtime.trained import Program
from autopar.runtime.update.update import Training
from autopar.session import compiled_folder
from autopar.session.call_texts import text_of_program
from autopar.session.compiled_folder import Contents
from autopar.session.padding import Padding
from autopar.session.sources import sources_of

_COLUMNS = 88  # width of the schedule's picture


@dataclass(frozen=True)
class Running:
    """Settings with which a compiled program runs; see `autopar.compile`.

    Attributes:
        backend: "eager", "aot_eager" or "inductor".
        cuda_graph: whether to capture the step and replay it.
        shapes: number of batch shapes for which the session compiles training programs.
        pad_to: lengths to which batches are padded; None for no padding.
        evaluate: "anchor", "average" or "": the weights that replicas evaluate.
    """

    backend: str = "eager"
    cuda_graph: bool = False
    shapes: int = 1
    evaluate: str = ""
    pad_to: Padding | None = None


@dataclass(frozen=True)
class Compiled:
    """A planned model with its emitted programs.

    Attributes:
        plan: the plan.
        captured: the captured model; for a pipeline, on one microbatch and only normalised.
        sources: the generated Python of every stage.
        facts: facts of the captured model; see `model_facts.py`.
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
        all_ranks: bool = False,
    ) -> Compiled:
        """Emits the programs of a plan.

        Args:
            captured: the captured model; for a pipeline, on one microbatch.
            plan: its plan.
            options: sharding rules, and prices for comments.
            trace: writes the sources.
            facts: facts of the model.
            all_ranks: whether every rank calls this; the first one then emits for all of them.

        Raises:
            PlanMismatchError: the plan is for another model or mesh.
            PlanError: the rules do not allow a layout.
        """
        emitted = partial(sources_of, captured.graph, plan, options, trace)
        sources = from_first_rank(emitted) if all_ranks else emitted()
        return cls(plan, captured, sources, facts or {})

    @property
    def source(self) -> str:
        """The generated Python of all stages."""
        return "\n\n".join(self.sources)

    @property
    def fingerprint(self) -> str:
        """A digest of graph, plan and sources."""
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
        """The ranks and the rows of a pipeline's stages; raises the errors of `placement_of`."""
        graphs = graphs_of(self.captured.graph, self.plan)
        meshes = [stage.mesh for stage in self.plan.stages]
        return placement_of(self.plan, wiring_of(graphs, meshes))

    @property
    def tied(self) -> dict[str, str]:
        """Additional names of parameters -> the name that is stored."""
        return {k: v for k, v in self.captured.parameter_names.items() if k != v}

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of one microbatch: name -> dtype, global shape and layout.

        Inputs that the runtime computes, such as counts, are not included.
        """
        return {
            leaf.target: f"{leaf.type.dtype}{input_layout(leaf).format(leaf.type.shape)}"
            for leaf in self.captured.graph.leaves("input")
            if leaf.keyword(COUNTS) is None
        }

    def start(self, values: Mapping[str, Tensor], training: Training, running: Running) -> Program:
        """Loads the program on this rank's device; every rank must call it.

        Args:
            values: every parameter and buffer by name, whole; all ranks take the first rank's.
            training: how the parameters are updated.
            running: how the program runs.

        Returns:
            The executor of the program.

        Raises:
            ProgramError: `training` or `running` do not fit the program.
            StateError: `values` does not fit the program.
        """
        modules, outer, mesh = self.modules(running.backend), self.plan.outer, self.plan.mesh
        if outer is None:
            return self._started(modules, values, training, running, Peers.here())
        peers = Peers.here().within(outer.replicas(mesh))
        program = self._started(modules, values, training, running, peers)
        sliced = self.plan.stages[0].asked.batches == GLOBAL
        return LocalUpdates(program, outer, mesh, peers, sliced, running.evaluate)

    def _started(
        self,
        modules: Sequence[Generated],
        values: Mapping[str, Tensor],
        training: Training,
        running: Running,
        peers: Peers,
    ) -> Executor | Pipeline:
        """Starts the program of all ranks, or of the replica that `peers` form."""
        plan = self.plan.inner
        device = local_device(plan.mesh)
        if not plan.is_pipeline:
            runtime = Runtime(plan.mesh, device, peers=peers)
            return Executor(
                modules[0], runtime, values, training, tied=self.tied,
                cuda_graph=running.cuda_graph,
            )  # fmt: skip
        placement = self.placement.on(peers.ranks)
        refuse_for_stages(plan, placement, running)
        return Pipeline(
            modules, placement, self.inputs, device, values, training, tied=self.tied,
            peers=peers, cuda_graph=running.cuda_graph,
        )  # fmt: skip

    def modules(self, backend: str) -> list[Generated]:
        """Returns the loaded program of every stage; ProgramError if one cannot be loaded."""
        return [
            loaded(source, self._name(number, source), backend)
            for number, source in enumerate(self.sources)
        ]

    def save(self, path: str | Path) -> Path:
        """Writes a folder that `autopar.load` reads on any number of processes.

        Returns:
            The folder.

        Raises:
            ProgramError: the batch or the results contain something that cannot be saved as data,
                or the folder cannot be written.
        """
        contents = Contents(self.plan, self.captured, self.sources, self.facts, self.fingerprint)
        return compiled_folder.write(contents, path)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Compiled:
        """Reads a folder that `save` wrote.

        Args:
            path: the folder. Its sources are code, so load it only if you trust its author.
            model: equal to the compiled model except for its values.

        Raises:
            ProgramError: the folder is missing, damaged or edited, or is for another model or
                version of torch; says what differs.
            PlanError: its plan is damaged.
        """
        contents = compiled_folder.read(path, model)
        compiled = cls(contents.plan, contents.captured, contents.sources, contents.facts)
        if compiled.fingerprint != contents.fingerprint:
            raise ProgramError(
                "the files of the compiled program do not belong together",
                where=str(path),
                why="they do not have the fingerprint that was written with them",
                todo="compile the model again, and save it; to edit a program, use the folder that "
                "Session.save writes",
            )
        return compiled

    def files(self, training: Training) -> dict[str, str]:
        """Returns the text files of a standalone folder; see `runtime/folder.py`."""
        if self.plan.outer is not None:
            raise ProgramError(
                "a folder that runs by itself cannot contain local updates",
                why=f"the plan's outer method is {self.plan.outer}",
                todo="save a checkpoint, and Compiled.save for autopar.load",
            )
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
        """Returns a unique name for a source, by which tracebacks look up its lines."""
        code = zlib.crc32(source.encode())
        where = f"stage {number}" if self.plan.is_pipeline else str(self.plan.mesh)
        return printable(f"<autopar {self.captured.graph.name}, {where}, {code:08x}>")


def groups_of(plan: Plan) -> int:
    """Returns the number of rank groups, each of which executes one row of the schedule."""
    return len({start for stage in plan.stages for start in stage.starts})


def placement_of(plan: Plan, wiring: Wiring) -> Placement:
    """Returns the ranks and the rows of the stages of a plan.

    Args:
        plan: plan of a pipeline.
        wiring: wiring of its stages.

    Raises:
        ScheduleError: the schedule does not exist for the plan's sizes.
        PlanError: the schedule places the stages on other ranks.
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
            f"the plan's stages are not placed as the schedule {plan.schedule!r} requires",
            why=f"their first ranks are {given}; the schedule uses the groups {wanted}",
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
    """Raises ProgramError if stages cannot run as `running` says."""
    schedule = plan.schedule
    if running.cuda_graph and not (len(plan.stages) == 1 and placement.flushes):
        refuse_graphs_of_stages()
    if not placement.flushes and running.backend != "eager":
        raise ProgramError(
            f"stages under the schedule {schedule!r} cannot be compiled",
            why="a compiled segment saves parameters for its backward, which may need other"
            " versions of them by then",
            todo='pass backend="eager", or a synchronous schedule such as 1f1b',
        )
    again = [n for n, stage in enumerate(plan.stages) if stage.recompute]
    if again and not schedule_of(schedule, groups_of(plan), plan.microbatches).stashes:
        raise ProgramError(
            f"blocks of stage {again[0]} cannot be recomputed under the schedule {schedule!r}",
            why="its backward runs on newer weights than its forward, as would recomputation",
            todo='pass recompute="none", or a schedule that stashes weights ("2bw", "pipedream")',
        )
    halves = any(action.kind == "W" for row in placement.rows for action in row)
    if halves and running.backend != "eager":
        raise ProgramError(
            f"stages under the schedule {schedule!r} cannot be compiled",
            why="it splits the backward in two halves, which a compiled segment cannot",
            todo='pass backend="eager", or a schedule with whole backwards ("1f1b", '
            '"interleaved_1f1b chunks=2")',
        )


def refuse_graphs_of_stages() -> NoReturn:
    """Raises ProgramError, because a step of microbatches cannot be a CUDA graph."""
    raise ProgramError(
        "the step cannot be a CUDA graph",
        why="the host follows the schedule of a pipeline and waits for its messages",
        todo="omit cuda_graph",
    )


def values_of(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """Returns the model's parameters and buffers by the names of the graph's leaves."""
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    values = {
        name: parameter.detach()
        for name, parameter in parameters.items()
        if captured.parameter_names[name] == name
    }
    return {**values, **captured.buffers}
