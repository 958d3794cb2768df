"""State that the solvers share: the best choice and bound so far, and steps that improve them.

Memory binds at few times, so it is limited only where a choice has exceeded the limit. The other
times are relaxed: the relaxation's bound is valid, and its optimum is the optimum if it fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError, ProblemError
from autopar.intra_op.problem import Edge, Problem, Solution, evaluate
from autopar.intra_op.reduce import flatten, run
from autopar.intra_op.reduce.flat import Flat, Floats, Ints
from autopar.intra_op.reduce.run import Reduced
from autopar.intra_op.solvers._budget import Budget
from autopar.intra_op.solvers._dual import Dual, ascend, step_work
from autopar.intra_op.solvers._moves import FITTING, descend, holds, kicks, local
from autopar.intra_op.solvers._trees import trees

Watch = Callable[[float, float, float], None]
"""Called with seconds since the start, the best price (or infinity) and the bound."""

PEAKS = 4  # new times with a memory limit per round
ROUNDS = 8
FEW_NODES = 5_000  # ties are settled up to this size; more nodes take seconds
GUESSES = 6  # last guesses of each bound that are improved
WIDE = 0.01  # gap above which the bound need not be raised to its end
LOOK = 10  # in that case, steps of the bound between guesses
LOOKS = 12  # rounds of repair while a choice exceeds memory
TREE = 200  # maximal nodes of a block that is optimised at once
DEVIATIONS = (0.0, 1e-3, 1e-2, 3e-2, 1e-1)  # from the best, allowed to kicks in rotation
NEAR = 0.01  # relative gap within which the bound prunes the core
MANY_PAIRS = 200_000  # pairs of a core for which pruning pays
SHRINK_STEPS = 12  # steps of the prices for that bound
WORK = 100_000_000  # pairs of choices per call of `shake`, under a second


class Search:
    """One problem being solved, within its time limit and to its gap."""

    def __init__(
        self,
        problem: Problem,
        time_limit: float,
        gap: float,
        progress: Callable[[str], None] | None,
        watch: Watch | None = None,
        seed: int = 0,
        work: float | None = None,
    ) -> None:
        self.work = time_limit if work is None else work
        # Proofs of small problems take unlike long: where a clock runs, they have all of its time.
        self.budget = Budget(time_limit, self.work if time_limit == math.inf else math.inf)
        self.problem, self.gap, self.seed = problem, gap, seed
        self.progress, self.watch = progress or (lambda text: None), watch
        self.best: Ints | None = None  # of the core, to continue from
        self.answer: Ints | None = None  # the choice of the whole problem with price `price`
        self.price, self.bound = math.inf, -math.inf
        self.layers = [run(flatten(problem), problem.name)]
        # A problem that is slow to reduce is slow to expand and judge.
        self.budget.keep(self.budget.elapsed())
        self.core = self.layers[0].flat
        self.whole = all(
            bool((amounts == np.floor(amounts)).all())
            for amounts in (self.core.nbytes, self.core.base)
        )  # then sums of bytes are exact
        self.times = np.zeros(0, dtype=np.int64)
        self.prices = np.zeros(0)  # seconds per byte at each of them
        self.moves = local(self.core.at(self.times))
        self.say(f"{len(problem.nodes)} nodes reduced to {self.core.size()}")

    def scale(self) -> float:
        """Returns the seconds that relative targets above the bound refer to."""
        largest = float(np.abs(self.core.cost).max(initial=0.0))
        return max(abs(self.bound), 1e-6 * largest, 1e-300)

    def say(self, text: str) -> None:
        """Reports a line of text."""
        self.progress(f"{self.budget.elapsed():7.2f} s  {text}")

    @property
    def done(self) -> bool:
        """Returns whether the gap is closed, or time or work has come to its end."""
        return self.proved or self.budget.over

    @property
    def proved(self) -> bool:
        """Returns whether price and bound are within the gap."""
        return self.price < math.inf and self.price - self.bound <= self.gap * abs(self.price)

    @property
    def near(self) -> bool:
        """Returns whether the bound is near the price, but not within the gap."""
        known = self.price < math.inf and self.price - self.bound <= NEAR * abs(self.price)
        return known and not self.proved

    def raise_bound(self, bound: float) -> None:
        """Records a proven bound."""
        if bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        self.say(f"best {self.price:.9g}, bound {min(self.bound, self.price):.9g}")
        if self.watch is not None:
            self.watch(self.budget.elapsed(), self.price, min(self.bound, self.price))

    def begin(self, start: Ints) -> None:
        """Considers a starting choice for the whole problem, as far as its choices remain."""
        if len(start) != len(self.problem.nodes):
            raise ProblemError(
                "a choice to start with does not fit its problem",
                where=f"problem {self.problem.name!r}",
                why=f"{len(start)} choices for {len(self.problem.nodes)} nodes",
            )
        self.offer(restricted(self.layers[0], start))

    def expand(self, choice: Ints) -> Ints:
        """Returns a choice for the whole problem: the best one, given one for the core."""
        for layer in reversed(self.layers):
            choice = layer.expand(choice)
        return choice

    def shrink(self, times: Ints, prices: Floats) -> Floats:
        """Drops choices that a bound excludes from the best solution, and reduces the core again.

        Returns better memory prices at those times. Pays where few pairs of many can be left: where
        the best price is near the bound.
        """
        if not self.near or np.isfinite(self.core.matrix).sum() < MANY_PAIRS:
            return prices
        half, flat = self.budget.part(0.5), self.core.at(times)
        work = step_work(flat)
        dual = ascend(flat, prices, self.price, lambda *_: half.spent(work), SHRINK_STEPS)
        kept = dual.without(self.price)
        self.raise_bound(dual.bound)
        layer = self.cheaper(kept)
        if layer is not None:
            self.keep(layer)
        return dual.prices

    def cheaper(self, kept: Flat) -> Reduced | None:
        """Reduces the core to the choices and pairs of a problem over the same ones.

        The problem must keep all that choices within the best price use. Returns None if nothing
        is left: then the best price is proved.
        """
        try:
            return run(replace(self.core, cost=kept.cost, matrix=kept.matrix), self.problem.name)
        except InfeasibleError:
            self.raise_bound(self.price)
            return None

    def keep(self, layer: Reduced) -> None:
        """Replaces the core by its reduction."""
        self.layers = [*self.layers, layer]
        self.core = layer.flat
        if self.best is not None:
            self.best = restricted(layer, self.best)
        self.moves = local(self.core.at(self.times))
        self.say(f"below {self.price:.9g}: {self.core.size()}")

    def narrowed(self, layer: Reduced) -> Search:
        """Returns a search of a reduction of the core, with the same budget and best price."""
        part = copy(self)
        part.keep(layer)
        return part

    def offer(self, choice: Ints, repair: bool = True) -> None:
        """Considers a choice for the core, first made to fit and improved unless `repair` is False.

        Memory is checked where it has exceeded the limit before. If the choice exceeds it
        elsewhere, those times are added, and it is made to fit again.
        """
        choice = choice.copy()
        for _ in range(LOOKS if repair else 1):
            if repair:
                self._improve(choice)
            price = self.core.price(choice)
            if price >= self.price:
                return
            if self._fits(choice):
                self.price, self.best, self.answer = price, choice, self.expand(choice)
                self._tell()
                return
            self._limit_at(self.peaks(choice, self.times))

    def _limit_at(self, times: Ints) -> None:
        if len(times) > len(self.times):
            self.weigh(self.times, self.prices, times)
            self.moves = local(self.core.at(times))

    def weigh(self, priced: Ints, prices: Floats, times: Ints | None = None) -> None:
        """Records the price of a byte at some times, and the times to check."""
        if times is not None:
            self.times = times
        self.prices = np.zeros(len(self.times))
        known = np.isin(priced, self.times)
        self.prices[np.searchsorted(self.times, priced[known])] = prices[known]

    def _fits(self, choice: Ints) -> bool:
        if not len(self.core.base):
            return True
        peak = float(self.core.holds(choice).max())
        if self.whole or peak <= self.core.limit * (1 - 1e-9):
            return peak <= self.core.limit
        # Close to the limit, only exact sums decide.
        return evaluate(self.problem, self.expand(choice).tolist()).feasible

    def _improve(self, choice: Ints) -> None:
        held = np.zeros(len(self.times))
        above = holds(self.moves, choice, held)
        weight = max(abs(self.bound), 1e-300) / max(self.core.limit, 1e-300) * 1e-4
        if not math.isfinite(weight):
            weight = 1e-6
        for _ in range(16):
            if above == 0:
                break
            descend(self.moves, choice, held, weight, 20)
            above = holds(self.moves, choice, held)
            weight *= 8
        descend(self.moves, choice, held, FITTING, 50)

    def rounds(self, most: int) -> int:
        """Returns the number of kicks between two checks of the clock: fewer for large problems."""
        return max(1, min(most, WORK // (len(self.core.matrix) + 1)))

    def shake(self, rounds: int) -> bool:
        """Kicks the best choice, single nodes and then trees; returns whether that helped."""
        if self.best is None:
            return False
        before = self.price
        choice, held = self.best.copy(), np.zeros(len(self.times))
        holds(self.moves, choice, held)
        self.seed += 1
        deviation = DEVIATIONS[self.seed % len(DEVIATIONS)]
        kicks(self.moves, choice, held, rounds, deviation, self.seed)
        trees(self.moves, choice, held, self.prices, rounds, TREE, deviation, self.seed)
        self.offer(choice)
        return self.price < before

    def peaks(self, choice: Ints, known: Ints) -> Ints:
        """Returns `known` plus times, far from one another, at which a choice does not fit."""
        if not len(self.core.base):
            return known
        held, times = self.core.holds(choice), list(known)
        apart = len(held) // 40 + 1
        for _ in range(PEAKS):
            fullest = int(np.argmax(held))
            if held[fullest] <= self.core.limit:
                break
            times.append(fullest)
            held[max(fullest - apart, 0) : fullest + apart] = 0.0
        return np.unique(np.array(times, dtype=np.int64))

    def solution(self, solver: str) -> Solution:
        """Returns the best choice.

        Raises:
            InfeasibleError: none was found, though there may be one.
        """
        if self.answer is None:
            raise InfeasibleError(
                f"no choice that fits was found within the {self.budget}",
                where=f"problem {self.problem.name!r}",
                why="whether there is one is not known",
                todo="raise the solver's limit, or allow more memory",
            )
        choice = tuple(self.answer.tolist())
        if self.problem.memory_limit is not None and len(choice) <= FEW_NODES:
            choice = lightest(self.problem, choice)
        price = evaluate(self.problem, choice).cost
        bound, left = min(self.bound, price), self.layers[0].flat.nodes
        ended = "proof" if self.proved else "work" if self.budget.left() else "time"
        return Solution(choice, price, bound, solver, self.budget.elapsed(), left, ended)


def lightest(problem: Problem, choice: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a choice of the same price in which no single node can hold less at that price."""
    now = list(choice)
    around: list[list[Edge]] = [[] for _ in choice]
    for edge in problem.edges:
        around[edge.a].append(edge)
        around[edge.b].append(edge)
    for v, node in enumerate(problem.nodes):
        paid = np.array(node.cost)
        for edge in around[v]:
            paid = paid + (edge.cost[:, now[edge.b]] if edge.a == v else edge.cost[now[edge.a]])
        equal = paid <= paid[now[v]] + 1e-13 * abs(paid[now[v]])
        if np.count_nonzero(equal) == 1:
            continue
        held = np.array([nbytes for _, nbytes in node.held])
        memory = np.sum(held, axis=0)
        memory[~equal] = np.inf
        memory[(held > held[:, now[v], None]).any(axis=0)] = np.inf
        now[v] = min(now[v], int(np.argmin(memory)), key=lambda k: float(memory[k]))
    return tuple(now)


