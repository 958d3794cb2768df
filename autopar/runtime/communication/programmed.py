"""A channel whose collectives are programs: rounds of batched point-to-point messages.

`cost/collectives/` writes the rounds; here a rank runs its own. All messages of a round are posted
in one batch. What arrives is awaited when it is sent on or needed, and no earlier, so that pieces
and levels overlap as far as the backend lets them. Sums are made in the tensor's dtype and in an
order that the program fixes, whenever messages arrive; what one rank has summed is copied to the
others, so that all have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.collectives import written
from autopar.cost.programs.collective_program import CollectiveProgram, Script
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm, ChosenAlgorithms
from autopar.ir.tensor import part_of
from autopar.runtime.communication.group import Group
from autopar.runtime.ranks.channel import Channel, Waiting

Span = tuple[int, int, int]  # buffer, first element, elements


class _Message(NamedTuple):
    """One end of a message on this rank.

    Attributes:
        peer: the group rank at the other end.
        chunks: what it carries.
        spans: where they lie, those that are neighbours together.
        does: "send", "add" or "keep".
        tag: tells the messages between two ranks apart.
    """

    peer: int
    chunks: tuple[int, ...]
    spans: tuple[Span, ...]
    does: str
    tag: int


class _Work(NamedTuple):
    """What a rank does: its rounds, and how many elements of other ranks pass through it."""

    rounds: tuple[tuple[_Message, ...], ...]
    passing: int


# The algorithm of a collective that brings so many bytes to each device, "" for the library's.
Pick = Callable[[str, int], str]


class ProgrammedChannel(Channel):
    """A channel whose collectives algorithms run; what has no program is the library's.

    The library also runs, or refuses, calls on strided or boolean tensors and on sizes that do not
    fit one another. All ranks decide alike, as they make calls with equal tensors.

    Args:
        channel: what messages and all other calls go through.
        pick: says the algorithm of a call.
        sizes: of the axes of its ranks, outermost first.
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
        """Adds x over the ranks, in its place; other reductions are the library's."""
        by = self._pick("all_reduce", x.nbytes)
        if not by or op != dist.ReduceOp.SUM or not _plain(x):
            super().all_reduce(x, op)
            return
        self._play("all_reduce", by, x.numel(), x.nbytes, [x.view(-1)])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Adds x over the ranks, and puts this rank's part into `out`; both are flat."""
        by = self._pick("reduce_scatter", x.nbytes)
        if not by or not _plain(x) or x.numel() != len(self.ranks) * out.numel():
            super().reduce_scatter(out, x)
            return
        whole = x.clone()
        self._play("reduce_scatter", by, out.numel(), x.nbytes, [whole])
        out.copy_(whole.narrow(0, self._me * out.numel(), out.numel()))

    def all_gather(self, out: Tensor, x: Tensor, ahead: bool = False) -> Waiting | None:
        """Puts every rank's x into `out`, both flat; by a program at once, ahead or not."""
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
    ) -> Waiting | None:
        """Sends one block of x to every rank, by a program at once; uneven ones are the library's.

        Those may be sent `ahead`.
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
        """Puts the x of a global rank into all others; the library's, but from the first rank."""
        by = self._pick("broadcast", x.nbytes)
        if not by or source != self.ranks[0] or not _plain(x):
            super().broadcast(x, source)
            return
        self._play("broadcast", by, x.numel(), x.nbytes, [x.view(-1)])

    def _play(self, kind: str, by: str, each: int, nbytes: int, buffers: list[Tensor]) -> None:
        """Runs this rank's rounds on its buffers; `each` are the elements of one block."""
        algorithm = Algorithm.parse(by)
        work = _work(kind, algorithm, algorithm.over(self._sizes), self._me, each)
        if work.passing:
            buffers.append(buffers[0].new_empty(work.passing))
        event = self.recorder.begin(self.name, self.ranks, f"{kind} by {by}", nbytes)
        _Run(self.handle, self.ranks, buffers).play(work)
        self.recorder.end(event)


def _plain(x: Tensor) -> bool:
    """Returns whether chunks of a tensor are spans of its memory, which can be added."""
    return x.is_contiguous() and x.dtype != torch.bool


def programmed(group: Group, by: str, chosen: ChosenAlgorithms) -> Group:
    """The group whose collectives are run by algorithms.

    Args:
        group: whose collectives are the library's.
        by: the algorithm of all of them, LIBRARY for none; "" if it is the one that is `chosen`.
        chosen: the algorithms by kind, axes and size.

    Raises:
        CollectiveError: the algorithm cannot be read, or is for another number of ranks.
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
    """Messages that are under way on this rank."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], buffers: Sequence[Tensor]
    ) -> None:
        self.group, self.ranks, self.buffers = group, ranks, buffers
        # By chunk what must end before it is sent, and before it is written.
        self.arriving: dict[int, list[Callable[[], None]]] = {}
        self.leaving: dict[int, list[Callable[[], None]]] = {}

    def play(self, work: _Work) -> None:
        for messages in work.rounds:
            self._post(messages)
        for waiting in (*self.arriving.values(), *self.leaving.values()):
            for finish in waiting:
                finish()

    def _post(self, messages: Sequence[_Message]) -> None:
        posted, calls = [], []
        for message in messages:
            for chunk in message.chunks if message.does != "add" else ():
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
        # A library that sends a batch as one call returns one thing to wait for.
        works = works if len(works) == len(posted) else works * len(posted)
        for (message, views, buffer), work in zip(posted, works, strict=True):
            waiting = self.leaving if message.does == "send" else self.arriving
            # What came to one chunk of a message earlier is written before it, in all its chunks.
            written = () if message.does == "send" else message.chunks
            earlier = [each for chunk in written for each in waiting.get(chunk, ())]
            finish = _once(partial(self._end, work, message, views, buffer, earlier))
            for chunk in message.chunks:
                waiting.setdefault(chunk, []).append(finish)

    @staticmethod
    def _buffer(message: _Message, views: list[Tensor]) -> Tensor:
        """What is sent, or where it arrives: the chunks themselves where they lie together."""
        if message.does == "send":
            return views[0] if len(views) == 1 else torch.cat(views)
        if message.does == "keep" and len(views) == 1:
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
    """A message is waited for by each of its chunks, and ends once."""
    left = [call]

    def finish() -> None:
        while left:
            left.pop()()

    return finish


@lru_cache(maxsize=1024)
def _work(kind: str, algorithm: Algorithm, shape: tuple[int, ...], me: int, each: int) -> _Work:
    """What rank `me` does where a block, or the tensor that is not cut, has `each` elements."""
    program, script = _script(kind, algorithm, shape, me)
    place, passing = _places(program, script, me, each)
    tags: dict[tuple[int, bool], int] = {}
    rounds = []
    for posts in script:
        messages = []
        for peer, chunks, does in posts:
            spans = _together([place[chunk] for chunk in chunks])
            way = (peer, does == "send")
            tags[way] = tags.get(way, -1) + 1
            if spans:
                messages.append(_Message(peer, chunks, spans, does, tags[way]))
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
    """Where each chunk lies on a rank, and how many elements lie there for others only."""
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
    """Spans without empty ones, those that are neighbours as one."""
    found: list[Span] = []
    for buffer, first, length in spans:
        if not length:
            continue
        if found and found[-1][0] == buffer and sum(found[-1][1:]) == first:
            found[-1] = (buffer, found[-1][1], found[-1][2] + length)
        else:
            found.append((buffer, first, length))
    return tuple(found)
