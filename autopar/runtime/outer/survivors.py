"""Survivors: continues without replicas that have lost a rank; see `attendance`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from autopar.errors import OptionError, ProgramError
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.runtime.outer.membership import Attendance
from autopar.runtime.ranks.channel import Channel, PendingCall
from autopar.runtime.ranks.shared import Lease, Peers, backend

SILENT = 10.0  # seconds without a sign of life after which a rank is lost
_BLINK = 0.01  # seconds


class Survivors:
    """The replicas that are left, and the group of this rank's peers in them.

    Args:
        attendance: who is alive.
        peers: all processes.
        lease: lease of the present group of this rank's peers.
        place: position of this rank in its replica.
    """

    def __init__(self, attendance: Attendance, peers: Peers, lease: Lease, place: int) -> None:
        self._attendance, self._peers, self._place = attendance, peers, place
        self._lease: Lease | None = lease
        self.anyone = False  # whether a replica is lost

    @classmethod
    def of(cls, outer: Outer, mesh: Mesh, lease: Lease) -> Survivors | None:
        """Returns it if replicas are to continue; OptionError if this backend cannot."""
        if not outer.goes_on or not dist.is_initialized() or backend() == "fake":
            return None
        if backend() != "gloo":
            raise OptionError(
                f'on_loss="continue" does not work with {backend()}',
                why="its collectives do not end when a rank is lost",
                todo="use gloo, or resume from a checkpoint on fewer devices",
            )
        peers, replicas = Peers.here(), outer.replicas(mesh)
        own = next(ranks for ranks in replicas if peers.rank in ranks)
        return cls(Attendance(peers.rank, replicas, SILENT), peers, lease, own.index(peers.rank))

    def agree(self, works: Sequence[PendingCall]) -> bool:
        """Returns whether all calls of all ranks have succeeded; the same on every rank."""
        return self._attendance.agree(lambda: _ended(works))

    def regroup(self, works: Sequence[PendingCall]) -> Channel | None:
        """Leaves out lost replicas, and returns the new channel of this rank's peers.

        Args:
            works: calls of the old one, which is closed.

        Returns:
            None if only this rank's replica is left.

        Raises:
            RankFailedError: the others have left out this rank's replica.
        """
        lost = self._attendance.roll()
        replicas = self._attendance.replicas
        if lost:
            self.anyone = True
            names = ", ".join(map(str, lost))
            warnings.warn(
                f"replicas with the ranks {names} are lost; averages go on over {len(replicas)}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._end(works)
        if len(replicas) == 1:
            return None
        ranks = tuple(replica[self._place] for replica in replicas)
        name = f"{self._attendance.place}/{self._place}"
        self._lease = self._peers.left("outer", ranks, name)
        return self._lease.channels[0]

    def _end(self, works: Sequence[PendingCall]) -> None:
        """Closes the old group once its calls have ended.

        A rank whose neighbour is lost closes first, which ends the calls of its other neighbour. If
        a lost process still exists, and has stopped, calls end by the time-out of the group.
        """
        until = time.monotonic() + SILENT
        while not all(work.is_completed() for work in works) and time.monotonic() < until:
            time.sleep(_BLINK)
        if self._lease is not None and all(work.is_completed() for work in works):
            self._lease.close()
        self._lease = None

    def refuse(self, what: str) -> None:
        """Raises ProgramError if a replica is lost, for an operation that needs all ranks."""
        if self.anyone:
            raise ProgramError(
                f"{what} needs all ranks, and a replica is lost",
                why="ranks compare and exchange through groups of all of them",
                todo="use state_dict(), or a program that was compiled before the loss",
            )

    def pause(self, paused: bool) -> None:
        """Stops or resumes this rank's heartbeats."""
        self._attendance.pause(paused)

    def close(self) -> None:
        """Ends the heartbeats, and closes a new group."""
        self._attendance.close()
        if self.anyone and self._lease is not None:
            self._lease.close()


def _ended(works: Sequence[PendingCall]) -> bool | None:
    """Returns whether all calls have succeeded, False if one failed, None if some still run."""
    done = [work for work in works if work.is_completed()]
    try:
        for work in done:
            work.wait()
    except RuntimeError:
        return False
    return True if len(done) == len(works) else None
