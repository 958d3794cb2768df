"""The search for problems that stay large: multipliers on memory, then annealed moves (kicks).

Integer programs find no choice that fits here in a minute. The first part of the work changes the
prices of memory (`multipliers`), makes some choices fit, and keeps the cheapest; the rest kicks it
(`kicks`). Work is counted, so that a seed gives the same choice wherever time does not run out.
"""

from __future__ import annotations

import numpy as np

from autopar.intra_op.reduce.flat import Ints
from autopar.intra_op.solvers._large.kicks import Walk, anneal
from autopar.intra_op.solvers._large.multipliers import Multipliers
from autopar.intra_op.solvers._large.usage_tree import usage
from autopar.intra_op.solvers._search import Search

LARGE = 1_500  # nodes of a core above which integer programs are not tried
ENTRIES = 500_000  # pairs of choices above which they are not tried either
PAIRS = 4.0e7  # pairs per second of a step of the prices; both speeds are of one shared core
VISITS = 2.2e8  # pairs per second of kicks
STEP, KICK = 50_000, 500  # pairs that take the time of a step's and of a kick's other work
BALL = 25  # matrices visited by a kick, on average
DRIFT = 0.01  # longest change of the prices between two looks at the clock, as a logarithm
FULL = 0.998  # share of the limit that they aim at, since kicks keep within it
LOOK = 0.05  # seconds between two looks at the clock
TELL = 0.02  # share of the kicks between two reports
STEPS = 100_000  # most steps of the prices
PRICES, WALK = 0.4, 0.5  # shares of the work for the prices of memory and for the kicks
CLOCK = 0.5  # share of the time at which prices end on a slower core
FEW, SHARE = 60, 0.8  # steps for which the prices' share of little work or time is raised, to SHARE
WARM = 0.05  # of their work without memory
LONG, SHORT = 1.0, 0.02  # first and last change of the prices, as logarithms
FIRST_FIT, FIT = 5, 20  # steps before the first choice that is made to fit, and most between two
NEAR = 1.01  # a choice within the limit is improved if it costs at most this times the best
HOT, COLD = 1e-4, 1e-7  # first and last temperature, relative to the price


class Progress:
    """Share of a part of the search that is done: by count, or by the clock if that is ahead.

    Args:
        search: the search.
        work: this part's share of the work.
        share: its share of the time that is left.
        rate: counted units per second of work.
    """

    def __init__(self, search: Search, work: float, share: float, rate: float) -> None:
        self.budget = search.budget
        self.begun, self.seconds = self.budget.elapsed(), share * self.budget.left()
        self.most = max(int(work * search.work * rate), 1)
        self.done = 0

    def share(self) -> float:
        """Returns the share that is done, at most 1."""
        clock = (self.budget.elapsed() - self.begun) / max(self.seconds, 1e-9)
        return min(max(self.done / self.most, clock), 1.0)


def is_large(search: Search) -> bool:
    """Returns whether reductions leave more than integer programs can close."""
    return search.core.nodes > LARGE or len(search.core.matrix) > ENTRIES


def large(search: Search) -> None:
    """Improves the search's choice and bound until the work is done, or time is up."""
    best = _Best(search)
    _price(search, best)
    if best.choice is not None and not search.done:
        _kick(search, best, best.choice)


class _Best:
    """The cheapest choice that fits, with the prices of memory that led to it."""

    def __init__(self, search: Search) -> None:
        self.search, self.multipliers = search, Multipliers(search.core, search.seed * STEPS)
        self.choice, self.price = search.best, search.price
        self.prices = self.multipliers.prices

    def offer(self, choice: Ints | None) -> None:
        """Keeps a choice that fits if it is the cheapest."""
        price = self.search.price if choice is None else self.multipliers.price(choice)
        if choice is not None and (self.choice is None or price < self.price):
            self.choice, self.price, self.prices = choice, price, self.multipliers.prices
            self.search.offer(choice, repair=False)


def _price(search: Search, best: _Best) -> None:
    """Changes the prices of memory, and offers the choices that they lead to."""
    multipliers = best.multipliers
    best.offer(multipliers.fitted(multipliers.lightest()))
    pairs = STEP + len(search.core.matrix) + len(search.core.cost)
    needed, left = FEW * pairs / PAIRS, search.budget.left()
    work = _raised(PRICES, needed / max(search.work, 1e-9))
    progress = Progress(search, work, _raised(CLOCK, needed / max(left, 1e-9)), PAIRS / pairs)
    while progress.share() < WARM:
        multipliers.choose()
        progress.done += 1
    multipliers.begin()
    fit = progress.done + FIRST_FIT
    while (share := progress.share()) < 1 and not search.done:
        choice = multipliers.choose()
        progress.done += 1
        price, look = multipliers.price(choice), progress.done >= fit
        if price < best.price if look else price < NEAR * best.price and multipliers.fits(choice):
            best.offer(multipliers.fitted(choice))
        if look:
            fit += min(progress.done, FIT)  # early choices improve fast
            search.raise_bound(multipliers.prove())
        multipliers.change(choice, LONG * (SHORT / LONG) ** share)
    if not search.done:
        best.offer(multipliers.fitted(multipliers.choice))
    search.raise_bound(multipliers.prove())


def _raised(share: float, needed: float) -> float:
    """Returns the share that is needed, between the usual share and SHARE."""
    return min(max(share, needed), SHARE)


def _kick(search: Search, best: _Best, choice: Ints) -> None:
    """Kicks a choice that fits, at the prices of memory that led to it."""
    core, multipliers, told = search.core, best.multipliers, 0.0
    moves, multipliers.prices = multipliers.moves, best.prices
    cost = multipliers.cost()
    walk = Walk(multipliers.space, usage(moves, choice), cost, choice.copy(), choice.copy())
    record = best.price - core.total
    area = len(core.matrix) / max(len(core.ends), 1) + len(core.cost) / core.nodes
    visits = KICK + BALL * area
    progress = Progress(search, WALK, 1.0, VISITS / visits)
    chunk = int(np.ceil(LOOK * VISITS / visits))
    while (share := progress.share()) < 1 and not search.done:
        heat = HOT * search.scale() * (COLD / HOT) ** share
        seed = search.seed * STEPS + progress.done // chunk
        record = anneal(moves, walk, record, chunk, heat, seed)
        progress.done += chunk
        multipliers.change(walk.choice, DRIFT, FULL)
        walk.cost[:] = multipliers.cost()
        if share > told + TELL or progress.share() >= 1 or search.done:
            told = share
            search.offer(walk.best, repair=False)
