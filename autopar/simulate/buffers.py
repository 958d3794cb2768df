"""Buffers and who holds them: the bookkeeping behind the memory of a simulated step.

A buffer is a tensor's storage. It is freed when nobody holds it any more: no variable, no operator
that keeps it for its backward, no gradient that waits to be added to. Every coming and going is
noted on the task that is being recorded.
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
    """A storage: what it is for, its bytes and how many hold it.

    Kinds are "parameter", "gradient", "optimizer", "batch", "activation" (kept for the backward),
    "communication" (staging of a collective) and "temporary". `kept` is what is kept for the
    backward in its place.
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
        buffer: the storage, which views of it share.
        grad: whether a gradient flows into it.
        gradient: what has arrived of it.
        readers: how many uses of it have a gradient to give; parameters only.
        ready, gradient_ready: the task that makes it while others run on, -1 for none.
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
    """Tasks in program order, with the buffers that come and go."""

    def __init__(self) -> None:
        self.drafts: list[_Draft] = []
        self.current = -1  # the task on which buffers come and go
        self.phase: Phase = "forward"
        self.barrier = -1  # the last task that everything after it waits for
        self.pending: set[int] = set()  # tasks that nobody has waited for
        self.launched = -1  # the last gradient that is synchronised beside the backward

    def compute(
        self, name: str, node: str, what: tuple[Work, ...], needs: Iterable[int] = ()
    ) -> None:
        """Kernels on the device itself; `needs` are unfinished tasks whose results they read."""
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
        """A collective for which the program waits, or a share of it."""
        self._add(name, node, ",".join(call.axes), call, needs, cause, share)
        self.barrier = len(self.drafts) - 1

    def side_by_side(
        self,
        name: str,
        node: str,
        call: Collective,
        cause: Cause,
        what: tuple[Work, ...],
        share: float,
    ) -> None:
        """Shares of a collective and of kernels at a time, and then what is left of the kernels."""
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
    ) -> None:
        """Kernels in turns of equal length, each but the last one beside a part of the calls.

        A turn begins when the one before it has computed and sent.
        """
        turns = len(calls) + 1
        needs = tuple(needs)
        for call in (*calls, None):
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
        """A collective for which only the readers of its result wait; returns its position."""
        self._add(name, node, ",".join(call.axes), call, needs, cause)
        self.pending.add(len(self.drafts) - 1)
        return len(self.drafts) - 1

    def copy(
        self, name: str, nbytes: float, back: bool, waits: bool, needs: Iterable[int] = ()
    ) -> int:
        """A copy to host memory or `back`; its position, -1 if the program `waits` for it."""
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
        """A buffer that others hold already is there, from the start of the current task on."""
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
        """A new buffer, from the start of the current task on; nobody holds it yet."""
        buffer = Buffer(kind, name, nbytes)
        self.drafts[self.current].allocates.append(buffer)
        return buffer

    def scratch(self, kind: str, name: str, nbytes: float) -> None:
        """A buffer that lives as long as the current task."""
        if nbytes:
            self.drafts[self.current].frees.append(self.allocate(kind, name, nbytes))

    def hold(self, buffer: Buffer) -> Buffer:
        """One holder more."""
        buffer.holders += 1
        return buffer

    def drop(self, buffer: Buffer, task: int = -1) -> None:
        """One holder less; the last one frees it at the end of the current task, or of another."""
        buffer.holders -= 1
        if not buffer.holders:
            self.drafts[self.current if task < 0 else task].frees.append(buffer)

    @contextmanager
    def aside(self, launched: bool = True) -> Iterator[None]:
        """What is launched inside has its own buffers; behind it the task before is current."""
        before = self.current
        yield
        if launched:
            self.current = before

    def tasks(self) -> tuple[Task, ...]:
        """Everything recorded, buffers by names of their own."""
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
