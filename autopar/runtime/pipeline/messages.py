"""Post: transfers values between the stages of a pipeline as messages between ranks.

A message is one box of a `Crossing`. A rank sends messages to another rank in the order of its row,
and the receiver posts receives in the same order, which the check of complete rows proves. So no
backend needs tags. Messages to higher and to lower ranks use separate process groups, because with
NCCL a send that waits for its receiver would block messages in the opposite direction.

Transfers overlap with computation: rows post a receive one action before the action that needs it,
and sends are awaited at the end of the step.
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
from autopar.runtime.ranks.channel import Channel, PendingCall
from autopar.runtime.ranks.shared import Peers

TAGS = 2**20  # exceeds the number of messages in flight at any time


@dataclass(frozen=True)
class Way:
    """A repeated transfer of one tensor between meshes.

    Attributes:
        tensor: its global type.
        crossing: the boxes to send.
    """

    tensor: TensorType
    crossing: Crossing


class Letter(NamedTuple):
    """One transfer of a way's tensor, numbered by microbatch if there are several."""

    way: int
    microbatch: int


class Wires:
    """The channels for messages to higher and to lower ranks; all ranks create them together.

    Args:
        peers: all ranks.
        alone: whether no other program shares the channels. Messages may then stay in flight
            between two steps, where they would collide with another program's.
    """

    def __init__(self, peers: Peers, alone: bool = False) -> None:
        ranks = peers.ranks
        self._leases = [
            peers.own(purpose) if alone else peers.shared(purpose, [ranks])
            for purpose in ("up", "down")
        ]
        (self.up,), (self.down,) = (lease.channels for lease in self._leases)

    def between(self, sender: int, receiver: int) -> Channel:
        """Returns the channel for messages from one rank to another."""
        return self.up if sender < receiver else self.down

    def close(self) -> None:
        """Releases the channels."""
        for lease in self._leases:
            lease.close()


class Post:
    """Sends and receives the messages of this rank.

    Args:
        ways: all ways of the pipeline.
        rank: global rank of this process.
        device: the device of this process.
        wires: channels of the messages; None for a single rank.
        tag: first of TAGS tags, which distinguish the messages of two posts on the same wires.
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
        self._coming: dict[tuple[Letter, int], tuple[PendingCall | None, Tensor]] = {}
        self._sent: dict[int, int] = {}
        self._going: list[tuple[PendingCall, Tensor]] = []

    def crossing(self, letter: Letter) -> Crossing:
        """Returns the crossing of a letter."""
        return self.ways[letter.way].crossing

    def _dtype(self, letter: Letter) -> torch.dtype:
        return TORCH_DTYPES[self.ways[letter.way].tensor.dtype]

    def send(self, letter: Letter, part: Tensor) -> None:
        """Sends the boxes of this rank's part of a value to their receivers."""
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
        """Posts the receives of a letter, for each sender in the order of its sends."""
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
        """Returns the tag of the next message to or from a rank."""
        count = counts[peer] = counts.get(peer, -1) + 1
        return self._first + count % TAGS

    def receive(self, letter: Letter, runtime: Communicator) -> Tensor:
        """Waits for a letter and returns this rank's part in the layout of its mesh."""
        way = self.ways[letter.way]
        shape = way.tensor.shape
        part = self._arrived(
            letter, way.crossing.arrival.local_shape(shape, runtime.mesh, runtime.coordinate)
        )
        for step in way.crossing.gathers:
            part = runtime.apply(step, part, shape)
        return part

    def _arrived(self, letter: Letter, shape: tuple[int, ...]) -> Tensor:
        """Returns the part of `shape` that was sent to this rank."""
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
        """Waits for all posted sends and receives; every send must have a posted receive."""
        for key, (work, piece) in list(self._coming.items()):
            if work is not None:
                work.wait()
                self._coming[key] = (None, piece)
        self.finish()

    def saved(self, put: Callable[[Tensor], Any]) -> Any:
        """Returns messages that have arrived but were not received; see `in_flight_state.py`."""
        return [
            [letter.way, letter.microbatch, number, put(piece)]
            for (letter, number), (_, piece) in self._coming.items()
        ]

    def resume(self, saved: Any, get: Callable[[Any], Tensor]) -> None:
        """Restores saved messages as if they had just arrived."""
        self._coming = {
            (Letter(way, microbatch), number): (None, get(piece))
            for way, microbatch, number, piece in saved
        }

    def finish(self) -> None:
        """Waits for pending sends."""
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
