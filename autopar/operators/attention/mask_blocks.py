"""Ranges of queries and keys outside of which a bool mask hides every pair.

A mask of documents or of a window leaves a query one range of keys. Runs of queries with the same
keys, or with one key more per query, need no mask: fused kernels compute them whole or causal.
Other queries are cut into blocks, each of which reads the range of keys to which they attend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.operators.attention.sequence_forms import ROWS
from autopar.operators.attention.sequences import Run

LEAST = 32  # queries of a run that is computed by itself
_SLACK = ROWS * ROWS  # hidden pairs that cost no more than another call
_Span = tuple[int, int, int]  # first key, end of the keys, number of keys


@dataclass(frozen=True)
class Block:
    """Queries and keys of which some pairs are not hidden.

    Attributes:
        rows, columns: first and number of the queries and of the keys.
        kind: "full" if no pair is hidden, "causal" if query i sees the keys up to the i-th, or
            "partial".
    """

    rows: Run
    columns: Run
    kind: str

    @property
    def pairs(self) -> int:
        """The number of pairs that are computed, if it is not causal."""
        return self.rows[1] * self.columns[1]

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the block's queries, keys and values."""
        columns = self.columns
        return query.narrow(-2, *self.rows), key.narrow(-2, *columns), value.narrow(-2, *columns)

    def cut(self, mask: Tensor | None) -> Tensor | None:
        """Returns the block's part of a mask whose dimensions may be broadcast; None if implied."""
        if self.kind != "partial" or mask is None:
            return None
        if mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask.narrow(-2, *self.rows)
        return mask.narrow(-1, *self.columns) if mask.shape[-1] > 1 else mask


def visible(mask: Tensor, queries: int, keys: int) -> list[Block]:
    """Returns the blocks that together have every visible pair once, in the order of the queries.

    Args:
        mask: bool, broadcast to [..., queries, keys]; a pair is visible if any batch or head sees
            it, and a block is full only if all of them do.
        queries, keys: numbers of queries and keys.
    """
    if not queries or not keys:
        return []
    spans = _spans(mask, keys)
    if len(spans) == 1:  # one range for all queries
        ((low, high, count),) = spans
        kind = "full" if count == high - low else "partial"
        return [Block((0, queries), (low, high - low), kind)] if low < high else []
    blocks: list[Block] = []
    waiting: list[_Line] = []  # runs too short for blocks of their own
    for line in _lines(spans):
        if line.kind != "partial" and line.rows[1] >= LEAST:
            blocks += [*_partial(waiting), *line.blocks()]
            waiting = []
        else:
            waiting.append(line)
    return [*blocks, *_partial(waiting)]


@dataclass(frozen=True)
class _Line:
    """Adjacent queries: those of equal or of growing ranges of keys, or a single one.

    Attributes:
        rows: first query, and number.
        low, high: first key, and end of the keys, of the first query.
        kind: as in `Block`.
    """

    rows: Run
    low: int
    high: int
    kind: str

    def blocks(self) -> list[Block]:
        """Returns the blocks of a long run."""
        if self.low == self.high:
            return []
        if self.kind == "full":
            return [Block(self.rows, (self.low, self.high - self.low), "full")]
        before = self.high - 1 - self.low
        square = Block(self.rows, (self.high - 1, self.rows[1]), "causal")
        return [Block(self.rows, (self.low, before), "full"), square] if before else [square]

    @property
    def end(self) -> int:
        """The end of the keys of the last query."""
        return self.high + (self.rows[1] - 1) * (self.kind == "causal")


def _lines(spans: Sequence[_Span]) -> Iterator[_Line]:
    """Yields runs of queries."""
    at, queries = 0, len(spans)
    while at < queries:
        low, high, count = spans[at]
        end, kind = at + 1, "full" if count == high - low else "partial"
        if kind == "full" and end < queries and low < high:
            kind = "causal" if spans[end] == (low, high + 1, count + 1) else "full"
        step = int(kind == "causal")
        while kind != "partial" and end < queries:
            more = step * (end - at)
            if spans[end] != (low, high + more, count + more):
                break
            end += 1
        yield _Line((at, end - at), low, high, kind)
        at = end


def _spans(mask: Tensor, keys: int) -> list[_Span]:
    """Returns for each query its first key, the end of its keys, and how many all batches see."""
    mask = torch.atleast_2d(mask)
    every = mask.flatten(0, -3) if mask.dim() > 2 else mask[None]
    some, all_see = every.any(0).byte(), every.all(0)
    if some.shape[-1] != keys:  # one value for all keys
        some, all_see = some.expand(-1, keys), all_see.expand(-1, keys)
    seen = some.amax(-1).long()
    low, high = some.argmax(-1) * seen, (keys - some.flip(-1).argmax(-1)) * seen
    return [tuple(row) for row in torch.stack([low, high, all_see.sum(-1)], -1).tolist()]


def _partial(lines: Sequence[_Line]) -> Iterator[Block]:
    """Yields blocks of up to `ROWS` queries of adjacent runs."""
    pending: Block | None = None
    for line in lines:
        if line.low == line.high:
            continue
        new = Block(line.rows, (line.low, line.end - line.low), "partial")
        both = new if pending is None else _union(pending, new)
        apart = new.pairs + (pending.pairs if pending else 0)
        if pending and (both.rows[1] > ROWS or both.pairs > apart + _SLACK):
            yield pending
            both = new
        pending = both
    if pending:
        yield pending


def _union(one: Block, other: Block) -> Block:
    """Returns the block of all queries from one to the other, with the keys of both."""
    low = min(one.columns[0], other.columns[0])
    high = max(sum(one.columns), sum(other.columns))
    rows = one.rows[0], sum(other.rows) - one.rows[0]
    return Block(rows, (low, high - low), "partial")
