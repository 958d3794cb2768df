"""Hands the state of one program to another in memory, as a checkpoint does through files.

The two programs may split parameters, averages and optimizer state differently. Every rank copies
its parts to host memory, the ranks exchange lists of the boxes that they have and need, and each
rank sends the overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.index import Chunk, Index, Stored, key_of
from autopar.runtime.checkpoint.plans import Part, Snapshot, merged
from autopar.runtime.checkpoint.values import DTYPES, dtype_name


def shared_index(snapshot: Snapshot, group: dist.ProcessGroup | None) -> Index:
    """Returns the index of the state that the ranks of a group hold together; all ranks call it.

    Args:
        snapshot: snapshot of this rank.
        group: all ranks; None for a process alone.

    Returns:
        An index whose chunks name the rank that holds them in place of a file. Of equal boxes the
        lowest rank's counts.
    """
    own = [(p.name, dtype_name(p.tensor.dtype), p.shape, p.box) for p in snapshot.parts]
    ranks = _gathered((own, snapshot.details), group)
    tensors: dict[str, Stored] = {}
    owners: dict[str, dict[Box, int]] = {}
    for rank, (parts, _) in enumerate(ranks):
        for name, dtype, shape, box in parts:
            tensors.setdefault(name, Stored(dtype, shape, ()))
            if box.volume or not Box.whole(shape).volume:
                owners.setdefault(name, {}).setdefault(box, rank)
    found = {
        name: Stored(
            stored.dtype,
            stored.shape,
            tuple(
                Chunk(box, str(rank), key_of(name, box, stored.shape))
                for box, rank in owners.get(name, {}).items()
            ),
        )
        for name, stored in tensors.items()
    }
    return Index(found, merged([details for _, details in ranks]))


Value = TypeVar("Value")


class _WantedBox(NamedTuple):
    """A box of a tensor that a rank wants, the `number`th of its wanted parts."""

    receiver: int
    number: int
    box: Box


class _Piece(NamedTuple):
    """The overlap of a chunk of the sender's with a part that the receiver wants."""

    sender: int
    receiver: int
    number: int
    chunk: Box
    overlap: Box


@torch.no_grad()
def exchange(
    snapshot: Snapshot, index: Index, wanted: Sequence[Part], group: dist.ProcessGroup | None
) -> None:
    """Fills the parts that every rank needs from the parts of all ranks; all ranks call it.

    Args:
        snapshot: snapshot of this rank.
        index: index of all ranks, from `shared_index`.
        wanted: parts of tensors of the index, on any device; they are overwritten.
        group: all ranks, on gloo; None for a process alone.
    """
    rank = 0 if group is None else dist.get_rank(group)
    have = {(part.name, part.box): part.tensor for part in snapshot.parts}
    wishes: dict[str, list[_WantedBox]] = {}
    for receiver, parts in enumerate(_gathered([(part.name, part.box) for part in wanted], group)):
        for number, (name, box) in enumerate(parts):
            wishes.setdefault(name, []).append(_WantedBox(receiver, number, box))
    for name, wishing in wishes.items():  # one tensor at a time, so that little memory is in flight
        works: list[dist.Work] = []
        arriving: list[tuple[_Piece, Tensor]] = []
        keep: list[Tensor] = []
        stored = index.tensors[name]
        for piece in _pieces(stored, wishing):
            if piece.sender == rank:
                source = have[name, piece.chunk][piece.overlap.within(piece.chunk).slices]
                if piece.receiver == rank:
                    arriving.append((piece, source))
                    continue
                keep.append(source.contiguous())
                works.append(_begun(dist.isend(keep[-1], group=group, group_dst=piece.receiver)))
            elif piece.receiver == rank:
                buffer = torch.empty(piece.overlap.sizes, dtype=DTYPES[stored.dtype])
                works.append(_begun(dist.irecv(buffer, group=group, group_src=piece.sender)))
                arriving.append((piece, buffer))
        for work in works:
            work.wait()
        for piece, values in arriving:
            part = wanted[piece.number]
            part.tensor[piece.overlap.within(part.box).slices].copy_(values)


def _pieces(stored: Stored, wishes: Sequence[_WantedBox]) -> Iterator[_Piece]:
    """Yields the overlaps of one tensor, in one order on all ranks."""
    for receiver, number, box in wishes:
        for chunk in stored.chunks:
            overlap = chunk.box.overlap(box)
            if overlap is not None:
                yield _Piece(int(chunk.file), receiver, number, chunk.box, overlap)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # torch returns None on ranks outside the group only
    return work


def _gathered(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """Every rank's value, by rank."""
    if group is None:
        return [value]
    found: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found  # type: ignore[return-value]
