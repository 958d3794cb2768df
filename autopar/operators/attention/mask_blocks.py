"""Ranges of queries and keys outside of which a bool mask hides every pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autopar.operators.attention.blocks import Block, Line, blocks_of

_Span = tuple[int, int, int]  # first key, end of the keys, number of keys


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
    return list(blocks_of(_lines(spans)))


def _lines(spans: Sequence[_Span]) -> Iterator[Line]:
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
        yield Line((at, end - at), low, high, kind)
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
