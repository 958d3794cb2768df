"""When one rank fails in a step, every rank stops, and says which rank failed and why.

A rank that waits in a collective for one that will never come cannot be interrupted from Python.
So the rank that fails leaves its error in the store of the process group before it raises, and on
every rank a thread looks there twice a second. What follows then depends on where the rank is:

- its step ends by itself (it succeeds, or the broken collective raises): RankFailedError;
- it stays inside the step: the error goes to stderr and the process ends with status 1;
- it is outside of a step, perhaps waiting for the device: likewise, after a longer wait.

A process that dies without raising (killed, out of memory) leaves no word. Its peers' collectives
fail by themselves with gloo, and after their time-out with NCCL, if no launcher stops them before.
Then the ranks call the roll: every one that reads of the broken collective answers, by its thread,
and who does not answer is named as lost.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from autopar.codegen.torch_private import Store, own_store
from autopar.errors import RankFailedError

_ANSWER_SECONDS = 10.0  # for one request to the store
_BLINK_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """A rank's error, in words.

    Attributes:
        rank: the global rank that failed first.
        number: how many failures the program has lived through before.
        summary: the exception in a line.
        trace: its traceback, causes included.
        broken: whether it may be a collective's that another rank broke.
    """

    rank: int
    number: int
    summary: str
    trace: str
    broken: bool = False

    @classmethod
    def of(cls, rank: int, number: int, error: BaseException) -> Failure:
        """The failure of `rank` with `error`."""
        summary = traceback.format_exception_only(error)[-1].partition("\n")[0]
        trace = "".join(traceback.format_exception(error))
        return cls(rank, number, summary, trace, _may_follow(error))

    def error(self, lost: Sequence[int] = ()) -> RankFailedError:
        """What the other ranks raise; `lost` are those that do not answer."""
        if lost:
            names = f"rank {lost[0]}" if len(lost) == 1 else "ranks " + ", ".join(map(str, lost))
            return RankFailedError(
                f"{names} {'was' if len(lost) == 1 else 'were'} lost",
                where=names,
                why="no error was left behind: the process was killed, ran out of memory or hangs;"
                f" rank {self.rank} noticed: {self.summary}",
                todo="look into that machine's system log, and start again from a checkpoint",
            )
        return RankFailedError(
            f"rank {self.rank} failed: {self.summary}",
            where=f"rank {self.rank}",
            why=f"its own error was\n{self.trace.rstrip()}",
            todo=f"mend what rank {self.rank} reports; the other ranks stopped because of it",
        )


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
    ) -> None:
        self.rank, self.world, self.key = rank, world, key
        self.ranks, self.roll = tuple(range(world) if ranks is None else ranks), roll
        self.interval, self.grace, self.patience = interval, grace, patience
        self._store = store if world > 1 else None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._depth = 0
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
        return cls(store, rank, len(ranks), key=f"autopar/failure/{name}/{number}", ranks=ranks)

    def __enter__(self) -> Watch:
        if self._store is not None and self._depth == 0:
            self._raise_what_is_known()
            if self._thread is None:
                self._start()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._store is None or self._depth:
            return
        if error is None:
            self._raise_what_is_known()
            return
        number = self._survivals
        first = self._publish(self._store, error)
        if not _may_follow(error):
            return
        failure = first or Failure.of(self.rank, number, error)
        lost = self._lost(failure)
        if first is not None or lost:
            raise failure.error(lost) from error

    def close(self) -> None:
        """End the thread; it also ends with the process. A later step starts another."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join(_ANSWER_SECONDS)
            self._thread = None
            atexit.unregister(self.close)

    def _start(self) -> None:
        self._closed.clear()
        self._thread = threading.Thread(target=self._run, name="autopar-watch", daemon=True)
        self._thread.start()
        # A thread that comes back from C++ while the interpreter shuts down would crash it.
        atexit.register(self.close)

    def _raise_what_is_known(self) -> None:
        with self._lock:
            failure = self._failure
            if failure is not None:
                self._survive(_write(failure))
        if failure is not None:
            raise failure.error()

    def _survive(self, value: str) -> None:
        self._survived, self._failure = value, None
        self._survivals += 1

    def _publish(self, store: Store, error: BaseException) -> Failure | None:
        """Leave this rank's error in the store; another rank's if that one was there first."""
        mine = _write(Failure.of(self.rank, self._survivals, error))
        try:
            value = store.compare_set(self.key, self._survived, mine).decode()
            if value != mine:
                self._answer(store, value)
            elif self.rank == 0:
                self._wait_for_answers(store, value)
        except RuntimeError:
            # The process that served the store is gone. The thread may have read what it left.
            with self._lock:
                value = mine if self._failure is None else _write(self._failure)
        with self._lock:
            self._survive(value)
        return None if value == mine else _read(value)

    def _answer(self, store: Store, value: str) -> None:
        """Report, once, that this rank has read `value`."""
        with self._lock:
            new, self._answered = value != self._answered, value
        if new:
            store.set(self._place(_read(value), self.rank), "")

    def _place(self, failure: Failure, rank: int) -> str:
        """Where a rank's answer to a failure stands."""
        return f"{self.key}/read/{failure.number}/{rank}"

    def _wait_for_answers(self, store: Store, value: str) -> None:
        """The first rank may serve the store: what it left must be read before it goes."""
        self._silent(store, _read(value), self.grace)

    def _lost(self, failure: Failure) -> tuple[int, ...]:
        """The ranks that do not answer, where a collective broke and nobody says why."""
        if not failure.broken or self._store is None:
            return ()
        return self._silent(self._store, failure, self.roll)

    def _silent(self, store: Store, failure: Failure, seconds: float) -> tuple[int, ...]:
        """The ranks that have not answered to a failure, as soon as there are none or time is up.

        Those that ended after they had answered count as answering, and so does who left it. Where
        the store is gone it is the first rank, which serves it unless a launcher does.
        """
        left = [rank for rank in self.ranks if rank not in (failure.rank, self.rank)]
        end = time.monotonic() + seconds
        try:
            while left and time.monotonic() < end:
                left = [rank for rank in left if not store.check([self._place(failure, rank)])]
                time.sleep(_BLINK_SECONDS if left else 0)
        except RuntimeError:
            return (0,) if 0 in left else ()
        return tuple(left)

    def _run(self) -> None:
        """The thread: look until another rank has failed, then see this rank out."""
        store = self._store
        while store is not None and not self._closed.wait(self.interval):
            try:
                failure = self._look(store)
            except RuntimeError:
                return  # the store is gone, as at the end of a program
            if failure is not None:
                self._see_out(failure)

    def _look(self, store: Store) -> Failure | None:
        """Another rank's failure that this rank has not dealt with."""
        if not store.check([self.key]):
            return None
        value = store.get(self.key).decode()
        failure = _read(value)
        with self._lock:
            if value == self._survived or failure.rank == self.rank:
                return None
            self._failure = failure
        self._answer(store, value)
        return failure

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
                error = failure.error(self._lost(failure))
                sys.stderr.write(f"rank {self.rank} stops: {error}\n")
                sys.stderr.flush()
                os._exit(1)


def _write(failure: Failure) -> str:
    return json.dumps(asdict(failure))


def _read(value: str) -> Failure:
    return Failure(**json.loads(value))


def _may_follow(error: BaseException) -> bool:
    """Whether an error may be a collective's, broken by another rank, and not this rank's own."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
