"""Replicas that train apart go on from a checkpoint to the bit, and other plans load it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from tests.programs.test_outer import METHODS, OPTIMIZERS, batch, loss, model
from tests.support.ranks import run_ranks

CASES = [
    METHODS[3].format(3),
    METHODS[2].format(2),
    "diloco over node, tau=4, fragments=2, delay=1, alpha=0.5",
    "local over node, tau=4 by loss",
]


def session_of(outer: str | None, mesh: str, **how: Any) -> autopar.Session:
    return autopar.compile(
        model(), mesh, example_inputs=batch(0), loss_fn=loss, outer=outer,
        optimizer=OPTIMIZERS["adamw"], **how,
    )  # fmt: skip


def gone_on(folder: str, mesh: str, how: dict[str, Any]) -> list[Any]:
    found = []
    for number, outer in enumerate(CASES):
        path = Path(folder) / str(number)
        whole = session_of(outer, mesh, **how)
        for step in range(7):
            whole.step(**batch(step))
        whole.save_checkpoint(path)
        agreed = whole.state_dict()
        losses = [whole.step(**batch(step)).item() for step in range(7, 14)]
        again = session_of(outer, mesh, **how)
        again.load_checkpoint(path)
        resumed = [again.step(**batch(step)).item() for step in range(7, 14)]
        other = session_of(None, mesh)
        other.load_checkpoint(path)
        found.append((losses, resumed, whole.state_dict(), again.state_dict(), agreed))
        found[-1] += (other.state_dict(), whole.rounds, again.rounds)
        for session in (whole, again, other):
            session.close()
    return found


@pytest.mark.parametrize(
    ("mesh", "count", "how"),
    [
        ("cpu: node=2, gpu=1", 2, {}),
        pytest.param("cpu: node=2, gpu=2", 4, {"state": "zero3"}, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_on_to_the_bit(mesh: str, count: int, how: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(gone_on, folder, mesh, how, count=count):
            for losses, resumed, one, two, agreed, other, rounds, again in found:
                assert losses == resumed
                assert (rounds.number, rounds.tau) == (again.number, again.tau)
                assert rounds.loss == again.loss
                for name, value in one.items():
                    assert torch.equal(value, two[name])
                    assert torch.equal(agreed[name], other[name])
