"""Closes the gap with integer programs, restricted to choices that can cost less than a target.

Everything that the bound rules out below a target is dropped. If the rest has a solution below the
target, its best one is optimal for the relaxation; otherwise the target is a bound, and the next
target is higher. Trial targets come first, since their programs are small; the last target is the
best price (`narrowing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.reduce import run
from autopar.intra_op.reduce.flat import Ints
from autopar.intra_op.solvers._dual import Dual
from autopar.intra_op.solvers._integer.integer_program import program, solve_program
from autopar.intra_op.solvers._integer.narrowing import Narrowed, narrow
from autopar.intra_op.solvers._search import GUESSES, Relaxation, Search

FIRST_TRIAL = 0.005  # relative distance of the first target above the bound
LAST_TRIAL = 100.0  # above this there is no target
FEW_PAIRS = 60_000
CUTS = 50
HALF = 0.5  # HiGHS restarts when a better price leaves this share of the gap
NARROWING = 0.2  # share of the remaining budget for bounds before HiGHS starts


def close(search: Search, relaxation: Relaxation, idle: Callable[[], None] | None = None) -> None:
    """Solves relaxation after relaxation until the gap is closed or the budget is spent.

    `idle` is called repeatedly while an integer program runs.

    Raises:
        InfeasibleError: it is proved that no choice fits.
    """
    trial = FIRST_TRIAL
    while not search.done:
        choice = _below(search, relaxation, _target(search, relaxation, trial), idle)
        if choice is None:
            trial *= 2
            continue
        search.offer(choice)
        wider = search.peaks(choice, relaxation.times)
        if len(wider) == len(relaxation.times):
            return  # optimal up to the gap
        search.say(f"memory at {len(wider)} times")
        relaxation = Relaxation(search, wider, relaxation.carried(wider))
        for guess in relaxation.guesses[-GUESSES:]:
            search.offer(guess)


def _target(search: Search, relaxation: Relaxation, trial: float) -> float:
    """Returns the seconds below which to search.

    This is the price of the best choice once few pairs are left below it, since cheaper choices are
    then soon found or ruled out.
    """
    target = search.bound + trial * search.scale()
    if search.price < math.inf:
        near = search.price - target <= 0.25 * (search.price - search.bound)
        if near or (trial > FIRST_TRIAL and _pairs(relaxation, search.price) <= FEW_PAIRS):
            return search.price
    return target if trial < LAST_TRIAL else math.inf


def _pairs(relaxation: Relaxation, price: float) -> int:
    if relaxation.dual is None:
        return 0
    return int((relaxation.dual.without(price).matrix < np.inf).sum())


def _below(
    search: Search, relaxation: Relaxation, target: float, idle: Callable[[], None] | None
) -> Ints | None:
    """Returns the relaxation's optimum, a choice for the core, if it is not above the target.

    Otherwise returns None, and raises the bound.
    """
    if relaxation.dual is None:
        return relaxation.guesses[0]
    try:
        rest = _rest(search, relaxation, relaxation.dual, target)
    except InfeasibleError:
        if target == math.inf:
            raise
        search.raise_bound(min(target, search.price))
        return None
    target = rest.target
    search.raise_bound(min(rest.dual.bound, target))
    search.say(f"below {target:.9g}: {rest.flat.size()}")
    if search.done:
        return None
    if rest.flat.nodes:
        chosen = _program_of(search, relaxation, rest, target, idle)
    else:
        chosen = np.zeros(0, dtype=np.int64)
        search.raise_bound(min(rest.flat.total, target))
    if chosen is None or rest.flat.price(chosen) > target + search.gap * abs(target):
        return None
    return relaxation.inner.expand(rest.expand(chosen))


def _rest(search: Search, relaxation: Relaxation, dual: Dual, target: float) -> Narrowed:
    """Returns the part of the relaxation that a choice at or below the target can use.

    A trial target gets a single bound: the few extra pairs that remain give good choices.
    """
    name = search.problem.name
    if target < search.price:
        return Narrowed((run(dual.without(target), name),), target, dual)
    if target == math.inf:
        return Narrowed((run(dual.flat, name),), target, dual)
    return narrow(dual, target, name, relaxation.offer, search.budget.part(NARROWING).spent)


def _program_of(
    search: Search,
    relaxation: Relaxation,
    rest: Narrowed,
    target: float,
    idle: Callable[[], None] | None,
) -> Ints | None:
    """Returns the optimum of the remaining problem, or None without one or budget."""
    latest: list[Ints] = []
    anew = -math.inf
    if target == search.price:
        anew = rest.dual.bound + HALF * (target - rest.dual.bound)

    def report(bound: float, choice: Ints | None) -> bool:
        search.raise_bound(min(bound, target))
        if choice is not None:
            latest.append(choice)
            search.offer(relaxation.inner.expand(rest.expand(choice)))
        # Nothing is below the target, or a restart below a much better price is faster.
        return not search.done and bound < target and search.price > anew

    span = target - search.bound if target < math.inf else math.inf
    scale = abs(target) if target < math.inf else abs(search.bound)
    cuts: tuple[Ints, ...] = ()
    while len(cuts) < CUTS:
        latest.clear()
        stated = program(rest.flat, span, cuts)
        status, bound = solve_program(
            stated, search.budget, 0.5 * search.gap * scale, report, idle, search.seed
        )
        search.raise_bound(min(bound, target))
        if status == "infeasible" and target == math.inf:
            raise InfeasibleError("no choice fits", where=f"problem {search.problem.name!r}")
        if status != "optimal" or not latest:
            return None
        if not len(rest.flat.base) or rest.flat.holds(latest[-1]).max() <= rest.flat.limit:
            return latest[-1]
        cuts += (latest[-1],)
    return None
