"""Chooses the blocks that recompute their activations, together with the layouts.

The extent of recomputation is one decision with few values, so the planner branches on it: under
each value, the layouts are an ordinary strategy problem. A value is skipped only if even without a
memory limit its plan is no faster than the best plan so far. Values are compared by plans within
`GAP` of their optima; the best value is then planned once more to the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.recompute import KINDS, Recompute, is_kind, run_names
from autopar.planning.within_memory import EXACT
from autopar.stage_plan import StagePlan

PARTS = 2  # fractions of a run's blocks to try: halves
REFINED = 2  # rounds that halve the step between fractions
GAP = 5e-3  # relative gap of plans that are made to compare two values
BEYOND = 1.1  # problems with at least this multiple of the limit are not solved for comparison

Chosen = Mapping[str, Recompute]


class Branch:
    """Planning under one decision.

    Args:
        free: returns the fastest plan without a memory limit; called once.
        fitting: returns the fastest plan within a number of bytes and a relative gap to the
            optimum, or raises InfeasibleError.
        seconds: returns the seconds of `free`, whose memory need not be simulated for it.
        least: the least memory of all nodes together, in bytes; every plan holds about as much.
    """

    def __init__(
        self,
        free: Callable[[], StagePlan],
        fitting: Callable[[float, float], StagePlan],
        seconds: Callable[[], float],
        least: float = 0.0,
    ) -> None:
        self.free, self.fitting, self._seconds = cache(free), fitting, seconds
        self.least = least

    def beats(self, plan: StagePlan) -> bool:
        """Returns whether a plan without a memory limit is faster than another plan."""
        return _less(self._seconds(), plan.predicted.step_seconds)


def cheapest(
    graph: Graph, wanted: str, limit: float, branch: Callable[[Chosen], Branch]
) -> StagePlan:
    """Returns the fastest plan that fits.

    Args:
        graph: the prepared graph with its repeats.
        wanted: "auto" searches; "none", a kind for all blocks, or a kind with a number of blocks
            ("full 8", at most all of a run) is used unchanged.
        limit: bytes of a device.
        branch: returns planning under a decision.

    Raises:
        InfeasibleError: nothing fits; states the least memory that is needed.
        PlanError: `wanted` cannot be parsed.
    """
    if wanted != "auto":
        return branch(parse_recompute(graph, wanted)).fitting(limit, EXACT)
    whole = branch({})
    best = whole.free()
    if best.predicted.peak_bytes <= limit:
        return best
    if not graph.repeats:
        return whole.fitting(limit, EXACT)
    search = _Search(graph, limit, branch)
    search.attempt({})
    if search.best is None:
        search.start_with_smallest()
    search.run()
    return search.refined()


class _Search:
    """The search: the fastest plan so far, and the decisions that were tried."""

    def __init__(self, graph: Graph, limit: float, branch: Callable[[Chosen], Branch]) -> None:
        self.graph, self.limit, self.branch = graph, limit, branch
        self.best: StagePlan | None = None
        self.tried: set[Key] = set()

    def run(self) -> None:
        """Tries more and more blocks of each kind, then numbers of blocks around the best one."""
        for kind in KINDS:
            for part in range(1, PARTS + 1):
                if not self.attempt(_of_all(self.graph, kind, part / PARTS)):
                    break
        step = 1 / PARTS
        for _ in range(REFINED):
            step /= 2
            for kind, share in self._around(step):
                self.attempt(_of_all(self.graph, kind, share))

    def _around(self, step: float) -> Iterator[tuple[str, float]]:
        """Yields the fractions of blocks one step below and above those of the best plan."""
        chosen = {} if self.best is None else self.best.recompute
        names = run_names(self.graph)
        shares = [
            how.blocks / self.graph.repeats[names.index(n)].count for n, how in chosen.items()
        ]
        kinds = {how.kind for how in chosen.values()} or KINDS
        middle = max(shares, default=0.0)
        for kind in kinds:
            yield from ((kind, s) for s in (middle - step, middle + step) if 0 < s <= 1)

    def start_with_smallest(self) -> None:
        """Plans with the least memory; raises an error with the excess if that does not fit."""
        chosen = _of_all(self.graph, "full", 1.0)
        self.tried.add(key_of(chosen))
        self.best = self.branch(chosen).fitting(self.limit, GAP)

    def refined(self) -> StagePlan:
        """Returns the best plan, or a better one with the same blocks recomputed."""
        assert self.best is not None
        with suppress(InfeasibleError):  # the solver may not find it in time again
            again = self.branch(self.best.recompute).fitting(self.limit, EXACT)
            return again if faster(again, self.best) else self.best
        return self.best

    def attempt(self, chosen: Chosen) -> bool:
        """Plans under a decision; returns False if it cannot be faster than the best plan."""
        key = key_of(chosen)
        if key in self.tried:
            return True
        self.tried.add(key)
        branch = self.branch(chosen)
        if branch.least > BEYOND * self.limit:
            return True
        if self.best is not None and not branch.beats(self.best):
            return False
        with suppress(InfeasibleError):
            plan = branch.fitting(self.limit, GAP)
            if self.best is None or faster(plan, self.best):
                self.best = plan
        return True


Key = tuple[tuple[str, str], ...]


def key_of(chosen: Chosen) -> Key:
    """Returns a hashable key of a decision."""
    return tuple(sorted((name, str(how)) for name, how in chosen.items()))


def faster(one: StagePlan, other: StagePlan) -> bool:
    """Returns whether one plan is faster than another, beyond rounding."""
    return _less(one.predicted.step_seconds, other.predicted.step_seconds)


def _less(a: float, b: float) -> bool:
    return a < b * (1 - 1e-9)


def _of_all(graph: Graph, kind: str, share: float) -> dict[str, Recompute]:
    """Returns the decision to recompute a fraction of the blocks of every run."""
    pairs = zip(run_names(graph), graph.repeats, strict=True)
    return {name: Recompute(kind, math.ceil(share * repeat.count)) for name, repeat in pairs}


def parse_recompute(graph: Graph, wanted: str) -> dict[str, Recompute]:
    """Parses an option such as "full 8"; raises PlanError if it cannot be parsed."""
    if wanted == "none":
        return {}
    if is_kind(wanted):
        return _of_all(graph, wanted, 1.0)
    try:
        how = Recompute.parse(wanted)
    except PlanError as error:
        known = ", ".join(map(repr, KINDS))
        error.todo = f'pass "auto", "none", {known}, "save linear:2 attention" or "full 8"'
        raise
    pairs = zip(run_names(graph), graph.repeats, strict=True)
    return {name: Recompute(how.kind, min(how.blocks, repeat.count)) for name, repeat in pairs}
