"""Attendance: which ranks are alive, and their joint decisions, in the process group's store.

With `on_loss="continue"` a synchronisation ends in the same way on all ranks. Either every rank has
voted that its sums have arrived; or the synchronisation is cancelled, and the ranks that answer a
roll call form the next groups. The first rank that sees the outcome writes it into the store, and
all ranks follow it.

Every rank sends a heartbeat twice a second, from a separate thread. A rank without a heartbeat for
some seconds is lost. A rank that computes for long, or waits for its data, is not.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ReferenceType

from autopar.errors import RankFailedError
from autopar.runtime.ranks.board import Board
from autopar.runtime.torch_private import own_store

_BEAT, _LOOK, _BLINK = 0.5, 0.5, 0.005  # seconds between signs, looks at them, and questions
_REQUEST = 10.0  # seconds of one request to the store
_COMMIT, _ABORT = "commit", "abort"


class Attendance:
    """The ranks of all replicas, of which some may be lost.

    Args:
        rank: this process's global rank.
        replicas: the global ranks of each replica; equal on every rank.
        silent: seconds after which a rank without a heartbeat is lost.

    Attributes:
        replicas: the remaining replicas.
    """

    def __init__(self, rank: int, replicas: Sequence[tuple[int, ...]], silent: float) -> None:
        self.rank, self.replicas, self._silent = rank, tuple(replicas), silent
        store = own_store()
        name = hashlib.sha256(repr(self.replicas).encode()).hexdigest()[:16]
        number = store.add(f"autopar/attendance/{name}/{rank}", 1)
        self._key = f"autopar/attendance/{name}/{number}"
        self._board = Board(store, _REQUEST)
        self._seen: dict[int, tuple[str, float]] = {}
        self._looked, self._votes = 0.0, 0
        self._silenced, self._closed = threading.Event(), threading.Event()
        board, place = Board(own_store(), _REQUEST), self._sign(rank)
        self._thread = threading.Thread(
            target=_beat, args=(weakref.ref(self), board, place, self._closed, self._silenced),
            name="autopar-attendance", daemon=True,
        )  # fmt: skip
        self._thread.start()

    def _sign(self, rank: int) -> str:
        return f"{self._key}/sign/{rank}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks that are left."""
        return tuple(rank for replica in self.replicas for rank in replica)

    @property
    def place(self) -> str:
        """Returns the key of the last joint decision in the store, the same on every rank."""
        return f"{self._key}/{self._votes}"

    def pause(self, paused: bool) -> None:
        """Stops or resumes heartbeats: a rank whose step failed may never return."""
        (self._silenced.set if paused else self._silenced.clear)()

    def close(self) -> None:
        """Ends the heartbeats."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_REQUEST)

    def agree(self, arrived: Callable[[], bool | None]) -> bool:
        """Returns whether all ranks have all that they wait for; the same on every rank.

        Args:
            arrived: returns True, False if it is broken, or None while it is under way.

        Raises:
            RankFailedError: the store is gone.
        """
        self._votes += 1
        place, voted = self.place, False
        outcome = f"{place}/outcome"
        while True:
            with _asking():
                have = arrived()
                if have is False:
                    self._board.first(outcome, _ABORT)
                elif have and not voted:
                    self._board.set(f"{place}/vote/{self.rank}", "")
                    voted = True
                if self._board.check(outcome):
                    return self._board.get(outcome) == _COMMIT
                if voted and self._all(f"{place}/vote"):
                    self._board.first(outcome, _COMMIT)
                elif self._lost():
                    self._board.first(outcome, _ABORT)
            time.sleep(_BLINK)

    def _all(self, place: str) -> bool:
        return all(self._board.check(f"{place}/{rank}") for rank in self.ranks)

    def roll(self) -> tuple[int, ...]:
        """Leaves out the replicas that have lost a rank; returns the ranks of these replicas.

        Raises:
            RankFailedError: the others have left out this rank's replica, or the store is gone.
        """
        place = f"{self.place}/roll"
        with _asking():
            self._board.set(f"{place}/{self.rank}", "")
            while True:
                lost = self._lost(again=True)
                there = {rank for rank in self.ranks if self._board.check(f"{place}/{rank}")}
                if there | lost >= set(self.ranks):
                    break
                time.sleep(_LOOK / 4)
            whole = [n for n, ranks in enumerate(self.replicas) if there >= set(ranks)]
            text = self._board.first(f"{place}/left", " ".join(map(str, whole)))
        left = [int(word) for word in text.split()]
        dropped = tuple(n for n in range(len(self.replicas)) if n not in left)
        own = next(n for n, ranks in enumerate(self.replicas) if self.rank in ranks)
        if own in dropped:
            raise RankFailedError(
                f"the replica of rank {self.rank} was excluded by the others",
                why=f"a rank of it sent no heartbeat for {self._silent:g} s, or was lost",
                todo="end this process; the other replicas go on",
            )
        lost_ranks = tuple(rank for n in dropped for rank in self.replicas[n])
        self.replicas = tuple(self.replicas[n] for n in left)
        return lost_ranks

    def _lost(self, again: bool = False) -> set[int]:
        """Returns the ranks without a sign of life; looks for signs now and then."""
        now = time.monotonic()
        if not again and now - self._looked < _LOOK:
            return set()
        self._looked = now
        for rank in self.ranks:
            place = self._sign(rank)
            sign = self._board.get(place) if self._board.check(place) else ""
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = (sign, now)
        return {
            rank
            for rank in self.ranks
            if rank != self.rank and now - self._seen[rank][1] > self._silent
        }


@contextmanager
def _asking() -> Iterator[None]:
    """Returns a context that raises an error with an explanation if the store is lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            "the process that serves the store of the process group is gone",
            why="replicas cannot agree on who is left without it",
            todo="start the processes by a launcher that serves the store",
        ) from error


def _beat(
    owner: ReferenceType[Attendance],
    board: Board,
    place: str,
    closed: threading.Event,
    silenced: threading.Event,
) -> None:
    """Writes signs of life until the owner is closed or gone."""
    number = 0
    while owner() is not None:
        number += 1
        try:
            if not silenced.is_set():
                board.set(place, str(number))
        except RuntimeError:
            return  # the store is gone
        if closed.wait(_BEAT):
            return
