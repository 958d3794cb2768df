"""The search for problems that stay large: prices of memory, merged choices, annealed moves.

Integer programs find no choice that fits here in a minute. The search has four parts:

1. The prices of memory change (`multipliers`), and some of the choices that they lead to are made
   to fit.
2. All other choices are left out. The reductions shrink this problem to a fraction of the whole
   one, so that its prices change many times faster: Blum et al., "Construct, Merge, Solve & Adapt"
   (Computers & Operations Research 68, 2016).
3. The prices of the whole problem change again, from those of the small one on, by small steps.
4. The cheapest choice that fits is kicked (`kicks`).

A choice or pair of choices with which the bound exceeds the best price is in no cheaper solution.
Without all of these, the problem still has every cheaper solution, so that its bounds, and the best
price if they exceed that, are bounds of the whole problem. If the reductions leave little of it,
integer programs solve it: after parts 1 and 3, and at the end.

Work is counted, so that a seed gives the same choice wherever time does not run out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.intra_op.reduce import run
from autopar.intra_op.reduce.flat import Flat, Ints
from autopar.intra_op.reduce.run import Reduced
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._integer.closing import close
from autopar.intra_op.solvers._large.kicks import Walk, anneal
from autopar.intra_op.solvers._large.multipliers import Multipliers
from autopar.intra_op.solvers._large.usage_tree import usage
from autopar.intra_op.solvers._search import Relaxation, Search

LARGE = 1_500  # nodes of a core above which integer programs are not tried
ENTRIES = 500_000  # pairs of choices above which they are not tried either
PAIRS = 7.5e7  # pairs per second of a step of the prices; both speeds are of one shared core
VISITS = 2.2e8  # pairs per second of kicks
STEP, KICK = 200_000, 500  # pairs that take the time of a step's and of a kick's other work
BALL = 25  # matrices visited by a kick, on average
DRIFT = 0.002  # longest change of the prices between two looks at the clock, as a logarithm
LOOK = 0.05  # seconds between two looks at the clock
TELL = 0.02  # share of the kicks between two reports
STEPS = 100_000  # most steps of the prices
FEW = 60  # steps for which the first part's share of little work or time is raised ...
MOST = 0.6  # ... to at most this
SWEEPS, STEP_SWEEPS = 40, 4  # between two bounds at the end, and in the time of a step
RISE = 1e-5  # relative rise of the bound between these at which to go on
CLOSING = 0.4  # share of what is left that integer programs have before the last time
DROP = 30  # steps that take the time of dropping choices
TIMES = 200  # most times at which memory is limited at first for integer programs
PRICED = 1e-6  # share of the bound that memory up to the limit costs where it is priced
WARM = 0.05  # share of the first part without memory
NOTED = 0.4  # share of the first part whose choices are not merged
FIRST_FIT, FIT = 5, 20  # steps before the first choice that is made to fit, and most between two
NEAR = 1.01  # a choice within the limit is improved if it costs at most this times the best
HOT, COLD = 3e-5, 1e-7  # first and last temperature, relative to the price


class Part(NamedTuple):
    """A part of the search.

    Args:
        work: its share of the work that is left by earlier parts.
        time: its share of the time that is left.
        long, short: first and last change of the prices, as logarithms.
    """

    work: float
    time: float
    long: float = 0.0
    short: float = 0.0


FIRST = Part(0.2, 0.25, 0.5, 0.02)
MERGED = Part(0.22, 0.3, 0.1, 0.005)
AGAIN = Part(0.28, 0.4, 0.1, 0.02)
KICKS = Part(0.8, 1.0)
SETTLED = Part(0.5, 0.5)


class Progress:
    """Share of a part of the search that is done: by count, or by the clock if that is ahead.

    Args:
        budget: limits of the search.
        seconds: by the clock.
        units: to be counted.
    """

    def __init__(self, budget: Budget, seconds: float, units: float) -> None:
        self.budget, self.begun, self.seconds = budget, budget.elapsed(), seconds
        self.most, self.done = max(int(units), 1), 0

    def share(self) -> float:
        """Returns the share that is done, at most 1."""
        clock = (self.budget.elapsed() - self.begun) / max(self.seconds, 1e-9)
        return min(max(self.done / self.most, clock), 1.0)


def is_large(search: Search) -> bool:
    """Returns whether reductions leave more than integer programs can close."""
    return search.core.nodes > LARGE or len(search.core.matrix) > ENTRIES


def large(search: Search) -> None:
    """Improves the search's choice and bound until the work is done, or time is up."""
    _Large(search).run()


