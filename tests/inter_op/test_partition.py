"""The partition against an enumeration of all pipelines with random prices; its calls; refusals."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import CostError, InfeasibleError
from autopar.inter_op.partition import TOGETHER, partition
from autopar.inter_op.stage_values import Candidate, Law, Pipeline, Progress, StageSearchResult
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh

ONE_F_ONE_B = Law("1f1b", lambda s, stages, count: min(s, count))
GPIPE = Law("gpipe", lambda s, stages, count: count, exposed=0.0)
# Not a real schedule: what is in flight and what fills depend on the number of stages.
ODD = Law(
    "odd",
    lambda s, stages, count: min(count, s + stages / 2),
    fill=lambda stages, count: 1 / stages,
    exposed=0.25,
    fits=lambda stages, count: stages % 2 == 1 and count >= stages,
)
INTERLEAVED = Law(
    "interleaved",
    lambda s, stages, count: min(count, s + stages / 2),
    fill=lambda stages, count: 0.5,
    holds=lambda rank, stages: (rank, rank + stages),
    chunks=2,
)


@dataclass
class World:
    """Random prices, all of them made beforehand."""

    kinds: tuple[str, ...]
    parts: tuple[SubMesh, ...]
    counts: tuple[int, ...]
    memory: float
    seed: int
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def room(self, part: SubMesh) -> float:
        """Bytes of a device; those of the second part have half as much again."""
        return self.memory * (1 + part.part / 2)

    def _random(self, *key: object) -> np.random.Generator:
        return np.random.default_rng([self.seed, *map(ord, repr(key))])

    def candidates(self, first: int, last: int, part: SubMesh, count: int) -> list[Candidate]:
        draw = self._random(self.kinds[first : last + 1], name(part), count)
        work = sum(1 + ord(kind) % 4 for kind in self.kinds[first : last + 1])
        found = []
        for way in range(draw.integers(0 if draw.random() < 0.1 else 1, 4)):
            seconds = work / part.size / count * draw.uniform(1, 3)
            found.append(
                Candidate(
                    seconds / 3,
                    seconds * 2 / 3,
                    draw.uniform(0, 2) * (draw.random() < 0.5),
                    work / part.size * draw.uniform(1, 3),
                    work / part.size / count * draw.uniform(1, 3),
                    draw.uniform(0, 1),
                    f"way {way}",
                )
            )
        return found

    def ask(self, first: int, last: int, part: SubMesh, count: int) -> list[Candidate]:
        self.asked.append((self.kinds[first : last + 1], name(part), count))
        return self.candidates(first, last, part, count)

    def bound(self, first: int, last: int, part: SubMesh, count: int) -> Candidate:
        work = sum(1 + ord(kind) % 4 for kind in self.kinds[first : last + 1])
        return Candidate(
            work / part.size / count,
            fixed=work / part.size,
            per_microbatch=work / part.size / count,
        )

    def transfer(self, border: int, before: SubMesh, behind: SubMesh, count: int) -> float:
        draw = self._random(border, name(before), name(behind), count)
        return float(draw.uniform(0, 0.5)) / count

    def search(self, laws: Sequence[Law], **options: object) -> StageSearchResult:
        return partition(
            self.kinds, self.parts, laws=laws, microbatches=self.counts,
            memory=[self.room(part) for part in self.parts], stage_cost=self.ask,
            lower_bound=self.bound, transfer=self.transfer, **options,
        )  # fmt: skip


def name(part: SubMesh) -> str:
    return f"{part.part}, {part}"


def formula(
    world: World, law: Law, count: int,
    stages: Sequence[tuple[int, int, SubMesh]], ways: Sequence[Candidate],
) -> float:  # fmt: skip
    """Seconds of a step as `Law` states them; infinite where something does not fit."""
    size = len(stages)
    fill, total, slowest = law.fill(size, count), 0.0, 0.0
    for at, ((first, _, part), way) in enumerate(zip(stages, ways, strict=True)):
        if way.memory(law.in_flight(size - at, size, count)) > world.room(part):
            return math.inf
        into = wait = 0.0
        if at:
            into = world.transfer(first, stages[at - 1][2], part, count)
            wait = law.exposed * world.transfer(first, part, part, count)
        total += fill * (way.seconds + into)
        slowest = max(slowest, (count - fill) * (way.seconds + wait) + way.once)
    return total + slowest


def all_stages(world: World) -> Iterator[list[tuple[int, int, SubMesh]]]:
    """Every way to cut the layers and to give each range a sub-mesh, all devices in use.

    A pipeline passes through the parts of a cluster one after another, in any order.
    """
    layers = len(world.kinds)
    whole = {part.part: part.size for part in world.parts}  # the largest comes last
    for size in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), size - 1):
            ends = [*cuts, layers]
            for parts in itertools.product(world.parts, repeat=size):
                used = [part.part for part in parts for _ in range(part.size)]
                order = [number for number, _ in itertools.groupby(used)]
                if Counter(used) == whole and len(order) == len(whole):
                    yield [
                        (a, b - 1, part) for a, b, part in zip((0, *cuts), ends, parts, strict=True)
                    ]


def brute_force(world: World, laws: Sequence[Law]) -> dict[tuple[str, int, int], float]:
    """The least seconds of every law, number of microbatches and number of stages."""
    best: dict[tuple[str, int, int], float] = {}
    everything = list(all_stages(world))
    for law, count in itertools.product(laws, world.counts):
        for stages in everything:
            if law.fits(len(stages), count):
                fronts = [world.candidates(*stage, count) for stage in stages]
                for ways in itertools.product(*fronts):
                    key = (law.name, count, len(stages))
                    seconds = formula(world, law, count, stages, ways)
                    best[key] = min(best.get(key, math.inf), seconds)
    return best


MESHES = ["gpu=4", "gpu=3", "gpu=6", "gpu=16", "a=8", "gpu=3 + H100: gpu=3", "a=2 + V100: a=4"]


@st.composite
def worlds(draw: Callable[..., object], most_layers: int = 4) -> World:
    mesh = draw(st.sampled_from(MESHES))
    parts = submeshes(Mesh.parse(f"H100: {mesh}"))
    if mesh == "gpu=16":  # two hosts; few enough parts to try all of them
        parts = tuple(part for part in parts if part.size >= 4)
    kinds = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=most_layers))
    counts = draw(st.sampled_from([(1,), (4,), (1, 2, 8)]))
    memory = draw(st.sampled_from([1e9, 12.0, 6.0, 3.0]))
    return World(tuple(kinds), parts, counts, memory, draw(st.integers(0, 10**6)))


def key(pipeline: Pipeline) -> tuple[str, int, int]:
    return pipeline.schedule, pipeline.microbatches, len(pipeline.stages)


@pytest.mark.parametrize("laws", [(ONE_F_ONE_B, GPIPE), (ODD,)], ids=["1f1b, gpipe", "odd"])
@settings(deadline=None, max_examples=25)
@given(world=worlds())
def test_equals_the_best_of_all_pipelines(laws: tuple[Law, ...], world: World) -> None:
    assert_best_of_all(laws, world)


@pytest.mark.slow
@pytest.mark.parametrize("laws", [(ONE_F_ONE_B, GPIPE), (ODD,)], ids=["1f1b, gpipe", "odd"])
@settings(deadline=None, max_examples=100)
@given(world=worlds(6))
def test_equals_the_best_of_all_larger_pipelines(laws: tuple[Law, ...], world: World) -> None:
    assert_best_of_all(laws, world)


def assert_best_of_all(laws: tuple[Law, ...], world: World) -> None:
    expected = {k: v for k, v in brute_force(world, laws).items() if v < math.inf}
    if not expected:
        with pytest.raises(InfeasibleError):
            world.search(laws)
        return
    found = world.search(laws)
    assert found.best.seconds == pytest.approx(min(expected.values()), rel=1e-9)
    assert found.bound == pytest.approx(found.best.seconds, rel=1e-9)
    assert found.gap == pytest.approx(0, abs=1e-9)
    # The pipeline is what its figures say, and every other one can be had for its price.
    for pipeline in (found.best, *found.others):
        stages = [(s.chunks[0].first, s.chunks[0].last, s.submesh) for s in pipeline.stages]
        ways = [s.chunks[0].candidate for s in pipeline.stages]
        law = next(law for law in laws if law.name == pipeline.schedule)
        seconds = formula(world, law, pipeline.microbatches, stages, ways)
        assert pipeline.seconds == pytest.approx(seconds, rel=1e-9)
        assert seconds >= expected[key(pipeline)] * (1 - 1e-9)
        assert all(stage.memory <= world.room(stage.submesh) for stage in pipeline.stages)
    forms = [key(pipeline) for pipeline in (found.best, *found.others)]
    assert len(set(forms)) == len(forms)
    # No question twice, and none that is the same for equal layers.
    assert len(set(world.asked)) == len(world.asked) == found.calls


@settings(deadline=None, max_examples=12)
@given(world=worlds(), stages=st.sampled_from([2, 4]), layers=st.sampled_from([1, 2]))
def test_chunks_of_equal_layers_against_all_ways(world: World, stages: int, layers: int) -> None:
    world.kinds = ("a",) * (2 * stages * layers)
    world.parts = submeshes(Mesh.parse("H100: gpu=4"))
    part = next(part for part in world.parts if part.size * stages == 4)
    expected = math.inf
    for count in world.counts:
        # All chunks are alike, each is run in any way.
        front = world.candidates(0, layers - 1, part, count)
        pairs = list(itertools.product(front, repeat=2))
        for ways in itertools.product(pairs, repeat=stages):
            total = slowest = 0.0
            fits = True
            for rank, (one, other) in enumerate(ways):
                kept = min(count, stages - rank + stages / 2)
                each = one.per_microbatch + other.per_microbatch
                memory = one.fixed + other.fixed + kept * each + max(one.transient, other.transient)
                fits = fits and memory <= world.memory
                borders = [first for first in (rank * layers, (rank + stages) * layers) if first]
                waits = sum(world.transfer(at, part, part, count) for at in borders)
                seconds = one.seconds + other.seconds
                total += 0.5 * (seconds + waits)
                busy = (count - 0.5) * (seconds + 0.5 * waits)
                slowest = max(slowest, busy + one.once + other.once)
            expected = min(expected, total + slowest if fits else math.inf)
    only = Law(
        INTERLEAVED.name, INTERLEAVED.in_flight, INTERLEAVED.fill, holds=INTERLEAVED.holds,
        chunks=2, fits=lambda ranks, count: ranks == stages,
    )  # fmt: skip
    if expected == math.inf:
        with pytest.raises(InfeasibleError):
            world.search([only])
        return
    found = world.search([only])
    assert found.best.seconds == pytest.approx(expected, rel=1e-9)
    spans = [[(c.first, c.last) for c in stage.chunks] for stage in found.best.stages]
    assert spans == [
        [(at * layers, (at + 1) * layers - 1) for at in (rank, rank + stages)]
        for rank in range(stages)
    ]


def closed_form(weights: Sequence[float], loss: float) -> dict[str, object]:
    """Work over devices, less efficient by `loss` for every doubling of devices."""

    def seconds(first: int, last: int, part: SubMesh, count: int) -> float:
        return sum(weights[first : last + 1]) / part.size / count

    def cost(first: int, last: int, part: SubMesh, count: int) -> list[Candidate]:
        slower = 1 + loss * math.log2(part.size)
        kept = sum(weights[first : last + 1]) / part.size
        return [Candidate(seconds(first, last, part, count) * slower, 0, 0, kept, kept / count)]

    return {
        "stage_cost": cost,
        "lower_bound": lambda *key: Candidate(seconds(*key)),
        "transfer": lambda *key: 0.0,
        "memory": math.inf,
        "laws": [ONE_F_ONE_B],
    }


def test_heavier_layers_get_more_devices() -> None:
    """Alpa, section 8.4: where layers differ in width, stages of unequal width are best."""
    widths = [2, 2, 4, 8]  # how many devices a layer can use; on all of them it takes a second

    def cost(first: int, last: int, part: SubMesh, count: int) -> list[Candidate]:
        layers = widths[first : last + 1]
        return [Candidate(sum(max(1.0, width / part.size) for width in layers) / count)]

    given_ = closed_form(widths, 0.0) | {"stage_cost": cost}
    parts = submeshes(Mesh.parse("V100: node=2, gpu=8"))
    found = partition(widths, parts, microbatches=[64], **given_)
    assert [stage.submesh.size for stage in found.best.stages] == [2, 2, 4, 8]
    assert found.best.seconds == pytest.approx((64 + 3) / 64)
    for pipeline in found.others:
        assert pipeline.seconds > 1.5 * found.best.seconds


def test_equal_layers_are_cut_evenly_as_far_as_bubbles_allow() -> None:
    """Many microbatches: as many narrow stages as there are; one: all devices on one stage."""
    parts = submeshes(Mesh.parse("H100: gpu=8"))
    many = partition("a" * 8, parts, microbatches=[4096], **closed_form([1.0] * 8, 0.1))
    assert [stage.submesh.size for stage in many.best.stages] == [1] * 8
    one = partition("a" * 8, parts, microbatches=[1], **closed_form([1.0] * 8, 0.1))
    assert len(one.best.stages) == 1
    limited = partition(
        "a" * 8, parts, microbatches=[4096], most_stages=2, **closed_form([1.0] * 8, 0.1)
    )
    assert [stage.submesh.size for stage in limited.best.stages] == [4, 4]


def test_a_doubtful_number_of_microbatches_must_seem_better_by_its_doubt() -> None:
    """Each microbatch takes a hundredth of a second more, so one is best, if it is believed."""
    given_ = closed_form([1.0] * 4, 0.1)
    even = given_["stage_cost"]
    given_["stage_cost"] = lambda *key: [Candidate(even(*key)[0].seconds + 0.01)]  # type: ignore[operator]

    def found(*counts: int, doubt: float = 0.0) -> StageSearchResult:
        parts = submeshes(Mesh.parse("H100: gpu=4"))
        return partition("aaaa", parts, microbatches=counts, doubts={1: doubt}, **given_)

    worse = found(8).best.seconds / found(1).best.seconds - 1
    assert worse > 0
    assert found(1, 8, doubt=0.9 * worse).best.microbatches == 1
    assert found(1, 8, doubt=1.1 * worse).best.microbatches == 8
    assert found(1, 8, doubt=9.0).calls == found(8).calls  # it is not even priced
    assert found(1, doubt=9.0).best == found(1).best


def test_more_memory_a_stage_means_fewer_of_them_in_flight() -> None:
    """1F1B keeps as many microbatches as stages follow; GPipe keeps them all and does not fit."""
    given_ = closed_form([1.0] * 4, 0.1) | {"memory": 1.5, "laws": [GPIPE, ONE_F_ONE_B]}
    found = partition("aaaa", submeshes(Mesh.parse("H100: gpu=4")), microbatches=[64], **given_)
    for pipeline in (found.best, *found.others):
        for at, stage in enumerate(pipeline.stages):
            kept = 64 if pipeline.schedule == "gpipe" else len(pipeline.stages) - at
            work = (stage.chunks[0].last - stage.chunks[0].first + 1) / stage.submesh.size
            assert stage.memory == pytest.approx(work * (1 + kept / 64))
    assert found.best.schedule == "1f1b"
    assert not [p for p in found.others if p.schedule == "gpipe"]


def test_what_is_missing_is_said_for_the_most_frugal() -> None:
    given_ = closed_form([1.0] * 4, 0.1) | {"memory": 0.9, "laws": [ONE_F_ONE_B]}
    with pytest.raises(InfeasibleError) as caught:
        partition("aaaa", submeshes(Mesh.parse("H100: gpu=4")), microbatches=[1, 8], **given_)
    # One stage on all devices with one of eight microbatches in flight: 1 + 1/8 bytes.
    assert "1f1b with 1 stage on 1x4 and 8 microbatches" in caught.value.why
    assert "needs 0.00 GiB" in caught.value.why
    nothing = given_ | {"laws": [Law("none", lambda *_: 1, fits=lambda *_: False)]}
    with pytest.raises(InfeasibleError, match="there is no pipeline"):
        partition("aaaa", submeshes(Mesh.parse("H100: gpu=4")), microbatches=[1], **nothing)


def test_prices_that_are_none_are_refused() -> None:
    given_ = closed_form([1.0] * 4, 0.1)
    for bad in (math.nan, -1.0, math.inf):
        given_["stage_cost"] = lambda *_, bad=bad: [Candidate(bad)]
        with pytest.raises(CostError, match="layers 0 to"):
            partition("aaaa", submeshes(Mesh.parse("H100: gpu=4")), microbatches=[4], **given_)


@pytest.mark.parametrize("scaling", [False, True])
def test_few_costs_are_asked_for_and_the_best_is_the_same(scaling: bool) -> None:
    """Without pruning every signature on every sub-mesh would be asked for."""
    parts = submeshes(Mesh.parse("H100: node=4, gpu=8"))
    weights = [1.0] * 24 + [2.5]
    counts = [8, 32, 128]
    seen: list[Progress] = []
    found = partition(
        weights, parts, microbatches=counts, borders=[0] * 24, scaling=scaling,
        progress=seen.append, **closed_form(weights, 0.05),
    )  # fmt: skip
    exact = partition(
        weights, parts, microbatches=counts, **closed_form(weights, 0.05)
        | {"lower_bound": lambda *key: closed_form(weights, 0.05)["stage_cost"](*key)[0]},
    )  # fmt: skip
    everything = len(counts) * len(parts) * (24 + 25)
    assert found.best.seconds == pytest.approx(exact.best.seconds, rel=1e-9)
    assert found.gap <= 1e-9
    assert found.calls <= everything / (10 if scaling else 4)
    calls = [p.calls for p in seen]
    assert calls == sorted(set(calls))
    assert calls[-1] == found.calls
    assert max(b - a for a, b in itertools.pairwise(calls)) <= TOGETHER


def test_a_budget_is_kept_and_its_gap_stated() -> None:
    weights = [1.0] * 24 + [2.5]
    parts = submeshes(Mesh.parse("H100: node=4, gpu=8"))
    given_ = closed_form(weights, 0.05)
    exact = partition(weights, parts, microbatches=[8, 32, 128], **given_)
    for budget in (2, 6, 20):
        found = partition(weights, parts, microbatches=[8, 32, 128], most_calls=budget, **given_)
        assert found.calls <= budget
        assert found.bound <= exact.best.seconds * (1 + 1e-9)
        assert found.best.seconds >= exact.best.seconds * (1 - 1e-9)
    loose = partition(weights, parts, microbatches=[8, 32, 128], gap=0.1, **given_)
    assert loose.calls <= exact.calls
    assert loose.gap <= 0.1


@pytest.mark.slow
def test_sixty_four_layers_on_five_hundred_devices_take_seconds() -> None:
    parts = submeshes(Mesh.parse("H100: node=64, gpu=8"))
    given_ = closed_form([1.0] * 64, 0.05) | {"laws": [ONE_F_ONE_B, GPIPE, INTERLEAVED]}
    options = {"microbatches": [2**k for k in range(3, 9)], "borders": [0] * 63, "scaling": True}
    partition("aaaa", parts[:4], microbatches=[4], **given_ | {"laws": [ONE_F_ONE_B]})  # compiles
    start = time.process_time()
    found = partition("a" * 64, parts, **options, **given_)
    assert found.gap <= 1e-9
    assert time.process_time() - start < 5
