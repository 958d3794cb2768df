"""Puts sends, receives and sums of gradients into the rows of a schedule.

Where the next stage is on another rank, what a stage has computed is sent (SEND_F, SEND_B) right
after it, and received there (RECV_F, RECV_B). Neither call blocks a rank: it goes on, and waits for
a receive only where it needs what comes. Between two stages on one rank nothing is sent.

In which order calls meet is what a deadlock depends on, and that depends on what runs them:

- "link": calls from one rank to another follow one another, others do not wait for them. So it is
  on gloo, and on NCCL with a communicator for each direction between two ranks. Receives are posted
  some actions ahead, so that a transfer runs while the receiver computes.
- "rank": all calls of a rank follow one another, batch by batch, as `batch_isend_irecv` on one NCCL
  communicator does; calls that stand side by side in a row are a batch. Every receive stands where
  its send does in one common order of all calls, so that the first call that is not done can be.

`rendezvous.check` is the judge of both.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Row, Schedule
from autopar.inter_op.schedule_time import StageCost, prepare
from autopar.ir.action import REDUCE, Action, format_row

Queue = Literal["link", "rank"]


@dataclass(frozen=True)
class Lowered:
    """A schedule with its transfers.

    Attributes:
        schedule: which one.
        rows: F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B and REDUCE of each rank, in the order in
            which it runs or posts them.
        queue: what the order of calls is made for.
    """

    schedule: Schedule
    rows: tuple[Row, ...]
    queue: Queue = "link"

    def __str__(self) -> str:
        """One line a rank."""
        return "\n".join(f"{rank}: {format_row(row)}" for rank, row in enumerate(self.rows))

    def peer(self, action: Action) -> int:
        """The rank that a transfer goes to or comes from."""
        other = action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)
        return self.schedule.placement[action.copy][other]


def lower(schedule: Schedule, queue: Queue = "link", ahead: int = 1) -> Lowered:
    """Returns the rows of a schedule with its transfers, and REDUCE at the end where it has copies.

    Args:
        schedule: which one.
        queue: what follows what, see above.
        ahead: with "link", how many actions before the one that needs it a receive is posted at the
            latest; more take more memory for what comes early. 1 is enough where a transfer takes
            no longer than an action.

    Raises:
        ScheduleError: `queue` is unknown, `ahead` is negative, or the schedule is not whole.
        DeadlockError: actions of the schedule wait for one another.
    """
    if queue not in get_args(Queue) or ahead < 0:
        raise ScheduleError(
            f"cannot lower {schedule.name} for the queue {queue!r}, {ahead} actions ahead",
            why="a queue is one of " + ", ".join(get_args(Queue)) + ", and `ahead` is not negative",
            todo='use "link" and 1',
        )
    rows = _common(schedule) if queue == "rank" else _ahead(schedule, ahead)
    if schedule.copies > 1:
        for rank, row in enumerate(rows):
            row += [Action(REDUCE, stage, copy=copy) for stage, copy in schedule.holds[rank]]
    return Lowered(schedule, tuple(map(tuple, rows)), queue)


def _transfer(schedule: Schedule, action: Action) -> tuple[Action, Action, int] | None:
    """The send of an action's result, its receive, and the rank that receives; None if it stays."""
    kind, stage, batch, copy = action
    if kind == "W":
        return None
    letter, to = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
    if not 0 <= to < schedule.stages:
        return None
    reader = schedule.placement[copy][to]
    if reader == schedule.rank_of(action):
        return None
    send, receive = Action(f"SEND_{letter}", stage, batch, copy), f"RECV_{letter}"
    return send, Action(receive, to, batch, copy), reader


def _common(schedule: Schedule) -> list[list[Action]]:
    """Rows in which send and receive have one place in a common order: when the sender is done."""
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    ended: list[tuple[float, int, Action]] = []

    def post(until: float) -> None:
        while ended and ended[0][0] <= until:
            action = heapq.heappop(ended)[2]
            transfer = _transfer(schedule, action)
            assert transfer is not None
            rows[schedule.rank_of(action)].append(transfer[0])
            rows[transfer[2]].append(transfer[1])

    for count, (start, end, action) in enumerate(_in_time(schedule)):
        post(start)
        rows[schedule.rank_of(action)].append(action)
        if _transfer(schedule, action) is not None:
            heapq.heappush(ended, (end, count, action))
    post(float("inf"))
    return rows


def _in_time(schedule: Schedule) -> Iterator[tuple[float, float, Action]]:
    """Start, end and action in the order of time, where all actions take as long."""
    prepared = prepare(schedule)
    timeline = prepared.run([StageCost()] * schedule.stages)
    spans = [span for row in timeline.spans for span in row]
    # What takes no time begins when what it needs does: the order in which all can run decides.
    for at in sorted(prepared.order.tolist(), key=lambda at: spans[at].start):
        yield spans[at].start, spans[at].end, spans[at].action


def _ahead(schedule: Schedule, ahead: int) -> list[list[Action]]:
    """Rows in which a receive stands `ahead` actions before its reader, or earlier.

    It is earlier where receives from one rank would otherwise not be in the order of their sends.
    """
    place = {action: position for row in schedule.rows for position, action in enumerate(row)}
    sends: dict[Action, Action] = {}
    links: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            transfer = _transfer(schedule, action)
            if transfer is not None:
                sends[action], receive, reader = transfer
                needed = place[_reader(receive, place)]
                links[rank, reader].append((max(0, needed - ahead), receive))
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for (_, reader), receives in sorted(links.items()):
        latest = len(schedule.rows[reader])
        late: list[tuple[int, Action]] = []
        for position, receive in reversed(receives):
            latest = min(latest, position)
            late.append((latest, receive))
        for position, receive in reversed(late):
            posted[reader, position].append(receive)
    rows: list[list[Action]] = []
    for rank, row in enumerate(schedule.rows):
        rows.append([])
        for position, action in enumerate(row):
            rows[rank] += posted[rank, position]
            rows[rank].append(action)
            if action in sends:
                rows[rank].append(sends[action])
    return rows


def _reader(receive: Action, place: dict[Action, int]) -> Action:
    """The action that needs what is received."""
    kinds = "F" if receive.kind == "RECV_F" else "BI"
    readers = (receive._replace(kind=kind) for kind in kinds)
    return next(reader for reader in readers if reader in place)
