"""Fixing by bounds, to a fixpoint: what a target rules out leaves less, whose bound is higher.

A choice, or pair of choices, with which the bound exceeds a target is in no solution at or below
it, so those solutions and their prices stay as they are when it is left out (`Dual.without`). The
reductions then decide more, and the bound of what they leave, though it holds for these solutions
only, rules out more than that of the whole did; and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.intra_op.reduce import run
from autopar.intra_op.reduce.flat import Flat, Ints
from autopar.intra_op.reduce.run import Reduced
from autopar.intra_op.solvers._dual import Dual, ascend

WORTH = 0.9  # share of the choices that a round may leave for another one to follow
ROUNDS = 20


@dataclass(frozen=True)
class Narrowed:
    """What can still be in a solution at or below a target.

    Args:
        layers: the reductions, the first one of the whole problem.
        target: seconds; the price of the best solution met on the way, if that is lower.
        dual: the last bound; it holds for the solutions at or below the target.
    """

    layers: tuple[Reduced, ...]
    target: float
    dual: Dual

    @property
    def flat(self) -> Flat:
        """What is left."""
        return self.layers[-1].flat

    def expand(self, choice: Ints) -> Ints:
        """Returns a choice for the whole problem, given one for what is left."""
        for layer in reversed(self.layers):
            choice = layer.expand(choice)
        return choice


def narrow(
    dual: Dual,
    target: float,
    name: str,
    offer: Callable[[Sequence[Ints]], float],
    expired: Callable[[], bool],
) -> Narrowed:
    """Leaves out, round after round, what is in no solution at or below a target.

    Args:
        dual: the problem and a first bound.
        target: seconds, finite.
        name: of the problem, for messages.
        offer: takes choices for the whole problem that cost little; returns the best price known.
        expired: whether to stop after this round.

    Raises:
        InfeasibleError: no solution is at or below the target, or below the best price known.
    """
    layers: tuple[Reduced, ...] = (run(dual.without(target), name),)
    for _ in range(ROUNDS):
        found = Narrowed(layers, target, dual)
        if not found.flat.nodes or expired():
            return found
        dual = ascend(found.flat, dual.prices, target, lambda *_: expired())
        target = min(target, offer([found.expand(guess) for guess in dual.guesses]))
        layers = (*layers, run(dual.without(target), name))
        if len(layers[-1].flat.cost) > WORTH * len(found.flat.cost):
            break
    return Narrowed(layers, target, dual)
