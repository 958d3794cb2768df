"""Residuals of compressed gradients: resumed to the bit, or divided among other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import NonFiniteError
from autopar.pins import data_parallel
from tests.support.ranks import run_ranks

BATCH = {"input": torch.arange(256.0, dtype=torch.float64).reshape(16, 16).sin()}
TWO = "cpu[10GFLOP/s 1GiB 5GB/s]: gpu=2 @1MB/s 1us"
FOUR = "cpu[10GFLOP/s 1GiB 5GB/s]: gpu=4 @1MB/s 1us"
SHAPES = {"0.weight": (48, 16), "2.weight": (16, 48)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)).double()


def loss(output: Tensor) -> Tensor:
    return (output - output.detach().roll(1, 0)).square().mean()


def session_of(mesh: str, gradients: str, state: str, stages: int = 1, **more: Any) -> Any:
    return autopar.compile(
        model(),
        mesh,
        example_inputs=BATCH,
        loss_fn=loss,
        pins=data_parallel(),
        state=state,
        gradients=gradients,
        stages=stages,
        microbatches=2,
        **more,
    )


def memories(session: Any) -> dict[str, dict[str, Tensor]]:
    """What this rank keeps of each parameter."""
    executor = session._executor
    stages = [executor] if hasattr(executor, "weights") else executor.stages.values()
    weights = [w for stage in stages for w in stage.weights.all if w.memory]
    return {w.name: {slot: t.clone() for slot, t in w.memory.items()} for w in weights}


def saved_and_resumed(
    folder: str, mesh: str, cases: list[tuple[str, str]], stages: int
) -> list[tuple[list[float], list[float], dict[str, Any]]]:
    return [
        one_saved_and_resumed(Path(folder) / gradients, mesh, gradients, state, stages)
        for gradients, state in cases
    ]


def one_saved_and_resumed(
    path: Path, mesh: str, gradients: str, state: str, stages: int
) -> tuple[list[float], list[float], dict[str, Any]]:
    first = session_of(mesh, gradients, state, stages)
    for _ in range(2):
        first.step(**BATCH)
    first.save_checkpoint(path)
    kept = memories(first)
    going_on = [first.step(**BATCH).item() for _ in range(2)]
    first.close()
    second = session_of(mesh, gradients, state, stages)
    second.load_checkpoint(path)
    for name, memory in memories(second).items():
        assert memory.keys() == kept[name].keys()
        assert all(torch.equal(memory[slot], kept[name][slot]) for slot in memory), name
    assert memories(second).keys() == kept.keys()
    resumed = [second.step(**BATCH).item() for _ in range(2)]
    second.load_weights(model().state_dict())
    assert not memories(second)  # what was left out belongs to other weights
    second.close()
    return going_on, resumed, kept


@pytest.mark.parametrize(
    ("cases", "stages"),
    [([("top-k 5 %", "ddp"), ("powersgd rank 2", "zero2")], 1), ([("1-bit", "ddp")], 2)],
)
def test_a_program_goes_on_to_the_bit(
    tmp_path: Path, cases: list[tuple[str, str]], stages: int
) -> None:
    mesh, count = (TWO, 2) if stages == 1 else (FOUR, 4)
    for rank in run_ranks(saved_and_resumed, str(tmp_path), mesh, cases, stages, count=count):
        for going_on, resumed, kept in rank:
            assert going_on == resumed
            assert kept
            assert any(bool(t.any()) for memory in kept.values() for t in memory.values())


def saved(folder: str, states: list[str]) -> list[dict[str, dict[str, Tensor]]]:
    kept = []
    for state in states:
        session = session_of(TWO, "top-k 5 %", state)
        session.step(**BATCH)
        session.save_checkpoint(Path(folder) / state)
        kept.append(memories(session))
        session.close()
    return kept


def resumed_elsewhere(folder: str, states: dict[str, str]) -> list[dict[str, dict[str, Tensor]]]:
    kept = []
    for before, after in states.items():
        session = session_of(FOUR, "powersgd rank 2", after)
        session.load_checkpoint(Path(folder) / before)
        kept.append(memories(session))
        assert session.step(**BATCH).isfinite()
        session.close()
    return kept


def test_other_devices_owe_the_same_in_all(tmp_path: Path) -> None:
    states = {"ddp": "zero2", "zero2": "ddp"}
    ranks = run_ranks(saved, str(tmp_path), list(states), count=2)
    others = run_ranks(resumed_elsewhere, str(tmp_path), states, count=4)
    for number in range(len(states)):
        for name, shape in SHAPES.items():
            owed = sum(t for kept in ranks for t in kept[number][name].values())
            now = sum(t for kept in others for t in kept[number][name].values())
            assert isinstance(owed, Tensor)
            assert owed.shape == shape
            torch.testing.assert_close(now, owed, rtol=1e-14, atol=1e-16)


def around_bad_steps(cases: list[tuple[str, str, str]]) -> None:
    """Steps that are not made change nothing, wherever the bad number is, and training goes on."""
    bad = BATCH["input"].clone()
    bad[-1, 3] = torch.nan  # of the last rank
    for gradients, state, policy in cases:
        losses = []
        for batches in ([BATCH] * 4, [BATCH, BATCH, {"input": bad}, BATCH, BATCH]):
            session = session_of(TWO, gradients, state, on_nonfinite=policy, clip_norm=0.01)
            losses.append([])
            for batch in batches:
                before = memories(session)
                if batch["input"] is not bad:
                    losses[-1].append(session.step(**batch).item())
                    continue
                if policy == "raise":
                    with pytest.raises(NonFiniteError, match="NaN"):
                        session.step(**batch)
                else:
                    session.step(**batch)
                for name, memory in memories(session).items():
                    for slot, tensor in memory.items():
                        assert torch.equal(tensor, before[name][slot]), (gradients, name, slot)
            session.close()
        assert losses[0] == losses[1], gradients


def test_a_step_that_is_not_made_leaves_what_is_owed() -> None:
    cases = [("1-bit", "ddp", "skip"), ("top-k 5 %", "zero2", "raise")]
    run_ranks(around_bad_steps, [*cases, ("powersgd rank 2", "ddp", "skip")], count=2)
