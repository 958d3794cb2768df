"""Plan: all decisions of the planner, as a value and as a TOML file that users can read and edit.

A plan has one or more stages, each with the layouts of its part of the model (`stage_plan.py`):

    version = 2
    graph = "gpt sha256:9f2c41aa"
    mesh = "H100: gpu=8"
    microbatches = 8
    schedule = "1f1b"

    [[stages]]
    end = "add_17"        # the last node of the stage, by execution order
    ranks = [0]           # the first global rank of each copy of the stage
    mesh = "H100: gpu=4"
    graph = "gpt, stage 0 sha256:0b6c12e5"
    ...

A plan that is not a pipeline has one stage and no schedule. Two stages with the same ranks share
their devices, as in interleaved schedules. A plan is data: loading it never executes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomlkit

from autopar.errors import PlanError, PlanMismatchError
from autopar.files.checked_values import Fields, Integer, Number, Row, Text
from autopar.files.kinds import Kind
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.replicas.outer_value import Outer
from autopar.plan_entries import (
    UNNAMED,
    UNPREDICTED,
    UNSEARCHED,
    ModelSpec,
    Prediction,
)
from autopar.stage_plan import StagePlan, check_mesh, mesh_of

VERSION = 2
FILE = Kind(
    "the plan", PlanError, "name a file that `autopar plan MODEL --mesh MESH -o FILE` has written"
)


@dataclass(frozen=True)
class Plan:
    """The plan of a model: how it is split over a mesh. `save` and `load` use a TOML file.

    Attributes:
        graph: fingerprint of the whole graph; for a pipeline, of the normalised graph of one
            microbatch.
        mesh: all devices.
        stages: in execution order; exactly one, unless the plan is a pipeline.
        microbatches: number of microbatches in a step.
        schedule: schedule of a pipeline, with its options: "interleaved_1f1b chunks=2"; "" if it is
            not one.
        predicted: figures of the whole step; without a pipeline, those of its stage.
        model: the model as the command line named it.
        outer: how replicas along independent axes synchronise; None without any. The stages' meshes
            and ranks are then those of the first replica.
        changes: a sentence on how training differs from training on one device, for plans with
            `outer`; else "".
        version: version of the file that it was read from; ignored in comparisons.
    """

    graph: str
    mesh: Mesh
    stages: tuple[StagePlan, ...]
    microbatches: int = 1
    schedule: str = ""
    predicted: Prediction = UNPREDICTED
    model: ModelSpec = UNNAMED
    outer: Outer | None = None
    changes: str = ""
    version: int = field(default=VERSION, compare=False)

    def __str__(self) -> str:
        return self.to_toml()

    @classmethod
    def of(cls, stage: StagePlan, model: ModelSpec = UNNAMED) -> Plan:
        """Returns the plan of a model in one stage."""
        return cls(
            stage.graph, stage.mesh, (stage,), stage.microbatches, "", stage.predicted, model
        )

    @property
    def is_pipeline(self) -> bool:
        """Returns whether a schedule of stages and microbatches runs the model."""
        return bool(self.schedule)

    @property
    def stage(self) -> StagePlan:
        """The only stage of a plan that is not a pipeline.

        Raises:
            PlanError: it is a pipeline.
        """
        if self.is_pipeline:
            raise PlanError(
                "the plan is a pipeline",
                why=f"it has {len(self.stages)} stages, but one is expected",
                todo="use plan.stages",
            )
        return self.stages[0]

    @property
    def ends(self) -> tuple[str, ...]:
        """The last node of every stage but the last."""
        return tuple(stage.end for stage in self.stages[:-1])

    @property
    def precision(self) -> Precision:
        """The dtypes in which all stages compute, update and send gradients."""
        return self.stages[0].precision

    @property
    def fuse(self) -> tuple[str, ...]:
        """The patterns that stages replace by kernels."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.fuse))

    def without_solver(self) -> Plan:
        """Returns the plan without the solver's report, whose seconds differ between runs."""
        stages = tuple(replace(stage, solver=UNSEARCHED) for stage in self.stages)
        return replace(self, stages=stages)

    @property
    def inner(self) -> Plan:
        """The plan of one replica, as if its devices were all there are."""
        if self.outer is None:
            return self
        return replace(self, mesh=self.outer.within(self.mesh), outer=None, changes="")

    def under(self, outer: Outer | None, mesh: Mesh, changes: str = "") -> Plan:
        """The plan of one replica as that of a mesh of them."""
        return self if outer is None else replace(self, mesh=mesh, outer=outer, changes=changes)

    def on(self, mesh: Mesh) -> Plan:
        """Returns the plan on another mesh with the same axes; stages of a pipeline keep theirs."""
        if self.is_pipeline:
            return replace(self, mesh=mesh)
        own = mesh if self.outer is None else self.outer.within(mesh)
        return replace(self, mesh=mesh, stages=(replace(self.stage, mesh=own),))

    def check(self, graph: Graph, mesh: Mesh) -> None:
        """Checks that the plan is for a graph and a mesh.

        Args:
            graph: the model; for a pipeline, normalised and on one microbatch.
            mesh: the devices.

        Raises:
            PlanMismatchError: it is for another graph or mesh; says what differs.
        """
        check_mesh(self.mesh, mesh)
        here = fingerprint(graph)
        if not self.is_pipeline:
            nodes = {node.name for node in graph.folded}
            self.stage.check(here, nodes, mesh if self.outer is None else self.outer.within(mesh))
        elif self.graph != here:
            raise PlanMismatchError(
                "the plan is for another model",
                why=f"plan: {self.graph}; here: {here}",
                todo="plan this model again with this microbatch size",
            )

    def to_toml(self) -> str:
        """Returns the file's text, which `Plan.from_toml` reads back to an equal plan."""
        document = tomlkit.document()
        document.add(tomlkit.comment("autopar plan. Predictions are seconds and bytes per device."))
        document["version"] = VERSION
        document["graph"] = self.graph
        document["mesh"] = str(self.mesh)
        if self.microbatches != 1:
            document["microbatches"] = self.microbatches
        if self.is_pipeline:
            document["schedule"] = self.schedule
        if self.outer is not None:
            document["outer"] = str(self.outer)
        if self.changes:
            document["changes"] = self.changes
        if self.model != UNNAMED:
            document["model"] = self.model.table()
        if self.is_pipeline and self.predicted != UNPREDICTED:
            document["predicted"] = self.predicted.table()
        stages = tomlkit.aot()
        for stage in self.stages:
            stages.append(stage.to_table())
        document["stages"] = stages
        return tomlkit.dumps(document)

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> Plan:
        """Parses a plan; also accepts files of version 1.

        Raises:
            PlanError: the text is not TOML or not a plan; names the entry.
        """
        return cls.from_table(FILE.toml(text, where), where)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "") -> Plan:
        """Builds a plan from the entries of a file; raises PlanError naming a malformed one."""
        version = Fields(table, PlanError, "the plan", where).take("version", Integer())
        if version not in (1, VERSION):
            raise PlanError(
                f"the plan has version {version}",
                where=where,
                why=f"only versions 1 and {VERSION} are supported",
                todo="plan again with this version of autopar",
            )
        fields = Fields(
            _upgraded(table, where) if version == 1 else table, PlanError, "the plan", where
        )
        fields.take("version", Integer())
        microbatches = fields.take("microbatches", Integer(1, 2**31), 1)
        schedule = fields.take("schedule", Text(1000), "")
        within = f"{where}, " if where else ""
        stages = tuple(
            StagePlan.from_table(
                entry, f"{within}stage {number}" if schedule else where, microbatches
            )
            for number, entry in enumerate(fields.take("stages", Row(dict)))
        )
        own = stages[0].predicted if stages and not schedule else UNPREDICTED
        plan = cls(
            fields.take("graph", Text()),
            fields.take("mesh", mesh_of),
            stages,
            microbatches,
            schedule,
            fields.take("predicted", Prediction.from_table, own),
            fields.take("model", ModelSpec.from_table, UNNAMED),
            fields.take("outer", lambda text: Outer.parse(Text(1000)(text)), None),
            fields.take("changes", Text(1000), ""),
            version,
        )
        fields.end()
        plan._validate(where)
        return plan

    def _validate(self, where: str) -> None:
        """Raises PlanError unless the stages fit one another and the mesh."""
        if self.outer is not None:
            lacking = [axis for axis in self.outer.axes if axis not in self.mesh.names]
            if lacking:
                raise PlanError(
                    "the plan has a damaged entry",
                    where=where,
                    why=f"{self.outer} names the axis {lacking[0]!r}, and the mesh is {self.mesh}",
                    todo="correct the entry `outer`, or plan again",
                )
            self.inner._validate(where)
            return
        faults = [*self._single_stage_faults()] if not self.schedule else []
        if not self.stages:
            faults.append("there are no stages")
        if any(bool(stage.end) != (stage is not self.stages[-1]) for stage in self.stages):
            faults.append("every stage but the last must have an end, and the last none")
        if len({len(stage.starts) for stage in self.stages}) > 1:
            faults.append("the stages differ in their number of copies")
        for number, stage in enumerate(self.stages):
            last = max(stage.starts, default=0) + stage.mesh.size
            if not stage.starts or min(stage.starts) < 0 or last > self.mesh.size:
                faults.append(f"stage {number} runs on ranks that {self.mesh} does not have")
            elif any(self.mesh.spans_parts(start, stage.mesh.size) for start in stage.starts):
                faults.append(f"collectives of stage {number} would span two parts of {self.mesh}")
        if len({stage.precision for stage in self.stages}) > 1:
            faults.append("the stages differ in their precision")
        spans = {(start, stage.mesh.size) for stage in self.stages for start in stage.starts}
        held = [rank for start, size in spans for rank in range(start, start + size)]
        if not faults and sorted(held) != list(range(self.mesh.size)):
            faults.append(f"the stages' groups do not partition the ranks of {self.mesh}")
        if faults:
            raise PlanError(
                "the plan has a damaged entry",
                where=where,
                why="; ".join(dict.fromkeys(faults)),
                todo="correct it, or plan again",
            )

    def _single_stage_faults(self) -> list[str]:
        faults = []
        if len(self.stages) > 1:
            faults.append("there are several stages but no schedule")
        elif self.stages and (self.stage.graph, self.stage.mesh) != (self.graph, self.mesh):
            faults.append("the stage has another graph or mesh than the plan")
        elif self.stages and self.predicted != self.stage.predicted:
            faults.append("the stage has other predictions than the plan")
        return faults

    def save(self, path: str | Path) -> None:
        """Writes the plan atomically; raises PlanError if it cannot be written."""
        FILE.write(path, self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file; raises PlanError if it is missing, not text or not a plan."""
        return cls.from_toml(FILE.text(path), where=str(path))


def _upgraded(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converts the entries of a file of version 1 to version 2.

    In version 1, a plan without a pipeline had no stages, a stage of a pipeline was a whole plan,
    and tables `memory` and `step` held entries that are fields now.
    """
    whole = {"version": VERSION, **{k: v for k, v in table.items() if k in ("graph", "mesh")}}
    if "stages" in table:
        entries = Row(dict)
        kept = {k: v for k, v in table.items() if k not in ("version", "stages")}
        stages = Fields(table, PlanError, "the plan", where).take("stages", entries)
        return {**kept, **whole, "stages": [_upgraded_stage(each, where)[0] for each in stages]}
    if "model" in table:
        whole["model"] = table["model"]
    stage, microbatches = _upgraded_stage(table, where)
    return {**whole, "microbatches": microbatches, "stages": [stage]}


def _upgraded_stage(entry: Mapping[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """Converts a stage of version 1; returns it with its number of microbatches."""
    kept = {k: v for k, v in entry.items() if k not in ("version", "model", "memory", "step")}
    memory = Fields(entry.get("memory", {}), PlanError, "the plan", where, "memory.")
    limit = memory.take("limit", Number(), None)
    state = memory.take("state", Number(0, 1e6), 2.0)
    memory.end()
    step = Fields(entry.get("step", {}), PlanError, "the plan", where, "step.")
    microbatches = step.take("microbatches", Integer(1, 2**31, rounded=True), 1)
    bucket = step.take("bucket", Integer(0, 2**50, rounded=True), 1)
    step.end()
    limited = {} if limit is None else {"limit": limit}
    return {**kept, **limited, "state_bytes": state, "bucket": bucket}, microbatches
