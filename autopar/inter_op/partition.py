"""The partition: which layers run on which sub-mesh, in how many microbatches, by which schedule.

All of it is chosen together. Stage costs are asked for lazily. First prices that are not known are
guessed from the most similar known ones, and what the best pipeline by such guesses needs is asked
until all of it is known. Then they are replaced by bounds, and what a pipeline needs that might
still be better is asked until there is none: the result is exact, whatever the guesses were.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from autopar.inter_op.answer import infeasible, pipeline_of
from autopar.inter_op.even import Even
from autopar.inter_op.search_task import Draft, Space
from autopar.inter_op.stage_prices import Cell, Floats, LowerBound, Prices, StageCost, Table
from autopar.inter_op.stage_values import Found, Law, Progress
from autopar.inter_op.straight import Straight
from autopar.inter_op.submeshes import SubMesh

# (border: the layer behind it; sub-mesh before; sub-mesh behind; microbatches) -> seconds that one
# microbatch takes over it, activations forwards and gradients backwards together
Transfer = Callable[[int, SubMesh, SubMesh, int], float]
Config = Straight | Even

# Of how many schedules and numbers of microbatches guesses are brought up to date after an answer.
_FRONT = 8
# So many stage costs of a pipeline are asked for at once.
TOGETHER = 4
# So many of the best pipelines by guesses, on other sub-meshes or microbatches, are asked together.
_PLACES = 2
# How exactly the best pipeline by guesses is looked for.
_SLACK = 0.005


def partition(
    kinds: Sequence[Hashable],
    submeshes: Sequence[SubMesh],
    *,
    laws: Sequence[Law],
    microbatches: Sequence[int],
    memory: float,
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
) -> Found:
    """The fastest pipeline by the formula of its `Law`, and the fastest of every other form.

    Args:
        kinds: of every layer; ranges of layers of equal kinds cost the same and are asked for once.
        submeshes: what stages may get; the largest is the cluster.
        laws: schedules to choose from.
        microbatches: numbers of them to choose from.
        memory: bytes of a device.
        stage_cost: (first layer, last layer, both counted in; sub-mesh; microbatches) -> ways to
            run them, none where there is none.
        lower_bound: the same -> a Candidate none of whose figures is above those of any way.
        transfer: see `Transfer`.
        borders: for each layer but the first, in what the border before it differs from others;
            equal ones have equal transfers. None: all differ.
        most_stages: how many stages there may be.
        most_calls: how many stage costs may be asked for; what is not asked for by then shows in
            `Found.bound`.
        patience: after how many further stage costs without a better pipeline it is no longer
            looked for a proof, 0: it is not begun; None: it goes on.
        gap: the search stops if the best is proved to be this close, as part of its seconds.
        scaling: believe that stages do not get more efficient with more devices, more microbatches
            or fewer layers, nor than the most efficient one that is known (efficient: near to
            `lower_bound`). Far fewer stage costs are asked for; `Found.bound` holds if that is so.
        progress: called after every few stage costs.
        probes: sub-meshes and microbatches of which one stage is asked for first.
        ahead: told of stage costs that are asked for next, one by one, so that it can work them
            out at once.
        again: guess that for so many times its seconds more a stage keeps nothing in flight.

    Raises:
        InfeasibleError: nothing fits into memory, or no schedule can be had.
        CostError: a stage cost with a figure that is negative or not finite.
    """
    space = Space(
        Prices(kinds, submeshes, stage_cost, lower_bound, scaling, ahead, again),
        max(part.size for part in submeshes),
        memory,
        min(len(kinds), most_stages or len(kinds)),
    )
    known: dict[int, Floats] = {}
    for count in microbatches:
        known[count] = _transfers(len(kinds), submeshes, count, transfer, borders)
    configs: list[Config] = [
        (Straight if law.chunks == 1 else Even)(space, law, count, known[count])
        for law in laws
        for count in microbatches
    ]
    search = _Search(space, configs, most_calls, patience, gap, progress)
    search.probe(probes)
    search.guess()
    search.prove()
    return search.result()


def _transfers(
    layers: int,
    submeshes: Sequence[SubMesh],
    microbatches: int,
    transfer: Transfer,
    borders: Sequence[Hashable] | None,
) -> Floats:
    """[layers, submesh before, submesh behind] of seconds at the border before each layer."""
    found = np.zeros((layers, len(submeshes), len(submeshes)))
    like: dict[Hashable, int] = {}
    for at in range(1, layers):
        same = like.setdefault(borders[at - 1] if borders is not None else at, at)
        if same != at:
            found[at] = found[same]
            continue
        for a, before in enumerate(submeshes):
            for b, behind in enumerate(submeshes):
                found[at, a, b] = transfer(at, before, behind, microbatches)
    return found


class _Search:
    """Asks for stage costs until the best pipeline is known."""

    def __init__(
        self,
        space: Space,
        configs: list[Config],
        most_calls: int | None,
        patience: int | None,
        gap: float,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.space, self.prices, self.configs = space, space.prices, configs
        self.most_calls = float("inf") if most_calls is None else most_calls
        self.patience = float("inf") if patience is None else patience
        self.gap, self.progress = gap, progress
        self.best: Draft | None = None
        self.bound = 0.0

    @property
    def seconds(self) -> float:
        """Of the best pipeline that is known."""
        return float("inf") if self.best is None else self.best.seconds

    def probe(self, wanted: Sequence[tuple[SubMesh, int]]) -> None:
        """Ask for the middle one of equal stages, so that guesses begin with usual efficiencies.

        On the sub-meshes and in the microbatches that are wanted; else on a whole host, in a usual
        number of microbatches. Where no stage is believed to be more efficient than the best
        known, also on the smallest sub-mesh in the largest microbatches: the kernels of a small
        model are all launches, and the more devices or microbatches share them, the less
        efficient they are.
        """
        prices, space = self.prices, self.space
        cells = []
        for part, count in wanted:
            stages = space.devices // part.size
            if stages <= min(space.most_stages, count):
                cells.append((*self._middle(stages, count), part, count))
        if not cells:
            part = max((p for p in prices.submeshes if p.hosts == 1), key=lambda p: p.size)
            stages = min(space.most_stages, max(1, space.devices // part.size))
            count = min(self._microbatches, key=lambda b: abs(math.log(b / (4 * stages))))
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
        """First and last layer of the middle one of equal stages."""
        ends = (0, *self.space.even(stages, count))
        return ends[stages // 2], ends[stages // 2 + 1] - 1

    def guess(self) -> None:
        """Ask for what the best pipeline by guesses needs until all of it is known.

        First among pipelines of equal sub-meshes, which need few different stage costs.
        """
        for rough in (True, False):
            last = dict.fromkeys(range(len(self.configs)), 0.0)
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
        """What is better by guesses than the best known, the best first; `last` gets their seconds.

        Of those on equal sub-meshes also the next best, in other places.
        """
        tables: dict[int, Table] = {}
        cutoff = self.seconds * (1 - self.gap)
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
                        break  # good enough to ask for what it needs
                elif len(found) == _PLACES:
                    cutoff = found[-1].seconds
        return found if rough else found[:1]

    def _known(self) -> None:
        """Take the best of what is known."""
        for rough in (True, False):
            for config in self.configs:
                table = self.prices.table(config.microbatches, "none")
                search = config.rough if rough else config.best
                self.best = search(table, self.seconds) or self.best

    def prove(self) -> None:
        """Ask for what a pipeline might need that is better than the best; set the bound."""
        if not self.patience:
            if self.best is None:
                self._known()
            return
        order = itertools.count()  # tells apart what has equal bounds
        queue: list[tuple[float, int, int, int]] = []
        drafts: dict[int, Draft] = {}
        ratio, better = math.inf, len(self.prices.known)
        while queue or ratio > self.prices.best_ratio():
            if ratio > self.prices.best_ratio():  # all bounds may be lower than they seemed
                ratio = self.prices.best_ratio()
                queue = [(0.0, next(order), at, -1) for at in range(len(self.configs))]
            self.bound, _, at, asked = queue[0]
            if self.bound >= self.seconds * (1 - self.gap):
                break
            config = self.configs[at]
            if asked != len(self.prices.known):
                heapq.heappop(queue)
                table = self.prices.table(config.microbatches, "bound")
                draft = config.best(table, self.seconds)
                if draft is not None:
                    drafts[at] = draft
                    asked = len(self.prices.known)
                    heapq.heappush(queue, (draft.seconds, next(order), at, asked))
            elif len(self.prices.known) - better >= self.patience:
                return self._known()
            elif not self._ask([drafts[at]], "looking for better ones"):
                self.best, better = drafts[at], len(self.prices.known)
            elif asked == len(self.prices.known):
                return self._known()  # the budget is spent
        if not queue:
            self.bound = self.seconds

    @property
    def _microbatches(self) -> list[int]:
        return sorted({config.microbatches for config in self.configs})

    def _ask(self, drafts: Sequence[Draft], doing: str) -> bool:
        """Whether prices of the first pipeline are not known; they are asked for, and with them of
        the next ones, as long as that is little.

        Where nothing is known of a sub-mesh in so many microbatches, its most frequent range of
        layers comes alone: the others seldom change whether it is worth anything.
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
        """Prices of a pipeline to ask for next, none if all of them are known."""
        count, known = draft.microbatches, self.prices.known
        tested = {(b, q) for b, _, q in known}
        keys = Counter((count, row, q) for row, q in draft.cells if (count, row, q) not in known)
        found: list[tuple[int, int, int]] = []
        for key, _ in keys.most_common():
            place = count, key[2]
            if place in tested or all((count, q) != place for _, _, q in found):
                found.append(key)
        return found

    def result(self) -> Found:
        """The best, and other forms whose prices are known, up to twice as slow."""
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
        forms: dict[tuple[str, int, int], Draft] = {}
        for draft in sorted(found, key=lambda draft: draft.seconds):
            forms.setdefault((draft.law.name, draft.microbatches, len(draft.stages)), draft)
        transfers = {config.microbatches: config.transfer for config in self.configs}
        best, *rest = forms.values()
        return Found(
            pipeline_of(best, self.prices, transfers),
            tuple(pipeline_of(draft, self.prices, transfers) for draft in rest),
            min(self.bound, best.seconds),
            len(self.prices.known),
            self.prices.families,
        )


def _elsewhere(drafts: Sequence[Draft]) -> list[Draft]:
    """The best ones of different numbers of microbatches or sub-meshes, the best first."""
    best: dict[Hashable, Draft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.seconds):
        best.setdefault((draft.microbatches, frozenset(q for q, _ in draft.stages)), draft)
    return list(best.values())[:_PLACES]
