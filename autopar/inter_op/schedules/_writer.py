"""Writes a row action by action, numbering microbatches as they come."""

from __future__ import annotations

from collections import Counter, deque

from autopar.ir.action import Action


class Writer:
    """A row that grows; each stage takes its microbatches in order."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self.pending: deque[Action] = deque()
        self._next: Counter[tuple[str, int]] = Counter()

    def forward(self, stage: int) -> None:
        """The next forward of a stage."""
        self._add("F", "F", stage)

    def backward(self, stage: int) -> None:
        """The next backward of a stage, whole."""
        self._add("B", "B", stage)

    def input(self, stage: int) -> None:
        """The next input backward of a stage; its weight backward is pending from then on."""
        self._add("I", "B", stage)
        self.pending.append(self.row[-1]._replace(kind="W"))

    def weight(self, stage: int | None = None) -> None:
        """The weight backward that has been pending longest, of a stage or of all."""
        action = next(one for one in self.pending if stage in (None, one.stage))
        self.pending.remove(action)
        self.row.append(action)

    def _add(self, kind: str, counter: str, stage: int) -> None:
        self.row.append(Action(kind, stage, self._next[counter, stage]))
        self._next[counter, stage] += 1
