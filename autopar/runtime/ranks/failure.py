"""When one rank fails in a step, every rank stops, and says which rank failed and why.

A rank that waits in a collective for one that will never come cannot be interrupted from Python.
So the rank that fails leaves its error in the store of the process group before it raises, and on
every rank a thread looks there twice a second. What follows then depends on where the rank is:

- its step ends by itself (it succeeds, or the broken collective raises): RankFailedError;
- it stays inside the step: the error goes to stderr and the process ends with status 1;
- it is outside of a step, perhaps waiting for the device: likewise, after a longer wait.

An error that nothing catches between steps is left there too, by Python's hooks, and a rank that
ends without one says so. A process that dies without raising (killed, out of memory) or is stopped
leaves no word. Its peers' collectives fail by themselves with gloo, and after their time-out with
NCCL, if no launcher stops them before. Then the ranks call the roll: every one that reads of the
broken collective answers, by its thread, with what it does. Who does not answer is named as lost;
if all do, who holds up the others is named.
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
from autopar.runtime.ranks.record import Record
from autopar.runtime.ranks.reports import Failure as Failure
from autopar.runtime.ranks.reports import Roll, may_follow
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.torch_private import Store, own_store

_ANSWER_SECONDS = 10.0  # for one request to the store
_BLINK_SECONDS = 0.05
_BEAT = 4  # looks from one sign of life to the next


class Watch:
    """`with watch:` around a step stops this rank where another has failed.

    A nested `with` is part of the outer one. An error that every rank raises for itself and
    survives (a refused batch) does not stop later steps.

    Args:
        store: a connection that nobody else uses; None for a process without peers.
        rank: this process's global rank.
        world: how many ranks watch one another.
        key: where in the store; the same on all ranks, and theirs alone.
        interval: seconds between looks.
        grace: seconds to leave a step in once another rank has failed.
        patience: the same where no step is running.
        roll: seconds in which a rank that lives has answered.
        ranks: the global ranks; by default 0, 1, ...
        peers: whose record this rank answers with.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world: int,
        *,
        key: str = "autopar/failure",
        interval: float = 0.5,
        grace: float = 2.0,
        patience: float = 20.0,
        roll: float = 5.0,
        ranks: Sequence[int] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.rank, self.world, self.key = rank, world, key
        self.ranks, self.roll = tuple(range(world) if ranks is None else ranks), roll
        self.interval, self.grace, self.patience = interval, grace, patience
        self._peers = Peers(None) if peers is None else peers
        self._board = None if store is None or world == 1 else Board(store, _ANSWER_SECONDS)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._depth = 0
        self._told: int | None = None  # the id of this rank's last error
        self._looks, self._beaten, self._dumped = 0, 0.0, 0
        self._lock = threading.Lock()  # of what follows
        self._failure: Failure | None = None  # that the step has yet to raise
        self._survived = ""  # the last value under the key that this rank has dealt with
        self._survivals = 0
        self._answered = ""  # the last value that this rank has reported as read

    @classmethod
    def over(cls, ranks: Sequence[int]) -> Watch:
        """The watch of the processes with these global ranks; they all make it in one order.

        Without a process group, or where this process is not among them, it watches nothing.
        """
        if not dist.is_initialized() or dist.get_backend() == "fake":
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
            if not isinstance(error, AutoparError):  # those may be every rank's
                self._dump(f"this rank failed: {error!r}")
            return
        failure = first or Failure.of(self.rank, number, error)
        raised = self._roll_call(failure) or (None if first is None else failure.error())
        if raised is not None:
            raise self._dumped_with(raised, failure) from error

    def close(self) -> None:
        """End the thread; it also ends with the process. A later step starts another."""
        if self._thread is not None:
            self._thread = None
            self._end()

    def tell(self, error: BaseException | None) -> None:
        """Leave word that this process ends with an error between steps, or with none."""
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
            if self.rank == 0:  # it may serve the store, from which others are to read that
                self._until(board, [self._left(r) for r in self.ranks], self.grace)
        except RuntimeError:
            pass  # nobody is left to read it
        self.close()

    def start(self) -> None:
        """Begin to look, and to listen for the end of this process; a step does it, too."""
        if self._board is None or self._thread is not None:
            return
        # The thread must not keep a watch alive that nobody else refers to.
        closed, mine = threading.Event(), weakref.ref(self)
        run = functools.partial(_look_again, mine, closed, self.interval)
        self._closed, self._thread = closed, threading.Thread(target=run, daemon=True)
        self._thread.name = "autopar-watch"
        self._thread.start()
        recorder = self._peers.recorder
        ending = Ending(self.tell, lambda: recorder.thread)
        # A thread that comes back from C++ while the interpreter shuts down would crash it.
        self._end = weakref.finalize(self, _end, self._thread, closed, ending)
        self._end.atexit = False  # `tell` is called then
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
        """Leave this rank's error in the store; another rank's if that one was there first."""
        failure = Failure.of(self.rank, self._survivals, error)
        mine = failure.write()
        try:
            board.set(self._place(failure, self.rank), self._record())
            value = board.first(self.key, mine, self._survived)
            if value != mine:
                self._answer(board, value)
            elif self.rank == 0:
                self._wait_for_answers(board, value)
        except RuntimeError:
            # The process that served the store is gone. The thread may have read what it left.
            with self._lock:
                value = mine if self._failure is None else self._failure.write()
        with self._lock:
            self._survive(value)
        return None if value == mine else Failure.read(value)

    def _record(self) -> str:
        recorder = self._peers.recorder
        return Record.of(recorder, self.rank, self._peers.world, whole=False).write()

    def _answer(self, board: Board, value: str) -> None:
        """Report, once, that this rank has read `value`, and what it does."""
        with self._lock:
            new, self._answered = value != self._answered, value
        if new:
            board.set(self._place(Failure.read(value), self.rank), self._record())

    def _place(self, failure: Failure, rank: int) -> str:
        """Where a rank's answer to a failure stands."""
        return f"{self.key}/read/{failure.number}/{rank}"

    def _left(self, rank: int) -> str:
        """Where a rank says that it has ended."""
        return f"{self.key}/left/{rank}"

    def _seen(self, rank: int) -> str:
        """Where a rank says now and then what it does."""
        return f"{self.key}/seen/{rank}"

    def _wait_for_answers(self, board: Board, value: str) -> None:
        """The first rank may serve the store: what it left must be read before it goes."""
        failure = Failure.read(value)
        self._until(board, [self._place(failure, rank) for rank in self.ranks], self.grace)

    @staticmethod
    def _until(board: Board, keys: Sequence[str], seconds: float) -> set[str]:
        """Wait until all keys are there or time is up; those that are not."""
        end = time.monotonic() + seconds
        left = set(keys)
        while left:
            left -= set(board.present(sorted(left)))
            if time.monotonic() > end:
                break
            time.sleep(_BLINK_SECONDS if left else 0)
        return left

    def _roll_call(self, failure: Failure) -> RankFailedError | None:
        """Who held up the others, where a collective broke and nobody says why."""
        if not failure.broken or self._board is None:
            return None
        try:
            return self._roll(self._board, failure).error()
        except RuntimeError:
            # The store is gone with the first rank, which serves it unless a launcher does.
            return Roll(failure, {}, (0,) if self.rank else (), {}, {}).error()

    def _roll(self, board: Board, failure: Failure) -> Roll:
        end = time.monotonic() + self.roll
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
        return Roll(failure, records, sorted(absent), seen, left)

    def _dump(self, reason: str) -> str:
        """Write this rank's record; the folder, or "" if that is not possible."""
        peers = self._peers
        token = peers.dumps.token
        try:
            if self._board is not None:
                token = self._board.first(f"{self.key}/folder", token)
        except RuntimeError:
            pass  # each rank has a folder of its own then
        try:
            record = Record.of(peers.recorder, self.rank, peers.world, reason)
            return str(peers.dumps.write(record, token))
        except DumpError:
            return ""

    def _dumped_with(self, error: RankFailedError, failure: Failure) -> RankFailedError:
        """The error that also names the folder in which all ranks leave what they did last."""
        folder = self._dump(error.what)
        if folder:
            error.todo += f"; `autopar doctor {folder}` compares what the ranks did last"
        if self._board is not None:
            with suppress(RuntimeError):
                self._leave(self._board, failure)
        return error

    def _leave(self, board: Board, failure: Failure) -> None:
        """The first rank, with which the store may go, ends when those that live know all."""
        done = f"{self.key}/done/{failure.number}"
        board.set(f"{done}/{self.rank}", "")
        if self.rank == 0:
            there = [rank for rank in self.ranks if board.check(self._place(failure, rank))]
            self._until(board, [f"{done}/{rank}" for rank in there], self.roll + self.grace)

    def _run(self) -> bool:
        """See this rank out if another has failed; whether to look again."""
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
        """Another rank's failure that this rank has not dealt with."""
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
        """Say what this rank does, now and then, and dump what it did if somebody asks."""
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
        """Return once the main thread has met the failure; end the process if it does not.

        The one place of the library that writes to stderr: nobody is left to catch an error.
        """
        start = time.monotonic()
        while not self._closed.wait(_BLINK_SECONDS):
            with self._lock:
                if self._failure is not failure:
                    return
            if time.monotonic() - start > (self.grace if self._depth else self.patience):
                error = self._roll_call(failure) or failure.error()
                error = self._dumped_with(error, failure)
                sys.stderr.write(f"rank {self.rank} stops: {error}\n")
                sys.stderr.flush()
                os._exit(1)


def _look_again(watch: ReferenceType[Watch], closed: threading.Event, interval: float) -> None:
    """The thread: look until the watch is closed or gone."""
    while not closed.wait(interval):
        there = watch()
        if there is None or not there._run():
            return
        del there


def _end(thread: threading.Thread, closed: threading.Event, ending: Ending) -> None:
    """End the thread of a watch; it may be the one that found the watch gone."""
    ending.close()
    closed.set()
    if thread is not threading.current_thread():
        thread.join(_ANSWER_SECONDS)
