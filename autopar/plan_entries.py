"""The entries of a plan: layouts, kernels, predictions, options and the solver's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import PlanError
from autopar.files.checked_values import FLAG, Check, Fields, Integer, Number, Table, Text
from autopar.ir.tensor import Layout

Shaped = tuple[tuple[int, ...], Layout]

_SIZE = Integer(1, 2**31)


@dataclass(frozen=True)
class NodePlan:
    """The layouts of one node's operands and results, each with its global shape, and its form.

    `form` is the name of its implementation; "" for the operator without a form.
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
        """Parses "[8, 4@gpu]; [4] -> [8]" (a leaf has no left side); raises LayoutError.

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
    """A kernel in a plan and its savings.

    Attributes:
        count: number of uses in the model; for the optimizer's kernel, of launches in a step.
        first: the user's line of the first operator that it replaces.
        nbytes: bytes of memory traffic that a device saves in a step.
        seconds: predicted seconds that a device saves in a step.
    """

    count: int
    first: str
    nbytes: float
    seconds: float

    @classmethod
    def from_table(cls, table: Any, name: str = "fused") -> Fused:
        """Parses an entry of a plan file; raises PlanError naming what is wrong."""
        saved = Number(-1e30)
        checks: dict[str, Check] = {
            "count": Integer(), "first": Text(), "nbytes": saved, "seconds": saved
        }  # fmt: skip
        return cls(**_entries(name, table, {name: (check, ...) for name, check in checks.items()}))


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step and bytes of a device; 0 for figures that are not predicted.

    Attributes:
        step_seconds: seconds of the whole step: simulated for a pipeline, otherwise in the closed
            forms by which the search chooses.
        simulated_seconds: seconds of the simulated step of a plan without stages.
        peak_bytes: peak memory of a device.
        bubble: fraction of a pipeline's step in which devices are idle.
        compute_seconds: seconds of operators.
        exchange_seconds: seconds of communication inside operators.
        parameter_seconds: seconds of gathering parameters and synchronising gradients.
        reshard_seconds: seconds of resharding activations.
        parameter_bytes: bytes of parameters, gradients and optimizer state.
        activation_bytes: bytes of activations saved for the backward.
        hidden_seconds: seconds of communication that overlaps with kernels; the step is the sum of
            the other seconds less these.
        host_seconds: seconds of copies to and from host memory.
        update_seconds: seconds of the optimizer's kernels.
        waiting_seconds: in which a device waits for its host to issue kernels.
        host_bytes: bytes of host memory for each device.
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
    update_seconds: float = 0.0
    waiting_seconds: float = 0.0
    simulated_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, simulated if it was: to be shown, and compared with clocks."""
        return self.simulated_seconds or self.step_seconds

    def figures(self) -> dict[str, float]:
        """Returns all figures by name."""
        return dict(vars(self))

    def table(self) -> dict[str, float]:
        """Returns the figures by name, without those that are 0."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_table(cls, table: Any) -> Prediction:
        """Parses the entry `predicted` of a plan file; raises PlanError naming what is wrong."""
        checks = {field.name: (Number(), 0.0) for field in fields(cls)}
        return cls(**_entries("predicted", table, checks))


@dataclass(frozen=True)
class ModelSpec:
    """The model as the command line names it; this is data, and nothing runs it.

    Attributes:
        source: a name of the zoo, "hf:config.json" or "file.py:function"; "" if unknown.
        batch, seq, layers: sizes given by the user; None for the model's own.
    """

    source: str = ""
    batch: int | None = None
    seq: int | None = None
    layers: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.table().items())

    def table(self) -> dict[str, str | int]:
        """Returns the known fields by name."""
        return {name: value for name, value in vars(self).items() if value not in ("", None)}

    @classmethod
    def from_table(cls, table: Any) -> ModelSpec:
        """Parses the entry `model` of a plan file; raises PlanError naming what is wrong."""
        sizes = dict.fromkeys(("batch", "seq", "layers"), (_SIZE, None))
        return cls(**_entries("model", table, {"source": (Text(), ""), **sizes}))


@dataclass(frozen=True)
class SolverReport:
    """The run of the solver that produced a plan.

    Attributes:
        name: the solver; "" for a plan that was not searched for.
        nodes: number of nodes of the problem.
        left: number of nodes that reductions left; None if none ran.
        gap: proven relative gap to the optimum.
        seconds: seconds of the search.
        ended: the reason for its end: "proof", "work" or "time"; only time depends on the machine.
    """

    name: str = ""
    nodes: int = 0
    left: int | None = None
    gap: float = 0.0
    seconds: float = 0.0
    ended: str = ""

    def table(self) -> dict[str, str | float]:
        """Returns the fields by name; empty for a plan that was not searched for."""
        given = {k: v for k, v in vars(self).items() if v not in (None, "")}
        return given if self.name else {}

    @classmethod
    def from_table(cls, table: Any) -> SolverReport:
        """Parses the entry `solver` of a plan file; raises PlanError naming what is wrong."""
        checks: dict[str, tuple[Check, Any]] = {
            "name": (Text(), ""), "nodes": (Integer(), 0), "left": (Integer(), None),
            "gap": (Number(), 0.0), "seconds": (Number(), 0.0), "ended": (Text(), ""),
        }  # fmt: skip
        return cls(**_entries("solver", table, checks))


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search that a plan's layouts do not show.

    Attributes:
        recompute, offload, solver, unknown_ops: as in `autopar.compile`.
        batches: whether a rank passes the whole batch or its part.
        expert_load: the frequency of each expert that prices assumed.
        documents: the lengths of documents in packed rows that prices assumed.
        execution: how prices assumed that kernels are run; "" for one for each operator.
        whole_loss: whether the loss of a step of microbatches is that of the whole batch.
    """

    recompute: str = "auto"
    offload: str = "none"
    solver: str = "ilp"
    unknown_ops: str = "replicate"
    batches: str = "global"
    expert_load: str = "equal"
    documents: str = "unknown"
    execution: str = ""
    whole_loss: bool = False

    def table(self) -> dict[str, Any]:
        """Returns the options that differ from the default, by name."""
        return {k: v for k, v in vars(self).items() if v != getattr(UNASKED, k)}

    @classmethod
    def from_table(cls, table: Any) -> SearchOptions:
        """Parses the entry `asked` of a plan file; raises PlanError naming what is wrong."""
        texts = ("recompute", "offload", "solver", "unknown_ops", "batches", "execution")
        checks: dict[str, tuple[Check, Any]] = {
            **{name: (Text(1000), getattr(UNASKED, name)) for name in texts},
            "expert_load": (Text(2**20), UNASKED.expert_load),
            "documents": (Text(2**20), UNASKED.documents),
            "whole_loss": (FLAG, UNASKED.whole_loss),
            "elementwise": (FLAG, None),  # of older files; `_update_of` in stage_plan.py reads it
        }
        entries = _entries("asked", table, checks)
        del entries["elementwise"]
        return cls(**entries)


UNASKED = SearchOptions()
UNPREDICTED = Prediction()
UNNAMED = ModelSpec()
UNSEARCHED = SolverReport()


def node_plans(table: Any) -> dict[str, NodePlan]:
    """Parses the entry `layouts` of a plan file.

    Raises:
        ValueError, LayoutError: a line is malformed; names it.
    """
    return {name: NodePlan.parse(line) for name, line in Table(Text())(table).items()}


def fused_entries(table: Any) -> dict[str, Fused]:
    """Parses the entry `fused` of a plan file; raises PlanError naming what is wrong."""
    entries = Table(lambda value: value)(table)
    return {name: Fused.from_table(entry, f"fused.{name}") for name, entry in entries.items()}


def _entries(name: str, table: Any, checks: Mapping[str, tuple[Check, Any]]) -> dict[str, Any]:
    """Returns the entries of a table, checked or default; raises PlanError for unknown ones."""
    given = Fields(table, PlanError, name, prefix=f"{name}.")
    entries = {key: given.take(key, check, default) for key, (check, default) in checks.items()}
    given.end()
    return entries
