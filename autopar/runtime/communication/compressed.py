"""Reduces compressed gradients by a method of `ir/compression/`, with error feedback.

A device adds its residual, the error of its earlier messages, to the gradient that it sends, and
keeps the error of the new message as residual (Seide et al., Interspeech 2014; Stich et al.,
arXiv:1809.07599). All messages and all residuals add up to the sum of all gradients.
Tensors are compressed one by one: no value depends on which tensors are sent together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.compression import Factors, Messages, method_of
from autopar.ir.compression._method import Reduction, matrix
from autopar.ir.storage import Hop
from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.communication.group import Group
from autopar_kernels.registry import register

_LIBRARY = register()  # keeps the operators registered
_KERNELS = torch.ops.autopar_kernels


class Memory(dict[str, Tensor]):
    """Tensors that compressed reductions keep of a parameter from step to step, by their names.

    A skipped step must leave it unchanged, so replaced tensors are kept until the step is decided.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Tensor | None] = {}

    def keep(self, name: str, value: Tensor) -> None:
        """Replaces a tensor; values that are not finite are replaced by 0."""
        self._before.setdefault(name, self.get(name))
        self[name] = value.nan_to_num(0.0, 0.0, 0.0).contiguous()

    def settle(self, made: Tensor | None) -> None:
        """Ends a step.

        Args:
            made: whether it is made, bool[] on the device; None if it is for certain.
        """
        for name, before in self._before.items():
            if made is not None:
                now = self[name]
                self[name] = torch.where(made, now, 0.0 if before is None else before)
        self._before.clear()


def reduce_compressed(
    group: Group,
    tensors: list[Tensor],
    hops: Sequence[Hop],
    memories: Sequence[Memory],
    slot: str,
) -> list[Tensor]:
    """Returns the sums of tensors over a group, or this rank's parts of them.

    Args:
        group: the ranks.
        tensors: this rank's gradients; the list is emptied.
        hops: the first hop of each tensor's compressed reduction.
        memories: the tensors kept of each parameter from step to step; residuals are under `slot`.
        slot: the name of this reduction among the reductions of a parameter.
    """
    method, dtype = method_of(hops[0].call.compression), tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    given = [
        x.to(wide) + memory[slot] if slot in memory else x.to(wide)
        for x, memory in zip(tensors, memories, strict=True)
    ]
    tensors.clear()
    dims = [hop.dim for hop in hops]
    if isinstance(method, Factors):
        summed, own = _by_factors(group, method, given, dtype, memories, slot)
        sums = [x if d is None else group.slice(x, d) for x, d in zip(summed, dims, strict=True)]
    elif hops[0].further:
        sums, own = _in_two_calls(group, method, given, dtype)
    else:
        sums, own = _by_messages(group, method, given, dtype, dims)
    if method.feedback:
        for memory, x, part in zip(memories, given, own, strict=True):
            memory.keep(slot, x - part)
    return [total.to(dtype) for total in sums]


Rows = list[Tensor]  # of each gradient [parts, n], a row for each receiver or from each sender


class _Packed:
    """Rows of several tensors, encoded, in one buffer [parts, bytes]."""

    def __init__(self, method: Messages, rows: Rows, dtype: torch.dtype) -> None:
        self.method, self.lengths = method, [row.shape[1] for row in rows]
        self.wide, self.dtype = rows[0].dtype, dtype
        pieces = [
            field.to(self._dtype(kind.dtype)).contiguous().view(torch.uint8)
            for row in rows
            for field, kind in zip(
                method.encode(row, _KERNELS), method.fields(row.shape[1]), strict=True
            )
        ]
        self.buffer = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def _dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[name] if name else self.dtype

    def _fields(self, buffer: Tensor) -> list[list[Tensor]]:
        """Returns the fields of each tensor's message in a buffer with the same packing."""
        found, start = [], 0
        for n in self.lengths:
            fields = []
            for name, length in self.method.fields(n):
                dtype = self._dtype(name)
                stop = start + length * dtype.itemsize
                field = buffer[:, start:stop].clone(memory_format=torch.contiguous_format)
                field = field.view(dtype)
                fields.append(field if name else field.to(self.wide))
                start = stop
            found.append(fields)
        return found

    def decoded(self, buffer: Tensor | None = None) -> Rows:
        """Returns the rows of a buffer that came, or of the own one."""
        fields = self._fields(self.buffer if buffer is None else buffer)
        return [
            self.method.decode(each, n, _KERNELS)
            for each, n in zip(fields, self.lengths, strict=True)
        ]

    def totals(self, buffer: Tensor) -> list[Tensor]:
        """Returns the sum over the rows of a buffer that came, [n] for each tensor."""
        return [
            self.method.total(each, n, _KERNELS)
            for each, n in zip(self._fields(buffer), self.lengths, strict=True)
        ]


