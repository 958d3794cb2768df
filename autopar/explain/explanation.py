"""Where a plan's time and memory go, as values: operators by block and line of code, parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.explain.moves import Move


@dataclass(frozen=True)
class Cost:
    """What one node of the folded graph costs a device, all blocks together.

    `compute` is seconds forwards and backwards, `saved` the bytes kept for the backward.
    """

    compute: float
    saved: float


@dataclass(frozen=True)
class Operator:
    """A node of the folded graph with its layouts, its cost, and the moves before and after it.

    `layer` is where it belongs (see layers.py), `axes` are the mesh axes that split it.
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
        """An ATen operator without its overload; what a share computes is a sum."""
        if self.op == "autopar.share":
            return "sum of gradients"
        if self.op.startswith("aten."):
            return self.op.split(".")[1]
        return self.op.removeprefix("autopar.")

    @property
    def seconds(self) -> float:
        """Compute and moves, all blocks together."""
        return self.cost.compute + sum(move.seconds for move in (*self.before, *self.after))


@dataclass(frozen=True)
class Line:
    """A line of the user's code in one module, with its operators."""

    module: str
    place: str
    text: str
    operators: tuple[Operator, ...]

    @property
    def seconds(self) -> float:
        """Compute and moves, all blocks together."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def saved(self) -> float:
        """Bytes kept for the backward, all blocks together."""
        return sum(operator.cost.saved for operator in self.operators)


@dataclass(frozen=True)
class Section:
    """Lines that run once, or those of a repeated block; `title` is what its modules share."""

    title: str
    times: int
    lines: tuple[Line, ...]

    @property
    def seconds(self) -> float:
        """Compute and moves, all blocks together."""
        return sum(line.seconds for line in self.lines)


@dataclass(frozen=True)
class Parameter:
    """A parameter, or one per block: how it is stored and used, and what it costs.

    Attributes:
        name: the user's, with "*" for the number of the block.
        times: number of blocks.
        layer: where it belongs; see layers.py.
        stored, used: layouts, in the notation of a pin, with the dtype.
        axes, updated_axes, used_axes: the mesh axes that split it as it is held, as it is updated
            and as it is used.
        moves: gathering it and synchronising its gradient.
        nbytes: of what is stored, on one device, all blocks together.
        gathered: of the copy that is kept for the backward, where that is another.
        gradient: of its gradient.
        optimizer: of its optimizer state, as far as the device holds it.
        host: of that which lies in host memory.
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
        """Its moves, all blocks together."""
        return sum(move.seconds for move in self.moves)


@dataclass(frozen=True)
class Explanation:
    """Where time and memory of one plan go.

    Attributes:
        graph, mesh: what the plan is for, as in its file.
        predicted: the figures of its file.
        sections: operators with the moves of activations, in order of execution.
        parameters: with the moves that belong to them.
        memory: bytes per device by cause; a step never holds all of them at once.
        limit: memory of one device in bytes.
        whole: operators that run whole on every device for want of a rule.
        hidden: seconds in which collectives and copies go beside kernels; causes, lines and
            views count them twice, `step` once.
        peak: bytes per device at the peak of the step, where that has been simulated.
        copies: seconds of copies to host memory and back.
        host: bytes per device in host memory.
        caution: what its precision does to results; see `Precision.caution`.
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

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values()) - self.hidden

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds a step by cause; their sum is the predicted step and what is hidden in it."""
        operators = [o for s in self.sections for line in s.lines for o in line.operators]
        moved = sum(m.seconds for o in operators for m in (*o.before, *o.after))
        found = {
            "compute": sum(operator.cost.compute for operator in operators),
            "activations": moved,
            "parameters": sum(parameter.seconds for parameter in self.parameters),
        }
        return found | ({"host copies": self.copies} if self.copies else {})

    @property
    def stale(self) -> bool:
        """Whether the plan's own figures are not those of its layouts."""
        activations = self.memory["activations"]
        own = {
            "step_seconds": self.step,
            "parameter_bytes": sum(self.memory.values()) - activations,
            "activation_bytes": activations,
        }
        return any(
            not math.isclose(value, self.predicted.get(name, value), rel_tol=1e-6)
            for name, value in own.items()
        )

    @property
    def dearest(self) -> tuple[tuple[Section, Line], ...]:
        """All lines that take time or memory, the slowest first."""
        lines = [(s, line) for s in self.sections for line in s.lines]
        lines = [pair for pair in lines if pair[1].seconds or pair[1].saved]
        return tuple(sorted(lines, key=lambda pair: -pair[1].seconds))
