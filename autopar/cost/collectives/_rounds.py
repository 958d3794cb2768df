"""Helpers for algorithms of collectives: a builder of rounds, rings, and reversed rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.cost.programs.collective_program import Message, Round

Shape = tuple[int, ...]
Written = tuple[int, Sequence[Round]]


class Rounds:
    """Collects messages by round.

    Messages of one round between the same two ranks are merged.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, dict[tuple[int, int, bool], list[int]]] = {}

    def send(
        self, number: int, source: int, target: int, chunks: Iterable[int], adds: bool = False
    ) -> None:
        """Adds a message from `source` to `target` in round `number`, unless it has no chunks."""
        if found := list(chunks):
            messages = self._rounds.setdefault(number, {})
            messages.setdefault((source, target, adds), []).extend(found)

    def ring(self, first: int, order: Sequence[int], held: Sequence[Sequence[int]]) -> int:
        """Adds an all_gather around a ring from round `first` on; returns the next free round.

        Args:
            first: the first round.
            order: the ranks in the order of the ring.
            held: the initial chunks of each rank.
        """
        count = len(order)
        for step in range(count - 1):
            for place, rank in enumerate(order):
                self.send(first + step, rank, order[(place + 1) % count], held[place - step])
        return first + count - 1

    def add(self, first: int, rounds: Sequence[Round]) -> int:
        """Adds existing rounds from round `first` on; returns the next free round."""
        for number, messages in enumerate(rounds, first):
            for message in messages:
                self.send(number, *message)
        return first + len(rounds)

    @property
    def written(self) -> list[Round]:
        """Returns the rounds in order, without empty ones."""
        return [
            tuple(
                Message(source, target, tuple(sorted(chunks)), adds)
                for (source, target, adds), chunks in sorted(self._rounds[number].items())
            )
            for number in sorted(self._rounds)
        ]


def ring(order: Sequence[int], held: Sequence[Sequence[int]]) -> list[Round]:
    """Returns the rounds of a single ring; see `Rounds.ring`."""
    rounds = Rounds()
    rounds.ring(0, order, held)
    return rounds.written


def backwards(rounds: Sequence[Round]) -> list[Round]:
    """Returns a reversed gather: receivers send, and senders add."""
    return [
        tuple(Message(m.target, m.source, m.chunks, True) for m in messages)
        for messages in reversed(rounds)
    ]


def pipelined(written: Written, pieces: int) -> tuple[int, tuple[Round, ...]]:
    """Returns the number of chunks and the rounds with each chunk cut into `pieces`.

    The pieces are pipelined, each one round behind the previous one.
    """
    chunks, rounds = written
    if pieces == 1:
        return chunks, tuple(rounds)
    made: list[list[Message]] = [[] for _ in range(len(rounds) + pieces - 1 if rounds else 0)]
    for number, messages in enumerate(rounds):
        for piece in range(pieces):
            made[number + piece] += (
                m._replace(chunks=tuple(chunk * pieces + piece for chunk in m.chunks))
                for m in messages
            )
    return chunks * pieces, tuple(map(tuple, made))


def groups(shape: Shape, level: int) -> list[list[int]]:
    """Returns the groups of ranks that differ along one level only, in order."""
    stride = math.prod(shape[level + 1 :])
    size = shape[level]
    return [
        [first + place * stride for place in range(size)]
        for first in range(math.prod(shape))
        if first // stride % size == 0
    ]


def nodes(shape: Shape) -> tuple[int, int]:
    """Returns the product of the outer levels' sizes, and the number of ranks in the innermost."""
    return math.prod(shape[:-1]), shape[-1]
