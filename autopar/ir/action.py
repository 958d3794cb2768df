"""Action: one thing that a rank of a pipeline does in a step, written "F2.5".

| kind | text | meaning |
|---|---|---|
| F | `F2.5` | forward of stage 2 on microbatch 5 |
| B | `B2.5` | its whole backward |
| I, W | `I2.5`, `W2.5` | the halves of a split backward: gradients of the input, of the weights |
| SEND_F, RECV_F | `SEND_F2.5`, `RECV_F3.5` | stage 2 sends its output to stage 3 |
| SEND_B, RECV_B | `SEND_B3.5`, `RECV_B2.5` | stage 3 sends the gradient of its input to stage 2 |
| SYNC | `SYNC2` | gradients of stage 2 are added up over the devices that hold replicas |
| SYNC_BEGIN, SYNC_AWAIT | `SYNC_BEGIN2.5` | the same in two parts, with other work in between |
| UPDATE | `UPDATE2`, `UPDATE2.5` | the optimizer updates the weights of stage 2 |

Marks that an action may carry, in this order:

- `'` the second copy of a stage, `''` the third: `F2.5'` is Chimera's other direction.
- `@1` on older weights: those of one update before the newest ones, `F2.5@1`.
- `>4`, `<0` a transfer that skips stages: `SEND_F2.5>4` to stage 4, `RECV_F3.5<0` from stage 0.
- `/copies` a SYNC over all copies of parameters: of the whole stage in its other copies, or of the
  named ones, which other stages hold too: `SYNC0/copies(wte.weight)`.
- `/@node` a SYNC over some axes of the stage's mesh, of all its parameters or of the named ones:
  `SYNC_BEGIN0.7/@node@rack`, `SYNC0.7/@gpu(wte.weight)`, `SYNC0.7/(wte.weight)` over all axes.

Microbatches are numbered within a period of the schedule; `B2.-1` is the backward of the last one
of the previous period. An UPDATE with a number uses the gradients up to that microbatch, and
updates its own stage. An UPDATE without a number ends a flushed step; all ranks decide together
whether to apply it. Adjacent SYNCs over copies are one exchange, and so are adjacent UPDATEs
without a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from autopar.errors import ScheduleError

COMPUTE: Final = ("F", "B", "I", "W")
TRANSFER: Final = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SYNC, SYNC_BEGIN, SYNC_AWAIT, UPDATE = "SYNC", "SYNC_BEGIN", "SYNC_AWAIT", "UPDATE"
_SUMS: Final = (SYNC, SYNC_BEGIN, SYNC_AWAIT)
ENDING: Final = (SYNC, SYNC_BEGIN, SYNC_AWAIT, UPDATE)  # of gradients
KINDS: Final = (*COMPUTE, *TRANSFER, *ENDING)
ALL: Final = -(2**31)  # the microbatch of an action that concerns them all
COPIES: Final = "copies"
_NEIGHBOUR: Final = -1  # the other stage of most transfers

_TEXT = re.compile(
    r"(?P<kind>[A-Z_]+?)(?P<stage>\d+)(?:\.(?P<microbatch>-?\d+))?(?P<primes>'*)(?:@(?P<age>\d+))?"
    r"(?:(?P<way>[<>])(?P<other>\d+))?(?:/(?P<over>copies|(?:@[A-Za-z_]\w*)*)(?:\((?P<names>[^()\s]+)\))?)?\Z",
    re.ASCII,
)
_UNQUOTED = "[]:-"  # in names of parameters, in addition to letters, digits, dots and "_"


class Action(NamedTuple):
    """One action; `parse` reads the result of `str`.

    Attributes:
        kind: one of KINDS.
        stage: number of the stage, from 0, that computes, sends or receives.
        microbatch: its number in the period, negative in those before; ALL for all of a step.
        copy: number of the copy of the stage, from 0, where a schedule trains several (Chimera).
        age: number of updates by which the weights are older than the newest ones.
        other: the stage at the other end of a transfer, where that is not a neighbour, else -1; see
            `partner`.
        over: of a SYNC, COPIES for that of parameters which several stages hold, axes of the mesh
            such as "@node@gpu", or "" for all axes along which parameters are replicated.
        names: keys of the parameters that a SYNC concerns, () for all of the stage.
    """

    kind: str
    stage: int
    microbatch: int = ALL
    copy: int = 0
    age: int = 0
    other: int = _NEIGHBOUR
    over: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.kind}{self.stage}"
        if self.microbatch != ALL:
            text += f".{self.microbatch}"
        if self.copy or self.age:
            text += self.copy * "'" + (f"@{self.age}" if self.age else "")
        if self.other != _NEIGHBOUR:
            text += f"{'>' if self.kind.startswith('SEND') else '<'}{self.other}"
        if self.over or self.names:
            names = ",".join(quote(name, safe=_UNQUOTED) for name in self.names)
            text += f"/{self.over}" + (f"({names})" if names else "")
        return text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses "F2.5", "SEND_B3.0'", "F0.1@1" or "UPDATE2".

        Raises:
            ScheduleError: the text is not an action.
        """
        match = _TEXT.match(text.strip())
        if match is None or match["kind"] not in KINDS:
            raise ScheduleError(
                f"cannot read the action {text!r}",
                why="an action is a kind, a stage, a dot and a microbatch; the kinds are "
                + ", ".join(KINDS),
                todo="write e.g. F2.5, the forward of stage 2 on microbatch 5",
            )
        kind, transfer, ending = match["kind"], match["other"], match["kind"] in ENDING
        fits = [
            ending or match["microbatch"] is not None,
            not match["age"] or kind in COMPUTE,
            not transfer or match["way"] == {"SEND": ">", "RECV": "<"}.get(kind[:4]),
            match["over"] is None or (kind == SYNC if match["over"] == COPIES else kind in _SUMS),
            match["over"] != "" or match["names"] is not None,
        ]
        if not all(fits):
            raise ScheduleError(
                f"cannot read the action {text!r}",
                why="SYNC and UPDATE may concern all microbatches, every other kind one; @ belongs"
                " to what computes, > to what sends, < to what receives, / to SYNC",
                todo="write e.g. UPDATE2, F2.5@1, SEND_F2.5>4, RECV_F4.5<2, SYNC2/copies and"
                " SYNC_BEGIN2.5/@node",
            )
        stage, batch = int(match["stage"]), int(match["microbatch"] or ALL)
        made = cls(kind, stage, batch, len(match["primes"]), int(match["age"] or 0))
        names = tuple(map(unquote, match["names"].split(","))) if match["names"] else ()
        made = made._replace(over=match["over"] or "", names=names)
        return made if transfer is None else made.towards(int(transfer))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that a SYNC names, () for all."""
        return () if self.over == COPIES else tuple(self.over.split("@")[1:])

    @property
    def partner(self) -> int:
        """The stage at the other end of a transfer."""
        if self.other != _NEIGHBOUR:
            return self.other
        return self.stage + (1 if self.kind in ("SEND_F", "RECV_B") else -1)

    def towards(self, stage: int) -> Action:
        """This transfer to or from another stage."""
        neighbour = self._replace(other=_NEIGHBOUR)
        return neighbour if neighbour.partner == stage else self._replace(other=stage)

    @property
    def counterpart(self) -> Action:
        """The receive of a send, the send of a receive."""
        side, letter = self.kind.split("_")
        kind = f"{'RECV' if side == 'SEND' else 'SEND'}_{letter}"
        turned = Action(kind, self.partner, self.microbatch, self.copy)
        return turned.towards(self.stage)


Row = tuple[Action, ...]


def parse_row(text: str) -> Row:
    """Returns the actions of a row such as "F0.0 F0.1 B0.0 B0.1"; ScheduleError as `parse`."""
    return tuple(map(Action.parse, text.split()))


def format_row(row: Iterable[Action]) -> str:
    """Returns the inverse of `parse_row`."""
    return " ".join(map(str, row))