class Relaxation:
    """The core with memory limited at some times, reduced again, and its dual bound."""

    def __init__(self, search: Search, times: Ints, prices: Floats) -> None:
        self.search, self.times = search, times
        self.inner: Reduced = run(search.core.at(times), search.problem.name)
        flat = self.inner.flat
        self.dual: Dual | None = None
        if flat.nodes:
            target = search.price if search.price < math.inf else _somewhat_above(flat)
            self.dual = ascend(flat, prices, target, self._watched(step_work(flat)))
            guesses: Sequence[Ints] = self.dual.guesses
            search.raise_bound(self.dual.bound)
            search.weigh(times, self.dual.prices)
        else:
            guesses = (np.zeros(0, dtype=np.int64),)
            search.raise_bound(flat.total)
        self.guesses = [self.inner.expand(guess) for guess in guesses]

    def _watched(self, work: float) -> Callable[[float, Ints], bool]:
        """Returns a test: half of the budget is spent or, at a wide gap, a guess halves the gap."""
        search = self.search
        half, step = search.budget.part(0.5), itertools.count()

        def enough(bound: float, guess: Ints) -> bool:
            if search.gap >= WIDE and next(step) % LOOK == 0:
                search.offer(self.inner.expand(guess))
                if search.price - bound <= 0.5 * search.gap * abs(search.price):
                    return True
            return half.spent(work)

        return enough

    def wider(self) -> tuple[Ints, Floats]:
        """Offers the guesses, and adds the times at which the last ones do not fit.

        Returns the times and memory prices for them.
        """
        search, times = self.search, self.times
        for guess in self.guesses[-GUESSES:]:
            search.offer(guess)
        for guess in self.guesses[-2:]:
            times = search.peaks(guess, times)
        return times, self.carried(times)

    def offer(self, guesses: Sequence[Ints]) -> float:
        """Offers the last of some choices for the reduced problem; returns the best price known."""
        for guess in guesses[-GUESSES:]:
            self.search.offer(self.inner.expand(guess))
        return self.search.price

    def carried(self, times: Ints) -> Floats:
        """Returns memory prices for more times, 0 at new ones."""
        prices = np.zeros(len(times))
        if self.dual is not None:
            prices[np.searchsorted(times, self.times)] = self.dual.prices
        return prices


