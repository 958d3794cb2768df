"""A collective as a program: rounds of messages of chunks between ranks, as a value and as text.

    all_reduce by flat_ring over 3 in 3 chunks
    0: 0>1 +0; 1>2 +1; 2>0 +2
    1: 0>1 +2; 1>2 +0; 2>0 +1
    2: 0>1 =1; 1>2 =2; 2>0 =0
    3: 0>1 =0; 1>2 =1; 2>0 =2

In round 0 rank 0 sends chunk 0 to rank 1, which adds it to its own; in round 2 rank 1 keeps what
arrives. A message holds what its sender has at the beginning of the round. The ranks form a grid,
outermost level first, and are numbered row by row. What a chunk is depends on the collective:

    kind             chunks                              before           after
    all_reduce       equal parts of the tensor           its own          the sum
    broadcast        equal parts of the tensor           rank 0 has all   the tensor
    all_gather       the same number of each rank        its own          all
    reduce_scatter   the same number for each rank       its own of all   the sum of its own
    all_to_all       of each pair: sender, receiver      what it sends    what it is sent
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autopar.errors import CollectiveError
from autopar.ir.chosen_algorithms import KINDS

MOST_RANKS, MOST_CHUNKS = 4096, 2**24
_HEAD = re.compile(r"(\w+) by (\S+) over (\d{1,9}(?:x\d{1,9})*) in (\d{1,9}) chunks")
_MESSAGE = re.compile(r"(\d{1,9})>(\d{1,9}) ([+=])(\d[\d,-]*)")
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Message(NamedTuple):
    """One message of a round.

    Attributes:
        source, target: the ranks.
        chunks: numbers of the chunks that are sent, ascending.
        adds: whether the target adds the chunks to its own or overwrites its own.
    """

    source: int
    target: int
    chunks: tuple[int, ...]
    adds: bool

    def __str__(self) -> str:
        return f"{self.source}>{self.target} {'+' if self.adds else '='}{_spans(self.chunks)}"


Round = tuple[Message, ...]


class Post(NamedTuple):
    """One end of a message.

    Attributes:
        peer: the rank at the other end.
        chunks: numbers of the chunks in the message.
        does: "send" the chunks, "add" them to the rank's own, or "keep" them in place of its own.
    """

    peer: int
    chunks: tuple[int, ...]
    does: str


Script = tuple[tuple[Post, ...], ...]


@dataclass(frozen=True)
class CollectiveProgram:
    """One algorithm for a collective, written for a number of ranks.

    Attributes:
        kind: the collective, one of `KINDS`.
        name: name of the algorithm.
        shape: the sizes of the levels, outermost first.
        chunks: number of chunks; a multiple of `unit`, see the table above.
        rounds: in order.

    Raises:
        CollectiveError: the kind is unknown, a rank or chunk does not exist, or a rank sends and
            overwrites a chunk, or writes it twice, in one round.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        sized = bool(self.shape) and min(self.shape) > 0 and self.ranks <= MOST_RANKS
        if self.kind not in KINDS or not sized or not 0 < self.chunks <= MOST_CHUNKS:
            raise self._damaged(
                f"{self.kind} over {_grid(self.shape)} in {self.chunks} chunks",
                f"the collectives are {', '.join(KINDS)}, with at most {MOST_RANKS} ranks",
            )
        if self.chunks % self.unit:
            raise self._damaged(
                f"it has {self.chunks} chunks", f"{self.kind} needs a multiple of {self.unit}"
            )
        for number, messages in enumerate(self.rounds):
            self._check(number, messages)

    def _check(self, number: int, messages: Round) -> None:
        sent: set[tuple[int, int]] = set()
        added: set[tuple[int, int]] = set()
        copied: set[tuple[int, int]] = set()
        for message in messages:
            source, target, chunks, adds = message
            rising = chunks and all(a < b for a, b in pairwise((-1, *chunks, self.chunks)))
            there = 0 <= source < self.ranks and 0 <= target < self.ranks
            if not rising or not there or source == target:
                raise self._damaged(
                    f"round {number} has the message {message}",
                    f"there are {self.ranks} ranks and {self.chunks} chunks, which are named in "
                    "rising order, and a rank sends itself nothing",
                )
            written = {(target, chunk) for chunk in chunks}
            if written & copied or (not adds and written & added):
                raise self._damaged(
                    f"round {number} writes twice with {message}",
                    "what is copied into a chunk is all that it gets in a round",
                )
            (added if adds else copied).update(written)
            sent.update((source, chunk) for chunk in chunks)
        if both := sent & (added | copied):
            rank, chunk = min(both)
            raise self._damaged(
                f"rank {rank} sends and receives chunk {chunk} in round {number}",
                "then which of the two is sent would depend on time",
            )

    def _damaged(self, what: str, why: str) -> CollectiveError:
        return CollectiveError(what, where=f"{self.kind} by {self.name}", why=why)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def unit(self) -> int:
        """The number that must divide `chunks`."""
        return unit(self.kind, self.ranks)

    @property
    def share(self) -> float:
        """The fraction of a device's payload that one chunk holds."""
        whole = self.ranks if self.kind in ("all_gather", "all_to_all") else 1
        return whole / self.chunks

    @property
    def messages(self) -> Iterator[Message]:
        """Every message, round by round."""
        return (message for messages in self.rounds for message in messages)

    @property
    def scripts(self) -> tuple[Script, ...]:
        """The posts of each rank, round by round, without rounds in which it posts nothing."""
        made: list[list[tuple[Post, ...]]] = [[] for _ in range(self.ranks)]
        for messages in self.rounds:
            posts: dict[int, list[Post]] = {}
            for source, target, chunks, adds in messages:
                posts.setdefault(source, []).append(Post(target, chunks, "send"))
                does = "add" if adds else "keep"
                posts.setdefault(target, []).append(Post(source, chunks, does))
            for rank, own in posts.items():
                made[rank].append(tuple(own))
        return tuple(map(tuple, made))

    def __str__(self) -> str:
        shape = _grid(self.shape)
        head = f"{self.kind} by {self.name} over {shape} in {self.chunks} chunks"
        rows = (f"{n}: {'; '.join(map(str, row))}" for n, row in enumerate(self.rounds))
        return "\n".join((head, *rows)) + "\n"

    @classmethod
    def parse(cls, text: str) -> CollectiveProgram:
        """Parses the result of `str`.

        Raises:
            CollectiveError: the text has another form, or the program is invalid.
        """
        head, *rows = text.strip().splitlines() or [""]
        match = _HEAD.fullmatch(head.strip())
        if match is None:
            raise CollectiveError(
                f"cannot read the head {head[:80]!r} of a collective",
                todo='write e.g. "all_reduce by flat_ring over 2x4 in 8 chunks"',
            )
        rounds = tuple(_round(number, row) for number, row in enumerate(rows))
        shape = tuple(map(int, match[3].split("x")))
        return cls(match[1], match[2], shape, int(match[4]), rounds)


