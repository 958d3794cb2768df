"""Accumulates results and gradients of attention over groups of keys, with few memory writes.

The first part that covers all rows is kept without a copy, so a single part is never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.operators.attention.partial_attention import Attention, merge_into
from autopar.operators.attention.sequences import Run
from autopar.operators.peer_devices import widened


@dataclass
class Result:
    """The result of attention of some queries over the keys added so far.

    Attributes:
        query, key, value: operands with the shapes of all parts, except for the number of keys.
        how: options of attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    how: Attention
    _total: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Run, out: Tensor, lse: Tensor) -> None:
        """Merges attention of some queries over further keys; may keep and overwrite `out`."""
        if self._total is None and rows[1] == self.query.shape[-2]:
            self._total = out, lse
            return
        own, own_lse = (x.narrow(-2, *rows) for x in self.total())
        merge_into(own, own_lse, out, lse)

    def total(self) -> tuple[Tensor, Tensor]:
        """Returns the result, in at least float32, and its lse [..., heads, queries, 1]."""
        if self._total is None:
            self._total = _unattended(self.query, self.key, self.value, self.how)
        return self._total


def _unattended(query: Tensor, key: Tensor, value: Tensor, how: Attention) -> tuple[Tensor, Tensor]:
    """Returns attention over no keys."""
    shared = (how.repeated(x, query) if how.grouped else x for x in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], *(x.shape[:-2] for x in shared))
    shape, wide = (*lead, query.shape[-2], value.shape[-1]), widened(query).dtype
    lse = query.new_full((*shape[:-1], 1), -torch.inf, dtype=wide)
    if len(shape) == 4:  # (batch, row, head, width) in memory, as torch's kernels write it
        shape = shape[0], shape[2], shape[1], shape[3]
        return query.new_zeros(shape, dtype=wide).transpose(1, 2), lse
    return query.new_zeros(shape, dtype=wide), lse


@dataclass
class GradientSum:
    """A sum of gradients, each for a range of rows.

    Attributes:
        like: a tensor with the shape of the sum, used if there is no target.
        target: the tensor into which the sum is written; None to allocate one.
    """

    like: Tensor
    target: Tensor | None = None
    _runs: list[Run] = field(default_factory=list)  # rows that have been written, disjoint

    def add(self, run: Run, more: Tensor) -> None:
        """Adds the gradients of some rows; may keep and overwrite `more`."""
        if self.target is None and run == (0, self.like.shape[-2]):
            self.target, self._runs = more, [run]
            return
        gaps = self._gaps(run)
        rows = self._memory().narrow(-2, *run)
        if gaps == [run]:
            rows.copy_(more)
        else:
            self._clear(gaps)
            rows.add_(more)
        self._runs = sorted([*self._runs, *gaps])

    def total(self) -> Tensor:
        """Returns the sum, in at least float32, with zeros where nothing was added."""
        every = 0, (self.like if self.target is None else self.target).shape[-2]
        self._clear(self._gaps(every))
        self._runs = [every]
        return self._memory()

    def add_to(self, total: Tensor) -> None:
        """Adds the sum to a tensor."""
        for run in self._runs:
            total.narrow(-2, *run).add_(self._memory().narrow(-2, *run))

    def _memory(self) -> Tensor:
        if self.target is None:
            self.target = torch.empty_like(self.like, dtype=widened(self.like).dtype)
        return self.target

    def _clear(self, gaps: Sequence[Run]) -> None:
        for gap in gaps:
            self._memory().narrow(-2, *gap).zero_()

    def _gaps(self, run: Run) -> list[Run]:
        """Returns the rows of a run that have not been written."""
        gaps, (at, count) = [], run
        end = at + count
        for start, size in self._runs:
            if at < start < end:
                gaps.append((at, start - at))
            if start < end:
                at = max(at, start + size)
        return [*gaps, (at, end - at)] if at < end else gaps
