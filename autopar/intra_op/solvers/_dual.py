"""Lower bounds by reparametrised costs and priced memory, and the choices that they rule out.

Two relaxations are combined. Memory is priced instead of limited (Lagrange multipliers, by Polyak's
subgradient steps along an average of the last directions): a choice pays lambda_t for every byte it
holds at time t, and lambda_t times the limit is subtracted. TRW-S moves costs between edges and
nodes. The sum of least entries is a lower bound.

A choice, or pair of choices, with which the bound exceeds a price is in no cheaper solution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.intra_op.reduce.flat import Flat, Floats, Ints
from autopar.intra_op.solvers._trws import bound, links, lower_bound, sweeps

STEPS = 600
SWEEPS = 4  # message sweeps per step of the memory prices
PATIENCE = 12  # steps without a better bound before the step length is halved
FIRST, LAST = 0.1, 5e-4  # step lengths, relative to Polyak's
MEMORY = 0.8  # weight of the last direction in the next
# Of a step, of each of its edges, and of each pair of choices, on a slow core.
STEP_SECONDS, EDGE_SECONDS, PAIR_SECONDS = 1e-4, 2e-6, 4e-8


@dataclass(frozen=True)
class Dual:
    """A lower bound in seconds, and the prices and messages that prove it.

    Args:
        flat: the problem.
        prices: seconds per byte at each of its times, (times,).
        messages: see `_trws`.
        bound: seconds.
        guesses: cheap choices under these memory prices, met on the way.
    """

    flat: Flat
    prices: Floats
    messages: Floats
    bound: float
    guesses: tuple[Ints, ...]

    def without(self, price: float) -> Flat:
        """Returns the problem without choices and pairs that no solution within `price` uses."""
        flat, graph = self.flat, links(self.flat)
        excess, least = np.zeros(len(flat.cost)), np.zeros(flat.nodes, dtype=np.int64)
        cost = flat.priced(self.prices)
        least_entries = bound(graph, cost, self.messages, excess, least)
        proved = _proved(flat, self.prices, least_entries)
        scale = abs(price) + abs(proved) + float(self.prices @ np.abs(flat.limit - flat.base))
        room = price - proved + 1e-11 * scale
        matrix = flat.matrix.copy()
        for e, (a, b) in enumerate(flat.ends.tolist()):
            left, right = (slice(graph.start[v], graph.start[v + 1]) for v in (a, b))
            lines = [
                self.messages[low:high]
                for low, high in pairwise(graph.message[2 * e : 2 * e + 3].tolist())
            ]
            view = matrix[flat.place[e] : flat.place[e + 1]].reshape(len(lines[0]), len(lines[1]))
            rest = view - lines[0][:, None] - lines[1]
            rest -= rest.min()
            # Costs that an edge adds at its ends must not count twice.
            rows, columns = excess[left] - rest.min(axis=1), excess[right] - rest.min(axis=0)
            view[rest + rows[:, None] + columns > room] = np.inf
        return replace(flat, cost=np.where(excess > room, np.inf, flat.cost), matrix=matrix)


def step_work(flat: Flat) -> float:
    """Returns the seconds on a slow core that a step of `ascend` counts as."""
    return STEP_SECONDS + EDGE_SECONDS * len(flat.ends) + PAIR_SECONDS * len(flat.matrix)


def ascend(
    flat: Flat,
    prices: Floats,
    target: float,
    enough: Callable[[float, Ints], bool],
    steps: int = STEPS,
) -> Dual:
    """Raises the bound until it stalls, reaches `target` seconds, or `enough` accepts it.

    Every choice of the problem must have an allowed partner at every neighbour.

    Args:
        flat: the problem.
        prices: initial prices of memory.
        target: seconds.
        enough: called with the bound and a cheap choice under the current memory prices.
        steps: maximal number of steps of the memory prices.
    """
    graph, table, room = links(flat), flat.table(), flat.limit - flat.base
    guess, least = np.zeros(flat.nodes, dtype=np.int64), np.zeros(flat.nodes, dtype=np.int64)
    messages = np.zeros(int(graph.message[-1]))
    best = Dual(flat, prices, messages.copy(), -np.inf, ())
    direction, length, stalled = np.zeros(len(prices)), FIRST, 0
    guesses: dict[bytes, Ints] = {}
    for step in range(steps):
        cost = flat.cost + table @ prices
        # The first sweep is a backward one, whose messages the first forward sweep reads.
        first, last = (0, SWEEPS) if step else (-1, 10 * SWEEPS)
        sweeps(graph, cost, messages, guess, first, last)
        proved = _proved(flat, prices, lower_bound(graph, cost, messages, least))
        guesses[guess.tobytes()] = guess.copy()
        stalled = 0 if proved - best.bound > 1e-5 * abs(proved) else stalled + 1
        if proved > best.bound:
            best = Dual(flat, prices, messages.copy(), proved, ())
        if best.bound >= target or enough(best.bound, guess) or length < LAST:
            break
        if stalled > PATIENCE:
            length, stalled = length / 2, 0
            prices, messages, direction = best.prices, best.messages.copy(), 0.0 * direction
        elif len(prices):
            held = 0.5 * (table[flat.start[:-1] + least] + table[flat.start[:-1] + guess]).sum(0)
            fresh = (held - room) / flat.limit
            direction = MEMORY * direction + (1 - MEMORY) * fresh
            prices = _stepped(prices, direction, fresh, length * (target - proved), flat.limit)
    return replace(best, guesses=tuple(guesses.values()))


def _stepped(prices: Floats, direction: Floats, fresh: Floats, rise: float, limit: float) -> Floats:
    """Returns non-negative prices one step along a direction, for a rise of `rise` seconds."""
    along = np.where((prices > 0) | (direction > 0), direction, 0.0)
    square = max(float(along @ along), 0.1 * float(fresh @ fresh))
    if not 0 < square < np.inf:
        return prices
    return np.maximum(prices + max(rise, 0.0) / square * along / limit, 0.0)


def _proved(flat: Flat, prices: Floats, least_entries: float) -> float:
    """Returns a lower bound in seconds on every choice that fits, reduced to allow for rounding."""
    refund = float(prices @ (flat.limit - flat.base)) if len(prices) else 0.0
    seconds = least_entries + flat.total
    return seconds - refund - 1e-12 * (abs(seconds) + abs(refund))
