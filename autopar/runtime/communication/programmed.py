"""A channel that runs collectives as programs: rounds of batched point-to-point messages.

`cost/collectives/` generates the rounds; this module runs those of one rank. All messages of a
round are posted in one batch. A received chunk is awaited only before it is forwarded or used, so
that pieces and levels overlap as far as the backend permits. Sums use the tensor's dtype and an
order that the program fixes, independently of the order of arrival. A sum is computed on one rank
and copied to the others, so all ranks get the same bits.

Under gloo, data is sent once both ends have posted a message. Receivers therefore post their
messages one round ahead, unless an earlier round uses the memory. NCCL gets whole rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.collectives import written
from autopar.cost.programs.collective_program import CollectiveProgram, Script
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm, ChosenAlgorithms
from autopar.ir.tensor import part_of
from autopar.runtime.communication.group import Group
from autopar.runtime.ranks.channel import Channel, PendingCall

Span = tuple[int, int, int]  # buffer, first element, number of elements
_SMALL = 1 << 14  # elements that are sooner copied than received late


class _Message(NamedTuple):
    """One end of a message on this rank.

    Attributes:
        peer: the group rank at the other end.
        chunks: the chunks that it carries.
        spans: their memory, with neighbours merged.
        does: "send", "add" or "keep".
        tag: distinguishes the messages between two ranks.
        direct: whether it is received straight into its chunks.
        early: whether it may be posted a round ahead.
    """

    peer: int
    chunks: tuple[int, ...]
    spans: tuple[Span, ...]
    does: str
    tag: int
    direct: bool = False
    early: bool = False


class _Work(NamedTuple):
    """The rounds of a rank, and the number of elements that it forwards for other ranks."""

    rounds: tuple[tuple[_Message, ...], ...]
    passing: int


# Returns the algorithm of a collective by its bytes per device, "" for the library's.
Pick = Callable[[str, int], str]


class ProgrammedChannel(Channel):
    """Runs collectives by their algorithms, and by the library if they have none.

    The library also runs, or refuses, calls on strided or boolean tensors and on sizes that do not
    match. All ranks decide equally, because they make calls with equal tensors.

    Args:
        channel: carries the messages and all other calls.
        pick: returns the algorithm of a call.
        sizes: sizes of the axes of its ranks, outermost first.
    """

    def __init__(self, channel: Channel, pick: Pick, sizes: Sequence[int]) -> None:
        super().__init__(
            channel.name,
            channel.ranks,
            lambda: None if channel.closed else channel.handle,
            channel.recorder,
        )
        self._pick, self._sizes = pick, sizes
        self._me = channel.ranks.index(dist.get_rank())

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Sums x over the ranks in place; the library runs other reductions."""
        by = self._pick("all_reduce", x.nbytes)
        if not by or op != dist.ReduceOp.SUM or not _plain(x):
            super().all_reduce(x, op)
            return
        self._play("all_reduce", by, x.numel(), x.nbytes, [x.view(-1)])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Sums x over the ranks and writes this rank's part to `out`; both are flat."""
        by = self._pick("reduce_scatter", x.nbytes)
        if not by or not _plain(x) or x.numel() != len(self.ranks) * out.numel():
            super().reduce_scatter(out, x)
            return
        whole = x.clone()
        self._play("reduce_scatter", by, out.numel(), x.nbytes, [whole])
        out.copy_(whole.narrow(0, self._me * out.numel(), out.numel()))

    def all_gather(self, out: Tensor, x: Tensor, ahead: bool = False) -> PendingCall | None:
        """Gathers every rank's x in `out`, both flat; a program completes even with `ahead`."""
        by = self._pick("all_gather", x.nbytes)
        if not by or not _plain(out) or out.numel() != len(self.ranks) * x.numel():
            return super().all_gather(out, x, ahead)
        out.narrow(0, self._me * x.numel(), x.numel()).copy_(x)
        self._play("all_gather", by, x.numel(), x.nbytes, [out])
        return None

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: Sequence[int] | None = None,
        sends: Sequence[int] | None = None,
        ahead: bool = False,
    ) -> PendingCall | None:
        """Sends one block of x to every rank; a program completes even with `ahead`.

        The library runs uneven exchanges, which can be sent `ahead`.
        """
        by = "" if takes is not None or sends is not None else self._pick("all_to_all", x.nbytes)
        fits = _plain(x) and _plain(out) and x.numel() == out.numel()
        if not by or not fits or x.numel() % len(self.ranks):
            return super().all_to_all(out, x, takes, sends, ahead)
        flat, into = x.view(-1), out.view(-1)
        each = flat.numel() // len(self.ranks)
        own = slice(self._me * each, (self._me + 1) * each)
        into[own] = flat[own]
        self._play("all_to_all", by, each, x.nbytes, [flat, into])
        return None

    def broadcast(self, x: Tensor, source: int) -> None:
        """Copies x from a global rank to all others; only from the first rank by a program."""
        by = self._pick("broadcast", x.nbytes)
        if not by or source != self.ranks[0] or not _plain(x):
            super().broadcast(x, source)
            return
        self._play("broadcast", by, x.numel(), x.nbytes, [x.view(-1)])

    def _play(self, kind: str, by: str, each: int, nbytes: int, buffers: list[Tensor]) -> None:
        """Runs this rank's rounds on its buffers; blocks have `each` elements."""
        algorithm = Algorithm.parse(by)
        work = _work(kind, algorithm, algorithm.over(self._sizes), self._me, each)
        if work.passing:
            buffers.append(buffers[0].new_empty(work.passing))
        event = self.recorder.begin(self.name, self.ranks, f"{kind} by {by}", nbytes)
        _Run(self.handle, self.ranks, buffers).execute(work)
        self.recorder.end(event)


