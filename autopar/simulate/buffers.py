"""Buffers and their holders: the bookkeeping behind the memory of a simulated step.

A buffer is a tensor's storage. It is freed when nothing holds it any more: no variable, no operator
that saved it for its backward, no gradient that waits for another. Allocations and frees are
recorded on the current task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from autopar.cost.host_copies import HostCopy
from autopar.cost.model import Work
from autopar.ir.collective import Collective
from autopar.simulate.task import COMPUTE, HOST, Cause, Phase, Task


@dataclass(eq=False, slots=True)
class Buffer:
    """A tensor's storage.

    Attributes:
        kind: "parameter", "gradient", "optimizer", "batch", "activation" (saved for the backward),
            "communication" (staging of a collective) or "temporary".
        name: name of its value.
        nbytes: its size.
        holders: number of holders.
        kept: the buffer that is saved for the backward in place of this one.
    """

    kind: str
    name: str
    nbytes: float
    holders: int = 0
    kept: Buffer | None = None


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the program: its storage and, in the backward, its gradient.

    Attributes:
        buffer: the storage, which its views share.
        grad: whether a gradient flows into it.
        gradient: the sum of the gradients so far.
        readers: number of uses that have yet to give a gradient; parameters only.
        ready, gradient_ready: the task that produces it asynchronously, -1 for none.
    """

    buffer: Buffer
    grad: bool
    gradient: Buffer | None = None
    readers: int = 0
    ready: int = -1
    gradient_ready: int = -1


@dataclass(slots=True)
class _Draft:
    name: str
    node: str
    phase: Phase
    stream: str
    what: tuple[Work, ...] | Collective | HostCopy
    after: tuple[int, ...]
    cause: Cause
    share: float
    allocates: list[Buffer] = field(default_factory=list)
    frees: list[Buffer] = field(default_factory=list)


