"""The partition with prices in closed form: known best pipelines, its calls, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import pytest

from autopar.errors import CostError, InfeasibleError
from autopar.inter_op.partition import TOGETHER, partition
from autopar.inter_op.stage_values import Candidate, Law, Progress, StageSearchResult
from autopar.inter_op.submeshes import SubMesh, submeshes
from autopar.ir.mesh import Mesh
from tests.inter_op.test_partition import GPIPE, INTERLEAVED, ONE_F_ONE_B
from tests.support.work import calls_of


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
def test_twice_the_layers_on_five_hundred_devices_take_about_twice_the_calls() -> None:
    """Up to 64 layers: many more candidates are bounded in compiled loops, and few priced."""
    parts = submeshes(Mesh.parse("H100: node=64, gpu=8"))
    counts = dict[int, int]()
    for layers in (16, 32, 64):
        given_ = closed_form([1.0] * layers, 0.05) | {"laws": [ONE_F_ONE_B, GPIPE, INTERLEAVED]}
        given_ |= {"borders": [0] * (layers - 1), "scaling": True}
        search = partial(
            partition, "a" * layers, parts, microbatches=[2**k for k in range(3, 9)], **given_
        )
        found = search()  # compiles
        assert found.gap <= 1e-9
        assert found.calls < 2 * layers + 32  # of more than a thousand runs of layers, on 10 meshes
        counts[layers] = calls_of(search)
    assert counts[64] < 2.5 * counts[32] < 2.5**2 * counts[16]
