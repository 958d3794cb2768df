"""Completes the compute rows of a schedule with transfers, gradient sums and updates.

If a value is read by a stage on another rank, the rank that computes it sends it (SEND_F, SEND_B)
right afterwards, and the other rank receives it (RECV_F, RECV_B). Neither call blocks: a rank waits
for a receive only where it needs the value. Stages on the same rank need no transfer.

Whether rows deadlock depends on the order in which calls are matched, and that depends on the
backend:

- "link": calls from one rank to another are serialised and do not wait for other calls, as on gloo,
  and on NCCL with one communicator per direction between two ranks. Receives are posted some
  actions ahead, so that transfers overlap with the receiver's computation.
- "rank": all calls of a rank are serialised, batch by batch, as with `batch_isend_irecv` on one
  NCCL communicator; adjacent calls of a row form a batch. Sends and receives follow one global
  order of all calls, so the first incomplete call can always proceed.

Gradients are synchronised (SYNC) before the update that uses them. A flushed schedule contains no
updates: they are added at the end of the step. Other schedules have UPDATEs in their rows.

`checkers/deadlock_checker.py` verifies the result.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import get_args

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedules._tied_updates import tied_updates
from autopar.ir.action import COMPUTE, COPIES, SYNC, SYNC_AWAIT, SYNC_BEGIN, UPDATE, Action, Row
from autopar.ir.pipeline_step import Queue, Step, Wiring

_Pair = tuple[Action, Action]  # a send and its receive
_Key = tuple[str, int, int]  # kind, stage and copy of an action


def complete(
    schedule: Schedule, wiring: Wiring | None = None, queue: Queue = "link", ahead: int = 1
) -> Step:
    """Returns the rows of a schedule with all actions of a step.

    Args:
        schedule: the schedule to complete.
        wiring: the connections of the model's stages; None for a chain.
        queue: "link" or "rank", see above.
        ahead: with "link", the minimum number of actions between posting a receive and its reader;
            a larger number takes more memory for early arrivals. 1 suffices where a transfer takes
            no longer than an action.

    Raises:
        ScheduleError: `queue` is unknown, `ahead` is negative, or the schedule is incomplete.
        DeadlockError: actions of the schedule wait for one another.
    """
    if queue not in get_args(Queue) or ahead < 0:
        raise ScheduleError(
            f"cannot complete {schedule.name} for the queue {queue!r}, {ahead} actions ahead",
            why="a queue is one of " + ", ".join(get_args(Queue)) + ", and `ahead` is not negative",
            todo='use "link" and 1',
        )
    wiring = wiring or Wiring.chain(schedule.stages)
    schedule = tied_updates(schedule, wiring)
    sends = _sends(schedule, wiring)
    rows = _ahead(schedule, sends, ahead)
    if queue == "rank":
        rows = _common(schedule, wiring, sends)
    done = tuple(_ended(schedule, wiring, rank, row) for rank, row in enumerate(rows))
    return Step(done, schedule.placement, schedule.microbatches, wiring, queue)


def with_sends(schedule: Schedule, wiring: Wiring | None = None) -> Step:
    """Returns complete rows without their receives, on which no time and no version depends.

    A receive takes no time on its rank, and its reader waits for the send in any case. There are as
    many receives as sends, and ordering them takes most of the time of `complete`.

    Args:
        schedule: the schedule to complete.
        wiring: the connections of the model's stages; None for a chain.
    """
    wiring = wiring or Wiring.chain(schedule.stages)
    schedule = tied_updates(schedule, wiring)
    known = {key: [send for send, _ in pairs] for key, pairs in _sends(schedule, wiring).items()}
    rows: list[list[Action]] = []
    for row in schedule.rows:
        done: list[Action] = []
        for action in row:
            done.append(action)
            for send in known.get((action.kind, action.stage, action.copy), ()):
                done.append(_on(send, action.microbatch))
        rows.append(done)
    ended = tuple(_ended(schedule, wiring, rank, row) for rank, row in enumerate(rows))
    return Step(ended, schedule.placement, schedule.microbatches, wiring, "link")


def _sends(schedule: Schedule, wiring: Wiring) -> dict[_Key, list[_Pair]]:
    """Returns the transfers of each result, by kind, stage and copy of its action."""
    found: dict[_Key, list[_Pair]] = defaultdict(list)
    for copy, ranks in enumerate(schedule.placement):
        for maker, reader, gradient in wiring.edges:
            if ranks[maker] == ranks[reader]:
                continue
            send = Action("SEND_F", maker, 0, copy).towards(reader)
            found["F", maker, copy].append((send, send.counterpart))
            if gradient:
                send = Action("SEND_B", reader, 0, copy).towards(maker)
                for kind in "BI":
                    found[kind, reader, copy].append((send, send.counterpart))
    return found


def _pairs(sends: dict[_Key, list[_Pair]], action: Action) -> list[_Pair]:
    """Returns the transfers of an action's result."""
    known = sends.get((action.kind, action.stage, action.copy), ())
    return [
        (_on(send, action.microbatch), _on(receive, action.microbatch)) for send, receive in known
    ]


