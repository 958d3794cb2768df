"""Moments of recomputed and of offloaded blocks in a step.

As in `lifetimes.py`, operator i of n runs forwards at i and backwards at 2 n - i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.ir.recompute import Recompute, RecomputedOperators, again


@dataclass(frozen=True)
class Block:
    """A recomputed block: its operators, when it runs again, and when its backward is done."""

    what: RecomputedOperators
    when: float
    done: float


@dataclass(frozen=True)
class OffloadSpan:
    """The times at which a block's offloaded activations have left the device and are back."""

    gone: float
    back: float


def recomputed(
    graph: Graph, recompute: Sequence[Recompute | None], place: Mapping[str, int]
) -> dict[str, Block]:
    """Returns the block of each operator that belongs to a recomputed block.

    Args:
        graph: a graph with its repeats.
        recompute: the choice for each run.
        place: position of each operator among all.
    """
    blocks: dict[str, Block] = {}
    end = len(place)
    for repeat, how in zip(graph.repeats, recompute, strict=True):
        if how is None:
            continue
        what = again(graph, repeat, how.kind)
        for names in repeat.iterations[: how.blocks]:
            places = [place[name] for name in names if name in place]
            begin, done = 2 * end - max(places), 2 * end - min(places)
            blocks |= dict.fromkeys(names, Block(what, begin - 0.5, done))
    return blocks


def regathered(
    graph: Graph, again: Mapping[str, Block], place: Mapping[str, int], ahead: bool
) -> dict[str, float]:
    """Returns when the parameters of each operator's block are gathered for its backward.

    The first operator of a block that needs one of them gathers them all.

    Args:
        graph: a graph with its repeats.
        again: the block of each operator that is recomputed.
        place: position of each operator among all.
        ahead: whether they are gathered while the block after theirs runs its backward. A block
            that is recomputed and one that is not do not gather for one another.
    """
    moments: dict[str, float] = {}
    for repeat in graph.repeats:
        blocks = [[name for name in names if name in place] for names in repeat.iterations]
        begins = [
            again[names[0]].when
            if names[0] in again
            else 2 * len(place) - max(place[name] for name in names)
            for names in blocks
        ]
        for number, names in enumerate(blocks):
            behind = min(number + ahead, repeat.count - 1)
            alike = (names[0] in again) == (blocks[behind][0] in again)
            moments |= dict.fromkeys(names, begins[behind if alike else number])
    return moments


def offloaded(
    graph: Graph, runs: Sequence[tuple[int, int]], place: Mapping[str, int], overlapped: bool
) -> dict[str, OffloadSpan]:
    """Returns the block of each operator that belongs to an offloaded block.

    Args:
        graph: a graph with its repeats.
        runs: for each run, its first offloaded block and the one after the last.
        place: position of each operator among all.
        overlapped: whether copies overlap with kernels, as on accelerators: a block's tensors leave
            while the next block computes, and come back while the block after it runs its backward.
    """
    blocks: dict[str, OffloadSpan] = {}
    end = len(place)
    for repeat, (first, stop) in zip(graph.repeats, runs, strict=True):
        last = [max(place.get(name, -1) for name in names) for names in repeat.iterations]
        for number in range(first, stop):
            behind = number + overlapped
            gone = end if behind >= stop else last[behind]
            comes = last[min(behind, repeat.count - 1)]
            away = OffloadSpan(gone, 2 * end - comes - 0.5)
            blocks |= dict.fromkeys(repeat.iterations[number], away)
    return blocks


def spans(away: OffloadSpan | None, begin: float, end: float) -> list[tuple[float, float]]:
    """Returns when a tensor kept between two moments is on the device."""
    if away is None or away.back <= away.gone:
        return [(begin, end)]
    return [(begin, max(away.gone, begin)), (min(away.back, end), end)]
