"""Pairs of a range of queries and a range of keys that attention computes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.operators.attention.blocks import Block
from autopar.operators.attention.sequences import Run


@dataclass(frozen=True)
class BlockPair:
    """A range of queries and a range of keys of a turn.

    Attributes:
        rows, columns: start and length among the queries and among the keys.
        ahead: the distance from the first key to the first query if a causal mask hides some of the
            pairs, else None.
        start: position of the first key; if the keys form several runs, of the first run.
    """

    rows: Run
    columns: Run
    ahead: int | None
    start: int

    def within(self, block: Block) -> BlockPair:
        """Returns some of these queries and keys."""
        (row, count), (column, width) = block.rows, block.columns
        rows, columns = (self.rows[0] + row, count), (self.columns[0] + column, width)
        return BlockPair(rows, columns, 0 if block.kind == "causal" else None, self.start + column)


def joined(meetings: Sequence[BlockPair]) -> list[BlockPair]:
    """Merges adjacent pairs with the same queries or the same keys, if no mask cuts them."""
    joined: list[BlockPair] = []
    for new in meetings:
        for place, old in enumerate(joined):
            if old.ahead is not None or new.ahead is not None:
                continue
            if old.rows == new.rows and sum(old.columns) == new.columns[0]:
                columns = old.columns[0], old.columns[1] + new.columns[1]
                joined[place] = replace(old, columns=columns)
                break
            if old.columns == new.columns and sum(old.rows) == new.rows[0]:
                joined[place] = replace(old, rows=(old.rows[0], old.rows[1] + new.rows[1]))
                break
        else:
            joined.append(new)
    return joined
