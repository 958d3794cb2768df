"""The simulator of pipelines: transfers, activations, deadlocks, and refusals."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace

import pytest

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.gantt import IDLE, gantt, legend
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedule_time import StageCost, prepare, simulate
from autopar.inter_op.schedules import exact, schedule
from autopar.ir.action import Action, parse_row
from autopar.ir.pipeline_step import Wiring
from tests.support.work import calls_of


def play(made: Schedule, costs: list[StageCost], transfers: list[float]) -> dict[Action, float]:
    """The end of all actions: what is asked for first is computed first, then it is carried."""
    place = {
        action: (rank, at) for rank, row in enumerate(made.rows) for at, action in enumerate(row)
    }
    ended: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[Action, float] = {}

    def seconds(action: Action) -> float:
        cost = costs[action.stage]
        whole = cost.input + cost.weight
        return {"F": cost.forward, "B": whole, "I": cost.input, "W": cost.weight}[action.kind]

    for _ in range(len(place)):
        for rank, row in enumerate(made.rows):
            for at, action in enumerate(row):
                if action in ended:
                    continue
                needs = [
                    next((one for one in alternatives if one in ended), None)
                    for alternatives in Wiring.chain(made.stages).needs(action)
                ]
                if None in needs or (at and row[at - 1] not in ended):
                    break
                ready = [arrived[one] if one.stage != action.stage else ended[one] for one in needs]
                start = max([ended[row[at - 1]] if at else 0.0, *ready])
                ended[action] = start + seconds(action)
                arrived[action] = ended[action]
                to = action.stage + (1 if action.kind == "F" else -1)
                if action.kind != "W" and 0 <= to < made.stages:
                    reader = made.placement[action.copy][to]
                    if reader != rank:
                        begin = max(ended[action], free[rank, reader])
                        arrived[action] = begin + transfers[min(to, action.stage)]
                        free[rank, reader] = arrived[action]
        if len(ended) == len(place):
            return ended
    raise AssertionError("the schedule does not end")


@pytest.mark.parametrize("name", exact())
def test_uneven_stages_and_transfers_as_a_simple_player_has_them(name: str) -> None:
    generator = random.Random(name)
    made = schedule(name, 4, 8)
    for most in (0.3, 3.0):
        costs = [
            StageCost(*(generator.uniform(0.5, 2) for _ in range(3))) for _ in range(made.stages)
        ]
        transfers = [generator.uniform(0, most) for _ in range(made.stages - 1)]
        expected = play(made, costs, transfers)
        timeline = simulate(made, costs, transfers)
        for row in timeline.spans:
            for span in row:
                assert span.end == pytest.approx(expected[span.action], abs=1e-9)
        assert timeline.seconds == pytest.approx(max(expected.values()))


def test_what_is_idle_and_what_is_busy_make_the_step() -> None:
    costs = [StageCost(1, 2, 3), StageCost(2, 2, 2)]
    timeline = simulate(schedule("1f1b", 2, 3), costs, [0.5])
    assert timeline.busy == (18, 18)
    for busy, idle in zip(timeline.busy, timeline.idle, strict=True):
        assert busy / timeline.seconds + idle == pytest.approx(1)
    assert timeline.bubble == pytest.approx(sum(timeline.idle) / 2)
    # rank 0 begins at 0; rank 1 waits for its forward and a transfer
    assert [float(start[0]) for start in timeline.starts] == [0, 1.5]


def test_a_transfer_takes_its_time_once_and_not_within_a_rank() -> None:
    made, slow = schedule("zb_v", 2, 3), [0.0, 7.0, 0.0]
    assert made.placement == ((0, 1, 1, 0),)
    costs = [StageCost()] * 4
    assert simulate(made, costs, slow).seconds == simulate(made, costs).seconds
    assert simulate(schedule("gpipe", 2, 1), costs[:2], [5]).seconds == 6 + 2 * 5


def test_gradients_may_take_another_time_back() -> None:
    costs, made = [StageCost(1, 1, 0)] * 3, schedule("gpipe", 3, 1)
    assert simulate(made, costs, [5, 6], [1, 2]).seconds == 6 + 5 + 6 + 1 + 2
    assert simulate(made, costs, [], [1, 2]).seconds == 6 + 1 + 2
    assert simulate(made, costs, [5, 6], []).seconds == 6 + 5 + 6
    with pytest.raises(ScheduleError):
        simulate(made, costs, [5, 6], [1])


def test_transfers_on_a_link_follow_one_another() -> None:
    """Four activations of 3 s each on one link, produced a second apart."""
    timeline = simulate(schedule("gpipe", 2, 4), [StageCost(1, 0, 0)] * 2, [3])
    starts = [span.start for span in timeline.spans[1] if span.action.kind == "F"]
    assert starts == [4, 7, 10, 13]


def test_bytes_of_activations_are_counted_until_their_backward_ends() -> None:
    cost = StageCost(activation=10)
    assert simulate(schedule("gpipe", 3, 5), [cost] * 3).peak_bytes == (50, 50, 50)
    assert simulate(schedule("1f1b", 3, 5), [cost] * 3).peak_bytes == (30, 20, 10)
    uneven = [StageCost(activation=size) for size in (1, 2, 4, 8)]
    assert simulate(schedule("zb_v", 2, 1), uneven).peak_bytes == (9, 6)


def test_between_input_and_weight_backward_a_part_is_kept() -> None:
    made = replace(schedule("zb_h1", 1, 2), rows=(parse_row("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1"),))
    for kept, peak in ((None, 20), (4, 14), (10, 20), (15, 30)):
        # at the second forward: all of it, and what is kept of the first; at the end twice `kept`
        timeline = simulate(made, [StageCost(activation=10, kept=kept)])
        assert timeline.peak_bytes == (peak,)
        assert timeline.peak_activations == (2,)


def test_actions_that_wait_for_one_another_are_named() -> None:
    made = schedule("1f1b", 2, 2)
    stuck = replace(made, rows=(parse_row("F0.0 B0.0 F0.1 B0.1"), parse_row("F1.0 F1.1 B1.0 B1.1")))
    with pytest.raises(DeadlockError) as caught:
        simulate(stuck, [StageCost()] * 2)
    text = str(caught.value)
    for part in (
        "B0.0 waits for SEND_B1.0 on rank 1",
        "F1.1 waits for SEND_F0.1 on rank 0",
        "ranks 0, 1",
    ):
        assert part in text
    backwards = replace(made, rows=(made.rows[0][::-1], made.rows[1]))
    with pytest.raises(DeadlockError, match=r"B0\.1 waits for what comes after it"):
        simulate(backwards, [StageCost()] * 2)


def test_a_circle_of_three_ranks_is_followed_round() -> None:
    made = schedule("1f1b", 3, 2)
    rows = ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", "F2.0 F2.1 B2.0 B2.1")
    with pytest.raises(DeadlockError) as caught:
        simulate(replace(made, rows=tuple(map(parse_row, rows))), [StageCost()] * 3)
    assert "F1.1 waits for SEND_F0.1" in str(caught.value)
    assert "B0.0 waits for SEND_B1.0" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (("F0.0 B0.0", "F1.0 B1.0 B1.0"), "B1.0 is in the schedule twice"),
        (("F0.0 B0.0", "F1.0"), "stage 1 does not train on microbatch 0 once"),
        (("F0.0 B0.0", "F1.0 I1.0"), "stage 1 does not train on microbatch 0 once"),
        (("F0.0 B0.0", "F1.0 B1.0 W1.0"), "stage 1 does not train on microbatch 0 once"),
        (("F0.0 B0.0", ""), "stage 1 does not train on microbatch 0 once"),
        (("F0.0 B0.0 F1.0 B1.0", ""), "F1.0 is on rank 0"),
        (("F0.0 B0.0", "F1.0 B1.0 F1.1 B1.1"), "F1.1 is no action"),
        (("F0.0 SEND_F0.0 B0.0", "F1.0 B1.0"), "SEND_F0.0 is no action"),
        (("F0.0' B0.0'", "F1.0 B1.0"), "F0.0' is no action"),
    ],
)
def test_a_schedule_that_is_not_whole_is_refused(rows: tuple[str, ...], what: str) -> None:
    made = replace(schedule("gpipe", 2, 1), rows=tuple(map(parse_row, rows)))
    with pytest.raises(ScheduleError) as caught:
        prepare(made)
    assert what in str(caught.value)
    assert caught.value.todo


@pytest.mark.parametrize(
    ("costs", "transfers"),
    [
        ([StageCost()], []),
        ([StageCost()] * 2, [0.0, 0.0]),
        ([StageCost(), StageCost(-1)], []),
        ([StageCost(), StageCost(float("nan"))], []),
        ([StageCost(), StageCost(float("inf"))], []),
        ([StageCost()] * 2, [-0.5]),
        ([StageCost()] * 2, [float("inf")]),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: list[StageCost], transfers: list[float]) -> None:
    with pytest.raises(ScheduleError):
        simulate(schedule("gpipe", 2, 1), costs, transfers)


def test_stages_that_cost_nothing_take_no_time() -> None:
    timeline = simulate(schedule("1f1b", 3, 4), [StageCost(0, 0, 0)] * 3)
    assert (timeline.seconds, timeline.bubble, timeline.joined_bubble) == (0, 0, 0)
    assert [str(line) for line in gantt(timeline, 10)] == ["", "", ""]


def test_a_gantt_has_a_letter_for_each_second() -> None:
    made = schedule("1f1b", 2, 2)
    timeline = simulate(made, [StageCost(1, 1, 1)] * 2)
    assert [str(line) for line in gantt(timeline, 9)] == ["FF··B0·B1", "·FB0FB1··"]
    for row, line in zip(timeline.spans, gantt(timeline, 18), strict=True):
        text = str(line)
        assert len(text) == 18
        for span in row:
            there = text[int(span.start * 2) : int(span.end * 2)]
            assert there.startswith(f"{span.action.kind}{span.action.microbatch}")
            assert set(there[2:]) <= {"-"}
        assert text.count(IDLE) == 18 - sum(round(2 * (end - start)) for *_, start, end in row)
    assert {"F", "B"} <= set(str(legend(timeline)).split())


def test_a_gantt_of_more_actions_than_columns_still_fits() -> None:
    timeline = simulate(schedule("zb_h2", 4, 300), [StageCost(1, 1.5, 0.5)] * 4)
    lines = [str(line) for line in gantt(timeline, 60)]
    assert {len(line) for line in lines} == {60}
    assert all(set(line) <= set("FIW" + IDLE) for line in lines)


def test_a_trace_holds_every_action_in_microseconds() -> None:
    timeline = simulate(schedule("zb_h1", 2, 2), [StageCost(1e-3, 2e-3, 1e-3)] * 2)
    events = json.loads(timeline.to_trace())["traceEvents"]
    runs = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(runs) == {
        f"{kind}{stage}.{batch}" for kind in "FIW" for stage in (0, 1) for batch in (0, 1)
    }
    assert runs["F1.0"]["ts"] == pytest.approx(1000)
    assert runs["F1.0"]["dur"] == pytest.approx(1000)
    assert runs["F1.0"]["tid"] == 1


@pytest.mark.parametrize("name", exact())
def test_a_schedule_is_prepared_action_by_action_and_run_in_compiled_loops(name: str) -> None:
    """A run of 16 ranks makes as many calls for many microbatches as for few."""

    def counts(microbatches: int) -> tuple[int, int, int]:
        made = schedule(name, 16, microbatches)
        costs, transfers = [StageCost()] * made.stages, [0.1] * (made.stages - 1)
        simulate(made, costs, transfers)  # compiles
        ready = prepare(made)
        preparing, running = (
            calls_of(run) for run in (lambda: prepare(made), lambda: ready.run(costs, transfers))
        )
        return sum(map(len, made.rows)), preparing, running

    (few, preparing, running), (many, preparing_many, running_many) = map(counts, (32, 96))
    assert preparing_many - preparing < 16 * (many - few)
    assert running_many == running < 1000
