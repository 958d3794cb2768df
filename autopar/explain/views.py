"""Groups an explanation by layer, kind of operator, kind of collective or mesh axis.

An explanation is divided into items, and each item belongs to exactly one row of every view.
Therefore all views add up to the same bytes, and to the same seconds, overlapped ones included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autopar.explain.explanation import CACHES, Explanation
from autopar.explain.moves import Move

VIEWS = ("layer", "op", "collective", "axis")
PARAMETER, CACHE = "parameter", "cache"


@dataclass(frozen=True)
class Item:
    """Seconds of a step, or bytes held at the peak.

    Attributes:
        layer: the layer of the model; see layer_names.py.
        op: the kind of operator, "parameter" for time and memory of a parameter, "cache" for
            memory of a cache.
        collective: its kind, "" for compute and for memory.
        axis: the mesh axes that a collective runs over or that split the memory, "node, gpu"; ""
            for compute and for replicated memory. Saved activations count as split along the axes
            that split their operator.
        cause: as in `Explanation.seconds` and `Explanation.memory`.
        seconds: seconds of forward and backward, all blocks together.
        nbytes: bytes on one device.
        calls: calls of the collective in a step.
        sent: payload of one device in a step, in bytes.
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
    """A row of a view.

    Attributes:
        name: name of the layer, operator, collective or axis.
        seconds: seconds of a step by cause.
        memory: bytes on one device by cause.
        calls: collectives in a step.
        sent: payload of one device in a step, in bytes.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    sent: int = 0

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def held(self) -> float:
        """Bytes on one device."""
        return sum(self.memory.values())

    def add(self, item: Item) -> None:
        """Adds an item to the sums."""
        if item.seconds:
            self.seconds[item.cause] = self.seconds.get(item.cause, 0.0) + item.seconds
        if item.nbytes:
            self.memory[item.cause] = self.memory.get(item.cause, 0.0) + item.nbytes
        self.calls += item.calls
        self.sent += item.sent


def view(explanation: Explanation, by: str) -> tuple[Row, ...]:
    """Returns the rows of one of `VIEWS`, without those that take neither time nor memory.

    Args:
        explanation: the explanation to group.
        by: one of `VIEWS`.

    Returns:
        Layers in order of execution, rows of other views the slowest first.
    """
    rows: dict[str, Row] = {}
    for item in items(explanation):
        name: str = getattr(item, by)
        rows.setdefault(name, Row(name)).add(item)
    listed = [row for row in rows.values() if row.seconds or row.memory]
    if by != "layer":
        listed.sort(key=lambda row: (-row.time, -row.held))
    return tuple(listed)


def items(explanation: Explanation) -> Iterator[Item]:
    """Yields every item of an explanation; a layer's parameters come before its operators."""
    owned: dict[str, list[Item]] = {}
    for parameter in explanation.parameters:
        layer = owned.setdefault(parameter.layer, [])
        place = (parameter.layer, PARAMETER)
        layer += _calls(place, "parameters", parameter.moves)
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
            layer.append(Item(*place, "", axis, cause, nbytes=nbytes))
    for cache in explanation.caches:
        held = Item(cache.layer, CACHE, "", ", ".join(cache.axes), CACHES, nbytes=cache.nbytes)
        owned.setdefault(cache.layer, []).append(held)
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
