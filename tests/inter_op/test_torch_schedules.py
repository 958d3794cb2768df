"""Our rows against those of torch.distributed.pipelining, without processes."""

from __future__ import annotations

from itertools import product

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from autopar.errors import ScheduleError
from autopar.inter_op.checkers.deadlock_checker import check
from autopar.inter_op.complete import complete
from autopar.inter_op.schedule import Row, Schedule
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import schedule
from autopar.ir.action import COMPUTE, SYNC, TRANSFER, UPDATE, Action
from autopar.ir.pipeline_step import Step, Wiring

SIZES = tuple(product(range(1, 9), range(1, 17)))


class Stage(_PipelineStageBase):
    """What a schedule asks of a stage before it runs."""

    def __init__(self, ranks: int, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_size, self.group_rank, self.group = ranks, 0, None
        self.has_backward, self.submod = True, None


Stage.__abstractmethods__ = frozenset()


def their_order(name: str, ranks: int, chunks: int, microbatches: int, lowered: bool) -> list[Row]:
    """Rows of torch's schedule of that name; ValueError where it refuses the sizes."""
    kind, stages = getattr(theirs, name), ranks * chunks
    vee = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    own = [0, stages - 1] if vee else range(0, stages, ranks)
    held = [Stage(ranks, stage, stages) for stage in own]
    single = issubclass(kind, theirs.PipelineScheduleSingle)
    made = kind(held[0] if single else held, microbatches, loss_fn=lambda *_: 0)
    if lowered:
        order = made.pipeline_order_with_comms
    else:
        order = made._get_pipeline_order() if single else made.pipeline_order
    kinds = (*COMPUTE, *TRANSFER)
    cells = [[cell for cell in order[rank] if cell is not None] for rank in range(ranks)]
    return [
        tuple(
            Action(part.computation_type.value, part.stage_index, part.microbatch_index)
            for cell in row
            for part in cell.sub_actions or (cell,)
            if part.computation_type.value in kinds
        )
        for row in cells
    ]


def their_rows(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[Row, ...]:
    """Their rows without transfers."""
    return tuple(their_order(name, ranks, chunks, microbatches, lowered=False))


def both(
    name: str, torch_name: str, ranks: int, microbatches: int, chunks: int
) -> tuple[Schedule, tuple[Row, ...]] | None:
    """Our schedule and their rows where both allow the sizes."""
    options = {"chunks": chunks} if name == "interleaved_1f1b" else {}
    try:
        made = schedule(name, ranks, microbatches, **options)
        return made, their_rows(torch_name, ranks, chunks, microbatches)
    except (ScheduleError, ValueError):
        return None


@pytest.mark.parametrize(
    ("name", "torch_name", "chunks", "least"),
    [
        ("gpipe", "ScheduleGPipe", 1, 128),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 2, 106),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 3, 106),
        ("zb_h1", "ScheduleInterleavedZeroBubble", 1, 106),
        ("zb_v", "ScheduleZBVZeroBubble", 2, 128),
        ("dualpipe_v", "ScheduleDualPipeV", 2, 64),
    ],
)
def test_rows_are_those_of_torch(name: str, torch_name: str, chunks: int, least: int) -> None:
    pairs = [both(name, torch_name, *size, chunks) for size in SIZES]
    found = [pair for pair in pairs if pair is not None]
    assert len(found) == least
    for made, rows in found:
        assert made.rows == rows


def test_rows_of_1f1b_are_those_of_torch_but_for_a_number() -> None:
    """torch's table numbers the forwards of the last stage from 1, its runtime from 0."""
    compared = 0
    for ranks, microbatches in SIZES:
        pair = both("1f1b", "Schedule1F1B", ranks, microbatches, 1)
        if pair is None:
            assert microbatches < ranks  # which only torch refuses
            continue
        made, rows = pair
        last = tuple(
            one._replace(microbatch=one.microbatch - 1) if one.kind == "F" else one
            for one in rows[-1]
        )
        assert made.rows == (*rows[:-1], last)
        compared += 1
    assert compared == 100


def test_interleaved_zero_bubble_of_torch_is_not_faster_than_zb_v() -> None:
    """torch's other schedule of two stages a rank, which we leave out: slower or as fast."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16), (8, 16)):
        rows = their_rows("ScheduleInterleavedZeroBubble", ranks, 2, microbatches)
        looped = schedule("interleaved_1f1b", ranks, microbatches, chunks=2)
        costs = [StageCost()] * looped.stages
        other = Schedule(
            "theirs", looped.stages, microbatches, rows, looped.placement, (), lambda _: None
        )
        ours = simulate(schedule("zb_v", ranks, microbatches), costs)
        assert ours.bubble <= simulate(other, costs).bubble
        assert max(ours.peak_activations) <= max(simulate(other, costs).peak_activations)


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [
        ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
        ("zb_v", "ScheduleZBVZeroBubble"),
        ("dualpipe_v", "ScheduleDualPipeV"),
    ],
)
def test_the_checker_accepts_the_transfers_that_torch_places(name: str, torch_name: str) -> None:
    """torch's are checked by its own simulator; we send the same, and our checker accepts both."""
    for ranks, microbatches in ((2, 4), (4, 8), (3, 12)):
        made = schedule(name, ranks, microbatches)
        rows = their_order(torch_name, ranks, 2, microbatches, lowered=True)
        for queue in ("link", "rank"):
            wiring = Wiring.chain(made.stages)
            check(Step(tuple(rows), made.placement, microbatches, wiring, queue), made.rows)
            ours = complete(made, wiring, queue).rows
            moved = [[one for one in row if one.kind not in (SYNC, UPDATE)] for row in ours]
            assert [sorted(row) for row in moved] == [sorted(row) for row in rows]
