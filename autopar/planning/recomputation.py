"""Which blocks compute their activations again: chosen together with the layouts.

How much is recomputed is one decision with few values, so it is branched on: under each value the
layouts are an ordinary strategy problem. A value is left out where even without a memory limit its
problem has no plan that is faster than the best one found; nothing else is cut. Values are compared
by plans that are within `GAP` of their optima; under the best one it is planned once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.recompute import KINDS, Recompute, run_names
from autopar.planning.fitting import EXACT
from autopar.stage_plan import StagePlan

PARTS = 2  # of a run of blocks, in which it is tried to recompute more and more
REFINED = 2  # rounds in which the step between the numbers of blocks is halved
GAP = 5e-3  # of plans that are made to compare two values

Chosen = Mapping[str, Recompute]


class Branch:
    """Planning under one decision.

    Args:
        free: makes the fastest plan if memory had no limit; called once.
        fitting: the fastest plan found within so many bytes, and within such a gap of the optimum;
            InfeasibleError if there is none.
    """

    def __init__(
        self, free: Callable[[], StagePlan], fitting: Callable[[float, float], StagePlan]
    ) -> None:
        self.free, self.fitting = cache(free), fitting


def cheapest(
    graph: Graph, wanted: str, limit: float, branch: Callable[[Chosen], Branch]
) -> StagePlan:
    """The fastest plan that fits.

    Args:
        graph: prepared, with its repeats.
        wanted: "auto" chooses; "none", a kind for all blocks or a kind and a number of blocks
            ("full 8", at most all that a run has) is taken as it is.
        limit: bytes a device.
        branch: planning under a decision.

    Raises:
        InfeasibleError: nothing fits; tells the need of the plan that needs least.
        PlanError: `wanted` is none of these.
    """
    if wanted != "auto":
        return branch(told(graph, wanted)).fitting(limit, EXACT)
    whole = branch({})
    best = whole.free()
    if best.predicted.peak_bytes <= limit:
        return best
    if not graph.repeats:
        return whole.fitting(limit, EXACT)
    search = _Search(graph, limit, branch)
    search.attempt({})
    if search.best is None:
        search.begin_with_the_smallest()
    search.run()
    return search.refined()


class _Search:
    """The fastest plan so far, and what has been tried."""

    def __init__(self, graph: Graph, limit: float, branch: Callable[[Chosen], Branch]) -> None:
        self.graph, self.limit, self.branch = graph, limit, branch
        self.best: StagePlan | None = None
        self.tried: set[Key] = set()

    def run(self) -> None:
        """Try more and more blocks of each kind, then the numbers next to the best one."""
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
        """The shares of blocks one step below and above those of the best plan."""
        chosen = {} if self.best is None else self.best.recompute
        names = run_names(self.graph)
        shares = [
            how.blocks / self.graph.repeats[names.index(n)].count for n, how in chosen.items()
        ]
        kinds = {how.kind for how in chosen.values()} or KINDS
        middle = max(shares, default=0.0)
        for kind in kinds:
            yield from ((kind, s) for s in (middle - step, middle + step) if 0 < s <= 1)

    def begin_with_the_smallest(self) -> None:
        """What needs the least memory: if not even that fits, its error says by how much."""
        chosen = _of_all(self.graph, "full", 1.0)
        self.tried.add(key_of(chosen))
        self.best = self.branch(chosen).fitting(self.limit, GAP)

    def refined(self) -> StagePlan:
        """The best plan, or a better one with the same blocks computed again."""
        assert self.best is not None
        with suppress(InfeasibleError):  # it may not be found in time again
            again = self.branch(self.best.recompute).fitting(self.limit, EXACT)
            return again if faster(again, self.best) else self.best
        return self.best

    def attempt(self, chosen: Chosen) -> bool:
        """Plan under a decision; False if it cannot be faster than what was found."""
        key = key_of(chosen)
        if key in self.tried:
            return True
        self.tried.add(key)
        branch = self.branch(chosen)
        if self.best is not None and not faster(branch.free(), self.best):
            return False
        with suppress(InfeasibleError):
            plan = branch.fitting(self.limit, GAP)
            if self.best is None or faster(plan, self.best):
                self.best = plan
        return True


Key = tuple[tuple[str, str], ...]


def key_of(chosen: Chosen) -> Key:
    """A decision, to tell it from others."""
    return tuple(sorted((name, str(how)) for name, how in chosen.items()))


def faster(one: StagePlan, other: StagePlan) -> bool:
    """Whether a plan is faster than another."""
    a, b = one.predicted.step_seconds, other.predicted.step_seconds
    return a < b * (1 - 1e-9)


def _of_all(graph: Graph, kind: str, share: float) -> dict[str, Recompute]:
    """A share of the blocks of every run."""
    pairs = zip(run_names(graph), graph.repeats, strict=True)
    return {name: Recompute(kind, math.ceil(share * repeat.count)) for name, repeat in pairs}


def told(graph: Graph, wanted: str) -> dict[str, Recompute]:
    """What the words of a user say; PlanError if nothing."""
    if wanted == "none":
        return {}
    if wanted in KINDS:
        return _of_all(graph, wanted, 1.0)
    try:
        how = Recompute.parse(wanted)
    except PlanError as error:
        error.todo = f'pass "auto", "none", {", ".join(map(repr, KINDS))} or such as "full 8"'
        raise
    pairs = zip(run_names(graph), graph.repeats, strict=True)
    return {name: Recompute(how.kind, min(how.blocks, repeat.count)) for name, repeat in pairs}
