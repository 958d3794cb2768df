"""Plan: what the planner decided, as a value and as a TOML file that people read and edit.

For every node of the folded graph it names the layouts that the operator takes and gives:

    "h_0_mlp_c_fc" = "[8@node, 16, 64] -sum(gpu); [64, 256@gpu] -sum(node) -> [8@node, 16, 256@gpu]"

so that code generation needs the graph and the plan and nothing else. A parameter's line says how
it is stored, its `share`'s line how it is used; where its gradients are added up or its optimizer
state lies otherwise, these layouts follow (`ir/storage.py`). Loading a plan is reading data:
nothing in it is ever executed.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from autopar.errors import AutoparError, PlanError, PlanMismatchError
from autopar.ir.fusion import UPDATE
from autopar.ir.mesh import Mesh
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.recompute import Recompute
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout

VERSION = 1
MODEL: dict[str, type] = {"source": str, "batch": int, "seq": int, "layers": int}
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
        try:
            table = tomlkit.parse(text).unwrap()
        except (TOMLKitError, ValueError, RecursionError) as error:
            raise PlanError("the plan is not readable TOML", where=where, why=str(error)) from error
        if "stages" in table and "layouts" not in table:
            raise PlanError(
                "the plan is one of a pipeline",
                where=where,
                why="this asks for the plan of a model in one piece",
                todo="autopar explain, simulate, why, diff and emit take it, and autopar.compile",
            )
        expected = {"version": int, "graph": str, "mesh": str, "predicted": dict, "layouts": dict}
        for key, kind in expected.items():
            if not isinstance(table.get(key), kind):
                raise PlanError(
                    f"the plan has no usable entry {key!r}",
                    where=where,
                    why=f"a plan has the entries {', '.join(expected)}",
                )
        if table["version"] != VERSION:
            raise PlanError(
                f"the plan has version {table['version']}", where=where, why=f"{VERSION} is read"
            )
        try:
            nodes = {name: NodePlan.parse(str(line)) for name, line in table["layouts"].items()}
            predicted = {name: _figure(value) for name, value in table["predicted"].items()}
            model = _model(table.get("model", {}))
            whole = {name: _figure(value) for name, value in table.get("replicated", {}).items()}
            pins = _texts(table, "pins")
            solver = {
                name: value if isinstance(value, (str, int)) else _figure(value)
                for name, value in table.get("solver", {}).items()
            }
            mesh = Mesh.parse(table["mesh"])
            memory = {name: _figure(value) for name, value in table.get("memory", {}).items()}
            recompute = {
                run: Recompute.parse(how) for run, how in _texts(table, "recompute").items()
            }
            made = (nodes, predicted, model, whole, pins, solver, memory, recompute)
            step = {name: _figure(value) for name, value in table.get("step", {}).items()}
            told = (
                _text(table, "calibration"),
                step,
                _text(table, "state"),
                tuple(map(str, table.get("fuse", ()))),
                {name: _fused(entry) for name, entry in table.get("fused", {}).items()},
                Precision.read(_text(table, "precision")),
                Offload.from_table(table.get("offload", {})),
            )
            return cls(table["graph"], mesh, *made, *told)
        except (AutoparError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise PlanError("the plan has a damaged entry", where=where, why=str(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the plan, whole or not at all."""
        write_plan(path, self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; PlanError if it is missing, not text or not a plan."""
        return cls.from_toml(read_plan(path), where=str(path))

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


def _figure(value: object) -> float:
    """A prediction as a number; ValueError unless it is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"a prediction of {value}")
    return float(value)


def _fused(entry: dict[str, object]) -> Fused:
    """An entry of `fused`; ValueError unless it is one."""
    count, first, *saved = (entry[name] for name in ("count", "first", "nbytes", "seconds"))
    if type(count) is not int or not isinstance(first, str):
        raise ValueError(f"fused = {entry!r} is no entry")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in saved):
        raise ValueError(f"fused saves {saved!r}")
    return Fused(count, first, *(float(str(value)) for value in saved))


def _text(table: dict[str, object], name: str) -> str:
    """An entry that may be missing; ValueError unless it is text."""
    value = table.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} is no text")
    return value


def _model(table: object) -> dict[str, str | int]:
    """The entry `model`; ValueError unless it holds the known keys with values of their types."""
    if not isinstance(table, dict):
        raise ValueError(f"model = {table!r} is no table")
    for key, value in table.items():
        # A bool is an int to Python, but no size.
        if type(value) is not MODEL.get(key) or (isinstance(value, int) and value < 1):
            raise ValueError(f"model.{key} = {value!r}")
    return dict(table)


def _texts(table: dict[str, object], key: str) -> dict[str, str]:
    """The entry `key`; ValueError unless it holds texts by name."""
    entry = table.get(key, {})
    if not isinstance(entry, dict):
        raise ValueError(f"{key} = {entry!r} is no table")
    for name, value in entry.items():
        if not isinstance(value, str):
            raise ValueError(f"{key}.{name} = {value!r} is no text")
    return dict(entry)


def write_plan(path: str | Path, text: str) -> None:
    """Write a plan file, whole or not at all (a temporary file is renamed into place)."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_plan(path: str | Path) -> str:
    """The text of a plan file; PlanError if it is missing or no text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the plan {path}", why=str(error)) from error
