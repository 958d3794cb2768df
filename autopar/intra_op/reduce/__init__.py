"""Exact reductions to a smaller problem with the same optimum, and the way back.

A problem without memory is a partitioned Boolean quadratic problem (PBQP). The eliminations are R0,
R1 and R2 of Scholz and Eckstein, "Register allocation for irregular architectures" (LCTES 2002);
dominance is dead-end elimination, Goldstein's criterion (Biophysical Journal 66, 1994). Computation
graphs are close to series-parallel, and most operators have one strategy for each of their
neighbour's, so that of ten thousand nodes the rules leave about a hundred.

Each rule explains in a sentence why no optimum is lost. `rules` contains the rules of nodes and
edges, `dominance` the rules that compare choices, `memory` the rules that use memory; `flat`
compresses time. All
are compiled, over the arrays of `store`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.problem import Choices, Edge, Problem
from autopar.intra_op.reduce.flat import Flat, critical_times, flatten, infinite
from autopar.intra_op.reduce.run import Reduced, run

__all__ = [
    "Flat",
    "Reduced",
    "Reduction",
    "critical_times",
    "flatten",
    "infinite",
    "problem_of",
    "reduce",
    "run",
    "too_little_memory",
]


@dataclass(frozen=True)
class Reduction:
    """A smaller problem, and `expand`, which maps a choice for it to one for the original.

    A choice for the smaller problem costs as much as its expansion, and fits in memory if and only
    if its expansion does (its peak alone may be lower, where memory cannot bind). Eliminated nodes
    leave nodes with a single choice: one for their cost, others for their memory. If a node
    represents several nodes, each further piece of memory is a node that must agree with it.
    """

    problem: Problem
    expand: Callable[[Sequence[int]], tuple[int, ...]]


def reduce(problem: Problem) -> Reduction:
    """Applies all reductions until none changes anything; without a limit, memory is ignored.

    Raises:
        InfeasibleError: every choice is forbidden or does not fit; if memory is the reason, the
            message has the least attainable peak.
    """
    reduced = run(flatten(problem), problem.name)
    count = reduced.flat.nodes

    def expand(choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(reduced.expand(np.array(choice[:count], dtype=np.int64)).tolist())

    return Reduction(problem_of(reduced.flat, problem.name), expand)


def problem_of(flat: Flat, name: str) -> Problem:
    """Returns flat arrays as a problem over the same times."""
    sizes, start, place = np.diff(flat.start).tolist(), flat.start.tolist(), flat.place.tolist()
    labels = [tuple(map(str, range(size))) for size in sizes]
    cost = [tuple(flat.cost[a:b].tolist()) for a, b in pairwise(start)]
    memory: list[tuple[tuple[float, ...], tuple[int, int]]] = [
        ((0.0,) * size, (0, 0)) for size in sizes
    ]
    edges = [
        Edge(a, b, flat.matrix[low:high].reshape(sizes[a], sizes[b]))
        for (a, b), (low, high) in zip(flat.ends.tolist(), pairwise(place), strict=True)
    ]
    further: list[Choices] = []
    for (v, low, high), (begin, end) in zip(
        flat.span.tolist(), pairwise(flat.held.tolist()), strict=True
    ):
        nbytes = tuple(flat.nbytes[begin:end].tolist())
        if memory[v][1] == (0, 0):
            memory[v] = nbytes, (low, high)
            continue
        agree = np.where(np.eye(sizes[v], dtype=bool), 0.0, np.inf)
        edges.append(Edge(v, len(sizes) + len(further), agree))
        further.append(Choices(f"n{v}'", labels[v], (0.0,) * sizes[v], nbytes, (low, high)))
    nodes = [Choices(f"n{v}", labels[v], cost[v], *memory[v]) for v in range(len(sizes))]
    limit = None if flat.limit == np.inf else flat.limit
    return Problem(name, (*nodes, *further, *_remains(flat)), tuple(edges), limit)


def _remains(flat: Flat) -> list[Choices]:
    """Returns single-choice nodes for cost and, where memory binds, for memory held in any case."""
    remains = []
    if flat.total:
        remains.append(Choices("eliminated: cost", ("all",), (flat.total,), (0.0,), (0, 0)))
    starts = np.flatnonzero(np.diff(flat.base, prepend=0.0))
    for start, end in pairwise([*starts.tolist(), len(flat.base)]):
        if flat.base[start]:
            remains.append(
                Choices("eliminated: memory", ("all",), (0.0,), (flat.base[start],), (start, end))
            )
    return remains


def too_little_memory(problem: Problem, peak: float, qualifier: str = "") -> InfeasibleError:
    """Returns the error to raise when no choice fits, with the least attainable peak in bytes."""
    limit = problem.memory_limit
    return InfeasibleError(
        "no choice fits in memory",
        where=f"problem {problem.name!r}",
        why=f"least attainable peak: {qualifier}{peak:.6g} bytes, limit: {limit:.6g} bytes",
        todo="use more devices, a smaller batch, state sharding or recomputation",
    )
