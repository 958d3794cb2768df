"""Fixes choices by bounds, to a fixpoint.

A choice, or pair of choices, with which the bound exceeds a target is in no solution at or below
the target; dropping it leaves those solutions and their prices unchanged (`Dual.without`). The
reductions then decide more, and the bound of the rest, though valid only for these solutions, rules
out more than that of the whole problem; and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.intra_op.reduce import run
from autopar.intra_op.reduce.flat import Flat, Ints
from autopar.intra_op.reduce.run import Reduced
from autopar.intra_op.solvers._dual import Dual, ascend, step_work

WORTH = 0.9  # another round follows if at most this share of the choices is left
ROUNDS = 20


@dataclass(frozen=True)
class Narrowed:
    """The choices that a solution at or below a target can still use.

    Args:
        layers: the reductions, the first one of the whole problem.
        target: seconds; lowered to the price of the best solution met on the way.
        dual: the last bound, valid for solutions at or below the target.
    """

    layers: tuple[Reduced, ...]
    target: float
    dual: Dual

    @property
    def flat(self) -> Flat:
        """The remaining problem."""
        return self.layers[-1].flat

    def expand(self, choice: Ints) -> Ints:
        """Returns a choice for the whole problem, given one for the remaining problem."""
        for layer in reversed(self.layers):
            choice = layer.expand(choice)
        return choice


def narrow(
    dual: Dual,
    target: float,
    name: str,
    offer: Callable[[Sequence[Ints]], float],
    expired: Callable[[float], bool],
) -> Narrowed:
    """Drops, round after round, everything that no solution at or below a target uses.

    Args:
        dual: the problem and a first bound.
        target: seconds, finite.
        name: name of the problem, for messages.
        offer: takes cheap choices for the whole problem; returns the best price known.
        expired: counts seconds of work, and returns whether to stop after this round.

    Raises:
        InfeasibleError: no solution is at or below the target, or below the best price known.
    """
    layers: tuple[Reduced, ...] = (run(dual.without(target), name),)
    for _ in range(ROUNDS):
        narrowed = Narrowed(layers, target, dual)
        step = step_work(narrowed.flat)
        if not narrowed.flat.nodes or expired(step):
            return narrowed
        dual = ascend(narrowed.flat, dual.prices, target, lambda *_, work=step: expired(work))
        target = min(target, offer([narrowed.expand(guess) for guess in dual.guesses]))
        layers = (*layers, run(dual.without(target), name))
        if len(layers[-1].flat.cost) > WORTH * len(narrowed.flat.cost):
            break
    return Narrowed(layers, target, dual)
