"""Whether lowered rows run to their end where a send and its receive wait for each other.

This is the judge of `lower`: it plays the ranks, and knows nothing of how the rows were made. A
rank goes through its row. It computes once what it needs has been received, posts transfers without
waiting, and waits in a REDUCE for all ranks that hold the stage. A transfer is done when both sides
have posted it and it is both sides' turn: calls on one link, or all calls of one rank, follow one
another (`lower` tells the two apart).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import groupby

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.transfers import Lowered
from autopar.ir.action import COMPUTE, REDUCE, TRANSFER, Action, dependencies

_Link = tuple[int, int]  # from rank, to rank


def check(lowered: Lowered) -> None:
    """Returns where all ranks reach the end of their rows.

    Raises:
        ScheduleError: what is computed is not what the schedule says; a transfer is missing, double
            or not between the ranks that hold the stages; an action runs before what it needs, on
            its own rank, is posted; sends and receives of a link are not in one order.
        DeadlockError: ranks wait for one another; names them and what they wait for.
    """
    play = _Play(lowered)
    while play.advance():
        pass
    if any(play.left) or any(play.batches):
        raise play.deadlock()


@dataclass
class _Play:
    """The ranks at play.

    Attributes:
        left: what each rank has yet to do; transfers that follow one another are one entry.
        batches: transfers that each rank has posted and that are not done, batch by batch.
        sent, received: those of each link, in the order in which they were posted.
        done: what each rank has computed, sent and received.
        there: all that is in each rank's row.
    """

    lowered: Lowered
    left: list[deque[tuple[Action, ...]]] = field(init=False)
    batches: list[deque[set[Action]]] = field(init=False)
    sent: dict[_Link, deque[Action]] = field(default_factory=lambda: defaultdict(deque))
    received: dict[_Link, deque[Action]] = field(default_factory=lambda: defaultdict(deque))
    done: list[set[Action]] = field(init=False)
    there: list[set[Action]] = field(init=False)

    def __post_init__(self) -> None:
        schedule, rows = self.lowered.schedule, self.lowered.rows
        computed = tuple(tuple(one for one in row if one.kind in COMPUTE) for row in rows)
        if computed != tuple(schedule.rows):
            raise ScheduleError(
                "the lowered rows do not compute what the schedule says",
                todo="lower the schedule again",
            )
        self.left = [deque(_entries(row)) for row in rows]
        self.batches = [deque() for _ in rows]
        self.done = [set() for _ in rows]
        self.there = [set(row) for row in rows]
        self._check_posts()

    def _check_posts(self) -> None:
        """Every transfer belongs to the rank, and what is needed has been posted before."""
        for rank, row in enumerate(self.lowered.rows):
            seen: set[Action] = set()
            for action in row:
                if action in seen:
                    raise _wrong(action, rank, "it is there twice")
                if action.kind in TRANSFER:
                    self._check_transfer(action, rank, seen)
                elif action.kind == REDUCE:
                    self._check_sum(action, rank)
                elif action.kind in COMPUTE and not any(
                    need <= seen for need in self._needs(action, rank)
                ):
                    raise _wrong(action, rank, "what it needs is neither computed nor received")
                seen.add(action)

    def _check_transfer(self, action: Action, rank: int, seen: set[Action]) -> None:
        other = action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)
        holds = (action.stage, action.copy) in self.lowered.schedule.holds[rank]
        if not holds or not 0 <= other < self.lowered.schedule.stages:
            raise _wrong(action, rank, "no such transfer begins or ends there")
        peer = self.lowered.peer(action)
        if peer == rank or _counterpart(action) not in self.there[peer]:
            raise _wrong(action, rank, f"there is no {_counterpart(action)} on rank {peer}")
        kinds = {"SEND_F": "F", "SEND_B": "BI"}.get(action.kind)
        if kinds and not any(action._replace(kind=kind) in seen for kind in kinds):
            raise _wrong(action, rank, "what it sends has not been computed")

    def _check_sum(self, action: Action, rank: int) -> None:
        for copy, ranks in enumerate(self.lowered.schedule.placement):
            other = action._replace(copy=copy)
            if other not in self.there[ranks[action.stage]]:
                raise _wrong(action, rank, f"there is no {other} on rank {ranks[action.stage]}")

    def _needs(self, action: Action, rank: int) -> list[set[Action]]:
        """What the rank must have computed or received for an action, as alternatives."""
        schedule = self.lowered.schedule
        ways: list[set[Action]] = [set()]
        for alternatives in dependencies(action, schedule.stages):
            if schedule.rank_of(alternatives[0]) == rank:
                ways = [way | {need} for way in ways for need in alternatives]
            else:
                kind = "RECV_F" if action.kind == "F" else "RECV_B"
                ways = [way | {action._replace(kind=kind)} for way in ways]
        return ways

    def advance(self) -> bool:
        """Does all that can be done at once; whether there was anything."""
        steps = sum(map(self._step, range(len(self.left))))
        meetings = sum(map(self._meet, sorted(self.sent.keys() & self.received.keys())))
        return steps > 0 or meetings > 0 or self._reduce()

    def _step(self, rank: int) -> bool:
        """Computes and posts what the rank can."""
        moved = False
        while self.left[rank]:
            entry = self.left[rank][0]
            if entry[0].kind in TRANSFER:
                self._post(rank, entry)
            elif entry[0].kind == REDUCE or not any(
                need <= self.done[rank] for need in self._needs(entry[0], rank)
            ):
                break
            else:
                self.done[rank].add(entry[0])
            self.left[rank].popleft()
            moved = True
        return moved

    def _post(self, rank: int, entry: tuple[Action, ...]) -> None:
        self.batches[rank].append(set(entry))
        for action in entry:
            peer = self.lowered.peer(action)
            if action.kind.startswith("SEND"):
                self.sent[rank, peer].append(action)
            else:
                self.received[peer, rank].append(action)

    def _meet(self, link: _Link) -> bool:
        """Carries over what both sides of a link have posted and have come to."""
        moved = False
        sender, reader = link
        while self.sent[link] and self.received[link]:
            send, receive = self.sent[link][0], self.received[link][0]
            if receive != _counterpart(send):
                raise ScheduleError(
                    f"{send} of rank {sender} meets {receive} of rank {reader}",
                    why="sends and receives between two ranks meet in the order of their posting",
                    todo="receive in the order in which is sent",
                )
            turn = self._turn(sender, send) and self._turn(reader, receive)
            if not turn:
                break
            for rank, action in ((sender, send), (reader, receive)):
                self.done[rank].add(action)
                batches = self.batches[rank]
                next(batch for batch in batches if action in batch).remove(action)
                while batches and not batches[0]:
                    batches.popleft()
            self.sent[link].popleft()
            self.received[link].popleft()
            moved = True
        return moved

    def _turn(self, rank: int, action: Action) -> bool:
        return self.lowered.queue == "link" or action in self.batches[rank][0]

    def _reduce(self) -> bool:
        """Ends one sum for which all ranks that hold the stage have come."""
        schedule = self.lowered.schedule
        for entry in [left[0] for left in self.left if left and left[0][0].kind == REDUCE]:
            stage = entry[0].stage
            ranks = {copy: ranks[stage] for copy, ranks in enumerate(schedule.placement)}
            waiting = [(Action(REDUCE, stage, copy=copy),) for copy in ranks]
            if all(
                self.left[rank] and self.left[rank][0] == waiting[copy]
                for copy, rank in ranks.items()
            ):
                for rank in ranks.values():
                    self.left[rank].popleft()
                return True
        return False

    def deadlock(self) -> DeadlockError:
        """Names the ranks that wait for one another, from one that stands still on."""
        standing = zip(self.left, self.batches, strict=True)
        rank = next(rank for rank, waiting in enumerate(standing) if any(waiting))
        path: list[int] = []
        told: list[str] = []
        while rank not in path:
            path.append(rank)
            text, rank = self._waits(rank)
            told.append(text)
        first = path.index(rank)
        return DeadlockError(
            "the ranks " + ", ".join(map(str, path[first:])) + " wait for one another",
            where="; ".join(
                f"rank {at} at {self.left[at][0][0]}" for at in path[first:] if self.left[at]
            ),
            why="; ".join(told[first:]),
            todo="post one of these transfers earlier, or change the order of the row",
        )

    def _waits(self, rank: int) -> tuple[str, int]:
        """What a rank waits for, in words, and the rank that this depends on."""
        blocking = self._blocking(rank)
        if blocking is None:
            stage = self.left[rank][0][0].stage
            others = [ranks[stage] for ranks in self.lowered.schedule.placement]
            wanted = next(at for at in others if at != rank and not self._comes(at, stage))
            return f"rank {rank} waits in REDUCE{stage} for rank {wanted}", wanted
        at, action = blocking
        peer = self.lowered.peer(action)
        other = _counterpart(action)
        posted = other in self.sent[peer, at] or other in self.received[at, peer]
        if not posted:
            told = f"{other} is not posted on rank {peer}, which stands at {self._head(peer)}"
        else:
            told = f"{other} on rank {peer} waits for {min(self.batches[peer][0], key=str)}"
        return f"rank {rank} waits for {action}, but {told}", peer

    def _blocking(self, rank: int) -> tuple[int, Action] | None:
        """The transfer that must be done next for the rank to go on; None in a sum."""
        if self.lowered.queue == "rank" and self.batches[rank]:
            return rank, min(self.batches[rank][0], key=str)
        if not self.left[rank] or self.left[rank][0][0].kind == REDUCE:
            return None
        needs = self._needs(self.left[rank][0][0], rank)
        missing = next(iter(sorted(needs[0] - self.done[rank])))
        return rank, missing

    def _head(self, rank: int) -> str:
        return str(self.left[rank][0][0]) if self.left[rank] else "its end"

    def _comes(self, rank: int, stage: int) -> bool:
        head = self.left[rank][0][0] if self.left[rank] else None
        return head is not None and head.kind == REDUCE and head.stage == stage


def _entries(row: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    """The row with transfers that follow one another together."""
    entries: list[tuple[Action, ...]] = []
    for transfers, group in groupby(row, key=lambda action: action.kind in TRANSFER):
        actions = tuple(group)
        entries += [actions] if transfers else [(action,) for action in actions]
    return entries


def _counterpart(action: Action) -> Action:
    """The other side of a transfer."""
    letter = action.kind[-1]
    way = 1 if action.kind in ("SEND_F", "RECV_B") else -1
    side = "RECV" if action.kind.startswith("SEND") else "SEND"
    return action._replace(kind=f"{side}_{letter}", stage=action.stage + way)


def _wrong(action: Action, rank: int, why: str) -> ScheduleError:
    return ScheduleError(
        f"{action} cannot stand where it does",
        where=f"row of rank {rank}",
        why=why,
        todo="lower the schedule again",
    )
