"""StagePlan: the layouts of one stage of a plan, or of the whole model if there is only one.

For every node of the folded graph it states the layouts of operands and results:

    "h_0_mlp_c_fc" = "[8@node, 16, 64] -sum(gpu); [64, 256@gpu] -sum(node) -> [8@node, 16, 256@gpu]"

so that code generation needs only the graph and the plan. A parameter's line has the layout in
which it is stored, and its `share`'s line the layout in which it is used. If gradients or optimizer
state have other layouts, these follow (`ir/storage.py`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import tomlkit
from tomlkit.items import Table as TomlTable

from autopar.errors import LayoutError, PlanError, PlanMismatchError
from autopar.files.checked_values import FLAG, AnyOf, Fields, Integer, Number, Row, Table, Text
from autopar.ir.chosen_algorithms import LIBRARY_ONLY, ChosenAlgorithms
from autopar.ir.fusion import UPDATE, switches
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.recompute import Recompute
from autopar.ir.storage import Hop, Storage
from autopar.ir.update import ADAMW, LocalState, Update, owner_hops, states_of
from autopar.plan_entries import (
    UNASKED,
    UNPREDICTED,
    UNSEARCHED,
    Fused,
    NodePlan,
    Prediction,
    SearchOptions,
    SolverReport,
    fused_entries,
    node_plans,
)


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage.

    Attributes:
        graph: fingerprint of the stage's graph.
        mesh: the devices of each copy of the stage.
        nodes: node name -> its layouts.
        end: the stage's last node in the normalised graph of the model, "" for the last stage.
        starts: the first global rank of each copy of the stage, whose ranks are consecutive.
            Schedules with one copy of the model have one.
        predicted: figures of the stage's step; in a pipeline, of one microbatch, with its share of
            the work that a step does once.
        replicated: operators without a sharding rule, which run whole on every device, with their
            predicted seconds.
        pins: layouts that the user fixed, by name; `autopar plan --from` plans again with them. A
            plan does not need them to run.
        limit: memory limit of a device in bytes; infinite for none.
        update: states that the optimizer keeps, and what it asks of a parameter's layout.
        recompute: run of blocks -> how many of them recompute their activations in the backward,
            and what they keep; see `autopar.ir.recompute`.
        offload: tensors that are offloaded to host memory; see `autopar.ir.offload`.
        microbatches: number of microbatches in a step.
        bucket: bytes of gradients, or of parameters, in one call; 1 for a call for each.
        state: the user's state sharding, such as "paro-iig over node"; "" if it was searched for.
        fuse: patterns to replace by kernels wherever they occur, and "adamw" for the optimizer's
            step.
        fused: kernel -> its uses and savings.
        precision: dtypes of compute, updates and gradients in messages.
        collectives: algorithms that run collectives in place of the library's own.
        late_loss: whether the loss leaves the program as each device has it, to be added up over
            devices when it is reported; otherwise it is whole on every device.
        asked: options of the search that the layouts do not show.
        solver: the solver's run; ignored in comparisons.
        calibration: fingerprint of the calibration that priced the plan, "" for closed forms;
            ignored in comparisons.
    """

    graph: str
    mesh: Mesh
    nodes: dict[str, NodePlan]
    end: str = ""
    starts: tuple[int, ...] = (0,)
    predicted: Prediction = UNPREDICTED
    replicated: dict[str, float] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    limit: float = math.inf
    update: Update = ADAMW
    recompute: dict[str, Recompute] = field(default_factory=dict)
    offload: Offload = NOTHING
    microbatches: int = 1
    bucket: int = 1
    state: str = ""
    fuse: tuple[str, ...] = ()
    fused: dict[str, Fused] = field(default_factory=dict)
    precision: Precision = AS_IS
    collectives: ChosenAlgorithms = LIBRARY_ONLY
    late_loss: bool = False
    asked: SearchOptions = UNASKED
    solver: SolverReport = field(default=UNSEARCHED, compare=False)
    calibration: str = field(default="", compare=False)

    def __str__(self) -> str:
        return tomlkit.dumps(self.to_table())

    def ranks(self, copy: int = 0) -> tuple[int, ...]:
        """Returns the global ranks of a copy, in row-major order of the stage's mesh."""
        return tuple(range(self.starts[copy], self.starts[copy] + self.mesh.size))

    def storage(self, parameter: str, share: str) -> Storage:
        """Returns the layouts of a parameter and its states.

        Args:
            parameter: name of its node in the folded graph.
            share: name of the node of its share.

        Raises:
            LayoutError: its line is incomplete.
        """
        if not self.nodes[share].results:
            raise LayoutError(f"the line of {share} has no layout", why="it has no right side")
        _, used = self.nodes[share].results[0]
        return Storage.of(used, [layout for _, layout in self.nodes[parameter].results])

    def hops(self, leaf: Node, storage: Storage) -> tuple[Hop, ...]:
        """Returns every collective of a parameter in a step, including those to and from an owner.

        Args:
            leaf: the parameter.
            storage: its layouts and those of its states.
        """
        trained = leaf.requires_grad
        hops = storage.hops(leaf.type, self.mesh, self.microbatches, trained, self.precision)
        if not trained:
            return hops
        own = self.precision.updated(leaf.type)
        rule = self.update.rule(leaf.target, own.shape)
        before = tuple(hop for hop in hops if hop.when != "update")
        return (*before, *owner_hops(rule, storage, own, self.mesh), *hops[len(before) :])

    def states(self, leaf: Node, storage: Storage) -> tuple[LocalState, ...]:
        """Returns the states that a device keeps of a parameter; none if it is not trained.

        Args:
            leaf: the parameter.
            storage: its layouts and those of its states.
        """
        if not leaf.requires_grad:
            return ()
        rule = self.update.rule(leaf.target, leaf.type.shape)
        away, in_parts = self.offload.optimizer, self.fuses_update
        return states_of(rule, storage, leaf.type, self.mesh, self.precision, away, in_parts)

    @property
    def fuses_update(self) -> bool:
        """Returns whether a kernel runs the optimizer's step, on state in device memory."""
        return UPDATE in self.fuse and not self.offload.optimizer

    def check(self, graph: str, nodes: set[str], mesh: Mesh) -> None:
        """Checks that the plan is for a graph and a mesh.

        Args:
            graph: fingerprint of the graph.
            nodes: names of the nodes of the folded graph.
            mesh: the devices.

        Raises:
            PlanMismatchError: it is for others; says what differs.
        """
        check_mesh(self.mesh, mesh)
        missing, extra = sorted(nodes - set(self.nodes)), sorted(set(self.nodes) - nodes)
        what, graphs = "the plan is for another model", f"plan: {self.graph}; here: {graph}; "
        if missing or extra:
            raise PlanMismatchError(
                what,
                why=f"{graphs}nodes without a layout: {', '.join(missing[:5]) or 'none'}; "
                f"unknown nodes: {', '.join(extra[:5]) or 'none'}",
                todo="plan this model again",
            )
        if self.graph != graph:
            raise PlanMismatchError(
                f"{what}, or another batch",
                why=f"{graphs}all nodes have the same names, but not the same shapes and arguments",
                todo="give the batch and the sizes that the plan was made for, or plan again",
            )

    def to_table(self) -> TomlTable:
        """Returns the stage's entries in the file of a plan."""
        table = tomlkit.table()
        if self.end:
            table["end"] = self.end
        table["ranks"] = list(self.starts)
        table["graph"] = self.graph
        table["mesh"] = str(self.mesh)
        if self.calibration:
            table["calibration"] = self.calibration
        if self.state:
            table["state"] = self.state
        if self.precision != AS_IS:
            table["precision"] = str(self.precision)
        if self.fuse:
            table["fuse"] = list(self.fuse)
        if self.bucket != 1:
            table["bucket"] = self.bucket
        if self.collectives:
            table["collectives"] = list(self.collectives.texts)
        if self.late_loss:
            table["late_loss"] = True
        if self.limit < math.inf:
            table["limit"] = self.limit
        if self.update != ADAMW:
            table["update"] = self.update.texts
        tables: dict[str, dict[str, Any]] = {
            "predicted": dict(self.predicted.table()),
            "replicated": self.replicated,
            "pins": dict(self.pins),
            "recompute": {run: str(how) for run, how in self.recompute.items()},
            "offload": self.offload.to_table(),
            "fused": {name: asdict(entry) for name, entry in self.fused.items()},
            "asked": self.asked.table(),
            "solver": dict(self.solver.table()),
            "layouts": {name: str(node) for name, node in self.nodes.items()},
        }
        for name, entries in tables.items():
            if entries or name == "layouts":
                table[name] = entries
        return table

    @classmethod
    def from_table(cls, table: Any, where: str = "", microbatches: int = 1) -> StagePlan:
        """Parses the entries of a stage.

        Args:
            table: from the file.
            where: file and stage, for errors.
            microbatches: number of microbatches in a step.

        Raises:
            PlanError: an entry is missing, malformed or unknown; names it.
        """
        fields = Fields(table, PlanError, "the stage", where)
        stage = cls(
            graph=fields.take("graph", Text()),
            mesh=fields.take("mesh", mesh_of),
            nodes=fields.take("layouts", node_plans),
            end=fields.take("end", Text(), ""),
            starts=fields.take("ranks", Row(Integer(0, 2**20)), (0,)),
            predicted=fields.take("predicted", Prediction.from_table, UNPREDICTED),
            replicated=fields.take("replicated", Table(Number()), {}),
            pins=fields.take("pins", Table(Text()), {}),
            limit=fields.take("limit", Number(), math.inf),
            update=_update_of(fields),
            recompute=fields.take("recompute", _recompute, {}),
            offload=fields.take("offload", Offload.from_table, NOTHING),
            microbatches=microbatches,
            bucket=fields.take("bucket", Integer(0, 2**50), 1),
            state=fields.take("state", Text(), ""),
            fuse=fields.take("fuse", Row(Text(known=switches()), unique=True), ()),
            fused=fields.take("fused", fused_entries, {}),
            precision=fields.take("precision", _precision, AS_IS),
            collectives=fields.take("collectives", _collectives, LIBRARY_ONLY),
            late_loss=fields.take("late_loss", FLAG, False),
            asked=fields.take("asked", SearchOptions.from_table, UNASKED),
            solver=fields.take("solver", SolverReport.from_table, UNSEARCHED),
            calibration=fields.take("calibration", Text(), ""),
        )
        fields.end()
        return stage


