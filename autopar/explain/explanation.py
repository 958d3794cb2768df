"""Values that say where a plan's time and memory go: operators by block and line, parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.explain.moves import Move

CACHES = "caches"  # of a generation, among the causes of memory


@dataclass(frozen=True)
class Cost:
    """The cost of one node of the folded graph on one device, all blocks together.

    Attributes:
        compute: seconds of its forward and backward in a step.
        saved: bytes of activations that it saves for the backward.
    """

    compute: float
    saved: float


@dataclass(frozen=True)
class Operator:
    """A node of the folded graph with its layouts, its cost, and the moves before and after it.

    Attributes:
        name: the node.
        op: its operator.
        layer: the layer of the model that it belongs to (see layer_names.py).
        axes: the mesh axes that split it.
        layouts: operands and results, as the plan writes them.
        cost: compute and saved activations.
        before, after: moves of its operands and of its results.
    """

    name: str
    op: str
    layer: str
    axes: tuple[str, ...]
    layouts: str
    cost: Cost
    before: tuple[Move, ...]
    after: tuple[Move, ...]

    @property
    def kind(self) -> str:
        """Kind of operator, without an overload: "addmm"; a share is a "sum of gradients"."""
        if self.op == "autopar.share":
            return "sum of gradients"
        if self.op.startswith("aten."):
            return self.op.split(".")[1]
        return self.op.removeprefix("autopar.")

    @property
    def seconds(self) -> float:
        """Seconds of compute and moves, all blocks together."""
        return self.cost.compute + sum(move.seconds for move in (*self.before, *self.after))


@dataclass(frozen=True)
class Line:
    """A line of the user's code in one module, with its operators.

    Attributes:
        module: the module that runs it, with "*" for the number of a block.
        place: "file:line".
        text: the code.
        operators: in order of execution.
    """

    module: str
    place: str
    text: str
    operators: tuple[Operator, ...]

    @property
    def seconds(self) -> float:
        """Seconds of compute and moves, all blocks together."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def saved(self) -> float:
        """Bytes of saved activations, all blocks together."""
        return sum(operator.cost.saved for operator in self.operators)


@dataclass(frozen=True)
class Section:
    """Lines outside of repeated blocks, or the lines of one block.

    Attributes:
        title: the path that the block's modules have in common, "" outside of blocks.
        times: number of blocks.
        lines: in order of execution.
    """

    title: str
    times: int
    lines: tuple[Line, ...]

    @property
    def seconds(self) -> float:
        """Seconds of compute and moves, all blocks together."""
        return sum(line.seconds for line in self.lines)


@dataclass(frozen=True)
class Parameter:
    """A parameter, or one per block, with its layouts and its cost.

    Bytes are those of one device, all blocks together.

    Attributes:
        name: the user's name, with "*" for the number of the block.
        times: number of blocks.
        layer: the layer of the model that it belongs to (see layer_names.py).
        stored, used: its dtype and layouts, in the notation of a pin.
        axes, updated_axes, used_axes: the mesh axes that split the stored parameter, the optimizer
            state and the parameter in use.
        moves: the gathering of the parameter and the synchronisation of its gradient.
        nbytes: bytes of the stored shard.
        gathered: bytes of the copy that is kept from forward to backward, if it is another.
        gradient: bytes of its gradient.
        optimizer: bytes of its optimizer state in device memory.
        host: bytes of its optimizer state in host memory.
    """

    name: str
    times: int
    layer: str
    stored: str
    used: str
    axes: tuple[str, ...]
    updated_axes: tuple[str, ...]
    used_axes: tuple[str, ...]
    moves: tuple[Move, ...]
    nbytes: int
    gathered: int
    gradient: int
    optimizer: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of its moves, all blocks together."""
        return sum(move.seconds for move in self.moves)


@dataclass(frozen=True)
class Cache:
    """Caches of a generation of one kind.

    Attributes:
        layer: the layer that reads and extends them.
        axes: mesh axes that split them.
        nbytes: bytes per device, all blocks together.
    """

    layer: str
    axes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Explanation:
    """The time and memory of one plan, by cause, operator and parameter.

    Attributes:
        graph, mesh: the model and the devices, as the plan's file writes them.
        predicted: the predictions in the plan's file, by name.
        sections: operators with the moves of activations, in order of execution.
        parameters: parameters with their moves.
        memory: bytes per device by cause; the causes never peak together.
        limit: memory of one device in bytes.
        whole: operators without a rule, which run whole on every device.
        hidden: seconds in which collectives and copies overlap with kernels; causes, lines and
            views count them twice, `step` once.
        peak: bytes per device at the simulated peak of the step; None if it was not simulated.
        copies: seconds of copies to and from host memory.
        host: bytes per device in host memory.
        caution: how its precision changes results; see `Precision.caution`.
        error: uncertainty of `step` in seconds, from the errors of the price tables; 0 if the plan
            was made under a calibration (see cost/uncertainty.py).
        added: seconds of adding gradients to those of earlier microbatches.
        caches: caches of a generation.
    """

    graph: str
    mesh: str
    predicted: dict[str, float]
    sections: tuple[Section, ...]
    parameters: tuple[Parameter, ...]
    memory: dict[str, float]
    limit: float
    whole: tuple[str, ...]
    hidden: float = 0.0
    peak: float | None = None
    copies: float = 0.0
    host: float = 0.0
    caution: str = ""
    error: float = 0.0
    added: float = 0.0
    caches: tuple[Cache, ...] = ()

    @property
    def step(self) -> float:
        """Predicted seconds of a step, in closed form."""
        return sum(self.seconds.values()) - self.hidden

    @property
    def shown(self) -> float:
        """Seconds of the simulated step in the plan's file; the closed form if there is none."""
        simulated = 0.0 if self.stale else self.predicted.get("simulated_seconds", 0.0)
        return simulated or self.step

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step by cause; their sum is `step` plus `hidden`."""
        operators = [o for s in self.sections for line in s.lines for o in line.operators]
        moved = sum(m.seconds for o in operators for m in (*o.before, *o.after))
        by_cause = {
            "compute": sum(operator.cost.compute for operator in operators),
            "activations": moved,
            "parameters": sum(parameter.seconds for parameter in self.parameters),
        }
        further = {
            "sums of gradients": self.added,
            "host copies": self.copies,
            "optimizer": self.predicted.get("update_seconds", 0.0),
            "waiting for the host": self.predicted.get("waiting_seconds", 0.0),
        }
        return by_cause | {name: seconds for name, seconds in further.items() if seconds}

    @property
    def stale(self) -> bool:
        """Returns whether the figures in the plan's file differ from those of its layouts."""
        activations = self.memory["activations"]
        own = {
            "step_seconds": self.step,
            "parameter_bytes": sum(self.memory.values())
            - activations
            - self.memory.get(CACHES, 0.0),
            "activation_bytes": activations,
        }
        return any(
            not math.isclose(value, self.predicted.get(name, value), rel_tol=1e-6)
            for name, value in own.items()
        )

    @property
    def slowest_lines(self) -> tuple[tuple[Section, Line], ...]:
        """All lines that take time or memory with their sections, the slowest first."""
        lines = [(s, line) for s in self.sections for line in s.lines]
        lines = [pair for pair in lines if pair[1].seconds or pair[1].saved]
        return tuple(sorted(lines, key=lambda pair: -pair[1].seconds))