def _plain(x: Tensor) -> bool:
    """Returns whether chunks of a tensor are contiguous in memory and can be added."""
    return x.is_contiguous() and x.dtype != torch.bool


def programmed(group: Group, by: str, chosen: ChosenAlgorithms) -> Group:
    """Returns a group that runs collectives by their algorithms.

    Args:
        group: a group that uses the library's collectives.
        by: the algorithm of all of them, LIBRARY for none; "" for those that are `chosen`.
        chosen: the algorithms by kind, axes and size.

    Raises:
        CollectiveError: the algorithm cannot be parsed, or needs another number of ranks.
    """
    sizes = [group.sizes[place] for place in group.order]
    if by and by != LIBRARY:
        Algorithm.parse(by).over(sizes)
    if group.channel is None or by == LIBRARY or not (by or chosen):
        return group

    def pick(kind: str, nbytes: int) -> str:
        return by or chosen.by(kind, group.axes, nbytes)

    return replace(group, channel=ProgrammedChannel(group.channel, pick, sizes))


class _Run:
    """The messages in flight on this rank."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], buffers: Sequence[Tensor]
    ) -> None:
        self.group, self.ranks, self.buffers = group, ranks, buffers
        # For each chunk, the calls that must complete before it is sent, and before it is written.
        self.arriving: dict[int, list[Callable[[], None]]] = {}
        self.leaving: dict[int, list[Callable[[], None]]] = {}

    def execute(self, work: _Work) -> None:
        ahead, posted = self.buffers[0].is_cpu, False
        for messages, following in zip_longest(work.rounds, work.rounds[1:], fillvalue=()):
            now = [m for m in messages if not (posted and m.early)]
            early = [m for m in following if ahead and m.early]
            self._post(now, early)
            posted = ahead
        for waiting in (*self.arriving.values(), *self.leaving.values()):
            for finish in waiting:
                finish()

    def _post(self, messages: Sequence[_Message], early: Sequence[_Message]) -> None:
        """Posts messages of a round, and early ones of the next round."""
        if not (messages or early):
            return
        posted, calls = [], []
        # Receives come first: gloo sends no data before the receiver has said over the same
        # connection that it is ready, and these words would wait behind data of the other way.
        ordered = [(each.does == "send", False, each) for each in messages]
        ordered += [(False, True, each) for each in early]
        for _, is_early, message in sorted(ordered, key=lambda each: each[0]):
            for chunk in () if is_early or message.does == "add" else message.chunks:
                self._settle(self.arriving, chunk)
                if message.does == "keep":
                    self._settle(self.leaving, chunk)
            views = [self.buffers[b].narrow(0, first, n) for b, first, n in message.spans]
            buffer = self._buffer(message, views)
            call = dist.isend if message.does == "send" else dist.irecv
            peer = self.ranks[message.peer]
            calls.append(dist.P2POp(call, buffer, peer, self.group, message.tag))
            posted.append((message, views, buffer))
        works = dist.batch_isend_irecv(calls)
        # A backend that sends a batch as one call returns a single work object.
        works = works if len(works) == len(posted) else works * len(posted)
        for (message, views, buffer), work in zip(posted, works, strict=True):
            waiting = self.leaving if message.does == "send" else self.arriving
            # Earlier data for any chunk of a message must be written before the message.
            written = () if message.does == "send" else message.chunks
            earlier = [each for chunk in written for each in waiting.get(chunk, ())]
            finish = _once(partial(self._end, work, message, views, buffer, earlier))
            for chunk in message.chunks:
                waiting.setdefault(chunk, []).append(finish)

    @staticmethod
    def _buffer(message: _Message, views: list[Tensor]) -> Tensor:
        """Returns the buffer of a message; contiguous chunks are not copied."""
        if message.does == "send":
            return views[0] if len(views) == 1 else torch.cat(views)
        if message.direct:
            return views[0]
        return views[0].new_empty(sum(view.numel() for view in views))

    def _end(
        self,
        work: Any,
        message: _Message,
        views: list[Tensor],
        buffer: Tensor,
        earlier: Sequence[Callable[[], None]],
    ) -> None:
        for finish in earlier:
            finish()
        work.wait()
        if message.does == "send" or buffer is views[0]:
            return
        for chunk in message.chunks:
            self._settle(self.leaving, chunk)
        parts = buffer.split([view.numel() for view in views])
        for view, part in zip(views, parts, strict=True):
            if message.does == "add":
                view.add_(part)
            else:
                view.copy_(part)

    @staticmethod
    def _settle(waiting: dict[int, list[Callable[[], None]]], chunk: int) -> None:
        for finish in waiting.pop(chunk, ()):
            finish()


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a call that runs once, although each chunk of a message waits for it."""
    left = [call]

    def finish() -> None:
        while left:
            left.pop()()

    return finish