class Recorder:
    """Records tasks in program order, with the buffers that they allocate and free."""

    def __init__(self) -> None:
        self.drafts: list[_Draft] = []
        self.current = -1  # the task that allocates and frees
        self.phase: Phase = "forward"
        self.barrier = -1  # the last task that all later ones wait for
        self.pending: set[int] = set()  # tasks that no task has waited for yet
        self.launched = -1  # the last asynchronous synchronisation of a gradient

    def compute(
        self, name: str, node: str, what: tuple[Work, ...], needs: Iterable[int] = ()
    ) -> None:
        """Adds kernels on the device; `needs` are unfinished tasks whose results they read."""
        self._add(name, node, COMPUTE, what, needs, "")
        self.barrier = len(self.drafts) - 1

    def collective(
        self,
        name: str,
        node: str,
        call: Collective,
        cause: Cause,
        needs: Iterable[int] = (),
        share: float = 1.0,
    ) -> None:
        """Adds a collective, or a share of it, that the program waits for."""
        self._add(name, node, ",".join(call.axes), call, needs, cause, share)
        self.barrier = len(self.drafts) - 1

    def gather(self, name: str, calls: Sequence[Collective]) -> None:
        """Adds the collectives that gather values from another stage."""
        for call in calls:
            self.collective(f"{call.title} of {name}", "", call, "exchange")

    def side_by_side(
        self,
        name: str,
        node: str,
        call: Collective,
        cause: Cause,
        what: tuple[Work, ...],
        share: float,
    ) -> None:
        """Adds shares of a collective and of kernels that overlap, then the rest of the kernels."""
        self._add(name, node, ",".join(call.axes), call, (), cause, share)
        sent = len(self.drafts) - 1
        self._add(f"products beside {name}", node, COMPUTE, what, (), "", share)
        self.barrier = len(self.drafts) - 1
        self._add(f"products after {name}", node, COMPUTE, what, (sent,), "", 1 - share)
        self.barrier = len(self.drafts) - 1

    def in_turns(
        self,
        name: str,
        node: str,
        calls: Sequence[Collective],
        what: tuple[Work, ...],
        needs: Iterable[int],
        alone: int = 0,
    ) -> None:
        """Adds kernels in turns of equal length; in all but the last, a part of the calls overlaps.

        A turn begins when the previous turn has computed and sent. The first `alone` calls are made
        before the first turn.
        """
        overlapped = calls[alone:]
        turns = len(overlapped) + 1
        needs = tuple(needs)
        for first in calls[:alone]:
            title = f"{first.kind} in {name}"
            self._add(title, node, ",".join(first.axes), first, needs, "exchange")
            needs = (len(self.drafts) - 1,)
        for call in (*overlapped, None):
            after = len(self.drafts)
            if call is not None:
                title = f"{call.kind} in {name}"
                self._add(title, node, ",".join(call.axes), call, needs, "exchange")
            self._add(name, node, COMPUTE, what, needs, "", 1 / turns)
            needs = tuple(range(after, len(self.drafts)))
        self.barrier = len(self.drafts) - 1

    def launch(
        self,
        name: str,
        node: str,
        call: Collective,
        cause: Cause,
        needs: Iterable[int] = (),
    ) -> int:
        """Adds an asynchronous collective, for which only readers of its result wait.

        Returns:
            Its position.
        """
        self._add(name, node, ",".join(call.axes), call, needs, cause)
        self.pending.add(len(self.drafts) - 1)
        return len(self.drafts) - 1

    def copy(
        self, name: str, nbytes: float, back: bool, waits: bool, needs: Iterable[int] = ()
    ) -> int:
        """Adds a copy to host memory, or `back` from it.

        Returns:
            Its position, or -1 if the program `waits` for it.
        """
        title = f"{name} from the host" if back else f"{name} to the host"
        stream = HOST[back]
        self._add(title, "", stream, HostCopy(nbytes, back), needs, "")
        place = len(self.drafts) - 1
        if waits:
            self.barrier = place
            return -1
        self.pending.add(place)
        return place

    def arrive(self, buffer: Buffer) -> None:
        """Allocates a buffer that already has holders, at the start of the current task."""
        self.drafts[self.current].allocates.append(buffer)

    def _add(
        self,
        name: str,
        node: str,
        stream: str,
        what: tuple[Work, ...] | Collective | HostCopy,
        needs: Iterable[int],
        cause: Cause,
        share: float = 1.0,
    ) -> None:
        after = tuple(sorted({task for task in (self.barrier, *needs) if task >= 0}))
        self.pending.difference_update(after)
        self.current = len(self.drafts)
        self.drafts.append(_Draft(name, node, self.phase, stream, what, after, cause, share))

    def allocate(self, kind: str, name: str, nbytes: float) -> Buffer:
        """Allocates a buffer at the start of the current task; it has no holder yet."""
        buffer = Buffer(kind, name, nbytes)
        self.drafts[self.current].allocates.append(buffer)
        return buffer

    def scratch(self, kind: str, name: str, nbytes: float) -> None:
        """Allocates a buffer for the duration of the current task."""
        if nbytes:
            self.drafts[self.current].frees.append(self.allocate(kind, name, nbytes))

    def hold(self, buffer: Buffer) -> Buffer:
        """Adds a holder to a buffer."""
        buffer.holders += 1
        return buffer

    def drop(self, buffer: Buffer, task: int = -1) -> None:
        """Removes a holder; after the last one, the current task, or another, frees the buffer."""
        buffer.holders -= 1
        if not buffer.holders:
            self.drafts[self.current if task < 0 else task].frees.append(buffer)

    @contextmanager
    def aside(self, launched: bool = True) -> Iterator[None]:
        """Returns a context for asynchronous tasks, which restores the current task at its end."""
        before = self.current
        yield
        if launched:
            self.current = before

    def tasks(self) -> tuple[Task, ...]:
        """Returns all recorded tasks; buffers get unique names."""
        names: dict[int, str] = {}
        taken: dict[str, int] = {}
        for draft in self.drafts:
            for buffer in draft.allocates:
                label = f"{buffer.kind} {buffer.name}"
                count = taken[label] = taken.get(label, 0) + 1
                names[id(buffer)] = label if count == 1 else f"{label} ({count})"
        return tuple(
            Task(
                draft.name,
                draft.node,
                draft.phase,
                draft.stream,
                draft.what,
                draft.after,
                tuple((names[id(b)], float(b.nbytes)) for b in draft.allocates),
                tuple(names[id(b)] for b in draft.frees),
                draft.cause,
                draft.share,
            )
            for draft in self.drafts
        )
