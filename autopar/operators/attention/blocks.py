"""Blocks of queries and keys that attention computes at once under a mask.

A mask of documents or of a window leaves a query one range of keys. Runs of queries with the same
keys, or with one key more per query, need no mask: fused kernels compute them whole or causal.
Other queries are cut into blocks, each of which reads the range of keys to which they attend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.operators.attention.sequence_forms import ROWS

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 32  # queries of a run that is computed by itself
_SLACK = ROWS * ROWS  # hidden pairs that cost no more than another call
Run = tuple[int, int]  # first position and length


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
    def area(self) -> int:
        """The number of pairs."""
        return self.rows[1] * self.columns[1]

    @property
    def work(self) -> int:
        """The number of pairs that are computed."""
        rows = self.rows[1]
        return rows * (rows + 1) // 2 if self.kind == "causal" else self.area

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


@dataclass(frozen=True)
class Line:
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


def blocks_of(lines: Iterable[Line]) -> Iterator[Block]:
    """Yields the blocks of adjacent lines, in the order of the queries."""
    waiting: list[Line] = []  # runs too short for blocks of their own
    for line in lines:
        if line.kind != "partial" and line.rows[1] >= LEAST:
            yield from _partial(waiting)
            yield from line.blocks()
            waiting = []
        else:
            waiting.append(line)
    yield from _partial(waiting)


def _partial(lines: Sequence[Line]) -> Iterator[Block]:
    """Yields blocks of up to `ROWS` queries of adjacent runs."""
    pending: Block | None = None
    for line in lines:
        if line.low == line.high:
            continue
        new = Block(line.rows, (line.low, line.end - line.low), "partial")
        both = new if pending is None else _union(pending, new)
        apart = new.area + (pending.area if pending else 0)
        if pending and (both.rows[1] > ROWS or both.area > apart + _SLACK):
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
