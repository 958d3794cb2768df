"""Tau: the steps of a round, fixed, scheduled, adaptive or chosen by measurement.

"12"                      twelve
"1 until 500 then 12"     one in the first 500 steps, then twelve (post-local SGD)
"16 by loss"              ceil(16 sqrt(F / F0)), F the loss of the last round, F0 of the first
"4 by 1/loss"             ceil(4 F0 / F)
"auto"                    the fewest steps that hide the synchronisation
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from autopar.errors import OptionError

MOST = 2**20
_LOSS, _INVERSE = "loss", "1/loss"


@dataclass(frozen=True)
class Tau:
    """Number of steps of a round; `str(tau)` parses back to an equal value.

    Post-local SGD (Lin et al., arXiv:1808.07217) begins with `first` until step `until`. By "loss"
    is AdaComm's rule with a constant rate (Wang & Joshi, arXiv:1810.08313, equation 17); by
    "1/loss" that of Haddadpour et al. (arXiv:1910.13598, section 5), whose optimal value is taken
    for 0.

    Attributes:
        steps: number of steps of a round; 0 if it is measured.
        first, until: another number of steps for rounds that begin before step `until`.
        by: "loss", "1/loss" or "".
    """

    steps: int
    first: int = 0
    until: int = 0
    by: str = ""

    def __str__(self) -> str:
        if not self.steps:
            return "auto"
        if self.first:
            return f"{self.first} until {self.until} then {self.steps}"
        return f"{self.steps} by {self.by}" if self.by else str(self.steps)

    @classmethod
    def read(cls, given: Any) -> Tau:
        """Reads a number or a text; raises OptionError for other forms than the above."""
        if isinstance(given, Tau):
            return given
        text = str(given).strip()
        if text == "auto":
            return AUTO
        match = re.fullmatch(
            r"(?:(\d{1,7}) until (\d{1,12}) then )?(\d{1,7})(?: by (loss|1/loss))?", text
        )
        scheduled = match is not None and match[1] is not None
        sizes = [int(match[n]) for n in ((1, 3) if scheduled else (3,))] if match else []
        if match is None or not all(1 <= n <= MOST for n in sizes) or (scheduled and match[4]):
            raise OptionError(
                f"tau is {text[:100]!r}",
                why=f'a number of steps from 1 to {MOST}, "auto" or a schedule is expected',
                todo='write "12", "auto", "1 until 500 then 12", "16 by loss" or "4 by 1/loss"',
            )
        first, until = (int(match[1]), int(match[2])) if scheduled else (0, 0)
        return cls(int(match[3]), first, until, match[4] or "")

    @property
    def is_auto(self) -> bool:
        """True if measurement decides."""
        return not self.steps

    def steps_at(self, step: int, loss: float, first_loss: float, measured: int) -> int:
        """Returns the steps of a round.

        Args:
            step: steps that were made before it.
            loss, first_loss: mean losses of the last round that is known, and of the first; NaN
                where there is none.
            measured: the tau that measurement chooses.
        """
        if self.is_auto:
            return measured
        if step < self.until:
            return self.first
        ratio = loss / first_loss if first_loss else math.nan
        if not self.by or not math.isfinite(ratio) or ratio <= 0:
            return self.steps
        factor = math.sqrt(ratio) if self.by == _LOSS else 1 / ratio
        return max(1, min(MOST, math.ceil(self.steps * factor)))


AUTO = Tau(0)
