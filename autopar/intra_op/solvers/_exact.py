"""Closing the gap with integer programs, on what a target leaves of a relaxation.

Everything that the bound rules out below a target is left out. If the rest has a solution below the
target, its best one is the relaxation's; else the target is a bound, and the next one is higher.
Trial targets come first, whose programs are small; the last one is the best price (`_narrow`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.reduce import run
from autopar.intra_op.reduce.flat import Ints
from autopar.intra_op.solvers._dual import Dual
from autopar.intra_op.solvers._narrow import Narrowed, narrow
from autopar.intra_op.solvers._program import program, solve_program
from autopar.intra_op.solvers._search import GUESSES, Relaxation, Search

FIRST_TRIAL = 0.005  # how far above the bound the first target is
LAST_TRIAL = 100.0  # from there on there is no target
FEW_PAIRS = 60_000
CUTS = 50
HALF = 0.5  # share of the gap that a better price may leave for HiGHS to begin anew
NARROWING = 0.2  # share of the time left that bounds of what is left may take before HiGHS begins


def close(search: Search, relaxation: Relaxation, idle: Callable[[], None] | None = None) -> None:
    """Solves relaxation after relaxation until the gap is closed or time is up.

    `idle` is called again and again while this waits for an integer program.

    Raises:
        InfeasibleError: it is proved that no choice fits.
    """
    trial = FIRST_TRIAL
    while not search.done:
        found = _below(search, relaxation, _target(search, relaxation, trial), idle)
        if found is None:
            trial *= 2
            continue
        search.offer(found)
        wider = search.peaks(found, relaxation.times)
        if len(wider) == len(relaxation.times):
            return  # it is the optimum, up to the gap
        search.say(f"memory at {len(wider)} times")
        relaxation = Relaxation(search, wider, relaxation.carried(wider))
        for guess in relaxation.guesses[-GUESSES:]:
            search.offer(guess)


def _target(search: Search, relaxation: Relaxation, trial: float) -> float:
    """Seconds below which to look: the price of the best choice once little is left below it, as
    what is cheaper is then soon found, or soon ruled out.
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
    """Returns the optimum of the relaxation, a choice for the core, if it is not above the target;
    else None, with the bound raised.
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
    """Returns what of the relaxation can be in a choice at or below the target.

    Below a trial target one bound says so: what a few more would rule out gives good choices.
    """
    name = search.problem.name
    if target < search.price:
        return Narrowed((run(dual.without(target), name),), target, dual)
    if target == math.inf:
        return Narrowed((run(dual.flat, name),), target, dual)
    end = search.elapsed() + NARROWING * search.left()
    return narrow(dual, target, name, relaxation.offer, lambda: search.elapsed() > end)


def _program_of(
    search: Search,
    relaxation: Relaxation,
    rest: Narrowed,
    target: float,
    idle: Callable[[], None] | None,
) -> Ints | None:
    """Returns the optimum of what a target left, or None if there is none or time is up."""
    latest: list[Ints] = []
    anew = -math.inf
    if target == search.price:
        anew = rest.dual.bound + HALF * (target - rest.dual.bound)

    def report(bound: float, choice: Ints | None) -> bool:
        search.raise_bound(min(bound, target))
        if choice is not None:
            latest.append(choice)
            search.offer(relaxation.inner.expand(rest.expand(choice)))
        # Nothing is below the target, or what is left below a much better price is solved sooner.
        return not search.done and bound < target and search.price > anew

    span = target - search.bound if target < math.inf else math.inf
    scale = abs(target) if target < math.inf else abs(search.bound)
    cuts: tuple[Ints, ...] = ()
    while len(cuts) < CUTS:
        latest.clear()
        stated = program(rest.flat, span, cuts)
        status, bound = solve_program(
            stated, search.left(), 0.5 * search.gap * scale, report, idle, search.seed
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
