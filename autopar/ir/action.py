"""Action: one thing that a rank of a pipeline does, written "F2.5", and what must come before it.

| kind | text | what it is |
|---|---|---|
| F | `F2.5` | forward of stage 2 on microbatch 5 |
| B | `B2.5` | its whole backward |
| I, W | `I2.5`, `W2.5` | the halves of a split backward: gradients of the input, of the weights |
| SEND_F, RECV_F | `SEND_F2.5`, `RECV_F3.5` | stage 2 sends its output to stage 3 |
| SEND_B, RECV_B | `SEND_B3.5`, `RECV_B2.5` | stage 3 sends the gradient of its input to stage 2 |
| REDUCE | `REDUCE2` | gradients of stage 2 are added up over the copies of the stage |

A prime marks the second copy of a stage, two the third: `F2.5'` is Chimera's other direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from autopar.errors import ScheduleError

COMPUTE: Final = ("F", "B", "I", "W")
TRANSFER: Final = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
REDUCE: Final = "REDUCE"
ALL: Final = -1  # the microbatch of an action that concerns them all

_TEXT = re.compile(r"(?P<kind>[A-Z_]+?)(?P<stage>\d+)(?:\.(?P<microbatch>\d+))?(?P<primes>'*)\Z")


class Action(NamedTuple):
    """One action; `str` gives what `parse` reads.

    Attributes:
        kind: one of COMPUTE or TRANSFER, or REDUCE.
        stage: number of the stage, from 0, that computes, sends or receives.
        microbatch: number of the microbatch, from 0; ALL for REDUCE.
        copy: which copy of the stage, from 0, where a schedule trains several (Chimera).
    """

    kind: str
    stage: int
    microbatch: int = ALL
    copy: int = 0

    def __str__(self) -> str:
        batch = "" if self.microbatch == ALL else f".{self.microbatch}"
        return f"{self.kind}{self.stage}{batch}{self.copy * chr(39)}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read "F2.5", "SEND_B3.0'" or "REDUCE2".

        Raises:
            ScheduleError: the text is no action.
        """
        match = _TEXT.match(text.strip())
        if match is None or match["kind"] not in (*COMPUTE, *TRANSFER, REDUCE):
            raise ScheduleError(
                f"cannot read the action {text!r}",
                why="an action is a kind, a stage, a dot and a microbatch; the kinds are "
                + ", ".join((*COMPUTE, *TRANSFER, REDUCE)),
                todo="write e.g. F2.5, the forward of stage 2 on microbatch 5",
            )
        if (match["kind"] == REDUCE) != (match["microbatch"] is None):
            raise ScheduleError(
                f"cannot read the action {text!r}",
                why="REDUCE concerns all microbatches, every other kind one",
                todo="write e.g. REDUCE2 and F2.5",
            )
        batch = ALL if match["microbatch"] is None else int(match["microbatch"])
        return cls(match["kind"], int(match["stage"]), batch, len(match["primes"]))


def parse_row(text: str) -> tuple[Action, ...]:
    """Returns the actions of a row such as "F0.0 F0.1 B0.0 B0.1"; ScheduleError as `parse`."""
    return tuple(map(Action.parse, text.split()))


def format_row(row: Iterable[Action]) -> str:
    """Returns the inverse of `parse_row`."""
    return " ".join(map(str, row))


def dependencies(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """Returns what must be done before a compute action can run.

    Each entry lists alternatives of which exactly one is in a schedule: the gradient that a
    backward needs comes from a whole backward (B) or from an input backward (I).

    Args:
        action: F, B, I or W.
        stages: of the pipeline; its last stage computes the loss, so that its backward needs no
            gradient from elsewhere.
    """
    kind, stage, microbatch, copy = action
    if kind == "F":
        return ((Action("F", stage - 1, microbatch, copy),),) if stage else ()
    if kind == "W":
        return ((Action("I", stage, microbatch, copy),),)
    own = (Action("F", stage, microbatch, copy),)
    if stage == stages - 1:
        return (own,)
    return (own, tuple(Action(half, stage + 1, microbatch, copy) for half in "BI"))
