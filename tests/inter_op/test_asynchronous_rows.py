"""Schedules without flushes: closed forms against rows that are walked and simulated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ScheduleError
from autopar.inter_op import schedules as package
from autopar.inter_op.checkers.deadlock_checker import check
from autopar.inter_op.checkers.weights_checker import StageWeights, check_weights, walk
from autopar.inter_op.complete import complete
from autopar.inter_op.schedule import Schedule, Times
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import (
    allowed,
    candidates,
    check_allowed,
    exact,
    schedule,
    schedules,
)
from autopar.inter_op.schedules.pipedream import versions_of_replicas
from autopar.inter_op.steady_state import steady
from autopar.ir.action import UPDATE, Action, parse_row
from autopar.ir.pipeline_step import Step, Wiring, unrolled
from tests.support.further_modules import find_also

WAYS: tuple[tuple[str, dict[str, int]], ...] = (
    ("pipedream", {}), ("pipedream", {"vertical": 1}), ("2bw", {}), ("ampnet", {}),
    ("ampnet", {"every": 2}), ("pipemare", {}), ("bounded_staleness", {}),
    ("bounded_staleness", {"ahead": 3}),
)  # fmt: skip
SIZES = tuple(product(range(1, 7), (2, 4, 6, 8, 12)))


def legal(name: str, options: dict[str, int]) -> list[Schedule]:
    found = []
    for ranks, microbatches in SIZES:
        try:
            found.append(schedule(name, ranks, microbatches, **options))
        except ScheduleError:
            assert name == "2bw"
            assert microbatches < ranks
    return found


def run(made: Schedule) -> tuple[Step, list[StageWeights]]:
    """Returns checked rows beyond the steady state, and the weights that stages use."""
    step = complete(made).unrolled(made.warm_up + 3)
    check(step)
    check_weights(step, made.versions, made.stashes)
    found = walk(step)
    return step, [found[stage, 0] for stage in range(made.stages)]


def test_every_method_is_here() -> None:
    assert {name for name, _ in WAYS} == set(schedules()) - set(exact())


@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_versions_staleness_and_activations_are_the_closed_forms(
    name: str, options: dict[str, int]
) -> None:
    for made in legal(name, options):
        _, weights = run(made)
        assert tuple(one.versions for one in weights) == made.versions
        assert tuple(one.staleness for one in weights) == made.staleness
        assert all(one.consistent for one in weights) or not made.stashes
        played = simulate(made, [StageCost()] * made.stages)
        assert played.peak_activations == made.in_flight
        assert not made.flushes


@pytest.mark.parametrize(("name", "options"), WAYS[:-2], ids=str)
def test_no_rank_is_idle_in_the_steady_state(name: str, options: dict[str, int]) -> None:
    for made in legal(name, options):
        for cost in (StageCost(1, 1, 1), StageCost(2, 1, 1), StageCost(1, 1, 1, update=0.5)):
            costs = [cost] * made.stages
            seconds, bubble = steady(complete(made), costs)
            updates = sum(one.kind == UPDATE for one in made.rows[0])
            work = made.microbatches * (cost.forward + cost.input + cost.weight)
            assert seconds == pytest.approx(work + updates * cost.update)
            assert bubble == pytest.approx(0, abs=1e-9)


def test_sums_beside_later_steps_are_waited_for_where_they_do_not_arrive() -> None:
    """A period of bounded staleness is that of 1F1B, unless a sum takes longer than a period."""
    for stages, microbatches in ((1, 4), (2, 4), (4, 8)):
        made = schedule("bounded_staleness", stages, microbatches)
        busy, span = 3 * microbatches, 3 * (microbatches + stages - 1)
        for sums in (0.0, 0.9 * span, 1.5 * span):
            costs = [StageCost(sums=sums)] * stages
            seconds, idle = steady(complete(made), costs)
            assert seconds == pytest.approx(max(span, sums))
            assert idle == pytest.approx(1 - busy / seconds)
        assert made.bubble(Times()) == pytest.approx(1 - busy / span)


def test_published_versions_and_staleness() -> None:
    """Written out from the papers, for four stages and, where it matters, eight microbatches."""
    for name, options, versions, staleness in (
        ("pipedream", {}, (4, 3, 2, 1), (3, 2, 1, 0)),
        ("pipedream", {"vertical": 1}, (4, 4, 4, 4), (3, 3, 3, 3)),
        ("2bw", {}, (2, 2, 2, 2), (1, 1, 1, 1)),
        ("ampnet", {}, (1, 1, 1, 1), (3, 2, 1, 0)),
        # 2 (P - i) + 1 microbatches of eight: all are under one update
        ("pipemare", {}, (1, 1, 1, 1), (1, 1, 1, 1)),
    ):
        made = schedule(name, 4, 8, **options)
        assert (made.versions, made.staleness) == (versions, staleness)


def test_the_delay_of_pipemare_is_on_average_what_its_table_says() -> None:
    for stages, microbatches in ((2, 4), (4, 2), (5, 8)):
        made = schedule("pipemare", stages, microbatches)
        step = complete(made).unrolled(made.warm_up + 6)
        for stage, weights in ((n, walk(step)[n, 0]) for n in range(stages)):
            last = range(made.warm_up * microbatches, (made.warm_up + 6) * microbatches)
            late = [weights.backwards[k] - weights.forwards[k] for k in last]
            delay = (2 * (stages - 1 - stage) + 1) / microbatches
            assert sum(late) / len(late) == pytest.approx(delay)
            assert made.adjustment.delays[stage] == delay


def test_versions_where_stages_are_replicated() -> None:
    for p in range(1, 7):
        straight = [versions_of_replicas([1] * p, stage) for stage in range(p)]
        assert straight == [*schedule("pipedream", p, 4).versions]
    # Two replicas of the first stage take turns: of three minibatches in flight each has two.
    assert [versions_of_replicas([2, 1], stage) for stage in range(2)] == [2, 1]
    assert [versions_of_replicas([3, 2, 1], stage) for stage in range(3)] == [2, 2, 1]


def test_warm_up_and_drain_follow_from_the_rows() -> None:
    row = parse_row("F0.0 B0.-1@1 UPDATE0.-1 F0.1 B0.0@1 UPDATE0.0")
    (all_of_it,) = unrolled([row], 2, 2)
    assert " ".join(map(str, all_of_it)) == (
        "F0.0 F0.1 B0.0@1 UPDATE0.0 F0.2 B0.1@1 UPDATE0.1 F0.3 B0.2@1 UPDATE0.2 B0.3@1 UPDATE0.3"
    )


def changed(made: Schedule, rank: int, change: Any) -> Schedule:
    rows = list(made.rows)
    rows[rank] = tuple(change(action) for action in rows[rank])
    return replace(made, rows=tuple(rows))


def test_the_checker_detects_overwritten_weights() -> None:
    made = schedule("pipedream", 3, 4)
    step = complete(made).unrolled(4)
    with pytest.raises(ScheduleError, match="stage 0 needs 3 versions") as caught:
        check_weights(step, (2, 2, 1))
    assert "it holds 2" in caught.value.why
    check_weights(step, (3, 2, 1))
    with pytest.raises(ScheduleError, match="needs 2 versions"):
        check_weights(complete(schedule("2bw", 3, 4)).unrolled(4))


def test_the_checker_detects_a_backward_on_other_weights() -> None:
    def newest(action: Action) -> Action:
        return action._replace(age=0) if action.kind == "B" else action

    made = changed(schedule("pipedream", 3, 4), 0, newest)
    step = complete(made).unrolled(4)
    with pytest.raises(
        ScheduleError, match=r"backward of stage 0 on microbatch 1 runs on version 1"
    ):
        check_weights(step, made.versions)
    check_weights(step, made.versions, stashes=False)


def test_updates_and_gradients_that_do_not_meet_are_named() -> None:
    made = schedule("ampnet", 2, 2)
    rows = list(complete(made).unrolled(2).rows)
    without = tuple(one for one in rows[1] if one != Action(UPDATE, 1, 3))
    with pytest.raises(ScheduleError, match=r"no update uses the gradients of .* \[3\] of stage 1"):
        walk(replace(complete(made).unrolled(2), rows=(rows[0], without)))
    early = tuple(one for one in rows[1] if one.kind != "B" or one.microbatch)
    with pytest.raises(ScheduleError, match=r"UPDATE1\.0 has no gradients to use"):
        walk(replace(complete(made).unrolled(2), rows=(rows[0], early)))


HOSTS = Wiring(Wiring.chain(2).edges, ((), ()), (("node", "gpu"),) * 2)


def test_sums_over_inner_axes_are_made_at_once() -> None:
    made = schedule("bounded_staleness", 2, 2, ahead=2, outer=1)
    step = complete(made, HOSTS)
    assert (
        str(step)
        .splitlines()[1]
        .endswith("SYNC1.1/@gpu SYNC_BEGIN1.1/@node SYNC_AWAIT1.-3/@node UPDATE1.-3")
    )
    check(step.unrolled(5))
    few = replace(HOSTS, axes=(("node",), ("node",)))
    assert complete(made, few).rows == complete(schedule("bounded_staleness", 2, 2, ahead=2)).rows


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("SYNC0.1/@gpu SYNC_BEGIN0.1/@node(a) SYNC0.1/@node(b) SYNC_AWAIT0.1/@node(a) UPDATE0.1",
         "gradients of stage 0 are not synchronised"),  # of other parameters over hosts
        ("SYNC0.1/@gpu SYNC_BEGIN0.1/@node UPDATE0.1", "gradients of stage 0 are not synchronised"),
        ("SYNC0.1 SYNC_BEGIN0.1/@node SYNC_AWAIT0.1/@node UPDATE0.1", ""),
        ("SYNC0.1/@gpu SYNC0.1 UPDATE0.1", "would be added up twice"),
        ("SYNC0.1/@rack SYNC0.1 UPDATE0.1", "the mesh of stage 0 has no axis rack"),
        ("SYNC0.1/(a) SYNC_AWAIT0.1/@node UPDATE0.1", "has not begun"),
        ("SYNC0.1/@gpu SYNC_BEGIN0.1/@node SYNC_AWAIT0.1/@node UPDATE0.1", ""),
    ],
)  # fmt: skip
def test_the_checker_detects_missing_sums_of_an_update(ending: str, why: str) -> None:
    row = parse_row(f"F0.0 B0.0 F0.1 B0.1 {ending}")
    step = Step((row,), ((0,),), 2, Wiring((), ((),), (("node", "gpu"),)))
    if not why:
        return check(step)
    with pytest.raises(ScheduleError) as caught:
        check(step)
    assert why in caught.value.why


def test_stale_gradients_have_to_be_allowed() -> None:
    for name in exact():
        check_allowed(name, "")
    for name, _ in WAYS:
        with pytest.raises(ScheduleError, match="trains with stale gradients") as caught:
            check_allowed(f"{name} chunks=2", "")
        assert "allow='stale gradients'" in caught.value.todo
        check_allowed(name, "stale gradients")
    with pytest.raises(ScheduleError, match="nothing 'haste' to allow"):
        allowed("stale gradients, haste")
    assert not {"2bw", "pipedream"} & set(candidates())
    new = set(candidates("stale gradients")) - set(candidates())
    assert {text.partition(" ")[0] for text in new} == {name for name, _ in WAYS}


def test_candidates_are_found_in_their_files() -> None:
    assert candidates()[:3] == ("1f1b", "zb_h1", "zb_v")
    assert "interleaved_1f1b chunks=16" in candidates()


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("pipedream", {"vertical": 2}, "vertical=2"),
        ("ampnet", {"every": 3}, "an update for every 3 of 4"),
        ("pipemare", {"correction": 1000}, "correction=1000"),
        ("bounded_staleness", {"ahead": 0}, "0 steps ahead"),
    ],
)
def test_options_that_are_none_are_refused(name: str, options: dict[str, int], what: str) -> None:
    with pytest.raises(ScheduleError, match=what):
        schedule(name, 2, 4, **options)
    with pytest.raises(ScheduleError, match="use 4 microbatches or more"):
        schedule("2bw", 4, 3)
    with pytest.raises(ScheduleError, match="periods overlap"):
        complete(schedule("2bw", 2, 2), queue="rank")


def test_a_further_method_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(next(iter(package.__path__)), "two_buffered.py").read_text("utf-8")
    source = source.replace('NAME = "2bw"', 'NAME = "mine"')
    (tmp_path / "fifth_method.py").write_text(source)
    find_also(monkeypatch, package, tmp_path)
    assert "mine" in candidates("stale gradients")
    assert "mine" not in candidates()
    made = schedule("mine", 3, 6)
    run(made)
    with pytest.raises(ScheduleError, match="'mine' trains with stale gradients"):
        check_allowed("mine", "")
