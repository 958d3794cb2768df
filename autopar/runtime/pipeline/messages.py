"""Post: what the stages of a pipeline send one another, as messages between ranks.

A message is one box of a `Crossing`. Messages from one rank to another go out in the order of the
sender's row, and the receiver asks for them in that same order, which the judge of complete rows
proves. So no backend needs tags. Upwards and downwards (by rank) they take process groups of their
own: with NCCL a send that waits for its receiver would otherwise hold up what comes the other way.

Sends and receives run beside the computation: rows post a receive before the action that precedes
its own; a send is waited for at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ir.crossing import Box, Crossing
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.ranks.channel import Channel, Waiting
from autopar.runtime.ranks.shared import Peers

TAGS = 2**20  # more than there are messages under way at a time


@dataclass(frozen=True)
class Way:
    """How one tensor crosses between meshes, again and again.

    Attributes:
        tensor: its global type.
        crossing: what is sent.
    """

    tensor: TensorType
    crossing: Crossing


class Letter(NamedTuple):
    """One tensor on a way, by number: that of a microbatch, where there are several."""

    way: int
    microbatch: int


class Wires:
    """The channels of messages to higher and to lower ranks; all ranks make them together.

    Args:
        peers: all ranks.
        alone: whether no other program shares them: between two steps messages may be under way,
            which another program's would meet.
    """

    def __init__(self, peers: Peers, alone: bool = False) -> None:
        ranks = peers.ranks
        self._leases = [
            peers.own(purpose) if alone else peers.shared(purpose, [ranks])
            for purpose in ("up", "down")
        ]
        (self.up,), (self.down,) = (lease.channels for lease in self._leases)

    def between(self, sender: int, receiver: int) -> Channel:
        """The channel of messages from one rank to another."""
        return self.up if sender < receiver else self.down

    def close(self) -> None:
        """Give the channels back."""
        for lease in self._leases:
            lease.close()


class Post:
    """The messages of this rank.

    Args:
        ways: all ways there are.
        rank: this process's global rank.
        device: where it computes.
        wires: what the messages go through; None for a single rank.
        tag: the first of TAGS tags, so that messages of two posts on the same wires do not meet.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        rank: int,
        device: torch.device,
        wires: Wires | None,
        tag: int = 0,
    ) -> None:
        self.ways, self.rank, self.device, self.wires = ways, rank, device, wires
        self._first = tag
        self._asked: dict[int, int] = {}
        self._coming: dict[tuple[Letter, int], tuple[Waiting | None, Tensor]] = {}
        self._sent: dict[int, int] = {}
        self._going: list[tuple[Waiting, Tensor]] = []

    def crossing(self, letter: Letter) -> Crossing:
        """How a letter crosses."""
        return self.ways[letter.way].crossing

    def _dtype(self, letter: Letter) -> torch.dtype:
        return TORCH_DTYPES[self.ways[letter.way].tensor.dtype]

    def send(self, letter: Letter, part: Tensor) -> None:
        """Send what the receivers need of this rank's part of a value."""
        self._going = [(work, kept) for work, kept in self._going if not work.is_completed()]
        for number, box in enumerate(self.crossing(letter).boxes):
            if box.sender != self.rank:
                continue
            piece = _taken(part.detach(), box)
            if box.receiver == self.rank:
                self._coming[letter, number] = (None, piece)
                continue
            assert self.wires is not None
            piece = piece.contiguous()
            tag = self._next(self._sent, box.receiver)
            channel = self.wires.between(self.rank, box.receiver)
            work = channel.send(piece, box.receiver, tag)
            self._going.append((work, piece))

    def ask(self, letter: Letter) -> None:
        """Post the receives of a letter; those of one sender in the order in which it sends."""
        for number, box in enumerate(self.crossing(letter).boxes):
            if box.receiver != self.rank or box.sender == self.rank:
                continue
            shape = [length for _, length in box.put]
            buffer = torch.empty(shape, dtype=self._dtype(letter), device=self.device)
            assert self.wires is not None
            tag = self._next(self._asked, box.sender)
            channel = self.wires.between(box.sender, self.rank)
            self._coming[letter, number] = (channel.receive(buffer, box.sender, tag), buffer)

    def _next(self, counts: dict[int, int], peer: int) -> int:
        """The tag of the next message to or from a rank."""
        count = counts[peer] = counts.get(peer, -1) + 1
        return self._first + count % TAGS

    def receive(self, letter: Letter, runtime: Communicator) -> Tensor:
        """This rank's part of a letter, in the layout that its mesh wants; waits for it."""
        way = self.ways[letter.way]
        shape = way.tensor.shape
        part = self._arrived(
            letter, way.crossing.arrival.local_shape(shape, runtime.mesh, runtime.coordinate)
        )
        for step in way.crossing.gathers:
            part = runtime.apply(step, part, shape)
        return part

    def _arrived(self, letter: Letter, shape: tuple[int, ...]) -> Tensor:
        """What was sent to this rank, a part of `shape`."""
        pieces = []
        for number, box in enumerate(self.crossing(letter).boxes):
            if box.receiver == self.rank:
                work, piece = self._coming.pop((letter, number))
                if work is not None:
                    work.wait()
                pieces.append((box, piece))
        if len(pieces) == 1:
            return pieces[0][1]
        part = torch.empty(shape, dtype=self._dtype(letter), device=self.device)
        for box, piece in pieces:
            _put(part, box).copy_(piece)
        return part

    def settle(self) -> None:
        """Waits for all that has been asked for and sent; whatever was sent must be asked for."""
        for key, (work, piece) in list(self._coming.items()):
            if work is not None:
                work.wait()
                self._coming[key] = (None, piece)
        self.finish()

    def saved(self, put: Callable[[Tensor], Any]) -> Any:
        """Returns what has arrived and not been received; see `under_way.py`."""
        return [
            [letter.way, letter.microbatch, number, put(piece)]
            for (letter, number), (_, piece) in self._coming.items()
        ]

    def resume(self, saved: Any, get: Callable[[Any], Tensor]) -> None:
        """Takes that back, as if it had just arrived."""
        self._coming = {
            (Letter(way, microbatch), number): (None, get(piece))
            for way, microbatch, number, piece in saved
        }

    def finish(self) -> None:
        """Wait for what is still on its way out."""
        for work, _ in self._going:
            work.wait()
        self._going.clear()


def _taken(part: Tensor, box: Box) -> Tensor:
    for dim, (start, length) in enumerate(box.taken):
        part = part.narrow(dim, start, length)
    return part


def _put(part: Tensor, box: Box) -> Tensor:
    for dim, (start, length) in enumerate(box.put):
        part = part.narrow(dim, start, length)
    return part
