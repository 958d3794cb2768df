"""Clock of a round: seconds of its local steps, and by how much synchronisation slows them down."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

from autopar.ir.replicas.tau import MOST

EXPOSED = 0.05  # share of a step's seconds, if a synchronisation cannot be hidden
TAKEN = 0.03  # the same of one that overlaps; noise takes more, and 5 % is what is promised
SEEN, FEW = 64, 16  # last steps that are compared, and the fewest


def best_tau(sync: float, step: float, late: bool, taken: float = 0.0) -> int:
    """Returns the smallest number of steps in a round that hides a synchronisation.

    A late method overlaps the synchronisation with a whole round, which needs ceil(sync / step)
    steps. Any other method waits for it; the round is then so long that the wait takes at most 5 %
    of the time of its steps. For a late method, `taken` may be at most 3 % of that time.

    Args:
        sync, step: seconds of both, measured while they overlap, which includes contention.
        late: whether the method applies averages one round late.
        taken: seconds of a round that no overlap hides; see `RoundClock.taken`.
    """
    if step <= 0:
        return 1
    hidden = max(sync / step, taken / (step * TAKEN))
    return max(1, min(MOST, math.ceil(hidden if late else (sync + taken) / (step * EXPOSED))))


class RoundClock:
    """Times one round after another.

    A local step is the time between a call of `left` and the next call of `arrived`: everything
    that the program does except for synchronising.

    Attributes:
        waited: seconds that this rank waited for messages in this round.
    """

    def __init__(self) -> None:
        # Seconds of the last steps without, and with, a message in flight.
        self._last: tuple[deque[float], deque[float]] = (deque(maxlen=SEEN), deque(maxlen=SEEN))
        self.start()

    def start(self) -> None:
        """Begins a round."""
        self.waited, self._outer = 0.0, 0.0
        self._local, self._steps, self._beside = 0.0, 0, 0
        self._sending, self._since = False, time.perf_counter()

    def arrived(self, sending: bool) -> None:
        """Ends a local step.

        Args:
            sending: whether a message is still on its way; it slows steps down.
        """
        seconds, beside = time.perf_counter() - self._since, self._sending or sending
        self._last[beside].append(seconds)
        self._local, self._steps = self._local + seconds, self._steps + 1
        self._beside += beside
        self._since += seconds

    def left(self, sending: bool) -> None:
        """Begins the next local step."""
        now = time.perf_counter()
        self._outer += now - self._since
        self._since, self._sending = now, sending

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Returns a context whose seconds count as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start

    @property
    def step(self) -> float:
        """Returns the mean seconds of a local step of the round."""
        return self._local / max(self._steps, 1)

    @property
    def taken(self) -> float:
        """Returns the seconds that a synchronisation takes from steps although it overlaps.

        They are the seconds of the outer update, plus the seconds by which messages slow steps
        down, estimated from the last steps.
        """
        alone, beside = self._last
        slower = 0.0
        if min(len(alone), len(beside)) >= FEW:
            slower = self._beside * max(mean(beside) - mean(alone), 0.0)
        outer = self._outer + time.perf_counter() - self._since - self.waited
        return max(outer, 0.0) + slower
