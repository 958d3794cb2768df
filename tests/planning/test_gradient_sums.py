"""Sums of gradients beside the last backwards of a rank's stages, against the fluid simulation."""

from __future__ import annotations

import pytest

from autopar.cost.work import Work
from autopar.inter_op.schedule_time import StageCost
from autopar.inter_op.schedules import schedule
from autopar.ir.action import Row
from autopar.ir.collective import Collective
from autopar.planning.pipelines.gradient_sums import waited_sums
from autopar.simulate import run
from autopar.simulate.task import Task

SLOWDOWN = 1.2


class Seconds:
    """Prices of a kernel and of a collective that state their seconds as bytes."""

    def compute(self, work: Work) -> float:
        return work.nbytes / 1e6

    def collective(self, call: Collective, /) -> float:
        return call.nbytes / 1e6

    def host(self, copy: object) -> float:
        raise AssertionError(copy)

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        return ()


def simulated(row: Row, costs: list[StageCost], sums: list[float]) -> float:
    """Seconds of a rank's row, without idle time, and of the sums that run beside it."""
    tasks: list[Task] = []
    before: tuple[int, ...] = ()
    for place, action in enumerate(row):
        cost = costs[action.stage]
        seconds = {
            "F": cost.forward, "B": cost.input + cost.weight, "I": cost.input, "W": cost.weight
        }[action.kind]  # fmt: skip
        rest = [other for other in row[place + 1 :] if other.stage == action.stage]
        if action.kind in "BW" and not any(other.kind in "BW" for other in rest):
            sent = Collective("all_reduce", ("dp",), round(sums[action.stage] * 1e6))
            tasks.append(Task(f"sum {action}", "", "backward", "dp", sent, before))
        work = (Work("kernel", 0.0, seconds * 1e6, "f32"),)
        tasks.append(Task(str(action), "", "backward", "compute", work))
        before = (len(tasks) - 1,)
    return run(tasks, Seconds(), SLOWDOWN).seconds


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "gpipe"])
@pytest.mark.parametrize("sums", [0.5, 2.0, 9.0, 400.0])
def test_sums_run_beside_all_that_follows_on_the_rank(name: str, sums: float) -> None:
    rows = schedule(name, 2, 6)
    costs = [StageCost(1 + 0.1 * n, 0.5 + 0.2 * n, 1.5) for n in range(rows.stages)]
    each = [sums * (1 + 0.3 * n) for n in range(rows.stages)]
    waited = waited_sums(rows, costs, each, [SLOWDOWN] * rows.stages)
    for rank, row in enumerate(rows.rows):
        own = sum(waited[stage] for stage, _ in rows.holds[rank])
        alone = simulated(row, costs, [0.0] * rows.stages)
        assert alone + own == pytest.approx(simulated(row, costs, each), rel=1e-6)


def test_without_overlap_they_take_turns_with_kernels() -> None:
    rows = schedule("interleaved_1f1b", 2, 4)
    costs = [StageCost()] * rows.stages
    waited = waited_sums(rows, costs, [0.7] * rows.stages, [2.0] * rows.stages)
    for held in rows.holds:
        assert sum(waited[stage] for stage, _ in held) == pytest.approx(0.7 * len(held))
