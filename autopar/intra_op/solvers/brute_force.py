"""Tries every choice: the reference for the other solvers, with which it shares no code."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError, ProblemError
from autopar.intra_op.problem import FORBIDDEN, Problem, Solution

LIMIT = 5_000_000
CHUNK = 1 << 16


def solve(problem: Problem, **_: Any) -> Solution:
    """Returns the optimum, found by pricing all combinations of choices.

    Raises:
        ProblemError: there are more than five million combinations.
        InfeasibleError: none fits; the least attainable peak is in the message.
    """
    started = time.perf_counter()
    sizes = [len(node.cost) for node in problem.nodes]
    count = math.prod(sizes)
    if count > LIMIT:
        raise ProblemError(
            "the problem is too large to try every choice",
            where=f"problem {problem.name!r}",
            why=f"{count} combinations, at most {LIMIT}",
            todo="use the ilp solver",
        )
    best, best_cost, least_peak = -1, math.inf, math.inf
    for first in range(0, count, CHUNK):
        numbers = np.arange(first, min(first + CHUNK, count))
        choice = _digits(numbers, sizes)
        cost = _costs(problem, choice)
        peak = np.where(np.isfinite(cost), _peaks(problem, choice), np.inf)
        least_peak = min(least_peak, float(peak.min()))
        if problem.memory_limit is not None:
            cost[peak > problem.memory_limit] = np.inf
        index = int(np.argmin(cost))
        if cost[index] < best_cost:
            best, best_cost = int(numbers[index]), float(cost[index])
    if best < 0:
        raise InfeasibleError(
            "no choice fits",
            where=f"problem {problem.name!r}",
            why=f"least attainable peak: {least_peak:.6g} bytes, limit: {problem.memory_limit}"
            if least_peak < math.inf
            else "every combination has something forbidden",
            todo="allow more layouts, or more memory",
        )
    optimum = tuple(int(digits[0]) for digits in _digits(np.array([best]), sizes))
    seconds = time.perf_counter() - started
    return Solution(optimum, best_cost, best_cost, "brute_force", seconds)


def _digits(numbers: NDArray[np.int64], sizes: list[int]) -> list[NDArray[np.int64]]:
    """Returns each node's choice in each numbered combination; the last node varies fastest."""
    digits = []
    for size in reversed(sizes):
        numbers, digit = np.divmod(numbers, size)
        digits.append(digit)
    return digits[::-1]


def _costs(problem: Problem, choice: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns the seconds of each combination, infinite if something is forbidden."""
    total = np.zeros(choice[0].shape if choice else 1)
    prices = [np.array(node.cost)[k] for node, k in zip(problem.nodes, choice, strict=True)]
    prices += [edge.cost[choice[edge.a], choice[edge.b]] for edge in problem.edges]
    for price in prices:
        total += np.where(price >= FORBIDDEN, np.inf, price)
    return total


def _peaks(problem: Problem, choice: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns the peak bytes of each combination; memory only grows where some node starts."""
    peak = np.zeros(choice[0].shape if choice else 1)
    for moment in {live[0] for node in problem.nodes for live, _ in node.held}:
        held = np.zeros_like(peak)
        for node, k in zip(problem.nodes, choice, strict=True):
            for (begin, end), nbytes in node.held:
                if begin <= moment < end:
                    held += np.array(nbytes)[k]
        np.maximum(peak, held, out=peak)
    return peak
