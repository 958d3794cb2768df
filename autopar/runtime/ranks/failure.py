"""Stops every rank when one fails in a step, and says which rank failed and why.

Python cannot interrupt a rank that waits in a collective for one that will never arrive. So a rank
that fails leaves its error in the store of the process group before it raises, and on every rank a
thread checks the store twice a second. The reaction depends on the state of the rank:
- its step ends by itself (it succeeds, or the broken collective raises): RankFailedError;
- it stays inside the step: the error goes to stderr and the process ends with status 1;
- it is outside a step, perhaps waiting for the device: the same, after a longer wait.

An error that nothing catches between steps is also left there, by Python's hooks, and a rank that
ends without one says so. A process that dies without raising (killed, out of memory) or is stopped
leaves no message. Its peers' collectives fail by themselves with gloo, and after their time-out
with NCCL, unless a launcher stops them before. Then the ranks call a roll: the thread of every rank
that reads of the broken collective answers with the rank's record. Ranks that do not answer are
named as lost; if all answer, the ranks that hold up the others are named.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from weakref import ReferenceType

import torch.distributed as dist

from autopar.errors import AutoparError, DumpError, RankFailedError
from autopar.runtime.ranks.board import Board
from autopar.runtime.ranks.ending import Ending
from autopar.runtime.ranks.pace import PACE, Pace
from autopar.runtime.ranks.record import Record
from autopar.runtime.ranks.reports import CLOSED, RankAnswers, may_follow
from autopar.runtime.ranks.reports import Failure as Failure
from autopar.runtime.ranks.shared import Peers, backend
from autopar.runtime.torch_private import Store, own_store

_ANSWER_SECONDS = 10.0  # time-out of one request to the store
_BLINK_SECONDS = 0.05
_BEAT = 4  # checks between two signs of life


class Watch:
    """`with watch:` around a step stops this rank if another has failed.

    A nested `with` is part of the outer one. An error that every rank raises and survives (a
    refused batch) does not stop later steps.

    Args:
        store: a connection with no other user; None for a process without peers.
        rank: this process's global rank.
        world: number of ranks that watch one another.
        key: prefix of keys in the store; the same on these ranks, and used by them alone.
        ranks: the global ranks; by default 0, 1, ...
        peers: the peers, whose recorder supplies this rank's answer.
        pace: how often it checks, and how long it waits.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world: int,
        *,
        key: str = "autopar/failure",
        ranks: Sequence[int] | None = None,
        peers: Peers | None = None,
        pace: Pace = PACE,
    ) -> None:
        self.rank, self.world, self.key, self.pace = rank, world, key, pace
        self.ranks = tuple(range(world) if ranks is None else ranks)
        self._peers = Peers(None) if peers is None else peers
        self._board = None if store is None or world == 1 else Board(store, _ANSWER_SECONDS)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._depth = 0
        self._told: int | None = None  # id of this rank's last reported error
        self._looks, self._beaten, self._dumped = 0, 0.0, 0
        self._lock = threading.Lock()  # guards the following fields
        self._failure: Failure | None = None  # to be raised by the step
        self._survived = ""  # the last value under the key that this rank has handled
        self._survivals = 0
        self._answered = ""  # the last value that this rank has acknowledged

    @classmethod
    def over(cls, ranks: Sequence[int]) -> Watch:
        """Returns the watch of the processes with these global ranks; they create it in one order.

        Without a process group, or if this process is not among them, it watches nothing.
        """
        if not dist.is_initialized() or backend() == "fake":
            return cls(None, 0, 1)
        rank = dist.get_rank()
        if len(ranks) == 1 or rank not in ranks:
            return cls(None, rank, 1)
        store = own_store()
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        name = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        number = store.add(f"autopar/watches/{name}/{rank}", 1)
        key = f"autopar/failure/{name}/{number}"
        return cls(store, rank, len(ranks), key=key, ranks=ranks, peers=Peers.here())

    def __enter__(self) -> Watch:
        if self._board is not None and self._depth == 0:
            self._raise_what_is_known()
            self.start()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._board is None or self._depth:
            return
        if error is None:
            self._raise_what_is_known()
            return
        number, self._told = self._survivals, id(error)
        first = self._publish(self._board, error)
        if not may_follow(error):
            if not isinstance(error, AutoparError):  # every rank may raise it
                self._dump(f"this rank failed: {error!r}")
            return
        failure = first or Failure.of(self.rank, number, error)
        raised = self._roll_call(failure) or (None if first is None else failure.error())
        if raised is not None:
            raise self._dumped_with(raised, failure) from error

    def close(self) -> None:
        """Ends the thread, which also ends with the process. A later step starts another."""
        if self._thread is not None:
            self._thread = None
            if (known := self._end.detach()) is not None:  # while Python ends, it does not run
                _, end, given, _ = known
                end(*given)

    def leave(self) -> None:
        """Reports that this rank closes its program while others may use it; ends the thread."""
        if self._board is not None and self._thread is not None:
            record = Record.of(self._peers.recorder, self.rank, self.world, whole=False)
            with suppress(RuntimeError):  # the process that serves the store may have ended
                self._board.set(self._left(self.rank), f"{CLOSED} {record.at}")
        self.close()

    def tell(self, error: BaseException | None) -> None:
        """Reports that this process ends with an error between steps, or with none."""
        board = self._board
        if board is None or self._thread is None or isinstance(error, RankFailedError):
            return
        if error is not None:
            if id(error) != self._told:
                self._told = id(error)
                self._publish(board, error)
                self._dump(f"this rank failed between steps: {error!r}")
            return
        record = Record.of(self._peers.recorder, self.rank, self.world, whole=False)
        try:
            board.set(self._left(self.rank), f"it ended {record.at}")
            if self.rank == 0:  # it may serve the store from which others must read this
                self._until(board, [self._left(r) for r in self.ranks], self.pace.grace)
        except RuntimeError:
            pass  # no rank is left to read it
        self.close()

    def start(self) -> None:
        """Starts checking, and observing the end of this process; a step also does so."""
        if self._board is None or self._thread is not None:
            return
        # The thread must not keep an otherwise unreferenced watch alive.
        closed, reference = threading.Event(), weakref.ref(self)
        run = functools.partial(_look_again, reference, closed, self.pace.interval)
        self._closed, self._thread = closed, threading.Thread(target=run, daemon=True)
        self._thread.name = "autopar-watch"
        self._thread.start()
        recorder = self._peers.recorder
        ending = Ending(self.tell, lambda: recorder.thread, self._thread)
        # A thread that returns from C++ while the interpreter shuts down would crash it.
        self._end = weakref.finalize(self, _end, self._thread, closed, ending)
        self._end.atexit = False  # `tell` is called at exit
        ending.listen()

    def _raise_what_is_known(self) -> None:
        with self._lock:
            failure = self._failure
            if failure is not None:
                self._survive(failure.write())
        if failure is not None:
            raise self._dumped_with(self._roll_call(failure) or failure.error(), failure)

    def _survive(self, value: str) -> None:
        self._survived, self._failure = value, None
        self._survivals += 1

    def _publish(self, board: Board, error: BaseException) -> Failure | None:
        """Publishes this rank's error; returns another rank's if that one was first."""
        failure = Failure.of(self.rank, self._survivals, error)
        text = failure.write()
        try:
            board.set(self._place(failure, self.rank), self._record())
            value = board.first(self.key, text, self._survived)
            if value != text:
                self._answer(board, value)
            elif self.rank == 0:
                self._wait_for_answers(board, value)
        except RuntimeError:
            # The process that served the store is gone; the thread may have read its error.
            with self._lock:
                value = text if self._failure is None else self._failure.write()
        with self._lock:
            self._survive(value)
        return None if value == text else Failure.read(value)

    def _record(self) -> str:
        recorder = self._peers.recorder
        return Record.of(recorder, self.rank, self._peers.world, whole=False).write()

    def _answer(self, board: Board, value: str) -> None:
        """Acknowledges `value` once, with this rank's record."""
        with self._lock:
            new, self._answered = value != self._answered, value
        if new:
            board.set(self._place(Failure.read(value), self.rank), self._record())

    def _place(self, failure: Failure, rank: int) -> str:
        """Returns the key of a rank's answer to a failure."""
        return f"{self.key}/read/{failure.number}/{rank}"

    def _left(self, rank: int) -> str:
        """Returns the key under which a rank reports its end."""
        return f"{self.key}/left/{rank}"

    def _seen(self, rank: int) -> str:
        """Returns the key under which a rank reports its state from time to time."""
        return f"{self.key}/seen/{rank}"

    def _wait_for_answers(self, board: Board, value: str) -> None:
        """Waits until others have read a failure, as the first rank may serve the store."""
        failure = Failure.read(value)
        self._until(board, [self._place(failure, rank) for rank in self.ranks], self.pace.grace)

    @staticmethod
    def _until(board: Board, keys: Sequence[str], seconds: float) -> set[str]:
        """Waits until all keys are set or time is up; returns the missing ones."""
        end = time.monotonic() + seconds
        left = set(keys)
        while left:
            left -= set(board.present(sorted(left)))
            if time.monotonic() > end:
                break
            time.sleep(_BLINK_SECONDS if left else 0)
        return left

    def _roll_call(self, failure: Failure) -> RankFailedError | None:
        """Returns who held up the others, if a collective broke and no rank reported why."""
        if not failure.broken or self._board is None:
            return None
        try:
            return self._roll(self._board, failure).error()
        except RuntimeError:
            # The store is gone with the first rank, which serves it unless a launcher does.
            return RankAnswers(failure, {}, (0,) if self.rank else (), {}, {}).error()

    def _roll(self, board: Board, failure: Failure) -> RankAnswers:
        end = time.monotonic() + self.pace.roll
        places = {rank: self._place(failure, rank) for rank in self.ranks if rank != self.rank}
        absent, left = set(places), dict[int, str]()
        while absent and time.monotonic() < end:
            absent = {rank for rank in absent if not board.check(places[rank])}
            left |= {r: board.get(self._left(r)) for r in absent if board.check(self._left(r))}
            absent -= set(left)
            time.sleep(_BLINK_SECONDS if absent else 0)
        there = [rank for rank in places if rank not in absent and rank not in left]
        records = {rank: Record.read(board.get(places[rank])) for rank in there}
        records[self.rank] = Record.read(self._record())
        seen = {r: board.get(self._seen(r)) for r in absent if board.check(self._seen(r))}
        return RankAnswers(failure, records, sorted(absent), seen, left)

    def _dump(self, reason: str) -> str:
        """Writes this rank's record; returns the folder, or "" if that is impossible."""
        peers = self._peers
        token = peers.dumps.token
        try:
            if self._board is not None:
                token = self._board.first(f"{self.key}/folder", token)
        except RuntimeError:
            pass  # then each rank has its own folder
        try:
            record = Record.of(peers.recorder, self.rank, peers.world, reason)
            return str(peers.dumps.write(record, token))
        except DumpError:
            return ""

    def _dumped_with(self, error: RankFailedError, failure: Failure) -> RankFailedError:
        """Returns the error extended by the folder in which all ranks write their records."""
        folder = self._dump(error.what)
        if folder:
            error.todo += f"; `autopar doctor {folder}` compares what the ranks did last"
        if self._board is not None:
            with suppress(RuntimeError):
                self._leave(self._board, failure)
        return error

    def _leave(self, board: Board, failure: Failure) -> None:
        """Delays the end of the first rank, which may serve the store, until all have read it."""
        done = f"{self.key}/done/{failure.number}"
        board.set(f"{done}/{self.rank}", "")
        if self.rank == 0:
            there = [rank for rank in self.ranks if board.check(self._place(failure, rank))]
            self._until(
                board, [f"{done}/{rank}" for rank in there], self.pace.roll + self.pace.grace
            )

    def _run(self) -> bool:
        """Ends this rank if another has failed; returns whether to check again."""
        if self._board is None:
            return False
        try:
            failure = self._look(self._board)
            if failure is None:
                self._beat(self._board)
        except RuntimeError:
            return False  # the store is gone, as at the end of a program
        if failure is not None:
            self._see_out(failure)
        return True

    def _look(self, board: Board) -> Failure | None:
        """Returns another rank's failure that this rank has not handled."""
        if not board.check(self.key):
            return None
        value = board.get(self.key)
        failure = Failure.read(value)
        with self._lock:
            if value == self._survived or failure.rank == self.rank:
                return None
            self._failure = failure
        self._answer(board, value)
        return failure

    def _beat(self, board: Board) -> None:
        """Reports this rank's state from time to time, and writes a dump on request."""
        recorder, dumps = self._peers.recorder, self._peers.dumps
        self._looks += 1
        if self._looks % _BEAT == 1 and recorder.changed != self._beaten:
            self._beaten = recorder.changed
            record = Record.of(recorder, self.rank, self._peers.world, whole=False)
            board.set(self._seen(self.rank), record.describe())
        asked = f"{self.key}/dump/{self._dumped}"
        if dumps.asked:
            board.set(asked, "")
        if dumps.wanted.number is not None and board.check(asked):
            self._dumped += 1
            self._dump("a signal asked for it")

    def _see_out(self, failure: Failure) -> None:
        """Returns once the main thread has handled the failure; otherwise ends the process.

        The one place in the library that writes to stderr, as an error can no longer be caught.
        """
        start = time.monotonic()
        while not self._closed.wait(_BLINK_SECONDS):
            with self._lock:
                if self._failure is not failure:
                    return
            if time.monotonic() - start > (self.pace.grace if self._depth else self.pace.patience):
                error = self._roll_call(failure) or failure.error()
                error = self._dumped_with(error, failure)
                sys.stderr.write(f"rank {self.rank} stops: {error}\n")
                sys.stderr.flush()
                os._exit(1)


def _look_again(watch: ReferenceType[Watch], closed: threading.Event, interval: float) -> None:
    """Checks, in the thread, until the watch is closed or gone."""
    while not closed.wait(interval):
        there = watch()
        if there is None or not there._run():
            return
        del there


def _end(thread: threading.Thread, closed: threading.Event, ending: Ending) -> None:
    """Ends the thread of a watch, possibly from that thread itself."""
    ending.close()
    closed.set()
    if thread is not threading.current_thread():
        thread.join(_ANSWER_SECONDS)
