"""Every schedule for 1 to 8 ranks and 1 to 16 microbatches is complete and as fast as published.

A few lines here simulate the rows, sharing no code with the simulator, which is compared with them;
times and bubbles are compared with formulas from the publications.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from autopar.errors import ScheduleError
from autopar.inter_op import schedules as package
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule import Schedule, Times
from autopar.inter_op.schedule_time import Prepared, StageCost, prepare, simulate
from autopar.inter_op.schedules import exact, schedule, schedules
from autopar.inter_op.schedules.dualpipe_v import published
from autopar.ir.action import Action
from autopar.ir.pipeline_step import Wiring
from tests.support.further_modules import find_also

NAMES = exact()
RANKS, MICROBATCHES = range(1, 9), range(1, 17)
EQUAL = Times(1, 1, 1)
TIMES = (EQUAL, Times(1, 0.5, 0.5), Times(2, 1, 1), Times(1, 1, 0.5), Times(1, 1.5, 0.5))
ODD = Times(1, 0.75, 2)  # weight backwards that are too long for any gap


@cache
def legal(name: str) -> tuple[tuple[int, int, Schedule], ...]:
    return tuple(_legal(name))


def _legal(name: str) -> Iterator[tuple[int, int, Schedule]]:
    for ranks, microbatches in product(RANKS, MICROBATCHES):
        try:
            yield ranks, microbatches, schedule(name, ranks, microbatches)
        except ScheduleError:
            continue


@cache
def prepared(name: str) -> dict[tuple[int, int], Prepared]:
    return {(ranks, batches): prepare(made) for ranks, batches, made in legal(name)}


def run(name: str, ranks: int, microbatches: int, times: Times) -> Timeline:
    made = prepared(name)[ranks, microbatches]
    return made.run([StageCost(*times)] * made.step.stages)


def play(made: Schedule, times: Times) -> list[list[tuple[Action, float, float]]]:
    """Start and end of all actions, by going round the ranks until nothing moves."""
    seconds = dict(zip("FIWB", (*times, times.input + times.weight), strict=True))
    ended: dict[Action, float] = {}
    rows: list[list[tuple[Action, float, float]]] = [[] for _ in made.rows]
    moved = True
    while moved:
        moved = False
        for row, actions in zip(rows, made.rows, strict=True):
            while len(row) < len(actions):
                action = actions[len(row)]
                needs = [
                    [ended[one] for one in alternatives if one in ended]
                    for alternatives in Wiring.chain(made.stages).needs(action)
                ]
                if not all(needs):
                    break
                start = max([row[-1][2] if row else 0.0, *(need[0] for need in needs)])
                ended[action] = start + seconds[action.kind]
                row.append((action, start, ended[action]))
                moved = True
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_there_once_and_can_run(name: str) -> None:
    count = 0
    for _, microbatches, made in legal(name):
        actions = Counter(action for row in made.rows for action in row)
        assert set(actions.values()) == {1}
        copies = {action.microbatch: action.copy for action in actions}
        assert sorted(copies) == list(range(microbatches))
        for stage, batch in product(range(made.stages), range(microbatches)):
            there = {
                kind for kind in "FBIW" if Action(kind, stage, batch, copies[batch]) in actions
            }
            assert there in ({"F", "B"}, {"F", "I", "W"})
        assert len(actions) == sum(
            3 if Action("I", stage, batch, copies[batch]) in actions else 2
            for stage, batch in product(range(made.stages), range(microbatches))
        )
        for rank, row in enumerate(made.rows):
            assert {made.rank_of(action) for action in row} == {rank}
            assert {(action.stage, action.copy) for action in row} == set(made.holds[rank]) or (
                made.copies > 1 and microbatches == 1
            )
        played = play(made, EQUAL)
        assert [len(row) for row in played] == [len(row) for row in made.rows]
        assert made.splits_backward == any(action.kind == "I" for action in actions)
        count += 1
    assert count >= 32


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_agrees_with_a_simple_player(name: str) -> None:
    for ranks, microbatches, made in legal(name):
        if ranks in (1, 2, 3, 6) and microbatches in (2, 11, 12):
            timeline = run(name, ranks, microbatches, ODD)
            for row, spans in zip(play(made, ODD), timeline.spans, strict=True):
                assert [(span.action, span.start, span.end) for span in spans] == row


def idle(name: str, ranks: int, microbatches: int, times: Times) -> Fraction | None:
    """Idle seconds of a rank as the publications have them, for their sizes and times."""
    forward, halves, weight = (Fraction(seconds) for seconds in times)
    total = forward + halves + weight
    fills = weight <= min(forward, halves)
    match name:
        case "naive":
            return (ranks - 1) * microbatches * total
        case "gpipe" | "1f1b" | "eager_1f1b":
            return (ranks - 1) * total
        case "interleaved_1f1b":  # two chunks; times are those of a chunk
            return (ranks - 1) * total if microbatches % ranks == 0 else None
        case "chimera":
            if microbatches % ranks == 0 and forward == halves + weight:
                return (ranks - 2) * forward
            if microbatches == ranks and 2 * forward == halves + weight:
                # (D-2)/(3N/2+D-2) of the step, where a microbatch takes three forwards
                return (ranks - 2) * 2 * forward
            return None
        case "zb_h1":
            return (ranks - 1) * (forward + halves - weight) if fills else None
        case "zb_h2":
            return (ranks - 1) * (forward + halves - 2 * weight) if fills else None
        case "zb_v":
            return Fraction(0) if forward == halves == weight else None
    return None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dualpipe_v"])
def test_simulated_bubbles_are_those_published(name: str) -> None:
    needed = {"zb_h1": lambda ranks: ranks, "zb_v": lambda ranks: 2 * ranks - 1}
    count = 0
    for (ranks, microbatches, made), times in product(legal(name), (*TIMES, ODD)):
        lost = idle(name, ranks, microbatches, times)
        if lost is None or microbatches < needed.get(name, lambda ranks: 1)(ranks):
            continue
        work = Fraction(microbatches * made.stages, ranks) * Fraction(times.total)
        expected = float(lost / (lost + work))
        timeline = run(name, ranks, microbatches, times)
        found = timeline.joined_bubble if made.joined else timeline.bubble
        assert abs(found - expected) < 1e-12
        stated = made.bubble(times)
        assert stated is not None
        assert abs(stated - expected) < 1e-12
        count += 1
    assert count >= 16


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_form_holds_wherever_there_is_one(name: str) -> None:
    others = (EQUAL, Times(4, 3, 2), Times(1, 2, 1), Times(0.5, 2, 1), ODD)
    for (ranks, microbatches, made), times in product(legal(name), others):
        stated = made.bubble(times)
        if stated is not None:
            timeline = run(name, ranks, microbatches, times)
            found = timeline.joined_bubble if made.joined else timeline.bubble
            assert abs(found - stated) < 1e-12


def test_closed_forms_as_they_are_usually_written() -> None:
    for ranks, microbatches in ((4, 4), (4, 8), (8, 16)):
        size = {"ranks": ranks, "microbatches": microbatches}

        def bubble(name: str, times: Times = EQUAL, size: dict[str, int] = size) -> float:
            made = schedule(name, *size.values())
            return simulate(made, [StageCost(*times)] * made.stages).bubble

        behind, equal = ranks - 1, Times(1, 0.5, 0.5)
        assert bubble("naive") == pytest.approx(behind / ranks)
        assert bubble("gpipe") == pytest.approx(behind / (behind + microbatches))
        assert bubble("1f1b") == pytest.approx(behind / (behind + microbatches))
        assert bubble("interleaved_1f1b") == pytest.approx(behind / (behind + 2 * microbatches))
        assert bubble("chimera", equal) == pytest.approx(
            (ranks - 2) / (ranks - 2 + 2 * microbatches)
        )
        assert bubble("zb_h1") == pytest.approx(behind / (behind + 3 * microbatches))
    assert schedule("gpipe", 4, 6).bubble(EQUAL) == pytest.approx(1 / 3)


def blocks(made: Schedule, times: Times, together: float) -> float:
    """Returns the seconds of DualPipeV if a forward and its concurrent backward are one block.

    Its results come at its end. On the last rank the first pair is no block, to begin earlier.
    """
    seconds = dict(zip("FIWB", (*times, times.input + times.weight), strict=True))
    rows: list[list[tuple[Action, ...]]] = []
    for rank, row in enumerate(made.rows):
        cells: list[tuple[Action, ...]] = []
        for action in row:
            paired = bool(cells) and len(cells[-1]) == 1 and cells[-1][0].kind == "F"
            first = rank == made.ranks - 1 and not any(one.kind == "B" for one, *_ in cells)
            if action.kind == "B" and paired and not first:
                cells[-1] = (*cells[-1], action)
            else:
                cells.append((action,))
        rows.append(cells)
    ended: dict[Action, float] = {}
    now = [0.0] * made.ranks
    moved = True
    while moved:
        moved = False
        for rank, cells in enumerate(rows):
            while cells:
                needs = [need for one in cells[0] for need in Wiring.chain(made.stages).needs(one)]
                ready = [[ended[one] for one in need if one in ended] for need in needs]
                if not all(ready):
                    break
                cell = cells.pop(0)
                took = together if len(cell) > 1 else seconds[cell[0].kind]
                now[rank] = max([now[rank], *(need[0] for need in ready)]) + took
                ended.update(dict.fromkeys(cell, now[rank]))
                moved = True
    assert not any(rows)
    return max(now)


def test_dualpipe_v_in_blocks_has_the_bubble_that_deepseek_gives() -> None:
    for ranks, microbatches, made in legal("dualpipe_v"):
        for times in (EQUAL, Times(1, 1, 0.5), Times(2, 2, 1)):
            pairs = times.total
            lost = published(ranks, times, pairs)
            step = blocks(made, times, pairs)
            assert step == pytest.approx(2 * microbatches * times.total + lost)
            one_by_one = simulate(made, [StageCost(*times)] * made.stages).seconds
            assert one_by_one <= step


FULL = {
    "naive": lambda rank, ranks, batches: 1,
    "gpipe": lambda rank, ranks, batches: batches,
    "1f1b": lambda rank, ranks, batches: min(ranks - rank, batches),
    "eager_1f1b": lambda rank, ranks, batches: min(2 * (ranks - rank) - 1, batches),
    "interleaved_1f1b": lambda rank, ranks, batches: min(
        max(ranks, batches // max(1, batches // ranks)) * (batches >= ranks)
        + batches * (batches < ranks)
        + 2 * (ranks - 1 - rank)
        + 1,
        2 * batches,
    ),
    "zb_h1": lambda rank, ranks, batches: min(ranks, batches),
    "zb_h2": lambda rank, ranks, batches: 2 * ranks - 1,
    "zb_v": lambda rank, ranks, batches: min(2 * ranks, 2 * batches),
    "dualpipe_v": lambda rank, ranks, batches: 2 * ranks + 1,
    "chimera": lambda rank, ranks, batches: min(
        ranks // 2 + 1 + min(rank, ranks - 1 - rank), batches
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_as_stated_and_as_published(name: str) -> None:
    """At most what is stated everywhere, and exactly that once the pipeline is full."""
    for ranks, microbatches, made in legal(name):
        peaks = run(name, ranks, microbatches, EQUAL).peak_activations
        expected = tuple(FULL[name](rank, ranks, microbatches) for rank in range(ranks))
        assert made.in_flight == expected
        assert all(peak <= stated for peak, stated in zip(peaks, made.in_flight, strict=True))
        if microbatches >= 2 * ranks:
            assert peaks == made.in_flight


def test_more_forwards_ahead_hide_transfers() -> None:
    """With a transfer of half a microbatch's time 1F1B waits for each; one more ahead suffices."""
    ranks, microbatches = 4, 64
    costs, transfers = [StageCost(1, 1, 0)] * ranks, [1.0] * (ranks - 1)
    seconds = {
        extra: simulate(
            schedule("eager_1f1b", ranks, microbatches, extra=extra), costs, transfers
        ).seconds
        for extra in (0, 1, 2)
    }
    plain = simulate(schedule("1f1b", ranks, microbatches), costs, transfers).seconds
    least = 2 * microbatches + 2 * (ranks - 1) + 2 * sum(transfers)
    assert seconds[0] == plain > 1.4 * least
    assert seconds[1] == seconds[2] == least


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "todo"),
    [
        ("chimera", 3, 4, "4 ranks"),
        ("chimera", 4, 3, "4 microbatches"),
        ("interleaved_1f1b", 4, 9, "8 or 12"),
        ("zb_h2", 4, 6, "7 microbatches"),
        ("dualpipe_v", 4, 7, "8 microbatches"),
        ("1f1b", 0, 4, "positive"),
        ("gpipe", 4, 0, "positive"),
        ("nonsense", 4, 4, "name one"),
    ],
)
def test_illegal_sizes_are_refused_with_what_to_do(
    name: str, ranks: int, microbatches: int, todo: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule(name, ranks, microbatches)
    assert name in str(caught.value)
    assert todo in caught.value.todo


def test_what_is_advised_instead_of_illegal_sizes_is_legal() -> None:
    assert schedule("chimera", 4, 4).microbatches == 4
    assert [schedule("interleaved_1f1b", 4, size).microbatches for size in (8, 12)] == [8, 12]
    assert schedule("zb_h2", 4, 7).microbatches == 7
    assert schedule("dualpipe_v", 4, 8).microbatches == 8


@pytest.mark.parametrize("options", [{"chunks": 1}, {"chunks": 0}, {"extra": -1}])
def test_illegal_options_are_refused(options: dict[str, int]) -> None:
    name = "eager_1f1b" if "extra" in options else "interleaved_1f1b"
    with pytest.raises(ScheduleError, match=name):
        schedule(name, 4, 8, **options)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    made = schedule("interleaved_1f1b", 4, 8, chunks=chunks)
    assert made.stages == 4 * chunks
    assert made.holds[1] == tuple((1 + 4 * chunk, 0) for chunk in range(chunks))
    timeline = simulate(made, [StageCost(*EQUAL)] * made.stages)
    assert timeline.bubble == pytest.approx(3 / (3 + chunks * 8))


def test_a_schedule_is_a_value() -> None:
    assert schedule("zb_v", 4, 8) == schedule("zb_v", 4, 8) != schedule("zb_v", 4, 9)
    made = schedule("chimera", 4, 4)
    assert made.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert str(schedule("1f1b", 2, 2)) == "0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1"


def test_schedules_are_found_by_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(next(iter(package.__path__)), "gpipe.py").read_text("utf-8")
    (tmp_path / "mine.py").write_text(source.replace('NAME = "gpipe"', 'NAME = "mine"'))
    find_also(monkeypatch, package, tmp_path)
    assert set(exact()) == {*NAMES, "mine"}
    assert schedule("mine", 2, 2).rows == schedule("gpipe", 2, 2).rows
    (tmp_path / "twin.py").write_text(source)
    with pytest.raises(ScheduleError, match="two schedules 'gpipe'"):
        schedules()


def test_bubbles_shrink_with_microbatches() -> None:
    for name in NAMES:
        made = [schedule(name, 4, count) for count in (8, 16, 32)]
        bubbles = [simulate(one, [StageCost()] * one.stages).bubble for one in made]
        assert bubbles == sorted(bubbles, reverse=True)
        assert (len(set(bubbles)) == 1) == (name == "naive")
        assert all(math.isfinite(bubble) for bubble in bubbles)
