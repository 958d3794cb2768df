"""Builds a row action by action and numbers the microbatches in order."""

from __future__ import annotations

from collections import Counter, deque

from autopar.ir.action import Action


class Writer:
    """A row under construction; each stage processes its microbatches in order."""

    def __init__(self) -> None:
        self.row: list[Action] = []
        self.pending: deque[Action] = deque()
        self._next: Counter[tuple[str, int]] = Counter()

    def forward(self, stage: int) -> None:
        """Appends the next forward of a stage."""
        self._add("F", "F", stage)

    def backward(self, stage: int) -> None:
        """Appends the next whole backward of a stage."""
        self._add("B", "B", stage)

    def input(self, stage: int) -> None:
        """Appends the next input backward of a stage and queues its weight backward."""
        self._add("I", "B", stage)
        self.pending.append(self.row[-1]._replace(kind="W"))

    def weight(self, stage: int | None = None) -> None:
        """Appends the oldest queued weight backward, of a stage or of all stages."""
        action = next(one for one in self.pending if stage in (None, one.stage))
        self.pending.remove(action)
        self.row.append(action)

    def _add(self, kind: str, counter: str, stage: int) -> None:
        self.row.append(Action(kind, stage, self._next[counter, stage]))
        self._next[counter, stage] += 1
