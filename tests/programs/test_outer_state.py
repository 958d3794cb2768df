"""Independent replicas resume from a checkpoint bit for bit, and other plans load it."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import autopar
from autopar.errors import NonFiniteError, OptionError, ProgramError
from autopar.runtime.outer.rounds import Report, best_tau
from tests.programs.test_outer import METHODS, OPTIMIZERS, batch, loss, model
from tests.support.outer_simulation import simulated
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


def gone_on(folder: str, cases: list[str], mesh: str, how: dict[str, Any]) -> list[Any]:
    found = []
    for number, outer in enumerate(cases):
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
    ("cases", "mesh", "count", "how"),
    [
        ([CASES[0], *CASES[2:]], "cpu: node=2, gpu=1", 2, {}),
        pytest.param(CASES, "cpu: node=2, gpu=2", 4, {"state": "zero3"}, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_on_to_the_bit(
    cases: list[str], mesh: str, count: int, how: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(gone_on, folder, cases, mesh, how, count=count):
            for losses, resumed, one, two, agreed, other, rounds, again in found:
                assert losses == resumed
                assert (rounds.number, rounds.tau) == (again.number, again.tau)
                assert rounds.loss == again.loss
                for name, value in one.items():
                    assert torch.equal(value, two[name])
                    assert torch.equal(agreed[name], other[name])


def bytes_of(cases: list[str]) -> list[tuple[float, float, str]]:
    found = []
    for outer in cases:
        session = session_of(outer, "cpu: node=2, gpu=1")
        for step in range(5):
            session.step(**batch(step))
        kept = sum(n for name, n in session.update_bytes().items() if name.startswith("outer_"))
        one = sum(p.nbytes for p in session._executor.program.weights.trained)
        text, losses = session.plan.to_toml(), [session.step(**batch(5)).item()]
        found.append((kept, one, text))
        with pytest.raises(ProgramError, match="local updates"):
            session.save("nowhere")
        session.close()
        if outer not in AGAIN:
            continue
        again = session_of(None, "cpu: node=2, gpu=1", plan=autopar.Plan.from_toml(text))
        losses += [again.step(**batch(step)).item() for step in range(6)][5:]
        assert losses[0] == losses[1]
        again.close()
    return found


def test_memory_is_that_of_the_plan() -> None:
    for found in run_ranks(bytes_of, METHODS_OF_MEMORY, count=2):
        for (kept, one, text), outer in zip(found, METHODS_OF_MEMORY, strict=True):
            plan = autopar.Plan.from_toml(text)
            assert str(plan.outer) == outer
            rule = plan.stage.update.rules[0]
            planned = sum(state.name.startswith("outer_") for state in rule.states) * one
            assert kept == pytest.approx(planned, rel=0.05)


METHODS_OF_MEMORY = [
    "local over node, tau=2",
    "slowmo over node, tau=2",
    "overlap over node, tau=2",
    "overlap over node, tau=2, beta=0",
    "co2 over node, tau=2",
    "co2 over node, tau=2, origin=round",
    "diloco over node, tau=2",
]
AGAIN = ("local over node, tau=2", "co2 over node, tau=2")  # run by their plans, too


def failing() -> None:
    session = session_of("local over node, tau=2", "cpu: node=2, gpu=1", on_nonfinite="raise")
    for step in range(8):
        given = batch(step)
        if step == 4:
            given["input"][:4] = float("nan")  # of the first replica
        with suppress(NonFiniteError):  # rank 0 goes on, and raises again or waits
            session.step(**given)


def test_a_fault_of_one_replica_stops_all(capfd: pytest.CaptureFixture[str]) -> None:
    """The other one raises the error of the first, or ends with it where it waits for a sum."""
    with pytest.raises((ProcessExitedException, ProcessRaisedException)) as raised:
        run_ranks(failing, count=2)
    found = f"{raised.value} {capfd.readouterr().err}"
    assert "rank 0 failed" in found
    assert "NonFiniteError: step 5 is not finite" in found


def chosen_tau() -> list[Report]:
    found = []
    for outer in ("co2 over node, tau=auto", "local over node, tau=auto"):
        session = session_of(outer, "cpu: node=2, gpu=1")
        for step in range(60):
            session.step(**batch(step))
        found.append(replace(session.rounds, waited=0.0))
        session.close()
    return found


def test_all_ranks_choose_one_tau() -> None:
    first, second = run_ranks(chosen_tau, count=2)
    assert first == second
    for late, report in zip((True, False), first, strict=True):
        sync, step, taken = report.sync_seconds, report.step_seconds, report.taken_seconds
        assert min(sync, step, taken) > 0
        # A tenth of what overlaps is to spare, and tau stays if one that is a tenth less would do.
        best = best_tau(1.1 * sync if late else sync, step, late, taken)
        assert best <= report.tau <= best / 0.9 + 1


def evaluated(kinds: list[str | None]) -> list[Any]:
    found = []
    for kind in kinds:
        session = session_of(METHODS[3].format(3), "cpu: node=2, gpu=1", evaluate=kind)
        for step in range(8):
            session.step(**batch(step))
        own = session._executor.program.state_dict()
        evaluation = session.eval_step(**batch(9)).loss
        found.append((own, session.state_dict(), evaluation, session.state_dict()))
        session.close()
    with pytest.raises(OptionError, match="no anchor"):
        session_of("local over node, tau=2", "cpu: node=2, gpu=1", evaluate="anchor")
    return found


def test_the_anchor_or_the_average_is_evaluated() -> None:
    """The average is that of both ranks' parameters; the anchor is what a simulation has."""
    batches = [batch(step) for step in range(8)]
    outer = METHODS[3].format(3)
    anchor = simulated(model(), loss, OPTIMIZERS["adamw"], batches, 2, outer).agreed
    first, second = run_ranks(evaluated, ["average", "anchor", None], count=2)
    average = {name: (value + second[0][0][name]) / 2 for name, value in first[0][0].items()}
    for found in (first, second):
        for (_, state, evaluation, after), wanted in zip(
            found, (average, anchor, anchor), strict=True
        ):
            whole = model()
            whole.load_state_dict(wanted)
            expected = loss(whole(batch(9)["input"]), batch(9)["labels"])
            torch.testing.assert_close(evaluation, expected, rtol=1e-12, atol=1e-12)
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
                assert torch.equal(state[name], after[name])