def check_mesh(planned: Mesh, mesh: Mesh) -> None:
    """Raises PlanMismatchError unless two meshes have the same parts with the same axes."""
    axes = [[(part.names, part.shape) for part in one.parts] for one in (planned, mesh)]
    if axes[0] != axes[1]:
        raise PlanMismatchError(
            "the plan is for another mesh",
            why=f"plan: {planned}; here: {mesh}",
            todo="pass the plan's mesh, or plan again for this mesh",
        )


def mesh_of(text: Any) -> Mesh:
    """Parses the entry `mesh` of a plan file; raises ValueError or MeshError."""
    return Mesh.parse(Text()(text))


def _update_of(fields: Fields) -> Update:
    """Reads the entry `update`, or `state_bytes`, which older files have instead."""
    before = fields.take("state_bytes", Number(0, 1e6), None)
    texts = fields.take("update", Row(Text(100_000)), None)
    if texts is not None:
        return Update.parse(texts)
    asked = fields.take("asked", Table(AnyOf((Text(), FLAG))), {})
    return Update.of_bytes(2.0 if before is None else before, asked.get("elementwise") is False)


def _precision(text: Any) -> Precision:
    return Precision.read(Text()(text))


def _collectives(rows: Any) -> ChosenAlgorithms:
    return ChosenAlgorithms.parse(Row(Text(1000))(rows))


def _recompute(table: Any) -> dict[str, Recompute]:
    return {run: Recompute.parse(how) for run, how in Table(Text())(table).items()}
