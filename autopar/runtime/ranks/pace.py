"""The intervals at which ranks check on one another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Intervals in seconds at which a rank looks for failures of others and gives up waiting.

    Attributes:
        interval: between looks.
        grace: to leave a step in once another rank has failed.
        patience: the same where no step is running.
        roll: in which a rank that lives has answered.
    """

    interval: float = 0.5
    grace: float = 2.0
    patience: float = 20.0
    roll: float = 5.0


PACE = Pace()