def _on(transfer: Action, microbatch: int) -> Action:
    """Returns the transfer for another microbatch; faster than `_replace`."""
    return Action(transfer.kind, transfer.stage, microbatch, transfer.copy, 0, transfer.other)


def _ahead(schedule: Schedule, sends: dict[_Key, list[_Pair]], ahead: int) -> list[list[Action]]:
    """Builds rows that post a receive at least `ahead` actions before its reader.

    A receive is posted earlier if those from one rank would otherwise not follow their sends'
    order.
    """
    size = schedule.microbatches
    readers = {
        ("F" if action.kind == "F" else "B", action.stage, action.microbatch % size, action.copy): (
            place, action.microbatch
        )
        for row in schedule.rows
        for place, action in enumerate(one for one in row if one.kind in COMPUTE)
        if action.kind != "W"
    }  # fmt: skip
    links: dict[tuple[int, int], list[tuple[tuple[int, int], int, Action]]] = defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            batch = action.microbatch
            known = sends.get((action.kind, action.stage, action.copy), ())
            for number, (_, receive) in enumerate(known):
                key = receive.kind[-1], receive.stage, batch % size, receive.copy
                if key not in readers:
                    raise _unread(_on(receive, batch))
                needed, own = readers[key]
                # A value may be read in a later period than it is sent.
                later = (batch - own) // size
                sent = place - later * len(row), number
                link = rank, schedule.placement[receive.copy][receive.stage]
                links[link].append((sent, max(0, needed - ahead), _on(receive, own)))
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for (_, rank), receives in sorted(links.items()):
        latest = len(schedule.rows[rank])
        late: list[tuple[int, Action]] = []
        for _, position, receive in sorted(receives, key=lambda one: one[0], reverse=True):
            latest = min(latest, position)
            late.append((latest, receive))
        for position, receive in reversed(late):
            posted[rank, position].append(receive)
    rows: list[list[Action]] = []
    for rank, row in enumerate(schedule.rows):
        done: list[Action] = []
        computed = 0
        for action in row:
            if action.kind in COMPUTE:
                done += posted.get((rank, computed), ())
                computed += 1
            done.append(action)
            for send, _ in sends.get((action.kind, action.stage, action.copy), ()):
                done.append(_on(send, action.microbatch))
        rows.append(done)
    return rows


def _unread(receive: Action) -> ScheduleError:
    return ScheduleError(
        f"no action uses what {receive} receives",
        why=f"stage {receive.stage} does not run microbatch {receive.microbatch}",
        todo="add the actions that are missing",
    )


def _common(
    schedule: Schedule, wiring: Wiring, sends: dict[_Key, list[_Pair]]
) -> list[list[Action]]:
    """Builds rows with sends and receives in one global order: that of the senders' end times."""
    if not schedule.flushes:
        raise ScheduleError(
            f"{schedule.name} cannot run if all transfers of a rank share one queue",
            why="its periods overlap, and one queue orders the calls of a single step only",
            todo='use the queue "link"',
        )
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    ended: list[tuple[float, int, Action]] = []

    def post(until: float) -> None:
        while ended and ended[0][0] <= until:
            for send, receive in _pairs(sends, heapq.heappop(ended)[2]):
                rows[schedule.rank_of(send)].append(send)
                rows[schedule.rank_of(receive)].append(receive)

    for count, (start, end, action) in enumerate(_in_time(schedule, wiring)):
        post(start)
        rows[schedule.rank_of(action)].append(action)
        if _pairs(sends, action):
            heapq.heappush(ended, (end, count, action))
    post(float("inf"))
    return rows


_SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def _in_time(schedule: Schedule, wiring: Wiring) -> list[tuple[float, float, Action]]:
    """Returns start, end and action, sorted by time, if all actions take equally long."""
    ended: dict[Action, float] = {}
    found: list[tuple[float, float, Action]] = []
    left = [deque(row) for row in schedule.rows]
    now = [0.0] * len(left)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row:
                needs = [
                    [ended[one] for one in alternatives if one in ended]
                    for alternatives in wiring.needs(row[0])
                ]
                if not all(needs):
                    break
                action = row.popleft()
                start = max([now[rank], *(need[0] for need in needs)])
                now[rank] = ended[action] = start + _SECONDS[action.kind]
                found.append((start, now[rank], action))
                moved = True
    if any(left):
        raise DeadlockError(
            f"{schedule.name} cannot end",
            where=", ".join(str(row[0]) for row in left if row),
            why="these actions wait for others that come after them",
            todo="move one of these actions behind what it waits for",
        )
    # An action without duration starts with its inputs; the topological order breaks ties.
    return sorted(found, key=lambda one: one[0])


def _ended(schedule: Schedule, wiring: Wiring, rank: int, row: list[Action]) -> Row:
    """Appends the gradient sums and the update to a row."""
    held = schedule.holds[rank]
    if not schedule.flushes:
        return _streaming(schedule, wiring, row)
    sums = [Action(SYNC, stage, copy=copy) for stage, copy in held]
    for stage, copy in held:
        names = () if schedule.copies > 1 else wiring.tied[stage]
        if names or schedule.copies > 1:
            sums.append(Action(SYNC, stage, copy=copy, over=COPIES, names=names))
    return (*row, *sums, *(Action(UPDATE, stage, copy=copy) for stage, copy in held))


def _streaming(schedule: Schedule, wiring: Wiring, row: list[Action]) -> Row:
    """Inserts the gradient sums into a row that contains its updates.

    Gradients are synchronised right before their update, or, if other backwards come in between,
    right after the last backward that contributes. Where the schedule awaits sums, it specifies the
    place, and sums over inner axes of the mesh come right before those over outer ones begin.
    """
    size, later = schedule.microbatches, _later(row, schedule.microbatches)
    done: list[Action] = []
    waiting: list[Action] = []
    for action in row:
        if not action.kind.startswith("SEND"):
            done += waiting
            waiting.clear()
        number = action.stage, action.copy, action.microbatch % size
        inner, outer = _divided(schedule, wiring, action)
        if action.kind == SYNC_BEGIN and inner:
            done.append(action._replace(kind=SYNC, over=inner))
        if action.kind in (SYNC_BEGIN, SYNC_AWAIT):
            action = action._replace(over=outer)
        if action.kind == UPDATE:
            if not schedule.pending and number not in later:
                done.append(action._replace(kind=SYNC))
            if names := wiring.tied[action.stage]:
                done.append(action._replace(kind=SYNC, over=COPIES, names=names))
        elif action.kind in "BW" and number in later and not schedule.pending:
            waiting.append(Action(SYNC, *action[1:4]))
        done.append(action)
    return (*done, *waiting)


def _divided(schedule: Schedule, wiring: Wiring, action: Action) -> tuple[str, str]:
    """Returns the axes over which a stage sums at once, and those over which sums are late."""
    axes = wiring.axes[action.stage] if wiring.axes else ()
    if not 0 < schedule.outer < len(axes):
        return "", ""
    inner, outer = axes[schedule.outer :], axes[: schedule.outer]
    return "".join(f"@{axis}" for axis in inner), "".join(f"@{axis}" for axis in outer)


def _later(row: Sequence[Action], size: int) -> set[tuple[int, int, int]]:
    """Returns (stage, copy, microbatch of the period) of updates that follow other backwards."""
    last: dict[tuple[int, int], int] = {}
    for action in row:
        if action.kind in "BW":
            last[action.stage, action.copy] = action.microbatch - size
    found: set[tuple[int, int, int]] = set()
    for action in row:
        key = action.stage, action.copy
        if action.kind in "BW":
            last[key] = action.microbatch
        elif action.kind == UPDATE and last.get(key) != action.microbatch:
            found.add((*key, action.microbatch % size))
    return found
