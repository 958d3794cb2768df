"""Blocks that are trees are made optimal at once, and nothing is ever made worse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.intra_op.problem import Choices, Edge, Problem, evaluate
from autopar.intra_op.reduce import flatten
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers._moves import descend, holds, local
from autopar.intra_op.solvers._trees import trees


def drawn(seed: int, count: int, chords: int, limit: float | None) -> Problem:
    """A random tree of nodes with up to four choices, and `chords` more edges."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, count)
    nodes = tuple(
        Choices(
            f"v{i}",
            tuple(map(str, range(size))),
            tuple(rng.integers(0, 50, size).astype(float)),
            tuple(rng.integers(0, 20, size).astype(float)),
            (0, 1),
        )
        for i, size in enumerate(sizes)
    )
    ends = {(int(rng.integers(i)), i) for i in range(1, count)}
    while len(ends) < count - 1 + chords:
        a, b = sorted(map(int, rng.choice(count, 2, replace=False)))
        ends.add((a, b))
    edges = tuple(
        Edge(a, b, rng.integers(0, 100, (sizes[a], sizes[b])).astype(float))
        for a, b in sorted(ends)
    )
    return Problem("tree", nodes, edges, limit)


@pytest.mark.parametrize("seed", range(5))
def test_one_block_solves_a_tree(seed: int) -> None:
    """Single changes stop short of the optimum; a block over the whole tree is the optimum."""
    problem = drawn(seed, 60, 0, None)
    best, moves = solve(problem, "ilp"), local(flatten(problem))
    choice, held = np.zeros(60, np.int64), np.zeros(0)
    descend(moves, choice, held, 0.0, 1000)
    before = evaluate(problem, choice.tolist()).cost
    assert before > best.objective
    trees(moves, choice, held, np.zeros(0), 1, 60, seed)
    assert evaluate(problem, choice.tolist()).cost == best.objective == best.bound


@pytest.mark.parametrize("seed", range(5))
def test_with_cycles_and_a_limit_nothing_gets_worse_or_too_large(seed: int) -> None:
    problem = drawn(seed, 60, 30, None)
    most = evaluate(problem, solve(problem, "ilp")).peak
    least = sum(min(node.memory) for node in problem.nodes)
    problem = replace(problem, memory_limit=0.5 * (most + least))
    exact = solve(problem, "ilp")
    moves = local(flatten(problem))
    choice = np.array([int(np.argmin(node.memory)) for node in problem.nodes])
    held = np.zeros(1)
    assert holds(moves, choice, held) == 0
    before = evaluate(problem, choice.tolist()).cost
    trees(moves, choice, held, np.full(1, 0.5), 50, 20, seed)
    judged = evaluate(problem, choice.tolist())
    assert judged.feasible
    assert judged.peak == held[0]
    assert exact.bound <= judged.cost < before