def _somewhat_above(flat: Flat) -> float:
    least = float(np.minimum.reduceat(flat.cost, flat.start[:-1]).sum()) + flat.total
    return least + float(np.median(flat.cost)) * flat.nodes


def relax(search: Search) -> Relaxation:
    """Limits memory at more and more times, until guesses fit at all others."""
    times, prices = np.zeros(0, dtype=np.int64), np.zeros(0)
    for _ in range(ROUNDS):
        relaxation = Relaxation(search, times, prices)
        search.say(f"memory at {len(times)} times: {relaxation.inner.flat.size()}")
        wider, prices = relaxation.wider()
        if len(wider) == len(times) or search.done:
            break
        times, prices = wider, search.shrink(wider, prices)
        if search.done:
            break
    return relaxation


def restricted(layer: Reduced, choice: Ints) -> Ints:
    """Restricts a choice for a problem to its reduction, as far as the choices remain."""
    start, wanted = layer.flat.start, np.asarray(choice)[layer.nodes]
    remaining = np.zeros(layer.flat.nodes, dtype=np.int64)
    for v in range(layer.flat.nodes):
        same = np.flatnonzero(layer.ident[start[v] : start[v + 1]] == wanted[v])
        remaining[v] = same[0] if len(same) else 0
    return remaining