class _Large:
    """The search, with the cheapest choice that fits and the prices of memory that led to it."""

    def __init__(self, search: Search) -> None:
        self.search, self.work = search, search.work
        self.multipliers = Multipliers(search.core, search.seed * STEPS)
        self.choice, self.price = search.best, search.price
        self.prices = self.multipliers.prices

    def run(self) -> None:
        """Runs the four parts, or integer programs once little is left."""
        multipliers = self.multipliers
        self._offer(multipliers, multipliers.lightest())
        needed = FEW * _pairs(multipliers.flat) / PAIRS
        work = _raised(FIRST.work, needed / max(self.work, 1e-9))
        time = _raised(FIRST.time, needed / max(self.search.budget.left(), 1e-9))
        first = self._progress(FIRST._replace(work=work, time=time), multipliers.flat)
        while first.share() < WARM:
            multipliers.choose()
            first.done += 1
        multipliers.begin()
        self._change_prices(multipliers, first, FIRST)
        if self.choice is None or self.search.done or self._closed(CLOSING):
            return
        self._merge(self.choice)
        multipliers.prices, multipliers.choice = self.prices, self.choice.copy()
        self._change_prices(multipliers, self._progress(AGAIN, multipliers.flat), AGAIN)
        if not self._closed(CLOSING):
            self._kick(self.choice)
            self._settle()
            self._closed(1.0, math.inf)

    def _closed(self, share: float, most: float = LARGE) -> bool:
        """Solves what cheaper choices can use, if that is little; returns whether that proves all.

        Args:
            share: of the work and time that are left.
            most: nodes above which integer programs are not tried.
        """
        search, proof, budget = self.search, self.multipliers.proof, self.search.budget
        if not search.near or search.done:
            return search.proved
        self.work -= DROP * _pairs(proof.flat) / PAIRS
        layer = search.cheaper(proof.without(search.price))
        if layer is None or layer.flat.nodes > most or len(layer.flat.matrix) > ENTRIES:
            return search.proved
        paid = proof.prices * (proof.flat.limit - proof.flat.base)
        dearest = np.sort(np.argsort(paid)[-TIMES:])
        times = dearest[paid[dearest] > PRICED * abs(proof.bound)]
        budget.done = search.work - self.work
        part = search.narrowed(layer)
        try:
            with budget.within(share):
                close(part, Relaxation(part, times, proof.prices[times]))
        except InfeasibleError:
            part.raise_bound(search.price)  # nothing is left
        self.work = search.work - budget.done
        search.raise_bound(part.bound)
        if part.price < search.price and part.best is not None:
            self.choice = layer.expand(part.best)
            search.offer(self.choice, repair=False)
            self.price = search.price
        return search.proved

    def _settle(self) -> None:
        """Passes more messages at the prices of the best bound, which raises it."""
        search, multipliers = self.search, self.multipliers
        multipliers.prices = multipliers.proof.prices
        multipliers.messages = multipliers.proof.messages.copy()
        progress, risen = self._progress(SETTLED, multipliers.flat), math.inf
        while progress.share() < 1 and risen > RISE * search.scale() and not search.done:
            before = multipliers.proof.bound
            multipliers.settle(SWEEPS)
            progress.done += SWEEPS // STEP_SWEEPS
            search.raise_bound(multipliers.prove())
            risen = multipliers.proof.bound - before

    def _progress(self, part: Part, flat: Flat) -> Progress:
        """Returns the progress of a part in which prices change."""
        return self._progress_of(part, PAIRS / _pairs(flat))

    def _progress_of(self, part: Part, rate: float) -> Progress:
        """Gives a part its share of the work, at a number of counted units per second."""
        work, budget = part.work * self.work, self.search.budget
        self.work -= work
        return Progress(budget, part.time * budget.left(), work * rate)

    def _change_prices(
        self, multipliers: Multipliers, progress: Progress, part: Part, layer: Reduced | None = None
    ) -> None:
        """Changes prices of memory, and offers the choices that they lead to.

        Args:
            multipliers: prices of the core's memory, or of a smaller problem's.
            progress: of this part.
            part: the lengths of the changes.
            layer: expands choices of the smaller problem; its bounds are not those of the core.
        """
        search, fit = self.search, progress.done + FIRST_FIT
        while (share := progress.share()) < 1 and not search.done:
            if part is FIRST and share < NOTED:
                multipliers.met[:] = False
            choice = multipliers.choose()
            progress.done += 1
            price, look = multipliers.price(choice), progress.done >= fit
            if (
                price < self.price
                if look
                else price < NEAR * self.price and multipliers.fits(choice)
            ):
                self._offer(multipliers, choice, layer)
            if look:
                fit += min(progress.done, FIT)  # early choices improve fast
                if layer is None:
                    search.raise_bound(multipliers.prove())
            multipliers.change(choice, part.long * (part.short / part.long) ** share)
        if not search.done:
            self._offer(multipliers, multipliers.choice, layer)
        if layer is None:
            search.raise_bound(multipliers.prove())

    def _offer(self, multipliers: Multipliers, choice: Ints, layer: Reduced | None = None) -> None:
        """Makes a choice fit, and keeps it if it is the cheapest."""
        fitted = multipliers.fitted(choice)
        if fitted is None or multipliers.price(fitted) >= self.price:
            return
        fitted = fitted if layer is None else layer.expand(fitted)
        self.search.offer(fitted, repair=False)
        self.choice, self.price, self.prices = fitted, self.search.price, multipliers.prices

    def _merge(self, choice: Ints) -> None:
        """Searches the problem of those choices that were met, and of one that fits."""
        core, met = self.search.core, self.multipliers.met
        met[core.start[:-1] + choice] = True
        layer = run(replace(core, cost=np.where(met, core.cost, np.inf)), self.search.problem.name)
        if layer.flat.nodes:
            multipliers = Multipliers(layer.flat, self.multipliers.seed + STEPS // 2)
            multipliers.choose()
            multipliers.prices = self.prices
            self._change_prices(multipliers, self._progress(MERGED, layer.flat), MERGED, layer)
        else:
            self._offer(self.multipliers, layer.expand(np.zeros(0, dtype=np.int64)))

    def _kick(self, choice: Ints) -> None:
        """Kicks a choice that fits, at the prices of memory that led to it."""
        search, multipliers, told = self.search, self.multipliers, 0.0
        core, moves, multipliers.prices = search.core, multipliers.moves, self.prices
        walk = Walk(
            multipliers.space,
            usage(moves, choice),
            multipliers.cost(),
            choice.copy(),
            choice.copy(),
        )
        record = self.price - core.total
        area = len(core.matrix) / max(len(core.ends), 1) + len(core.cost) / core.nodes
        visits = KICK + BALL * area
        progress = self._progress_of(KICKS, VISITS / visits)
        chunk = int(np.ceil(LOOK * VISITS / visits))
        while (share := progress.share()) < 1 and not search.done:
            heat = HOT * search.scale() * (COLD / HOT) ** share
            seed = search.seed * STEPS + progress.done // chunk
            record = anneal(moves, walk, record, chunk, heat, seed)
            progress.done += chunk
            multipliers.change(walk.choice, DRIFT)
            walk.cost[:] = multipliers.cost()
            if share > told + TELL or progress.share() >= 1 or search.done:
                told = share
                search.offer(walk.best, repair=False)


def _pairs(flat: Flat) -> int:
    """Returns the pairs that take the time of a step of the prices."""
    return STEP + len(flat.matrix) + len(flat.cost)


def _raised(share: float, needed: float) -> float:
    """Returns the share that is needed, between the usual share and MOST."""
    return min(max(share, needed), MOST)
