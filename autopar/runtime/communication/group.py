"""A group of ranks: its blocks of a tensor, and moves of plain tensors.

`autopar.runtime.communication.communicator` pairs these moves with those of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import LayoutError
from autopar.ir.tensor import blocks, part_of
from autopar.operators.peer_devices import flattened
from autopar.runtime.communication.padded_blocks import (
    inner_counts,
    padded,
    rearranged,
    spans,
    trimmed,
)
from autopar.runtime.communication.quantised import pack, unpack
from autopar.runtime.ranks.channel import Channel, free


@dataclass(frozen=True)
class Group:
    """The ranks that differ from this one only along `axes`.

    Attributes:
        axes: outermost first, in the order in which they split a dimension.
        sizes: the number of devices along each.
        order: positions in `axes` of the axes in mesh order, which is the order of group ranks.
        index: number of this rank's block of a dimension split over `axes`.
        channel: the channel of its calls; None for a group of one.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    index: int
    channel: Channel | None

    @property
    def calls(self) -> Channel:
        """Returns the channel of a group of more than one rank."""
        assert self.channel is not None
        return self.channel

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def parts(self, extent: int) -> tuple[tuple[int, int], ...]:
        """Returns (start, length) of the blocks of a dimension of `extent` elements, by group rank.

        Raises:
            LayoutError: a block would be empty.
        """
        if extent < self.size:
            raise LayoutError(
                f"a dimension of {extent} does not split {self.size} ways",
                where=f"axis {', '.join(self.axes)}",
                why="a device would have none of its elements",
            )
        return spans(self.sizes, self.order, extent)

    def own(self, extent: int) -> tuple[int, int]:
        """Returns (start, length) of this rank's block."""
        start = 0
        remainder = self.index
        for count, inner in zip(self.sizes, inner_counts(self.sizes), strict=True):
            position, remainder = divmod(remainder, inner)
            offset, extent = part_of(extent, count, position)
            start += offset
        return start, extent

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Cuts x along `dim` into `size` blocks: contiguous [size, *block], by group rank.

        Shorter blocks are padded with zeros to the length of the longest.
        """
        dim = dim % x.dim()
        parts = self.parts(int(x.shape[dim]))
        if x.shape[dim] % self.size:
            longest = max(length for _, length in parts)
            return torch.stack([padded(x.narrow(dim, *part), dim, longest) for part in parts])
        blocks = x.unflatten(dim, (*self.sizes, parts[0][1]))
        blocks = blocks.movedim([dim + i for i in self.order], list(range(len(self.axes))))
        result: Tensor = blocks.flatten(0, len(self.axes) - 1).contiguous()
        return result

    def join(self, blocks: Tensor, dim: int, extent: int, into: Tensor | None = None) -> Tensor:
        """Inverts `split`: [size, *block] by group rank to one contiguous tensor, or `into` it."""
        dim = dim % (blocks.dim() - 1)
        if extent % self.size:
            pairs = sorted(zip(self.parts(extent), blocks, strict=True), key=lambda pair: pair[0])
            rows = [block.narrow(dim, 0, part[1]) for part, block in pairs]
            return torch.cat(rows, dim) if into is None else torch.cat(rows, dim, out=into)
        count = len(self.axes)
        blocks = blocks.unflatten(0, [self.sizes[i] for i in self.order])
        blocks = blocks.movedim(list(range(count)), [dim + i for i in self.order])
        if into is None:
            return blocks.flatten(dim, dim + count).contiguous()
        into.unflatten(dim, blocks.shape[dim : dim + count + 1]).copy_(blocks)
        return into

    # Moves of a plain tensor. Each returns a new tensor and leaves x unchanged. `extent` is the
    # whole length of a dimension to gather; without it all parts are equal.

    def reduce(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the sum over the group, on every rank, computed in `dtype` if given."""
        total = x.to(dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
        if self.size > 1:
            self.calls.all_reduce(total)
        return total.to(x.dtype)

    def maximum(self, x: Tensor) -> Tensor:
        """Returns the maximum over the group, on every rank."""
        largest = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.calls.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def stack(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to stack the tensors of all ranks, of equal shapes, along a new dimension 0."""
        stacked, row = x.new_empty((self.size, *x.shape)), x.contiguous().view(-1)
        work = self.calls.all_gather(stacked.view(-1), row, ahead=True)

        def arrive(row: Tensor | None = row) -> Tensor:  # held until all of it is sent
            if work is not None:
                work.wait()
            return stacked

        return arrive

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns tensors from the ranks with the previous and the next block, None at the ends.

        `before` is sent to the previous rank, `after` to the next; shapes are equal on all ranks.
        """
        if self.size == 1:
            return None, None
        rank_of = {index: rank for rank, index in enumerate(self._by_rank())}
        sides = (
            (rank_of.get(self.index - 1), before, after),
            (rank_of.get(self.index + 1), after, before),
        )
        # All ranks take part, though most pairs of them exchange nothing.
        sent, taken = [before.new_empty(0)] * self.size, [before.new_empty(0)] * self.size
        for rank, outgoing, incoming in sides:
            if rank is not None:
                sent[rank], taken[rank] = outgoing.reshape(-1), torch.empty_like(incoming).view(-1)
        takes, sends = ([piece.numel() for piece in pieces] for pieces in (taken, sent))
        self.calls.all_to_all(out := before.new_empty(sum(takes)), torch.cat(sent), takes, sends)
        taken = list(out.split(takes))
        head, tail = (
            None if rank is None else taken[rank].view(like.shape) for rank, _, like in sides
        )
        return head, tail

    def swap(self, x: Tensor) -> Tensor:
        """Sends x[i] to the rank with block i; returns the messages of all ranks, in this order."""
        if self.size == 1:
            return x
        index_of = list(self._by_rank())
        in_order = index_of == sorted(index_of)
        sent = (x if in_order else x[index_of]).contiguous()
        out = torch.empty_like(sent)
        self.calls.all_to_all(out.view(-1), sent.view(-1))
        return out if in_order else out[self.order_of_blocks()]

    def rows(self, x: Tensor, sends: Sequence[int], takes: Sequence[int]) -> Tensor:
        """Sends the first sends[0] rows of x to the rank with block 0, and so on; see `Peers`."""
        if self.size == 1:
            return x
        order, inverse = self._by_rank(), self.order_of_blocks()
        x, width = rearranged(x, sends, order), math.prod(x.shape[1:])
        out = x.new_empty((sum(takes), *x.shape[1:]))
        taken = [takes[block] for block in order]
        counts = ([rows * width for rows in taken], [sends[block] * width for block in order])
        self.calls.all_to_all(out.view(-1), x.contiguous().view(-1), *counts)
        return rearranged(out, taken, inverse)

    def _by_rank(self) -> tuple[int, ...]:
        """Returns the number of each group rank's block."""
        return tuple(start for start, _ in spans(self.sizes, self.order, self.size))

    def blocks(self, extent: int) -> list[tuple[int, int]]:
        """Returns (start, length) of the blocks of all ranks, in the order of the blocks."""
        return blocks(self.sizes, extent)

    def order_of_blocks(self) -> list[int]:
        """Returns the group rank with each block."""
        return [self._by_rank().index(block) for block in range(self.size)]

    def deal(
        self, sent: Sequence[Sequence[Tensor]], takes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Starts to send tensors `sent[i]` to the rank with block i; see `Peers`."""
        index_of, me = self._by_rank(), self.index
        leaving = [[] if index == me else sent[index] for index in index_of]
        sends = [sum(x.numel() for x in pieces) for pieces in leaving]
        counts = [0 if index == me else takes[index] for index in index_of]
        pieces = [x for pieces in leaving for x in pieces]
        row = flattened(pieces) if pieces else next(filter(len, sent))[0].new_empty(0)
        out = row.new_empty(sum(counts))
        work = self.calls.all_to_all(out, row, counts, sends, ahead=True)

        def arrive(row: Tensor | None = row) -> list[Tensor]:  # held until all of it is sent
            if work is not None:
                work.wait()
            taken = dict(zip(index_of, out.split(counts), strict=True))
            return [taken[index] for index in range(self.size)]

        return arrive

    def sum_parts(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks of x[i], where i is this rank's block."""
        if x.is_cpu:  # gloo reduces all of x on every rank, which takes twice as long
            return self.swap(x).sum(0)
        index_of = list(self._by_rank())
        rows = x if index_of == sorted(index_of) else x[index_of]
        out = x.new_empty(x.shape[1:])
        self.calls.reduce_scatter(out.view(-1), rows.reshape(-1))
        return out

    def reduce_scatter(self, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns this rank's block of the sum over the group, computed in `dtype` if given."""
        return self.reduce_scatter_all([x.to(dtype or x.dtype)], [dim])[0].to(x.dtype)

    def gather(self, x: Tensor, dim: int, extent: int | None = None) -> Tensor:
        """Concatenates the blocks of all ranks."""
        return self.gather_all([x], [dim], [extent])[0]

    # Several tensors at once, in one flat buffer: gloo needs equal ranks, and every backend accepts
    # such a buffer. A single tensor that is only sent is its own buffer.

    def reduce_all(self, xs: list[Tensor]) -> list[Tensor]:
        """Returns the sum of each over the group; empties `xs` once they are in the buffer."""
        if self.channel is None:
            return xs
        shapes = [x.shape for x in xs]
        total = torch.cat([x.reshape(-1) for x in xs])
        xs.clear()
        self.calls.all_reduce(total)
        flat = total.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]

    def reduce_scatter_all(
        self, xs: list[Tensor], dims: Sequence[int], into: Tensor | None = None
    ) -> list[Tensor]:
        """Applies `reduce_scatter` to each along its dimension.

        Empties `xs` once they are in the buffer. The result is in `into`, if that has as many
        elements and the same dtype.
        """
        own = [self.own(int(x.shape[dim]))[1] for x, dim in zip(xs, dims, strict=True)]
        sent, shapes = self._packed(xs, dims)
        fits = into is not None and (len(into), into.dtype) == (sent.shape[1], sent.dtype)
        out = into if into is not None and fits else sent.new_empty(sent.shape[1])
        self.calls.reduce_scatter(out, sent.view(-1))
        if len(shapes) > 1:
            free(sent)
        parts = out.split([shape.numel() for shape in shapes])
        return [
            trimmed(part.view(shape), dim, length)
            for part, shape, dim, length in zip(parts, shapes, dims, own, strict=True)
        ]

    def _packed(self, xs: list[Tensor], dims: Sequence[int]) -> tuple[Tensor, list[torch.Size]]:
        """Packs blocks by rank; returns the buffer and the blocks' shapes; empties `xs`."""
        blocks = [self.split(x, dim) for x, dim in zip(xs, dims, strict=True)]
        xs.clear()
        shapes = [block.shape[1:] for block in blocks]
        rows = [block.view(self.size, -1) for block in blocks]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1), shapes

    def gather_all(
        self, xs: Sequence[Tensor], dims: Sequence[int], extents: Sequence[int | None]
    ) -> list[Tensor]:
        """Applies `gather` to each along its dimension."""
        return self.begin_gather(xs, dims, extents, False)()

    def begin_gather(
        self,
        xs: Sequence[Tensor],
        dims: Sequence[int],
        extents: Sequence[int | None],
        ahead: bool,
        quantised: bool = False,
        into: Sequence[Tensor] = (),
    ) -> Callable[[], list[Tensor]]:
        """Starts `gather_all`; the returned function waits for it, if it runs `ahead`.

        If `quantised`, tensors are sent as int8 blocks, and a device's own part is rounded too, so
        that all have the same values. Results are written `into` contiguous tensors, if given; rows
        of a single one arrive there without a buffer.
        """
        equal = [self._of_equal_blocks(*given) for given in zip(xs, dims, extents, strict=True)]
        flat = [x.reshape(-1) for x, _ in equal]
        lengths = [part.numel() for part in flat]
        if quantised:
            sent = pack([part.unsqueeze(0) for part in flat]).view(-1)
        else:
            sent = flat[0] if len(flat) == 1 else torch.cat(flat)
        straight = len(into) == 1 and not quantised and not dims[0] and self._in_order(into[0])
        out = into[0] if straight else sent.new_empty((self.size, sent.numel()))
        work = self.calls.all_gather(out.view(-1), sent, ahead)

        def arrive() -> list[Tensor]:
            if work is not None:
                work.wait()
            if straight:
                return [*into]
            if len(flat) > 1:
                free(sent)
            rows: Sequence[Tensor] = (
                unpack(out, lengths, xs[0].dtype) if quantised else out.split(lengths, 1)
            )
            whole: Sequence[Tensor | None] = into or [None] * len(xs)
            joined = [
                self.join(row.unflatten(1, x.shape) if x.dim() else row, dim, extent, to)
                for row, (x, extent), dim, to in zip(rows, equal, dims, whole, strict=True)
            ]
            if into:
                free(out)
            return joined

        return arrive

    def _in_order(self, x: Tensor) -> bool:
        """Returns whether blocks of rows of x are in the order of ranks, with equal lengths."""
        straight = x.is_contiguous() and list(self.order) == sorted(self.order)
        return straight and x.shape[0] % self.size == 0

    def exchange(self, x: Tensor, dim: int, to_dim: int, extent: int | None = None) -> Tensor:
        """Gathers `dim` while splitting `to_dim`."""
        length = self.own(int(x.shape[to_dim]))[1]
        x, extent = self._of_equal_blocks(x, dim, extent)
        blocks = self.split(x, to_dim)
        out = torch.empty_like(blocks)
        self.calls.all_to_all(out, blocks)
        return trimmed(self.join(out, dim, extent), to_dim, length)

    def _of_equal_blocks(self, x: Tensor, dim: int, extent: int | None) -> tuple[Tensor, int]:
        """Pads x along `dim` to the length of the longest block; also returns the whole extent."""
        if extent is None:
            return x, int(x.shape[dim]) * self.size
        longest = max(length for _, length in self.parts(extent))
        return padded(x, dim, longest), extent

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's block of x."""
        self.parts(int(x.shape[dim]))
        own = x.narrow(dim, *self.own(int(x.shape[dim])))
        return own.clone(memory_format=torch.contiguous_format)

    def pad(self, x: Tensor, dim: int, extent: int | None = None) -> Tensor:
        """Places x among zeros."""
        dim = dim % x.dim()
        extent = int(x.shape[dim]) * self.size if extent is None else extent
        whole = x.new_zeros([*x.shape[:dim], extent, *x.shape[dim + 1 :]])
        whole.narrow(dim, *self.own(extent)).copy_(x)
        return whole

    def first(self, x: Tensor) -> Tensor:
        """Returns x on the first rank, zeros on the others."""
        return x.clone() if self.index == 0 else torch.zeros_like(x)
