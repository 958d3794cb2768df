"""Multipliers on memory at every time, for problems that stay large after reductions.

Every time has a Lagrange multiplier, the price of a byte at this time. It changes by a factor
that depends on how far a cheap choice is above or below the limit, relative to the room above the
lightest choices: multiplicative weights, Plotkin, Shmoys and Tardos, "Fast Approximation Algorithms
for Fractional Packing and Covering Problems" (FOCS 1991). Between two changes TRW-S continues with
its messages (`_trws`); dynamic programs over random forests improve the choice that it decodes
(`forest`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autopar.intra_op.reduce.flat import Flat, Floats, Ints
from autopar.intra_op.solvers._dual import Dual
from autopar.intra_op.solvers._large.forest import forest, forests
from autopar.intra_op.solvers._large.kicks import polish, repair
from autopar.intra_op.solvers._large.usage_tree import held, usage
from autopar.intra_op.solvers._moves import local, price
from autopar.intra_op.solvers._trws import lower_bound, sweep, sweeps

FORESTS = 2  # at a time
POLISHES = 3  # sweeps over single nodes
FIRST = 0.2  # price of all memory up to the limit at first, relative to the bound without it
LEAST, MOST = 0.03, 0.3  # relative excesses between which the largest makes the longest step


class Multipliers:
    """Prices of memory, with the messages and choices that go with them.

    Attributes:
        flat: the problem.
        prices: seconds per byte at each time.
        proof: the best lower bound so far, with its prices and messages.
        met: whether each choice of a node was part of a cheap choice.
    """

    def __init__(self, flat: Flat, seed: int = 0) -> None:
        self.flat, self.seed = flat, seed
        self.moves, self.steps = local(flat), 0
        self.space = forest(self.moves)
        self.messages = np.zeros(int(self.moves.graph.message[-1]))
        self.guess = np.zeros(flat.nodes, dtype=np.int64)
        self.choice, self.met = self.guess.copy(), np.zeros(len(flat.cost), dtype=np.bool_)
        pieces = range(len(flat.span))
        lightest = np.array([flat.nbytes[flat.held[p] : flat.held[p + 1]].min() for p in pieces])
        change = np.zeros(len(flat.base) + 1)
        np.add.at(change, flat.span[:, 1], lightest)
        np.subtract.at(change, flat.span[:, 2], lightest)
        room = flat.limit - flat.base - np.cumsum(change)[:-1]
        self.room = np.maximum(room, 1e-6 * flat.limit) if len(room) else room
        self.prices = np.zeros(len(flat.base))
        self.proof = Dual(flat, self.prices, self.messages.copy(), -np.inf, ())

    def begin(self) -> None:
        """Gives every time a first price, once the bound without memory is known."""
        self.prove()
        self.prices = FIRST * abs(self.proof.bound) / max(len(self.room), 1) / self.room

    def cost(self) -> Floats:
        """Returns the cost of every choice, with its memory priced."""
        return self.flat.priced(self.prices)

    def choose(self) -> Ints:
        """Returns a cheap choice at the present prices; it need not fit.

        It is the cheaper of two choices, each improved by random forests at the present prices: the
        last choice, and the choice that TRW-S decodes.
        """
        priced = self.moves._replace(cost=self.cost())
        decoded: list[Ints] = []
        for backward in (False, True):
            sweep(priced.graph, priced.cost, self.messages, self.guess, backward)
            decoded.append(self.guess.copy())
        fresh = min(decoded, key=lambda choice: price(priced, choice))
        self.choice = fresh.copy() if self.steps == 0 else self.choice
        for choice in (fresh, self.choice):
            self.steps += 1
            forests(priced, self.space, priced.cost, choice, FORESTS, self.seed + self.steps)
            self.met[self.flat.start[:-1] + choice] = True
        self.choice = min(self.choice, fresh, key=lambda choice: price(priced, choice))
        return self.choice.copy()

    def change(self, choice: Ints, length: float) -> None:
        """Changes prices by a factor of at most e^length.

        They rise where the choice holds more than the limit, and fall where it holds less.
        """
        if not len(self.room):
            return
        over = (held(self.moves, choice) - self.flat.limit) / self.room
        over /= min(max(float(over.max()), LEAST), MOST)
        self.prices = self.prices * np.exp(length * np.clip(over, -1.0, 1.0))

    def settle(self, count: int) -> None:
        """Passes messages at the present prices, in an even number of sweeps."""
        sweeps(self.moves.graph, self.cost(), self.messages, self.guess, 0, count)

    def prove(self) -> float:
        """Returns the best bound so far, after that of the present prices and messages."""
        flat, least = self.flat, self.guess.copy()
        refund = float(self.prices @ (flat.limit - flat.base))
        seconds = lower_bound(self.moves.graph, self.cost(), self.messages, least)
        rounding = 1e-12 * (abs(seconds) + abs(refund) + abs(flat.total))
        bound = seconds + flat.total - refund - rounding
        if bound > self.proof.bound:
            self.proof = Dual(flat, self.prices, self.messages.copy(), bound, ())
        return self.proof.bound

    def price(self, choice: Ints) -> float:
        """Returns the seconds of a choice."""
        return self.flat.total + price(self.moves, choice)

    def fits(self, choice: Ints) -> bool:
        """Returns whether a choice is within the limit at all times."""
        return float(held(self.moves, choice).max(initial=0.0)) <= self.flat.limit

    def lightest(self) -> Ints:
        """Returns the choice of the least bytes, each weighed by how long it is held."""
        flat = self.flat
        weight = flat.weighed((flat.span[:, 2] - flat.span[:, 1]).astype(np.float64))
        weight[np.isinf(flat.cost)] = np.inf
        return np.array([int(np.argmin(weight[a:b])) for a, b in pairwise(flat.start.tolist())])

    def fitted(self, choice: Ints) -> Ints | None:
        """Returns a choice near this one that fits, improved by single changes, or None."""
        choice = choice.copy()
        tree = usage(self.moves, choice)
        if not repair(self.moves, tree, self.cost(), choice):
            return None
        polish(self.moves, tree, choice, POLISHES)
        return choice
