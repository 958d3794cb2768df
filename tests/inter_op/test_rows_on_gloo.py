"""Complete rows on four gloo ranks, without tags: every action receives the right values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.inter_op.complete import complete
from autopar.inter_op.schedules import exact, schedule
from autopar.ir.action import COMPUTE, COPIES, TRANSFER, Action
from autopar.ir.pipeline_step import Queue, Step
from tests.support.ranks import run_ranks


def _train(step: Step, groups: dict[int, dist.ProcessGroup]) -> int:
    """Runs this rank's row; what is sent says what it is. Returns the number of transfers."""
    rank = dist.get_rank()
    waiting: dict[Action, tuple[dist.Work, torch.Tensor]] = {}
    transfers = 0
    for action in step.rows[rank]:
        kind, stage, batch, copy = action[:4]
        transfers += kind in TRANSFER
        if kind.startswith("SEND"):
            sent = torch.tensor([ord(kind[-1]), stage, batch, copy])
            waiting[action] = (dist.isend(sent, step.peer(action)), sent)
        elif kind.startswith("RECV"):
            got = torch.zeros(4, dtype=torch.int64)
            waiting[action] = (dist.irecv(got, step.peer(action)), got)
        elif action.over == COPIES:
            copies = torch.ones(1)
            dist.all_reduce(copies, group=groups[stage])
            assert copies.item() == len(step.placement)
        elif kind in COMPUTE and kind != "W":
            letter = "F" if kind == "F" else "B"
            receive = action._replace(kind=f"RECV_{letter}")
            if receive in waiting:
                work, got = waiting.pop(receive)  # gloo waits for another one if asked twice
                work.wait()
                origin = stage - 1 if letter == "F" else stage + 1
                assert got.tolist() == [ord(letter), origin, batch, copy], str(action)
    for work, _ in waiting.values():
        work.wait()
    return transfers


def _all(names: list[str], queue: Queue) -> dict[str, int]:
    found = {}
    for name in names:
        step = complete(schedule(name, 4, 8), None, queue)
        groups = {}
        if len(step.placement) > 1:
            for stage in range(step.stages):
                held = sorted(ranks[stage] for ranks in step.placement)
                groups[stage] = dist.new_group(held)
        found[name] = _train(step, groups)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["link", "rank"])
def test_rows_meet_on_gloo(queue: Queue) -> None:
    names = [*exact()]
    found = run_ranks(_all, names, queue)
    for name in names:
        step = complete(schedule(name, 4, 8), None, queue)
        moved = [sum(one.kind in TRANSFER for one in row) for row in step.rows]
        assert [ranks[name] for ranks in found] == moved
        assert min(moved) >= 16
