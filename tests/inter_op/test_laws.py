"""Closed-form laws against simulations of the schedules that they describe."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.inter_op import laws
from autopar.inter_op.laws import law
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import schedule

SCHEDULES: tuple[tuple[str, dict[str, int]], ...] = (
    ("gpipe", {}), ("1f1b", {}), ("eager_1f1b", {"extra": 2}), ("interleaved_1f1b", {"chunks": 3}),
    ("chimera", {}), ("zb_h1", {}), ("zb_h2", {}), ("zb_v", {}), ("dualpipe_v", {}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
def test_a_law_tells_the_step_of_equal_stages(name: str, options: dict[str, int]) -> None:
    told = law(name, **options)
    for ranks, microbatches in ((2, 8), (4, 16), (6, 48), (8, 128)):
        made = schedule(name, ranks, microbatches, **options)
        played = simulate(made, [StageCost()] * made.stages)
        work = played.busy[0] / microbatches  # of a rank on one microbatch
        step = (microbatches + told.fill(ranks, microbatches) * (ranks - 1)) * work
        # A published form may hold for whole units of microbatches only.
        assert played.seconds == pytest.approx(step, rel=0.02)
        kept = [told.in_flight(ranks - rank, ranks, microbatches) for rank in range(ranks)]
        held = [len(pairs) for pairs in made.holds]
        peak = [count / of for count, of in zip(played.peak_activations, held, strict=True)]
        assert all(a >= b for a, b in zip(kept, peak, strict=True))
        assert max(kept) == max(peak)
        assert [told.holds(rank, ranks) for rank in range(ranks)] == [
            tuple(stage for stage, _ in pairs) for pairs in made.holds
        ]
        assert (told.chunks, told.copies) == (made.stages // ranks, made.copies)


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
def test_a_law_tells_how_long_a_rank_waits_for_transfers(
    name: str, options: dict[str, int]
) -> None:
    """On another number of ranks, and with other transfers, than it was read off."""
    told, ranks, transfer = law(name, **options), 6, 0.01

    def seconds(microbatches: int, border: float) -> float:
        made = schedule(name, ranks, microbatches, **options)
        return simulate(made, [StageCost()] * made.stages, [border] * (made.stages - 1)).seconds

    few, many = 36, 72
    more = seconds(many, transfer) - seconds(few, transfer) - seconds(many, 0) + seconds(few, 0)
    # To one rank, and gradients on their way back.
    into = 2 * transfer * len(told.holds(1, ranks)) / told.copies
    assert more / ((many - few) * into) == pytest.approx(told.exposed, abs=0.1)
    assert told.exposed <= 1  # lower bounds of steps rely on it


def test_a_law_knows_what_does_not_fit() -> None:
    assert not law("chimera").fits(3, 8)
    assert law("chimera").fits(4, 1536)
    assert not law("dualpipe_v").fits(4, 7)
    with pytest.raises(ScheduleError, match="no schedule"):
        law("waterfall")
    with pytest.raises(ScheduleError, match="chunks"):
        law("interleaved_1f1b", chunks=1)


def test_numbers_of_microbatches_that_differ_in_whole_rounds_share_a_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, simulated = law("zb_v"), list[int]()

    def counting(made: Schedule, costs: list[StageCost]) -> Timeline:
        simulated.append(made.microbatches)
        return simulate(made, costs)

    monkeypatch.setattr(laws, "simulate", counting)
    fills = {told.fill(4, microbatches) for microbatches in (48, 96, 192, 384, 1536)}
    assert simulated == [12]
    assert len(fills) == 1
