"""PipelinePlan: how a model is cut into stages, where each runs and how, as a value and as TOML.

Every stage has a plan of its own, as of a whole model, for its own mesh:

    [[stages]]
    end = "add_17"        # the last node of the stage, by execution order
    ranks = [0]           # the first global rank of each copy of the stage
    mesh = "H100: gpu=4"
    graph = "gpt, stage 0 sha256:9f2c41aa"
    ...

Two stages with the same ranks share their devices, as in interleaved schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from autopar.errors import PlanError, PlanMismatchError
from autopar.fields import Fields, Row, Text, Whole
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.plan import FILE, VERSION, Plan, check_version


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        end: name of its last node in the normalised graph, "" for the last stage.
        starts: the first global rank of each copy of the stage; schedules with one copy of the
            model have one. A copy's ranks follow one another.
        plan: layouts of its nodes on its own mesh.
    """

    end: str
    starts: tuple[int, ...]
    plan: Plan

    def ranks(self, copy: int = 0) -> tuple[int, ...]:
        """The global ranks of a copy, row-major on the stage's mesh."""
        return tuple(range(self.starts[copy], self.starts[copy] + self.plan.mesh.size))


@dataclass(frozen=True)
class PipelinePlan:
    """A whole pipeline.

    Attributes:
        graph: fingerprint of the whole normalised graph, on one microbatch.
        mesh: all devices.
        microbatches: in a step.
        schedule: its name, with options if it takes any: "interleaved_1f1b chunks=2".
        stages: in execution order.
        predicted: figures such as "step_seconds" and "peak_bytes".
        model: how the command line spelled the model, as in `Plan.model`.
    """

    graph: str
    mesh: Mesh
    microbatches: int
    schedule: str
    stages: tuple[StagePlan, ...]
    predicted: dict[str, float] = field(default_factory=dict)
    model: dict[str, str | int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.to_toml()

    @property
    def ends(self) -> tuple[str, ...]:
        """The last node of every stage but the last."""
        return tuple(stage.end for stage in self.stages[:-1])

    @property
    def precision(self) -> Precision:
        """In which dtypes all stages compute, update and send gradients."""
        return self.stages[0].plan.precision

    def to_toml(self) -> str:
        """The file's text; `PipelinePlan.from_toml` reads it back to an equal plan."""
        document = tomlkit.document()
        document.add(
            tomlkit.comment("autopar pipeline plan. Predictions are seconds and bytes per device.")
        )
        document["version"] = VERSION
        document["graph"] = self.graph
        document["mesh"] = str(self.mesh)
        document["microbatches"] = self.microbatches
        document["schedule"] = self.schedule
        if self.model:
            document["model"] = dict(self.model)
        document["predicted"] = dict(self.predicted)
        stages = tomlkit.aot()
        for stage in self.stages:
            table = tomlkit.table()
            table["end"] = stage.end
            table["ranks"] = list(stage.starts)
            table.update(tomlkit.parse(stage.plan.to_toml()).unwrap())
            stages.append(table)
        document["stages"] = stages
        return tomlkit.dumps(document)

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> PipelinePlan:
        """Read a plan.

        Raises:
            PlanError: the text is not TOML or no plan of a pipeline; names the entry.
        """
        return cls.from_table(FILE.toml(text, where), where)

    @classmethod
    def from_table(cls, table: dict[str, Any], where: str = "") -> PipelinePlan:
        """Make a plan of the entries of its file; PlanError names one that is damaged."""
        if "layouts" in table and "stages" not in table:
            raise PlanError(
                "the plan is one of a model in one piece",
                where=where,
                why="this asks for the plan of a pipeline",
                todo="plan with stages, or autopar plan --global-batch",
            )
        fields = Fields(table, PlanError, "the plan", where)
        check_version(fields, where)
        entries = fields.take("stages", Row(dict))
        stages = tuple(
            _stage(entry, f"{where + ', ' if where else ''}stage {number}")
            for number, entry in enumerate(entries)
        )
        # What every plan has is read and judged as in every plan.
        common = ("version", "graph", "mesh", "predicted", "model")
        shell = Plan.from_table(
            {"layouts": {}} | {key: table[key] for key in common if key in table}, where
        )
        for key in common[1:]:
            fields.take(key, lambda value: value, None)
        made = cls(
            shell.graph,
            shell.mesh,
            fields.take("microbatches", Whole(1, 2**20)),
            fields.take("schedule", Text(1000)),
            stages,
            shell.predicted,
            shell.model,
        )
        fields.end()
        made._judge(where)
        return made

    def _judge(self, where: str) -> None:
        """PlanError unless the stages are a pipeline on the mesh."""
        faults = []
        if not self.stages:
            faults.append("there are no stages")
        if any(bool(stage.end) != (stage is not self.stages[-1]) for stage in self.stages):
            faults.append("every stage but the last has an end")
        if len({len(stage.starts) for stage in self.stages}) > 1:
            faults.append("the stages differ in their number of copies")
        for number, stage in enumerate(self.stages):
            last = max(stage.starts, default=0) + stage.plan.mesh.size
            if not stage.starts or min(stage.starts) < 0 or last > self.mesh.size:
                faults.append(f"stage {number} runs on ranks that {self.mesh} does not have")
        if len({stage.plan.precision for stage in self.stages}) > 1:
            faults.append("the stages differ in their precision")
        spans = {(start, stage.plan.mesh.size) for stage in self.stages for start in stage.starts}
        held = [rank for start, size in spans for rank in range(start, start + size)]
        if not faults and sorted(held) != list(range(self.mesh.size)):
            faults.append(f"the stages' ranks are not those of {self.mesh}, each in one group")
        if faults:
            raise PlanError(
                "the plan has a damaged entry", where=where, why="; ".join(dict.fromkeys(faults))
            )

    def save(self, path: str | Path) -> None:
        """Write the plan, whole or not at all; PlanError if it cannot be written."""
        FILE.write(path, self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> PipelinePlan:
        """Read a plan file; PlanError if it is missing, not text or not a plan of a pipeline."""
        return cls.from_toml(FILE.text(path), where=str(path))

    def check(self, graph: str, mesh: Mesh) -> None:
        """PlanMismatchError, saying what differs, unless the plan is for this graph and mesh."""
        if self.mesh.names != mesh.names or self.mesh.shape != mesh.shape:
            raise PlanMismatchError(
                "the plan is for another mesh", why=f"plan: {self.mesh}; here: {mesh}"
            )
        if self.graph != graph:
            raise PlanMismatchError(
                "the plan is for another model",
                why=f"plan: {self.graph}; here: {graph}",
                todo="plan this model, with this size of microbatch, again",
            )


def load_plan(path: str | Path) -> Plan | PipelinePlan:
    """Read a plan file of either kind; PlanError if it is missing or neither."""
    table = FILE.toml(FILE.text(path), str(path))
    return (PipelinePlan if "stages" in table else Plan).from_table(table, str(path))


def _stage(entry: dict[str, Any], where: str) -> StagePlan:
    """One entry of `stages`; PlanError names what is wrong with it."""
    fields = Fields(entry, PlanError, "the stage", where)
    end, starts = fields.take("end", Text()), fields.take("ranks", Row(Whole(0, 2**20)))
    own = {name: value for name, value in entry.items() if name not in ("end", "ranks")}
    return StagePlan(end, starts, Plan.from_table(own, where))
