"""The limits of a search: seconds by the clock, and work that is counted.

Work is counted in seconds of a slow core, from the sizes of what is computed. A search that only
work can end returns the same choice on every machine, however busy; the clock cannot promise that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

RESERVE, MOST_RESERVE = 0.05, 6.0  # of the time limit, and in seconds, for the last step


class Budget:
    """Time and work of a search, and what is left of them.

    Args:
        time_limit: seconds by the clock; infinity if only work ends the search.
        work: seconds of counted work.
    """

    def __init__(self, time_limit: float, work: float = math.inf) -> None:
        self.time_limit, self.work = time_limit, work
        self.started, self.done = time.perf_counter(), 0.0
        self.reserve = min(RESERVE * time_limit, MOST_RESERVE)

    def __str__(self) -> str:
        clock = self.work == math.inf
        return f"limit of {self.time_limit:g} s" if clock else f"work of {self.work:g} s"

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return time.perf_counter() - self.started

    def keep(self, seconds: float) -> None:
        """Reserves more seconds, up to a share of the time limit."""
        self.reserve += min(seconds, RESERVE * self.time_limit)

    def left(self) -> float:
        """Returns the seconds left by the clock, without those in reserve."""
        return max(self.time_limit - self.reserve - self.elapsed(), 0.0)

    def spend(self, work: float) -> None:
        """Counts work."""
        self.done += work

    def unspent(self) -> float:
        """Returns the work that is left."""
        return max(self.work - self.done, 0.0)

    @property
    def over(self) -> bool:
        """Returns whether time or work has come to its end."""
        return self.unspent() == 0 or self.left() == 0

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Ends time and work after a share of what is left now, until the context is left."""
        time_limit, work = self.time_limit, self.work
        if time_limit < math.inf:
            self.time_limit -= (1 - share) * self.left()
        if work < math.inf:
            self.work -= (1 - share) * self.unspent()
        try:
            yield
        finally:
            self.done = min(self.done, self.work)
            self.time_limit, self.work = time_limit, work

    def part(self, share: float) -> Part:
        """Returns a part of what is left now."""
        return Part(self, share)


class Part:
    """A share of the time and of the work that a budget has left."""

    def __init__(self, budget: Budget, share: float) -> None:
        self.budget = budget
        self._clock = budget.elapsed() + share * budget.left()
        self._work = budget.done + share * budget.unspent()

    def spent(self, work: float = 0.0) -> bool:
        """Counts work, and returns whether the part has come to its end."""
        self.budget.spend(work)
        return self.budget.done > self._work or self.budget.elapsed() > self._clock