@lru_cache(maxsize=1024)
def _work(kind: str, algorithm: Algorithm, shape: tuple[int, ...], me: int, each: int) -> _Work:
    """Returns the work of rank `me`; `each` counts elements of a block or of an uncut tensor."""
    program, script = _script(kind, algorithm, shape, me)
    place, passing = _places(program, script, me, each)
    tags: dict[tuple[int, bool], int] = {}
    rounds = []
    used: set[int] = set()  # chunks of earlier rounds
    for posts in script:
        messages = []
        for peer, chunks, does in posts:
            spans = _together([place[chunk] for chunk in chunks])
            way = (peer, does == "send")
            tags[way] = tags.get(way, -1) + 1
            if spans:
                free = used.isdisjoint(chunks)
                small = spans[0][2] <= _SMALL
                direct = does == "keep" and len(spans) == 1 and (free or not small)
                early = does != "send" and (free or not direct)
                messages.append(_Message(peer, chunks, spans, does, tags[way], direct, early))
        used.update(chunk for post in posts for chunk in post.chunks)
        if messages:
            rounds.append(tuple(messages))
    return _Work(tuple(rounds), passing)


@lru_cache(maxsize=256)
def _script(
    kind: str, algorithm: Algorithm, shape: tuple[int, ...], me: int
) -> tuple[CollectiveProgram, Script]:
    program = written(kind, algorithm.name, shape, algorithm.pieces)
    return program, program.scripts[me]


def _places(
    program: CollectiveProgram, script: Script, me: int, each: int
) -> tuple[dict[int, Span], int]:
    """Returns the span of each chunk on a rank, and the number of elements held for others."""
    if program.kind in ("all_reduce", "broadcast"):
        spans = (part_of(each, program.chunks, chunk) for chunk in range(program.chunks))
        return {chunk: (0, *span) for chunk, span in enumerate(spans)}, 0
    per, ranks = program.chunks // program.unit, program.ranks
    place: dict[int, Span] = {}
    passing = 0
    used = {chunk for posts in script for post in posts for chunk in post.chunks}
    for chunk in sorted(used):
        block, piece = divmod(chunk, per)
        start, length = part_of(each, per, piece)
        if program.kind != "all_to_all":
            place[chunk] = (0, block * each + start, length)
            continue
        source, target = divmod(block, ranks)
        if source == me:
            place[chunk] = (0, target * each + start, length)
        elif target == me:
            place[chunk] = (1, source * each + start, length)
        else:
            place[chunk] = (2, passing, length)
            passing += length
    return place, passing


def _together(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Returns nonempty spans, with neighbours merged."""
    found: list[Span] = []
    for buffer, first, length in spans:
        if not length:
            continue
        if found and found[-1][0] == buffer and sum(found[-1][1:]) == first:
            found[-1] = (buffer, found[-1][1], found[-1][2] + length)
        else:
            found.append((buffer, first, length))
    return tuple(found)
