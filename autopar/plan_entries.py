"""The entries of a plan: layouts of a node, kernels, predicted figures, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import PlanError
from autopar.files.checked_values import FLAG, Check, Fields, Number, Table, Text, Whole
from autopar.ir.tensor import Layout

Shaped = tuple[tuple[int, ...], Layout]

_SIZE = Whole(1, 2**31)


@dataclass(frozen=True)
class NodePlan:
    """Layouts of one node, each with the global shape it belongs to, and its form.

    `form` is the name of its implementation; "" for the operator as it is.
    """

    operands: tuple[Shaped, ...]
    results: tuple[Shaped, ...]
    form: str = ""

    def __str__(self) -> str:
        left, right = (
            "; ".join(layout.format(shape) for shape, layout in side)
            for side in (self.operands, self.results)
        )
        text = f"{left} -> {right}" if left else right
        return f"{text} by {self.form}" if self.form else text

    @classmethod
    def parse(cls, text: str) -> NodePlan:
        """Read "[8, 4@gpu]; [4] -> [8]" (leaves have no left side); LayoutError if it is not.

        A form follows the layouts: "[8@gpu, 4] -> [8@gpu, 4] by ring".
        """
        layouts, _, form = text.partition(" by ")
        left, arrow, right = layouts.rpartition("->")
        sides = [
            tuple(Layout.parse(part) for part in side.split(";")) if side.strip() else ()
            for side in (left if arrow else "", right)
        ]
        return cls(sides[0], sides[1], form.strip())


@dataclass(frozen=True)
class Fused:
    """A kernel in a plan, and what it saves.

    Attributes:
        count: how often it stands in the model; how often the optimizer's is launched in a step.
        first: the user's line of the first operator that it replaces.
        nbytes: bytes that a device moves less in a step than where it is written out.
        seconds: predicted seconds that this takes less.
    """

    count: int
    first: str
    nbytes: float
    seconds: float

    @classmethod
    def from_table(cls, table: Any, name: str = "fused") -> Fused:
        """Read an entry of a plan file; PlanError names what is wrong with it."""
        saved = Number(-1e30)
        checks: dict[str, Check] = {
            "count": Whole(), "first": Text(), "nbytes": saved, "seconds": saved
        }  # fmt: skip
        return cls(**_entries(name, table, {name: (check, ...) for name, check in checks.items()}))


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step and bytes of a device; 0 where nothing is predicted.

    Attributes:
        step_seconds: of a whole step.
        peak_bytes: the most that a device holds at once.
        bubble: the part of a pipeline's step in which its devices are idle.
        compute_seconds: of operators.
        exchange_seconds: of what operators ask other devices for.
        parameter_seconds: of gathering parameters and of synchronising gradients.
        reshard_seconds: of activations that change their layout.
        parameter_bytes: of parameters with gradients and optimizer state.
        activation_bytes: saved for the backward.
        hidden_seconds: communication beside kernels; the step is the other seconds' sum less these.
        host_seconds: of copies to and from host memory.
        host_bytes: of host memory.
    """

    step_seconds: float = 0.0
    peak_bytes: float = 0.0
    bubble: float = 0.0
    compute_seconds: float = 0.0
    exchange_seconds: float = 0.0
    parameter_seconds: float = 0.0
    reshard_seconds: float = 0.0
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    hidden_seconds: float = 0.0
    host_seconds: float = 0.0
    host_bytes: float = 0.0

    def figures(self) -> dict[str, float]:
        """Returns all figures by name."""
        return dict(vars(self))

    def table(self) -> dict[str, float]:
        """The figures by name, without those that are 0."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_table(cls, table: Any) -> Prediction:
        """Read the entry `predicted` of a plan file; PlanError names what is wrong with it."""
        checks = {field.name: (Number(), 0.0) for field in fields(cls)}
        return cls(**_entries("predicted", table, checks))


@dataclass(frozen=True)
class ModelSpec:
    """The model as the command line spells it: data only, nothing runs it.

    Attributes:
        source: a name of the zoo, "hf:config.json" or "file.py:function"; "" if it is not known.
        batch, seq, layers: sizes that were given; None leaves the model's own.
    """

    source: str = ""
    batch: int | None = None
    seq: int | None = None
    layers: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.table().items())

    def table(self) -> dict[str, str | int]:
        """What is known, by name."""
        return {name: value for name, value in vars(self).items() if value not in ("", None)}

    @classmethod
    def from_table(cls, table: Any) -> ModelSpec:
        """Read the entry `model` of a plan file; PlanError names what is wrong with it."""
        sizes = dict.fromkeys(("batch", "seq", "layers"), (_SIZE, None))
        return cls(**_entries("model", table, {"source": (Text(), ""), **sizes}))


@dataclass(frozen=True)
class SolverReport:
    """How a plan was found.

    Attributes:
        name: the solver; "" where a plan was not searched for.
        nodes: of the problem.
        left: of these nodes, how many the reductions left to be searched; None if none ran.
        gap: the proven relative distance from the optimum.
        seconds: of the search.
    """

    name: str = ""
    nodes: int = 0
    left: int | None = None
    gap: float = 0.0
    seconds: float = 0.0

    def table(self) -> dict[str, str | float]:
        """The report by name; nothing of a plan that was not searched for."""
        return {k: v for k, v in vars(self).items() if v is not None} if self.name else {}

    @classmethod
    def from_table(cls, table: Any) -> SolverReport:
        """Read the entry `solver` of a plan file; PlanError names what is wrong with it."""
        checks: dict[str, tuple[Check, Any]] = {
            "name": (Text(), ""), "nodes": (Whole(), 0), "left": (Whole(), None),
            "gap": (Number(), 0.0), "seconds": (Number(), 0.0),
        }  # fmt: skip
        return cls(**_entries("solver", table, checks))


@dataclass(frozen=True)
class Asked:
    """Options that a plan was searched under and that its layouts do not show.

    Attributes:
        recompute, offload, solver, unknown_ops: as in `autopar.compile`.
        elementwise: whether the optimizer may update parts of a parameter.
    """

    recompute: str = "auto"
    offload: str = "none"
    solver: str = "ilp"
    unknown_ops: str = "replicate"
    elementwise: bool = True

    def table(self) -> dict[str, Any]:
        """The options that differ from the default, by name."""
        return {k: v for k, v in vars(self).items() if v != getattr(UNASKED, k)}

    @classmethod
    def from_table(cls, table: Any) -> Asked:
        """Read the entry `asked` of a plan file; PlanError names what is wrong with it."""
        words = ("recompute", "offload", "solver", "unknown_ops")
        checks: dict[str, tuple[Check, Any]] = {
            **{name: (Text(1000), getattr(UNASKED, name)) for name in words},
            "elementwise": (FLAG, True),
        }
        return cls(**_entries("asked", table, checks))


UNASKED = Asked()
UNPREDICTED = Prediction()
UNNAMED = ModelSpec()
UNSEARCHED = SolverReport()


def node_plans(table: Any) -> dict[str, NodePlan]:
    """Read the entry `layouts` of a plan file; ValueError or LayoutError names a damaged line."""
    return {name: NodePlan.parse(line) for name, line in Table(Text())(table).items()}


def fused_entries(table: Any) -> dict[str, Fused]:
    """Read the entry `fused` of a plan file; PlanError names what is wrong with it."""
    entries = Table(lambda value: value)(table)
    return {name: Fused.from_table(entry, f"fused.{name}") for name, entry in entries.items()}


def _entries(name: str, table: Any, checks: Mapping[str, tuple[Check, Any]]) -> dict[str, Any]:
    """The entries of a table, each checked or its default; PlanError for others."""
    given = Fields(table, PlanError, name, prefix=f"{name}.")
    found = {key: given.take(key, check, default) for key, (check, default) in checks.items()}
    given.end()
    return found
