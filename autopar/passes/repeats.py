"""Finds runs of equal blocks by structure.

Nodes are compared in execution order. Two nodes are alike if they have the same operator, literals,
result types and operand types. For each period p the sequence is compared with itself
shifted by p, in one vectorised comparison; where it looks alike for at least p operators there may
be a run. Each candidate (a start, a period p and a number of blocks n) is then checked exactly.
Every operand must be of one kind, the same in all blocks:

    inner      the value at the same place of its own block
    carried    the value at the same place of the previous block; for the first block, a value from
               before the run
    invariant  the same value from before the run, for all blocks
    own        a parameter or buffer that only this block reads

Only carried values may leave a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.passes.shares import Run, insert_shares

_NONE = -(2**62)  # no operand
# Cuts tried per period and number of blocks, in ascending order of the values that cross them.
_CUTS = 32

Ints = NDArray[np.int64]


def find_repeats(graph: Graph) -> Graph:
    """Returns `graph` with shares between values and their readers, and with its `repeats`.

    Of all runs, those that cover the most operators are taken, with the smallest period; where the
    cut between blocks is free, it goes where the fewest values cross it. A block contains or reads
    a parameter.
    """
    return insert_shares(graph, _search(_Row(graph)))


class _Row:
    """The operators of a graph as arrays.

    Attributes:
        nodes: the operators, in execution order.
        token: number of each operator's looks; equal for operators that look alike.
        operands: for each operator its operands, padded: the place of an operator in `nodes`, or -1
            - the number of a leaf.
        single: whether each operator has one result.
        used: whether each operator is already in a run.
        last: place of each operator's last reader; beyond the end for outputs.
        leaves, looks, kinds: for each leaf its name, a number equal for leaves that look alike, and
            its kind.
        reads: number of reads of each leaf.
    """

    def __init__(self, graph: Graph) -> None:
        leaves = [node for node in graph.nodes if node.is_leaf]
        self.nodes = [node for node in graph.nodes if not node.is_leaf]
        self.leaves = [node.name for node in leaves]
        place = {node.name: -1 - index for index, node in enumerate(leaves)}
        place |= {node.name: index for index, node in enumerate(self.nodes)}
        size = len(self.nodes)
        width = max((len(node.inputs) for node in self.nodes), default=0)
        self.operands = np.full((size, width), _NONE)
        self.last = np.arange(size)
        self.reads = np.zeros(len(leaves), dtype=np.int64)
        for index, node in enumerate(self.nodes):
            for slot, name in enumerate(node.inputs):
                at = place[name]
                self.operands[index, slot] = at
                if at >= 0:
                    self.last[at] = index
                else:
                    self.reads[-1 - at] += 1
        for at in {place[name] for _, name in graph.outputs}:
            if at >= 0:
                self.last[at] = 2 * size
            else:
                self.reads[-1 - at] += 1
        self.token = _numbered([_looks(node, graph) for node in self.nodes])
        self.looks = _numbered([_leaf_looks(node) for node in leaves])
        self.kinds = np.array([node.op for node in leaves], dtype=np.str_)
        self.single = np.array([len(node.types) == 1 for node in self.nodes], dtype=bool)
        self.used = np.zeros(size, dtype=bool)

    @cached_property
    def crossing(self) -> Ints:
        """For each place, the number of earlier values that it or a later place reads."""
        change = np.zeros(len(self.nodes) + 2, dtype=np.int64)
        np.add.at(change, np.arange(len(self.nodes)) + 1, 1)
        np.add.at(change, np.minimum(self.last, len(self.nodes)) + 1, -1)
        return np.cumsum(change)

    def name(self, place: int) -> str:
        """Returns the name of an operator or leaf."""
        return self.nodes[place].name if place >= 0 else self.leaves[-1 - place]


def _numbered(looks: list[object]) -> Ints:
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(look, len(numbers)) for look in looks], dtype=np.int64)


def _looks(node: Node, graph: Graph) -> object:
    """Returns everything of an operator that must be equal in all blocks, except references."""
    operands = tuple((graph[name].types, graph[name].requires_grad) for name in node.inputs)
    literals = (_literals(node.args), tuple((key, _literals(arg)) for key, arg in node.kwargs))
    return (node.op, literals, node.types, node.requires_grad, node.saved_types, operands)


def _literals(arg: Arg) -> object:
    """Returns an argument without its references."""
    if isinstance(arg, tuple):
        return tuple(map(_literals, arg))
    # repr, because True == 1 and nan != nan.
    return None if isinstance(arg, Ref) else repr(arg)


def _leaf_looks(node: Node) -> object:
    return (node.op, repr((node.args[1:], node.kwargs)), node.types, node.requires_grad)


def _search(row: _Row) -> list[Run]:
    """Returns runs in execution order, without overlap."""
    runs: list[Run] = []
    while (run := _best(row)) is not None:
        runs.append(run)
        row.used[run.start : run.stop] = True
    return sorted(runs, key=lambda run: run.start)


def _best(row: _Row) -> Run | None:
    """Returns the run that covers the most unused operators; of equals that of smallest period."""
    candidates = []
    for period in range(1, len(row.nodes) // 2 + 1):
        counts = _counts(row, period)
        starts = np.flatnonzero(counts > 1)
        for region in np.split(starts, np.flatnonzero(np.diff(starts) > 1) + 1):
            if len(region):
                candidates.append((-int(counts[region].max()) * period, period, region, counts))
    best: Run | None = None
    for covered, period, region, counts in sorted(candidates, key=lambda item: item[:2]):
        if best is not None and -covered <= best.covered:
            break
        run = _of_region(row, period, region, counts[region])
        if run is not None and (best is None or run.covered > best.covered):
            best = run
    return best


def _counts(row: _Row, period: int) -> Ints:
    """Returns for each start the largest possible number of blocks."""
    size = len(row.nodes)
    alike = row.token[:-period] == row.token[period:]
    # A value read two periods later, or an output, can only be in the last block.
    alike &= row.last[:-period] < np.arange(size - period) + 2 * period
    alike &= ~row.used[:-period] & ~row.used[period:]
    if np.count_nonzero(alike) < period:
        return np.zeros(0, dtype=np.int64)
    looks_until = _until(alike)
    spans = looks_until - np.arange(size - period) >= period
    if not spans.any():
        return np.zeros(0, dtype=np.int64)
    a, b = row.operands[:-period], row.operands[period:]
    leaf = (a < 0) & (b < 0) & (a != _NONE) & (b != _NONE)
    own = np.zeros_like(leaf)
    own[leaf] = row.looks[-1 - a[leaf]] == row.looks[-1 - b[leaf]]
    shifted = (a >= 0) & (b == a + period)
    reads_until = _until(((a == b) | shifted | own).all(axis=1))
    # The first block may read anything in place of carried values.
    start = np.arange(size - period)
    after = np.minimum(start + period, size - period - 1)
    limit = np.minimum(looks_until, np.maximum(reads_until[after], start + period))
    return np.where(spans, 1 + (limit - start) // period, 0)


def _until(holds: NDArray[np.bool_]) -> Ints:
    """Returns for each place the first place from there on where `holds` is false."""
    size = len(holds)
    ends = np.where(holds, size, np.arange(size))
    return np.minimum.accumulate(ends[::-1])[::-1]


def _of_region(row: _Row, period: int, starts: Ints, counts: Ints) -> Run | None:
    """Returns the best run that begins in `starts`: most blocks, fewest carried values, first."""
    order = np.lexsort((starts, row.crossing[starts + period]))
    for count in _descending(int(counts.max())):
        cuts = starts[order][counts[order] >= count][:_CUTS]
        runs = [run for t in cuts if (run := _check(row, int(t), period, count)) is not None]
        if runs:
            return min(runs, key=lambda run: len(run.ends))
    return None


def _descending(most: int) -> Iterator[int]:
    """Yields numbers of blocks to try, as the first, the last or a middle block may differ."""
    yield from range(most, max(most - 3, 1), -1)
    half = most // 2
    while half > 1:
        if half < most - 2:
            yield half
        half //= 2


@dataclass(frozen=True)
class _Slots:
    """The operands of a candidate run by their kind, as arrays of [period, width]."""

    inner: NDArray[np.bool_]
    carried: NDArray[np.bool_]
    invariant: NDArray[np.bool_]
    own: NDArray[np.bool_]


def _check(row: _Row, start: int, period: int, count: int) -> Run | None:
    """Returns the run of `count` blocks of `period` operators from `start` on, if it is one."""
    stop = start + period * count
    blocks = row.operands[start:stop].reshape(count, period, row.operands.shape[1])
    shift = period * np.arange(count)[:, None, None]
    slots = _slots(blocks, start, period)
    later = blocks - (shift - period)  # as seen from block 1
    same = (blocks == blocks[1]).all(axis=0)
    moves = (later[1:] == blocks[1]).all(axis=0)
    first = blocks[0]
    fine = (
        (slots.inner & moves & (first == blocks[1] - period))
        | (slots.carried & moves & (first < start))
        | (slots.invariant & same)
        | slots.own
        | (blocks[1] == _NONE)
    )
    if not fine.all() or not _owned(row, blocks[:, slots.own]):
        return None
    # A run without parameters is not worth a function; an invariant may enter through its share
    # only.
    leaves = slots.own | (slots.invariant & (first < 0))
    if not _params(row, first[leaves]).any() or _params(row, first[slots.carried]).any():
        return None
    return _closed(row, blocks, slots, start, count)


def _params(row: _Row, operands: Ints) -> NDArray[np.bool_]:
    """Returns which of the leaves among `operands` are parameters."""
    kinds: NDArray[np.str_] = row.kinds[-1 - operands[operands < 0]]
    return np.equal(kinds, "param")


def _slots(blocks: Ints, start: int, period: int) -> _Slots:
    first, second = blocks[0], blocks[1]
    leaf = (second < 0) & (second != _NONE)
    return _Slots(
        inner=second >= start + period,
        carried=(second >= start) & (second < start + period),
        invariant=((second >= 0) & (second < start)) | (leaf & (first == second)),
        own=leaf & (first != second),
    )


def _owned(row: _Row, reads: Ints) -> bool:
    """Returns whether leaves read by [blocks, slots] each belong to one block, and are aligned."""
    if (reads >= 0).any() or (reads == _NONE).any():
        return False
    leaves = -1 - reads
    if np.isin(row.kinds[leaves], ("input", "received")).any():
        return False
    if (row.looks[leaves] != row.looks[leaves[0]]).any():
        return False
    firsts = [{leaf: slot for slot, leaf in reversed(list(enumerate(block)))} for block in leaves]
    aligned = [[where[leaf] for leaf in block] for where, block in zip(firsts, leaves, strict=True)]
    if any(line != aligned[0] for line in aligned[1:]):
        return False
    names, times = np.unique(leaves, return_counts=True)
    distinct = sum(len(where) for where in firsts) == len(names)
    return distinct and bool((row.reads[names] == times).all())


def _closed(row: _Row, blocks: Ints, slots: _Slots, start: int, count: int) -> Run | None:
    """Returns the run, if only carried values leave their block, to enter the next one."""
    period = blocks.shape[1]
    entering: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}  # place in the block -> number of the carried value
    starts: list[int] = []
    for place, slot in np.argwhere(slots.carried):
        end, begin = int(blocks[1, place, slot]) - start, int(blocks[0, place, slot])
        if end not in ends:
            ends[end] = len(ends)
            starts.append(begin)
        if starts[ends[end]] != begin:
            return None
        entering[int(place), int(slot)] = ends[end]
    if not ends or len(set(starts)) < len(starts):
        return None
    if not row.single[[start + end for end in ends]].all():
        return None
    limit = start + period * (1 + np.arange(count))[:, None] + np.zeros(period, dtype=np.int64)
    limit[:, list(ends)] += period
    limit[-1, list(ends)] = 3 * len(row.nodes)
    stop = start + period * count
    if (row.last[start:stop].reshape(count, period) >= limit).any():
        return None
    own = [
        tuple(dict.fromkeys(row.name(int(leaf)) for leaf in block[slots.own])) for block in blocks
    ]
    names = tuple(row.name(place) for place in starts)
    return Run(start, period, count, entering, tuple(ends), names, tuple(own))
