"""Plan: what the planner decided, as a value and as a TOML file that people read and edit.

For every node of the folded graph it names the layouts that the operator takes and gives:

    "h_0_mlp_c_fc" = "[8@node, 16, 64] -sum(gpu); [64, 256@gpu] -sum(node) -> [8@node, 16, 256@gpu]"

so that code generation needs the graph and the plan and nothing else. A parameter's line says how
it is stored, its `share`'s line how it is used; where its gradients are added up or its optimizer
state lies otherwise, these layouts follow (`ir/storage.py`). Loading a plan is reading data:
nothing in it is ever executed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from autopar.errors import LayoutError, PlanError, PlanMismatchError
from autopar.fields import Check, Fields, Number, Or, Row, Table, Text, Whole
from autopar.ir.fusion import UPDATE, switches
from autopar.ir.mesh import Mesh
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.recompute import Recompute
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout
from autopar.outside import Kind

VERSION = 1
FILE = Kind("the plan", PlanError)
Shaped = tuple[tuple[int, ...], Layout]


@dataclass(frozen=True)
class NodePlan:
    """Layouts of one node, each with the global shape it belongs to."""

    operands: tuple[Shaped, ...]
    results: tuple[Shaped, ...]

    def __str__(self) -> str:
        left, right = (
            "; ".join(layout.format(shape) for shape, layout in side)
            for side in (self.operands, self.results)
        )
        return f"{left} -> {right}" if left else right

    @classmethod
    def parse(cls, text: str) -> NodePlan:
        """Read "[8, 4@gpu]; [4] -> [8]" (leaves have no left side); LayoutError if it is not."""
        left, arrow, right = text.rpartition("->")
        sides = [
            tuple(Layout.parse(part) for part in side.split(";")) if side.strip() else ()
            for side in (left if arrow else "", right)
        ]
        return cls(sides[0], sides[1])


@dataclass(frozen=True)
class Fused:
    """What one kernel has taken the place of.

    Attributes:
        count: how often it stands in the model; how often the optimizer's is launched in a step.
        first: the user's line of the first one.
        nbytes: bytes that a device moves less in a step than where it is written out.
        seconds: predicted seconds that this takes less.
    """

    count: int
    first: str
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A whole plan.

    Attributes:
        graph: fingerprint of the graph it is for.
        mesh: the devices it is for.
        nodes: node name -> its layouts.
        predicted: figures such as "step_seconds" and "peak_bytes".
        model: how the command line spelled the model, "source", "batch", "seq" and "layers" where
            they were given; data only, nothing runs it.
        replicated: operators that run whole on every device for want of a sharding rule, each with
            its predicted seconds.
        pins: what was fixed before the plan was made, name -> layout; `autopar plan --from` plans
            again under it. A plan that is only used need not keep it.
        memory: what it was made within: the "limit" in bytes a device, and the optimizer's "state"
            in units of a parameter's own bytes (AdamW: 2).
        recompute: run of blocks -> how many of them compute their activations again in the
            backward, and what they keep; see `autopar.ir.recompute`.
        offload: what lies in host memory while nothing needs it; see `autopar.ir.offload`.
        step: the "microbatches" of a step, 1 if not told, and the "bucket" of gradients and
            parameters that go together, in bytes.
        state: what was said of state sharding, as "paro-iig over node"; "" for nothing.
        fuse: the patterns in whose place kernels stand wherever they are found, and "adamw" where
            the optimizer's step is one.
        fused: kernel -> where it was placed, and what it saves.
        precision: in which dtypes it computes, updates and sends gradients.
        solver: how it was found: "name", the "nodes" of the problem, how many of them the
            reductions "left" to be searched, the proven relative "gap" and the "seconds". It is no
            part of what the plan says, so plans that differ in it only are equal.
        calibration: fingerprint of the calibration that priced it, "" where closed forms did;
            nor is this part of what it says.
    """

    graph: str
    mesh: Mesh
    nodes: dict[str, NodePlan]
    predicted: dict[str, float] = field(default_factory=dict)
    model: dict[str, str | int] = field(default_factory=dict)
    replicated: dict[str, float] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    solver: dict[str, str | float] = field(default_factory=dict, compare=False)
    memory: dict[str, float] = field(default_factory=dict)
    recompute: dict[str, Recompute] = field(default_factory=dict)
    calibration: str = field(default="", compare=False)
    step: dict[str, float] = field(default_factory=dict)
    state: str = ""
    fuse: tuple[str, ...] = ()
    fused: dict[str, Fused] = field(default_factory=dict)
    precision: Precision = AS_IS
    offload: Offload = NOTHING

    def __str__(self) -> str:
        return self.to_toml()

    def storage(self, parameter: str, share: str) -> Storage:
        """Where a parameter and its states lie.

        Args:
            parameter: name of its node in the folded graph.
            share: name of the node of its share.

        Raises:
            LayoutError: its line does not say so.
        """
        if not self.nodes[share].results:
            raise LayoutError(f"the line of {share} says no layout", why="it has no right side")
        _, used = self.nodes[share].results[0]
        return Storage.of(used, [layout for _, layout in self.nodes[parameter].results])

    @property
    def bucket(self) -> int:
        """Bytes of gradients, or of parameters, that go together; 1 if each goes by itself."""
        return int(self.step.get("bucket", 1))

    @property
    def fuses_update(self) -> bool:
        """Whether the optimizer's step is a kernel, on state that is on the device."""
        return UPDATE in self.fuse and not self.offload.optimizer

    @property
    def microbatches(self) -> int:
        """How many a step accumulates."""
        return int(self.step.get("microbatches", 1))

    def to_toml(self) -> str:
        """The file's text; `Plan.from_toml` reads it back to an equal plan."""
        document = tomlkit.document()
        document.add(tomlkit.comment("autopar plan. Predictions are seconds and bytes per device."))
        document["version"] = VERSION
        document["graph"] = self.graph
        document["mesh"] = str(self.mesh)
        if self.calibration:
            document["calibration"] = self.calibration
        if self.model:
            document["model"] = dict(self.model)
        document["predicted"] = dict(self.predicted)
        if self.replicated:
            document["replicated"] = dict(self.replicated)
        if self.pins:
            document["pins"] = dict(self.pins)
        if self.state:
            document["state"] = self.state
        if self.precision != AS_IS:
            document["precision"] = str(self.precision)
        if self.fuse:
            document["fuse"] = list(self.fuse)
        if self.step:
            document["step"] = dict(self.step)
        if self.memory:
            document["memory"] = dict(self.memory)
        if self.recompute:
            document["recompute"] = {run: str(how) for run, how in self.recompute.items()}
        if self.offload:
            document["offload"] = self.offload.to_table()
        if self.fused:
            document["fused"] = {name: asdict(entry) for name, entry in self.fused.items()}
        if self.solver:
            document["solver"] = dict(self.solver)
        document["layouts"] = {name: str(node) for name, node in self.nodes.items()}
        return tomlkit.dumps(document)

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> Plan:
        """Read a plan.

        Raises:
            PlanError: the text is not TOML or not a plan; names the entry.
        """
        return cls.from_table(FILE.toml(text, where), where)

    @classmethod
    def from_table(cls, table: dict[str, Any], where: str = "") -> Plan:
        """Make a plan of the entries of its file; PlanError names one that is damaged."""
        if "stages" in table and "layouts" not in table:
            raise PlanError(
                "the plan is one of a pipeline",
                where=where,
                why="this asks for the plan of a model in one piece",
                todo="autopar explain, simulate, why, diff and emit take it, and autopar.compile",
            )
        fields = Fields(table, PlanError, "the plan", where)
        check_version(fields, where)
        made = cls(
            graph=fields.take("graph", Text()),
            mesh=fields.take("mesh", _mesh),
            predicted=fields.take("predicted", Table(Number())),
            nodes=fields.take("layouts", _layouts),
            model=fields.take("model", model_of, {}),
            replicated=fields.take("replicated", Table(Number()), {}),
            pins=fields.take("pins", Table(Text()), {}),
            solver=fields.take("solver", Table(Or((Text(), Whole(), Number()))), {}),
            memory=fields.take("memory", _memory, {}),
            recompute=fields.take("recompute", _recompute, {}),
            calibration=fields.take("calibration", Text(), ""),
            step=fields.take("step", _step, {}),
            state=fields.take("state", Text(), ""),
            fuse=fields.take("fuse", Row(Text(known=switches()), unique=True), ()),
            fused=fields.take("fused", _fused, {}),
            precision=fields.take("precision", _precision, AS_IS),
            offload=fields.take("offload", Offload.from_table, NOTHING),
        )
        fields.end()
        return made

    def save(self, path: str | Path) -> None:
        """Write the plan, whole or not at all; PlanError if it cannot be written."""
        FILE.write(path, self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; PlanError if it is missing, not text or not a plan."""
        return cls.from_toml(FILE.text(path), where=str(path))

    def check(self, graph: str, nodes: set[str], mesh: Mesh) -> None:
        """PlanMismatchError, saying what differs, unless the plan is for this graph and mesh."""
        if self.mesh.names != mesh.names or self.mesh.shape != mesh.shape:
            raise PlanMismatchError(
                "the plan is for another mesh", why=f"plan: {self.mesh}; here: {mesh}"
            )
        if self.graph != graph or set(self.nodes) != nodes:
            missing, extra = sorted(nodes - set(self.nodes)), sorted(set(self.nodes) - nodes)
            raise PlanMismatchError(
                "the plan is for another model",
                why=f"plan: {self.graph}; here: {graph}; "
                f"nodes without a layout: {', '.join(missing[:5]) or 'none'}; "
                f"unknown nodes: {', '.join(extra[:5]) or 'none'}",
                todo="plan this model again",
            )


def check_version(fields: Fields, where: str) -> None:
    """PlanError unless the entry `version` is the one that is read."""
    version = fields.take("version", Whole())
    if version != VERSION:
        raise PlanError(f"the plan has version {version}", where=where, why=f"{VERSION} is read")


def model_of(table: Any) -> dict[str, str | int]:
    """The entry `model`; ValueError unless it holds the known keys with values of their types."""
    return _entries("model", table, source=Text(), batch=_SIZE, seq=_SIZE, layers=_SIZE)


_SIZE = Whole(1, 2**31)


def _entries(name: str, table: Any, **checks: Any) -> dict[str, Any]:
    """Those of the entries that there are, and no others."""
    fields = Fields(table, PlanError, name, prefix=f"{name}.")
    found = {key: fields.take(key, check, None) for key, check in checks.items()}
    fields.end()
    return {key: found[key] for key in table}


def _mesh(text: Any) -> Mesh:
    return Mesh.parse(Text()(text))


def _precision(text: Any) -> Precision:
    return Precision.read(Text()(text))


def _layouts(table: Any) -> dict[str, NodePlan]:
    return {name: NodePlan.parse(line) for name, line in Table(Text())(table).items()}


def _recompute(table: Any) -> dict[str, Recompute]:
    return {run: Recompute.parse(how) for run, how in Table(Text())(table).items()}


def _memory(table: Any) -> dict[str, float]:
    return _entries("memory", table, limit=Number(), state=Number(0, 1e6))


def _step(table: Any) -> dict[str, float]:
    sizes = {"microbatches": Whole(1, 2**31, rounded=True), "bucket": Whole(0, 2**50, rounded=True)}
    return {name: float(value) for name, value in _entries("step", table, **sizes).items()}


def _fused(table: Any) -> dict[str, Fused]:
    saved = Number(-1e30)
    checks: dict[str, Check] = {
        "count": Whole(),
        "first": Text(),
        "nbytes": saved,
        "seconds": saved,
    }
    return {
        name: Fused(*(fields.take(key, check) for key, check in checks.items()))
        for name, entry in Table(lambda value: value)(table).items()
        for fields in (Fields(entry, PlanError, f"fused.{name}"),)
    }
