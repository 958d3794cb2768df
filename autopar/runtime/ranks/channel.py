"""Channels: torch process groups that record every call through them.

Every collective and message of a program uses one, so that each is recorded and a closed program
reports that it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopar.errors import ProgramError
from autopar.runtime import torch_private
from autopar.runtime.ranks.recorder import Event, Recorder


class Channel:
    """A process group with a recorder, as long as it is in use.

    Args:
        name: name in records; the same on all ranks.
        ranks: global ranks of its members, in order of their group ranks.
        handle: returns torch's group; None if this process is not a member, and after closing.
        recorder: recorder of this process.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        handle: Callable[[], dist.ProcessGroup | None],
        recorder: Recorder,
    ) -> None:
        self.name, self.ranks, self.recorder = name, ranks, recorder
        self._handle = handle

    @property
    def handle(self) -> dist.ProcessGroup:
        """The process group; raises ProgramError once it is closed."""
        handle = self._handle()
        if handle is None:
            raise ProgramError(
                "the program's process groups are gone",
                why="it was closed, or dist.destroy_process_group() ended all groups",
                todo="compile the model again",
            )
        return handle

    @property
    def closed(self) -> bool:
        """Returns whether the process group is closed."""
        return self._handle() is None

    def take(self) -> dist.ProcessGroup | None:
        """Closes the channel and returns the process group, which it no longer refers to."""
        handle = self._handle()
        self._handle = lambda: None
        return handle

    def _run(self, kind: str, nbytes: int, call: Callable[..., Any], *args: Any) -> None:
        handle = self.handle
        event = self.recorder.begin(self.name, self.ranks, kind, nbytes)
        call(*args, group=handle)
        self.recorder.end(event)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduces x over the ranks, in place."""
        self._run("all_reduce", x.nbytes, dist.all_reduce, x, op)

    def all_reduce_async(self, x: Tensor) -> PendingCall:
        """Starts an all_reduce of x, in place."""
        handle = self.handle
        event = self.recorder.begin(self.name, self.ranks, "all_reduce", x.nbytes, False)
        return PendingCall(dist.all_reduce(x, group=handle, async_op=True), event)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Reduces x over the ranks, and writes this rank's part to `out`; both are flat."""
        self._run("reduce_scatter", x.nbytes, torch_private.reduce_scatter_single, out, x)

    def all_gather(self, out: Tensor, x: Tensor, ahead: bool = False) -> PendingCall | None:
        """Writes every rank's x to `out`, both flat; with `ahead` the result must be awaited."""
        handle = self.handle
        event = self.recorder.begin(self.name, self.ranks, "all_gather", x.nbytes, not ahead)
        work = torch_private.all_gather_single(out, x, group=handle, async_op=ahead)
        if work is not None:
            return PendingCall(work, event)
        self.recorder.end(event)
        return None

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: Sequence[int] | None = None,
        sends: Sequence[int] | None = None,
        ahead: bool = False,
    ) -> PendingCall | None:
        """Sends one block of x to every rank: equal ones, or of `takes` and `sends` elements.

        With `ahead` the result must be awaited.
        """
        # Uneven blocks differ between ranks, but the bytes of one event must not.
        nbytes, handle = x.nbytes if takes is None else 0, self.handle
        event = self.recorder.begin(self.name, self.ranks, "all_to_all", nbytes, not ahead)
        work = dist.all_to_all_single(out, x, takes, sends, group=handle, async_op=ahead)
        if work is not None:
            return PendingCall(work, event)
        self.recorder.end(event)
        return None

    def all_to_all_beside(
        self, out: Tensor, x: Tensor, takes: Sequence[int], sends: Sequence[int]
    ) -> PendingCall:
        """Starts `all_to_all` of uneven blocks; the result must be awaited."""
        handle = self.handle
        event = self.recorder.begin(self.name, self.ranks, "all_to_all", 0, False)
        work = dist.all_to_all_single(out, x, list(takes), list(sends), group=handle, async_op=True)
        return PendingCall(work, event)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Copies the x of a global rank to all others."""
        self._run("broadcast", x.nbytes, dist.broadcast, x, source)

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._run("barrier", 0, dist.barrier)

    def broadcast_objects(self, values: list[Any], source: int) -> None:
        """Replaces the values of all ranks by those of a global rank."""
        self._run("broadcast of objects", 0, dist.broadcast_object_list, values, source)

    def all_gather_object(self, value: object) -> list[Any]:
        """Returns the values of all ranks."""
        values: list[Any] = [None] * len(self.ranks)
        self._run("all_gather of objects", 0, dist.all_gather_object, values, value)
        return values

    def gather_object(self, value: object, target: int) -> list[Any]:
        """Returns the values of all ranks on a global rank, [] on the others."""
        values: list[Any] | None = [None] * len(self.ranks) if dist.get_rank() == target else None
        self._run("gather of objects", 0, dist.gather_object, value, values, target)
        return values or []

    def send(self, x: Tensor, receiver: int, tag: int) -> PendingCall:
        """Starts sending x to a global rank."""
        return self._message("send", dist.isend, x, dist.get_rank(), receiver, tag)

    def receive(self, x: Tensor, sender: int, tag: int) -> PendingCall:
        """Starts receiving x from a global rank."""
        return self._message("receive", dist.irecv, x, sender, dist.get_rank(), tag)

    def _message(
        self, kind: str, call: Callable[..., Any], x: Tensor, sender: int, receiver: int, tag: int
    ) -> PendingCall:
        other = receiver if kind == "send" else sender
        handle = self.handle
        event = self.recorder.begin(
            f"{sender}>{receiver}", (sender, receiver), kind, x.nbytes, False
        )
        return PendingCall(call(x, other, group=handle, tag=tag), event)


class PendingCall:
    """An asynchronous call that has yet to be awaited."""

    def __init__(self, work: Any, event: Event) -> None:
        self._work, self._event = work, event

    def is_completed(self) -> bool:
        """Returns whether `wait` returns at once."""
        done = bool(self._work.is_completed())
        if done:
            Recorder.end(self._event)
        return done

    def wait(self) -> None:
        """Waits for its end."""
        self._event.wait()
        self._work.wait()
        Recorder.end(self._event)


def free(buffer: Tensor) -> None:
    """Frees a buffer that a finished call has read or written, and that nobody reads again.

    Threads of gloo refer to the tensors of a call for an unknown time after its end. Without this,
    the memory of a step would depend on their pace.
    """
    if buffer.is_cpu:
        buffer.untyped_storage().resize_(0)