def unit(kind: str, ranks: int) -> int:
    """Returns the number that must divide the chunks of `kind` over `ranks` ranks."""
    return {"all_gather": ranks, "reduce_scatter": ranks, "all_to_all": ranks**2}.get(kind, 1)


def _grid(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _round(number: int, row: str) -> Round:
    head, colon, body = row.partition(":")
    found = []
    for text in body.split(";") if body.strip() else ():
        match = _MESSAGE.fullmatch(text.strip())
        if match is None:
            raise CollectiveError(
                f"cannot read the message {text.strip()[:80]!r}",
                where=f"round {number}",
                todo='write e.g. "0>1 +0-3,7", or "=" for what is not added',
            )
        chunks = tuple(_parse_spans(match[4], number))
        found.append(Message(int(match[1]), int(match[2]), chunks, match[3] == "+"))
    if not colon or head.strip() != str(number):
        raise CollectiveError(f"cannot read the round {row[:80]!r}", why=f"round {number} is next")
    return tuple(found)


def _spans(chunks: Sequence[int]) -> str:
    """Formats ascending numbers; consecutive ones as "first-last"."""
    starts = [i for i, chunk in enumerate(chunks) if not i or chunks[i - 1] + 1 != chunk]
    spans = (chunks[a:b] for a, b in pairwise((*starts, len(chunks))))
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def _parse_spans(text: str, number: int) -> Iterator[int]:
    for span in text.split(","):
        match = _SPAN.fullmatch(span)
        if match is None or int(match[2] or match[1]) > MOST_CHUNKS:
            raise CollectiveError(
                f"cannot read the chunks {text[:80]!r}",
                where=f"round {number}",
                todo='write e.g. "0-3,7"',
            )
        yield from range(int(match[1]), int(match[2] or match[1]) + 1)
