"""Chooses the stages, their sub-meshes, the number of microbatches and the schedule jointly.

Stage costs are requested lazily. The search first estimates unknown prices from the most similar
known ones and requests those that the best estimated pipeline needs, until all of them are known.
It then replaces the estimates with lower bounds and requests the prices of every pipeline that
could still beat the best one. The result is exact, however poor the estimates were.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from autopar.inter_op.answer import infeasible, pipeline_of
from autopar.inter_op.equal_submeshes import EqualSubmeshPipelines
from autopar.inter_op.search_task import Draft, Space, Transfer, part_sizes, transfers
from autopar.inter_op.single_chunk import SingleChunkPipelines
from autopar.inter_op.stage_prices import Cell, Floats, LowerBound, Prices, StageCost, Table
from autopar.inter_op.stage_values import Law, Progress, StageSearchResult
from autopar.inter_op.submeshes import SubMesh

Config = SingleChunkPipelines | EqualSubmeshPipelines

# Number of schedules and microbatch counts whose estimates are refreshed after an answer.
_FRONT = 8
# Number of stage costs of one pipeline that are requested in one batch.
TOGETHER = 4
# Number of top estimated pipelines, on other sub-meshes or microbatches, requested in one batch.
_PLACES = 2
# Relative tolerance of the search for the best estimated pipeline.
_SLACK = 0.005


def partition(
    kinds: Sequence[Hashable],
    submeshes: Sequence[SubMesh],
    *,
    laws: Sequence[Law],
    microbatches: Sequence[int],
    memory: float | Sequence[float],
    stage_cost: StageCost,
    lower_bound: LowerBound,
    transfer: Transfer,
    borders: Sequence[Hashable] | None = None,
    most_stages: int | None = None,
    most_calls: int | None = None,
    patience: int | None = None,
    gap: float = 0.0,
    scaling: bool = False,
    progress: Callable[[Progress], None] | None = None,
    probes: Sequence[tuple[SubMesh, int]] = (),
    ahead: Callable[[Sequence[Cell]], None] | None = None,
    again: float = 0.0,
    doubts: Mapping[int, float] | None = None,
    near: float = 0.0,
) -> StageSearchResult:
    """Finds the fastest pipeline by the formula of its `Law`, and the fastest of each other form.

    Args:
        kinds: one per layer; ranges with equal kinds have equal costs and are requested once.
        submeshes: candidate sub-meshes of stages; the largest is the whole cluster, or a whole part
            of it. A pipeline passes through one part after another, in any order.
        laws: candidate schedules.
        microbatches: candidate numbers of microbatches.
        memory: bytes per device, of all or of those of each sub-mesh.
        stage_cost: maps (first layer, last layer, both inclusive; sub-mesh; microbatches) to
            candidates, empty if the range cannot run there.
        lower_bound: takes the same arguments and returns a Candidate whose figures are lower
            bounds for every candidate.
        transfer: see `Transfer`.
        borders: a key per layer but the first that describes the border before it; borders with
            equal keys have equal transfers. None: all differ.
        most_stages: maximum number of stages.
        most_calls: maximum number of stage costs to request; the `bound` of the result reflects the
            prices that remain unknown.
        patience: gives up the proof of optimality after this many further stage costs without a
            better pipeline; 0 skips the proof, None never gives up.
        gap: stops once the best is proved to be within this fraction of the optimum.
        scaling: assumes that stages do not get more efficient with more devices, more microbatches
            or fewer layers, and that none exceeds the best known efficiency (closeness to
            `lower_bound`). Requests far fewer stage costs; the `bound` of the result holds only if
            the assumption does.
        progress: called after every few stage costs.
        probes: pairs of sub-mesh and microbatches for which one stage is priced first.
        ahead: receives the stage costs that are requested next, one by one, so that it can
            compute them in one batch.
        again: extra time of full recomputation as a multiple of a stage's seconds; estimates
            assume that a recomputed stage keeps no activations in flight.
        doubts: number of microbatches -> fraction by which closed forms may be too low; 0 for the
            others. Such pipelines are looked at last, and must seem faster by that fraction.
        near: fraction by which closed forms may be too high; the best pipeline of every schedule
            that could be the fastest then is among the `others` of the result.

    Raises:
        InfeasibleError: no pipeline fits into memory, or no schedule fits the sizes.
        CostError: a figure of a stage cost is negative or not finite.
    """
    space = Space(
        Prices(kinds, submeshes, stage_cost, lower_bound, scaling, ahead, again),
        sum(part_sizes(submeshes).values()),
        np.broadcast_to(np.asarray(memory, dtype=np.float64), len(submeshes)).copy(),
        min(len(kinds), most_stages or len(kinds)),
    )
    known: dict[int, Floats] = {}
    for count in microbatches:
        known[count] = transfers(len(kinds), submeshes, count, transfer, borders)
    configs: list[Config] = []
    for law, count in itertools.product(laws, microbatches):
        if law.chunks == 1:
            configs += [
                SingleChunkPipelines(space, law, count, known[count], order)
                for order in space.orders
            ]
        else:
            configs.append(EqualSubmeshPipelines(space, law, count, known[count]))
    search = _Search(space, configs, most_calls, patience, gap, progress, doubts or {})
    search.probe(probes)
    search.guess()
    search.prove()
    search.compare(near)
    return search.result()


class _Search:
    """Requests stage costs until the best pipeline is known."""

    def __init__(
        self,
        space: Space,
        configs: list[Config],
        most_calls: int | None,
        patience: int | None,
        gap: float,
        progress: Callable[[Progress], None] | None,
        doubts: Mapping[int, float],
    ) -> None:
        self.space, self.prices, self.configs = space, space.prices, configs
        self.most_calls = float("inf") if most_calls is None else most_calls
        self.patience = float("inf") if patience is None else patience
        self.gap, self.progress, self.doubts = gap, progress, doubts
        self.best: Draft | None = None
        self.bound = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the best known pipeline."""
        return float("inf") if self.best is None else self.best.seconds

    def _doubt(self, microbatches: int) -> float:
        """Returns by what factor a closed form counts, for it may be too low."""
        return 1 + self.doubts.get(microbatches, 0.0)

    def _limit(self, microbatches: int) -> float:
        """Returns the closed form below which a pipeline counts as faster than the best."""
        own = 1.0 if self.best is None else self._doubt(self.best.microbatches)
        return self.seconds * own / self._doubt(microbatches)

    def probe(self, wanted: Sequence[tuple[SubMesh, int]]) -> None:
        """Requests the middle one of equal stages, so that estimates start from usual efficiencies.

        It uses the given sub-meshes and microbatches, or else a whole host and a typical number of
        microbatches. With `scaling` it also prices the smallest sub-mesh with the largest
        microbatches: launch overhead dominates the kernels of a small model, and efficiency drops
        further as more devices or microbatches share them.
        """
        prices, space = self.prices, self.space
        cells = []
        for part, count in wanted:
            stages = space.devices // part.size
            if stages <= min(space.most_stages, count):
                cells.append((*self._middle(stages, count), part, count))
        if not cells:
            hosts = {p.part: p for p in prices.submeshes if p.hosts == 1}
            for part in hosts.values():
                stages = min(space.most_stages, max(1, space.devices // part.size))
                count = self._nearest(4 * stages)
                cells.append((*self._middle(stages, count), part, count))
        if prices.scaling:
            part = min(prices.submeshes, key=lambda p: p.size)
            stages = min(space.most_stages, space.devices // part.size)
            count = next((b for b in self._microbatches if b >= stages), self._microbatches[-1])
            cells.append((*self._middle(stages, count), part, count))
        prices.ask(
            [
                (count, int(prices.row[first, last]), list(prices.submeshes).index(part))
                for first, last, part, count in cells[: int(min(self.most_calls, 1e6))]
            ]
        )

    def _middle(self, stages: int, count: int) -> tuple[int, int]:
        """Returns the first and last layer of the middle one of equal stages."""
        ends = (0, *self.space.even(stages, count))
        return ends[stages // 2], ends[stages // 2 + 1] - 1

    def guess(self) -> None:
        """Requests the prices of the best estimated pipeline until all of them are known.

        Starts with pipelines of equal sub-meshes, which need few distinct stage costs, and with
        those whose closed forms are in no doubt.
        """
        groups: dict[float, list[int]] = {}
        for at, config in enumerate(self.configs):
            groups.setdefault(self._doubt(config.microbatches), []).append(at)
        for doubt, rough in itertools.product(sorted(groups), (True, False)):
            last = dict.fromkeys(groups[doubt], 0.0)
            everything = True
            while len(self.prices.known) < self.most_calls:
                order = sorted(last, key=lambda at: last[at])
                found = self._guessed(order if everything else order[:_FRONT], last, rough)
                if not found and everything:
                    break
                everything = not found
                if found and not self._ask(found, "looking for good pipelines"):
                    self.best = found[0]
        if len(self.prices.known) >= self.most_calls:
            self._known()

    def _guessed(self, order: list[int], last: dict[int, float], rough: bool) -> list[Draft]:
        """Returns the drafts estimated to beat the best known one, best first; updates `last`.

        For equal sub-meshes it also returns the runners-up on other sub-meshes or microbatches.
        """
        tables: dict[int, Table] = {}
        cutoff = self._limit(self.configs[order[0]].microbatches) * (1 - self.gap)
        found: list[Draft] = []
        for at in order:
            config = self.configs[at]
            if config.microbatches not in tables:
                tables[config.microbatches] = self.prices.table(config.microbatches, "guess")
            table = tables[config.microbatches]
            if rough:
                draft = config.rough(table, cutoff)
            else:
                draft = config.best(table, cutoff, slack=_SLACK)
            last[at] = cutoff if draft is None else draft.seconds
            if draft is not None:
                found = _elsewhere([*found, draft])
                if not rough:
                    cutoff = draft.seconds
                    if len(order) == _FRONT:
                        break  # good enough to request its prices
                elif len(found) == _PLACES:
                    cutoff = found[-1].seconds
        return found if rough else found[:1]

    def _known(self) -> None:
        """Updates the best pipeline from the known prices."""
        for rough in (True, False):
            for config in self.configs:
                table = self.prices.table(config.microbatches, "none")
                search = config.rough if rough else config.best
                self.best = search(table, self._limit(config.microbatches)) or self.best

    def prove(self) -> None:
        """Requests the prices of every pipeline that could beat the best; sets the bound."""
        if not self.patience:
            if self.best is None:
                self._known()
            return
        order = itertools.count()  # breaks ties between equal bounds
        queue: list[tuple[float, int, int, int]] = []
        drafts: dict[int, Draft] = {}
        ratio, better = math.inf, len(self.prices.known)
        while queue or ratio > self.prices.best_ratio():
            if ratio > self.prices.best_ratio():  # every bound may now be lower than before
                ratio = self.prices.best_ratio()
                queue = [(0.0, next(order), at, -1) for at in range(len(self.configs))]
            self.bound, _, at, asked = queue[0]
            if self.bound >= self._limit(0) * (1 - self.gap):
                break
            config = self.configs[at]
            if asked != len(self.prices.known):
                heapq.heappop(queue)
                table = self.prices.table(config.microbatches, "bound")
                draft = config.best(table, self._limit(config.microbatches))
                if draft is not None:
                    drafts[at] = draft
                    asked = len(self.prices.known)
                    bound = draft.seconds * self._doubt(config.microbatches)
                    heapq.heappush(queue, (bound, next(order), at, asked))
            elif len(self.prices.known) - better >= self.patience:
                return self._known()
            elif not self._ask([drafts[at]], "looking for better ones"):
                self.best, better = drafts[at], len(self.prices.known)
            elif asked == len(self.prices.known):
                return self._known()  # the budget is exhausted
        if not queue:
            self.bound = self.seconds

    def compare(self, near: float) -> None:
        """Requests the prices of the best pipeline of each schedule that may be the fastest.

        It is the best by bounds if the search proves its result, otherwise by estimates.
        """
        if self.best is None or not near:
            return
        unknown = "bound" if math.isinf(self.patience) else "guess"
        laws: dict[str, list[Config]] = {}
        for config in self.configs:
            laws.setdefault(config.law.name, []).append(config)
        for name, configs in laws.items():
            draft = None if name != self.best.law.name else self.best
            while draft is None:
                limit = self._limit(0) / (1 - near)
                for config in configs:
                    table = self.prices.table(config.microbatches, unknown)
                    cutoff = limit / self._doubt(config.microbatches)
                    if draft is not None:
                        cutoff = min(cutoff, draft.seconds)
                    draft = config.best(table, cutoff) or draft
                asked = len(self.prices.known)
                if draft is None or not self._ask([draft], "comparing schedules"):
                    break
                draft = None if len(self.prices.known) > asked else draft

    @property
    def _microbatches(self) -> list[int]:
        return sorted({config.microbatches for config in self.configs})

    def _nearest(self, number: int) -> int:
        """Returns the candidate number of microbatches that is nearest to a number."""
        return min(self._microbatches, key=lambda count: abs(math.log(count / number)))

    def _ask(self, drafts: Sequence[Draft], doing: str) -> bool:
        """Requests the unknown prices of the first draft; returns whether there were any.

        Adds those of the next drafts while the batch is small. For a sub-mesh and microbatch count
        without any known price it requests only the most frequent range of layers, because the
        others seldom change whether that combination is worthwhile.
        """
        missing = [self._unknown(draft) for draft in drafts]
        wanted: list[tuple[int, int, int]] = []
        for keys in missing:
            if len(wanted) < _PLACES:
                wanted += keys
        room = int(min(self.most_calls - len(self.prices.known), TOGETHER))
        if wanted and room > 0:
            self.prices.ask(wanted[:room])
            if self.progress is not None:
                self.progress(
                    Progress(len(self.prices.known), self.seconds, self.bound, doing)
                )  # fmt: skip
        return bool(missing[0])

    def _unknown(self, draft: Draft) -> list[tuple[int, int, int]]:
        """Returns the prices of a draft to request next, empty if all are known."""
        count, known = draft.microbatches, self.prices.known
        tested = {(b, q) for b, _, q in known}
        keys = Counter((count, row, q) for row, q in draft.cells if (count, row, q) not in known)
        found: list[tuple[int, int, int]] = []
        for key, _ in keys.most_common():
            place = count, key[2]
            if place in tested or all((count, q) != place for _, _, q in found):
                found.append(key)
        return found

    def result(self) -> StageSearchResult:
        """Returns the best pipeline, and other fully priced forms at most twice as slow."""
        if self.best is None:
            raise infeasible(self.space, self.configs)
        limit, own = 2 * self.best.seconds, (self.best.law, self.best.microbatches)
        found = [self.best]
        counts = {count for count, _, _ in self.prices.known}
        for config in self.configs:
            if config.microbatches not in counts:
                continue
            table = self.prices.table(config.microbatches, "none")
            same = (config.law, config.microbatches) == own
            for stages in range(1, self.space.most_stages + 1) if same else (None,):
                draft = config.best(table, limit, stages)
                found += [draft] if draft is not None else []
        forms: dict[Hashable, Draft] = {}
        found.sort(key=lambda draft: draft.seconds * self._doubt(draft.microbatches))
        for draft in found:
            forms.setdefault(self.space.form(draft), draft)
        transfers = {config.microbatches: config.transfer for config in self.configs}
        best, *rest = forms.values()
        return StageSearchResult(
            pipeline_of(best, self.prices, transfers),
            tuple(pipeline_of(draft, self.prices, transfers) for draft in rest),
            min(self.bound, best.seconds),
            len(self.prices.known),
            self.prices.families,
        )


def _elsewhere(drafts: Sequence[Draft]) -> list[Draft]:
    """Returns the best draft of each number of microbatches or sub-mesh, best first."""
    best: dict[Hashable, Draft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.seconds):
        best.setdefault((draft.microbatches, frozenset(q for q, _ in draft.stages)), draft)
    return list(best.values())[:_PLACES]
