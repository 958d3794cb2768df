"""One explanation from four sides: by layer, kind of operator, kind of collective, mesh axis.

An explanation is cut into items, each in one place on every side. A view adds up the items of each
place, so every view adds up to the same peak, and to the same step with what is hidden in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autopar.explain.explanation import Explanation
from autopar.explain.moves import Move

VIEWS = ("layer", "op", "collective", "axis")
PARAMETER = "parameter"


@dataclass(frozen=True)
class Item:
    """Seconds of a step, or bytes held at the peak.

    Attributes:
        layer: see layers.py.
        op: the kind of operator, "parameter" for what belongs to a parameter.
        collective: its kind, "" for compute and for memory.
        axis: the mesh axes that a collective runs over or that split what is held, "node, gpu"; ""
            for compute and for what every device holds whole. What operators keep for the
            backward counts as split along the axes that split the operator.
        cause: as in `Explanation.seconds` and `Explanation.memory`.
        seconds: forwards and backwards, all blocks together.
        nbytes: held on one device.
        calls: how often a step makes the collective.
        sent: payload of one device in a step, bytes.
    """

    layer: str
    op: str
    collective: str
    axis: str
    cause: str
    seconds: float = 0.0
    nbytes: float = 0.0
    calls: int = 0
    sent: int = 0


@dataclass
class Row:
    """A place of a view: seconds and bytes held by cause, collectives a step, bytes sent."""

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    sent: int = 0

    @property
    def time(self) -> float:
        """Seconds a step."""
        return sum(self.seconds.values())

    @property
    def held(self) -> float:
        """Bytes on one device."""
        return sum(self.memory.values())

    def add(self, item: Item) -> None:
        """Count an item in."""
        if item.seconds:
            self.seconds[item.cause] = self.seconds.get(item.cause, 0.0) + item.seconds
        if item.nbytes:
            self.memory[item.cause] = self.memory.get(item.cause, 0.0) + item.nbytes
        self.calls += item.calls
        self.sent += item.sent


def view(explanation: Explanation, by: str) -> tuple[Row, ...]:
    """The rows of one of `VIEWS`: layers in order of execution, others the slowest first.

    Rows without time and memory are left out.
    """
    rows: dict[str, Row] = {}
    for item in items(explanation):
        name: str = getattr(item, by)
        rows.setdefault(name, Row(name)).add(item)
    found = [row for row in rows.values() if row.seconds or row.memory]
    if by != "layer":
        found.sort(key=lambda row: (-row.time, -row.held))
    return tuple(found)


def items(explanation: Explanation) -> Iterator[Item]:
    """Every item of an explanation; parameters stand where their layer begins."""
    owned: dict[str, list[Item]] = {}
    for parameter in explanation.parameters:
        mine = owned.setdefault(parameter.layer, [])
        place = (parameter.layer, PARAMETER)
        mine += _calls(place, "parameters", parameter.moves)
        stored, updated, used = (
            ", ".join(axes)
            for axes in (parameter.axes, parameter.updated_axes, parameter.used_axes)
        )
        for cause, axis, nbytes in (
            ("parameters", stored, parameter.nbytes),
            ("gathered parameters", used, parameter.gathered),
            ("gradients", updated, parameter.gradient),
            ("optimizer", updated, parameter.optimizer),
        ):
            mine.append(Item(*place, "", axis, cause, nbytes=nbytes))
    for section in explanation.sections:
        for operator in (operator for line in section.lines for operator in line.operators):
            yield from owned.pop(operator.layer, ())
            place = (operator.layer, operator.kind)
            yield Item(*place, "", "", "compute", seconds=operator.cost.compute)
            axis = ", ".join(operator.axes)
            yield Item(*place, "", axis, "activations", nbytes=operator.cost.saved)
            yield from _calls(place, "activations", (*operator.before, *operator.after))
    for left in owned.values():
        yield from left


def _calls(place: tuple[str, str], cause: str, moves: Iterable[Move]) -> Iterator[Item]:
    for move in moves:
        for call in move.calls:
            yield Item(
                *place, call.kind, ", ".join(call.axes), cause,
                seconds=move.count(call) * call.seconds, calls=move.count(call),
                sent=move.count(call) * call.nbytes,
            )  # fmt: skip