def _by_messages(
    group: Group,
    method: Messages,
    given: Sequence[Tensor],
    dtype: torch.dtype,
    dims: Sequence[int | None],
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns sums by one all_gather, or parts by one all_to_all, and this rank's contribution.

    A method without feedback does not need its contribution.
    """
    if dims[0] is None:
        packed = _Packed(method, [x.reshape(1, -1) for x in given], dtype)
        shapes = [x.shape for x in given]
        totals = packed.totals(_gathered(group, packed.buffer))  # frees what came
        sums = [t.view(s) for t, s in zip(totals, shapes, strict=True)]
        if not method.feedback:
            return sums, []
        return sums, [t.reshape(s) for t, s in zip(packed.decoded(), shapes, strict=True)]
    sides = [dim or 0 for dim in dims]
    blocks = [group.split(x, dim) for x, dim in zip(given, sides, strict=True)]
    cuts = [block.shape for block in blocks]
    packed = _Packed(method, [block.view(group.size, -1) for block in blocks], dtype)
    blocks.clear()
    totals = packed.totals(_exchanged(group, packed.buffer))
    extents = [int(x.shape[dim]) for x, dim in zip(given, sides, strict=True)]
    sums = [
        total.view(cut[1:]).narrow(dim, 0, group.own(extent)[1]).contiguous()
        for total, cut, dim, extent in zip(totals, cuts, sides, extents, strict=True)
    ]
    if not method.feedback:
        return sums, []
    own = [
        group.join(row.reshape(cut), dim, extent)
        for row, cut, dim, extent in zip(packed.decoded(), cuts, sides, extents, strict=True)
    ]
    return sums, own


def _in_two_calls(
    group: Group, method: Messages, given: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns sums, of which each rank computes a part, and this rank's contribution.

    The error of the encoded sum counts as an error of the gradient of the rank that encodes it.
    """
    size, me = group.size, group.calls.ranks.index(torch.distributed.get_rank())
    lengths = [x.numel() for x in given]
    rows = [F.pad(x.reshape(-1), (0, -x.numel() % size)).view(size, -1) for x in given]
    packed = _Packed(method, rows, dtype)
    parts = packed.totals(_exchanged(group, packed.buffer))
    again = _Packed(method, [part.to(packed.wide).view(1, -1) for part in parts], dtype)
    sums = [
        whole.reshape(-1)[:n].view(x.shape)
        for whole, n, x in zip(
            again.decoded(_gathered(group, again.buffer)), lengths, given, strict=True
        )
    ]
    own: list[Tensor] = []
    if not method.feedback:
        return sums, own
    for row, part, said, n, x in zip(
        packed.decoded(), parts, again.decoded(), lengths, given, strict=True
    ):
        row = row.clone()
        row[me] -= part.to(row.dtype) - said[0]
        own.append(row.reshape(-1)[:n].view(x.shape))
    return sums, own


def _gathered(group: Group, buffer: Tensor) -> Tensor:
    out = buffer.new_empty((group.size, buffer.shape[1]))
    group.calls.all_gather(out.view(-1), buffer.view(-1))
    return out


def _exchanged(group: Group, buffer: Tensor) -> Tensor:
    out = torch.empty_like(buffer)
    group.calls.all_to_all(out, buffer)
    return out


def _by_factors(
    group: Group,
    method: Factors,
    given: Sequence[Tensor],
    dtype: torch.dtype,
    memories: Sequence[Memory],
    slot: str,
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns sums, with one all_reduce per factor, and this rank's contribution."""
    prefix = f"{slot}_"
    kept: list[dict[str, Tensor]] = [
        {key.removeprefix(prefix): memory[key] for key in memory if key.startswith(prefix)}
        for memory in memories
    ]
    runs: list[Reduction] = [
        method.reduce(x.reshape(matrix(x.shape)), mine) for x, mine in zip(given, kept, strict=True)
    ]
    factors = [next(run) for run in runs]
    sums: list[Tensor] = []
    own: list[Tensor] = []
    while factors:
        flat = torch.cat([factor.reshape(-1) for factor in factors]).to(dtype)
        group.calls.all_reduce(flat)
        came = flat.to(given[0].dtype).split([factor.numel() for factor in factors])
        shapes = [factor.shape for factor in factors]
        factors = []
        for run, total, shape, x in zip(runs, came, shapes, given, strict=True):
            try:
                factors.append(run.send(total.view(shape)))
            except StopIteration as end:
                whole, part = end.value
                sums.append(whole.view(x.shape))
                own.append(part.view(x.shape))
    for memory, mine in zip(memories, kept, strict=True):
        for key, value in mine.items():
            memory.keep(prefix + key, value)
    return sums, own
