"""Checks that complete rows run to completion where a send and its receive wait for each other.

This is the independent checker of `complete`: it simulates the ranks, and shares no code with the
construction of rows. Each rank runs its row in order. It computes an action once its inputs have
arrived, posts transfers without blocking, and waits for other ranks in two cases: where all copies
of parameters sum their gradients (SYNC0/copies), and where all ranks decide on an update (UPDATE0).
A transfer completes once both sides have posted it and it is next in the queue of both. Depending
on `Step.queue`, calls on one link or all calls of one rank are serialised (`complete` explains
both). `weights_checker.py` walks the same rows for the weights that they use.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.checkers.missing_sums import MissingSums
from autopar.ir.action import (
    ALL,
    COMPUTE,
    COPIES,
    SYNC,
    TRANSFER,
    UPDATE,
    Action,
    Row,
)
from autopar.ir.pipeline_step import Step

_Link = tuple[int, int]  # sending rank, receiving rank


def check(step: Step, computed: Sequence[Row] | None = None) -> None:
    """Checks that all ranks reach the end of their rows.

    Args:
        step: the rows, from the first microbatch to the last.
        computed: the compute rows of the schedule to compare with; None skips the comparison.

    Raises:
        ScheduleError: the computation differs from the schedule; a transfer is missing, duplicate
            or not between the ranks that hold the stages; an action runs before its inputs are
            posted on its own rank; an update takes gradients that are not synchronised; the sends
            and receives of a link are in different orders.
        DeadlockError: ranks wait for one another; the message names them and their pending actions.
    """
    if computed is not None:
        made = tuple(tuple(one for one in row if one.kind in COMPUTE) for row in step.rows)
        if made != tuple(tuple(one for one in row if one.kind in COMPUTE) for row in computed):
            raise ScheduleError(
                "the complete rows do not compute what the schedule says",
                todo="complete the schedule again",
            )
    simulation = _Simulation(step)
    while simulation.advance():
        pass
    if any(simulation.left) or any(simulation.batches):
        raise simulation.deadlock()


@dataclass
class _Simulation:
    """The state of all ranks during the simulation.

    Attributes:
        left: remaining entries of each rank; consecutive transfers form one entry, and so do
            consecutive sums over copies and consecutive updates.
        batches: posted but incomplete transfers of each rank, by batch.
        sent, received: those of each link, in posting order.
        done: computed, sent and received actions of each rank.
        there: all actions in the row of each rank.
    """

    step: Step
    left: list[deque[Row]] = field(init=False)
    batches: list[deque[set[Action]]] = field(init=False)
    sent: dict[_Link, deque[Action]] = field(default_factory=lambda: defaultdict(deque))
    received: dict[_Link, deque[Action]] = field(default_factory=lambda: defaultdict(deque))
    done: list[set[Action]] = field(init=False)
    there: list[set[Action]] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.step.rows
        self.left = [deque(_entries(row)) for row in rows]
        self.batches = [deque() for _ in rows]
        self.done = [set() for _ in rows]
        self.there = [set(row) for row in rows]
        for rank, row in enumerate(rows):
            self._check_posts(rank, row)

    def _check_posts(self, rank: int, row: Row) -> None:
        """Checks that each transfer belongs to the rank and that inputs are posted before use."""
        seen: set[Action] = set()
        missing = MissingSums(row, self.step.wiring)
        for action in row:
            if action in seen:
                raise _wrong(action, rank, "it is there twice")
            if action.kind in TRANSFER:
                self._check_transfer(action, rank, seen)
            elif action.kind in COMPUTE:
                if not any(need <= seen for need in self._needs(action, rank)):
                    raise _wrong(action, rank, "what it needs is neither computed nor received")
                missing.computed(action)
                action = _aged(action)
            elif _is_sum(action):
                self._check_sum(action, rank)
            elif why := missing.ended(action):
                raise _wrong(action, rank, why)
            seen.add(action)

    def _check_transfer(self, action: Action, rank: int, seen: set[Action]) -> None:
        ways = {(m, r) for m, r, _ in self.step.wiring.edges}
        back = {(r, m) for m, r, gradient in self.step.wiring.edges if gradient}
        pair = action.stage, action.partner
        pair = pair if action.kind.startswith("SEND") else pair[::-1]
        holds = self.step.placement[action.copy][action.stage] == rank
        if not holds or pair not in (ways if action.kind.endswith("F") else back):
            raise _wrong(action, rank, "no such transfer begins or ends there")
        peer = self.step.peer(action)
        if peer == rank or action.counterpart not in self.there[peer]:
            raise _wrong(action, rank, f"there is no {action.counterpart} on rank {peer}")
        kinds = {"SEND_F": "F", "SEND_B": "BI"}.get(action.kind)
        made = Action("", *action[1:4])
        if kinds and not any(made._replace(kind=kind) in seen for kind in kinds):
            raise _wrong(action, rank, "what it sends has not been computed")

    def _check_sum(self, action: Action, rank: int) -> None:
        for other, peer in self._partners(action):
            if not any(_same_sum(one, other) for one in self.there[peer]):
                raise _wrong(action, rank, f"there is no {other} on rank {peer}")

    def _partners(self, action: Action) -> list[tuple[Action, int]]:
        """Returns the sums that an action takes part in, and the ranks that run them."""
        placement, found = self.step.placement, []
        for copy, ranks in enumerate(placement):
            for stage, rank in enumerate(ranks):
                if action.names:
                    shares = set(action.names) & set(self.step.wiring.tied[stage])
                else:
                    shares = {""} if stage == action.stage else set()
                if shares:
                    found.append((action._replace(stage=stage, copy=copy), rank))
        return found

    def _needs(self, action: Action, rank: int) -> list[set[Action]]:
        """Returns the alternative sets of actions that must precede an action on the rank."""
        ways: list[set[Action]] = [set()]
        for alternatives in self.step.wiring.needs(action):
            one = alternatives[0]
            if self.step.placement[one.copy][one.stage] == rank:
                ways = [way | {need} for way in ways for need in alternatives]
            else:
                kind = "RECV_F" if action.kind == "F" else "RECV_B"
                receive = Action(kind, *action[1:4]).towards(one.stage)
                ways = [way | {receive} for way in ways]
        return ways

    def advance(self) -> bool:
        """Advances every rank as far as it can; returns whether anything ran."""
        steps = sum(map(self._step, range(len(self.left))))
        meetings = sum(map(self._meet, sorted(self.sent.keys() & self.received.keys())))
        return steps > 0 or meetings > 0 or self._together()

    def _step(self, rank: int) -> bool:
        """Computes and posts as many entries of the rank as possible."""
        moved = False
        while self.left[rank]:
            entry = self.left[rank][0]
            if entry[0].kind in TRANSFER:
                self._post(rank, entry)
            elif _meets_others(entry[0]):
                break
            elif entry[0].kind in COMPUTE:
                if not any(need <= self.done[rank] for need in self._needs(entry[0], rank)):
                    break
                self.done[rank].add(_aged(entry[0]))
            self.left[rank].popleft()
            moved = True
        return moved

    def _post(self, rank: int, entry: Row) -> None:
        self.batches[rank].append(set(entry))
        for action in entry:
            peer = self.step.peer(action)
            if action.kind.startswith("SEND"):
                self.sent[rank, peer].append(action)
            else:
                self.received[peer, rank].append(action)

    def _meet(self, link: _Link) -> bool:
        """Completes the transfers of a link that both sides have posted and that are next."""
        moved = False
        sender, reader = link
        while self.sent[link] and self.received[link]:
            send, receive = self.sent[link][0], self.received[link][0]
            if receive != send.counterpart:
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
        return self.step.queue == "link" or action in self.batches[rank][0]

    def _together(self) -> bool:
        """Completes one collective call that all its ranks have reached."""
        for rank, left in enumerate(self.left):
            if left and _meets_others(left[0][0]):
                ranks = {peer for action in left[0] for peer in self._with(action)} | {rank}
                heads = [self.left[peer][0] if self.left[peer] else () for peer in ranks]
                if all(self._comes(head, left[0]) for head in heads):
                    for peer in ranks:
                        self.left[peer].popleft()
                    return True
        return False

    def _with(self, action: Action) -> list[int]:
        """Returns the ranks that take part in a call."""
        if action.kind == UPDATE:
            return [rank for rank, there in enumerate(self.there) if there]
        return [rank for _, rank in self._partners(action)]

    def _comes(self, head: Row, call: Row) -> bool:
        """Returns whether a rank whose next entry is `head` takes part in a call."""
        if not head or not _meets_others(head[0]) or head[0].kind != call[0].kind:
            return False
        if head[0].kind == UPDATE:
            return True
        others = [one for action in call for one, _ in self._partners(action)]
        return any(_same_sum(own, other) for own in head for other in others)

    def deadlock(self) -> DeadlockError:
        """Returns an error that names the ranks waiting for one another."""
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
        """Describes what a rank waits for, and returns the rank that it depends on."""
        blocking = self._blocking(rank)
        if blocking is None:
            call = self.left[rank][0]
            ranks = sorted({peer for action in call for peer in self._with(action)})
            heads = {at: self.left[at][0] if self.left[at] else () for at in ranks}
            wanted = next(at for at in ranks if at != rank and not self._comes(heads[at], call))
            return f"rank {rank} waits in {call[0]} for rank {wanted}", wanted
        at, action = blocking
        peer = self.step.peer(action)
        other = action.counterpart
        posted = other in self.sent[peer, at] or other in self.received[at, peer]
        if not posted:
            told = f"{other} is not posted on rank {peer}, which stands at {self._head(peer)}"
        else:
            told = f"{other} on rank {peer} waits for {min(self.batches[peer][0], key=str)}"
        return f"rank {rank} waits for {action}, but {told}", peer

    def _blocking(self, rank: int) -> tuple[int, Action] | None:
        """Returns the transfer that the rank waits for next; None for a call of several ranks."""
        if self.step.queue == "rank" and self.batches[rank]:
            return rank, min(self.batches[rank][0], key=str)
        if not self.left[rank] or _meets_others(self.left[rank][0][0]):
            return None
        needs = self._needs(self.left[rank][0][0], rank)
        missing = next(iter(sorted(needs[0] - self.done[rank])))
        return rank, missing

    def _head(self, rank: int) -> str:
        return str(self.left[rank][0][0]) if self.left[rank] else "its end"


def _entries(row: Row) -> list[Row]:
    """Groups consecutive transfers, sums and updates of a row into entries."""
    entries: list[Row] = []
    for kind, group in groupby(row, key=_together_with):
        actions = tuple(group)
        entries += [actions] if kind else [(action,) for action in actions]
    return entries


def _together_with(action: Action) -> str:
    """Returns the key by which neighbouring actions form one entry; "" for a single action."""
    if action.kind in TRANSFER:
        return "transfer"
    return action.kind if _meets_others(action) else ""


def _meets_others(action: Action) -> bool:
    """Returns whether a rank waits for other ranks at this action."""
    return _is_sum(action) or (action.kind == UPDATE and action.microbatch == ALL)


def _is_sum(action: Action) -> bool:
    return action.kind == SYNC and action.over == COPIES


def _same_sum(one: Action, other: Action) -> bool:
    """Returns whether two sums are one call: they may differ in names that overlap."""
    same = (one.kind, one.stage, one.microbatch, one.copy, one.over) == (
        other.kind, other.stage, other.microbatch, other.copy, other.over
    )  # fmt: skip
    return same and (one.names == other.names or bool(set(one.names) & set(other.names)))


def _aged(action: Action) -> Action:
    """Returns the action without the age of its weights, as dependencies refer to it."""
    return action._replace(age=0) if action.age else action


def _wrong(action: Action, rank: int, why: str) -> ScheduleError:
    return ScheduleError(
        f"{action} is in the wrong place",
        where=f"row of rank {rank}",
        why=why,
        todo="complete the schedule again",
    )
