"""Asynchronous pipelines: unsupported combinations, checkpoints, saved programs, bytes, closing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.errors import AutoparError, ProgramError
from autopar.inter_op import schedules
from autopar.ir.action import parse_row
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS
from autopar.planning.pipelines.stages import schedule_of
from autopar.runtime.pipeline.refusals import refuse_what_cannot_stream
from autopar.runtime.pipeline.routes import Placement
from tests.programs.test_saved_program import run
from tests.support.ranks import run_ranks
from tests.support.stale_weights import (
    METHODS,
    OPTIMIZERS,
    Method,
    made,
    mesh,
    program_of,
    simulated,
)  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "skip": ({"on_nonfinite": "skip"}, 'on_nonfinite="skip"'),
    "fp16": ({"precision": "fp16"}, "float16"),
    "host": ({"offload": "optimizer"}, "optimizer state in host memory"),
    "kernel": ({"fuse": ["adamw"]}, "the kernel of AdamW"),
    "zero3": ({"state": "zero3"}, "gathered for every use"),
    "split": ({"state": "zero1", "schedule": "pipemare"}, "optimizer state is split"),
    "compiled": ({"backend": "aot_eager"}, "stages under the schedule '2bw' cannot be compiled"),
    "not allowed": ({"allow": ""}, "trains with stale gradients"),
}


def refused() -> dict[str, str]:
    """What is said of each."""
    said = {}
    for name, (how, _) in REFUSED.items():
        model, batches = made(2)
        batch = {k: v.float() for k, v in batches[0].items()}
        given = {"schedule": "2bw", "allow": "stale gradients", "microbatches": 2, **how}
        pins = autopar.pins.data_parallel("gpu")
        try:
            autopar.compile(
                model.float(), mesh(4), example_inputs=batch, stages=2, pins=pins,
                optimizer=OPTIMIZERS["adamw"], **given,
            )  # fmt: skip
        except AutoparError as error:
            said[name] = str(error)
    return said


@pytest.mark.slow
def test_what_does_not_compose_is_refused_by_name() -> None:
    for said in run_ranks(refused):
        assert set(said) == set(REFUSED)
        for name, (_, what) in REFUSED.items():
            assert what in said[name], said[name]
            assert "why:" in said[name]


def test_several_stages_of_a_rank_are_refused_by_name() -> None:
    row = parse_row("F0.0 F1.0 B1.0 UPDATE1.0 B0.0 UPDATE0.0")
    placement, training = Placement((((0,), (0,)),), (row,), 1), SimpleNamespace(clip_norm=None)
    with pytest.raises(ProgramError, match=r"the stages \[0, 1\] share their ranks") as caught:
        refuse_what_cannot_stream([], placement, training, {})  # type: ignore[arg-type]
    assert "one optimizer would update both" in caught.value.why


@pytest.mark.parametrize("over", ["@rack", "(layers.9.weight)"])
def test_sums_of_what_a_stage_does_not_have_are_refused_by_name(over: str) -> None:
    """Rows of a saved program may be edited by hand."""
    row = parse_row(f"F0.0 B0.0 SYNC0.0/{over} UPDATE0.0")
    placement = Placement((((0,),),), (row,), 1)
    training = SimpleNamespace(clip_norm=None, on_nonfinite="raise")
    module = SimpleNamespace(
        precision=AS_IS, host_state=False, fused_update=False, parameters=(),
        mesh=Mesh.parse("cpu: gpu=1"),
    )  # fmt: skip
    with pytest.raises(ProgramError, match="which names the") as caught:
        refuse_what_cannot_stream([module], placement, training, {})  # type: ignore[list-item, arg-type]
    assert "stage 0 trains no such parameter" in caught.value.why


FIFTH = '''
"""Gradients two updates old: no flush, three versions of the weights."""
from autopar.inter_op.schedule import Rows, Schedule, check_sizes, line
from autopar.inter_op.schedules._streaming import STALE, bubble, row

NAME, NEEDS, ALLOW, CANDIDATES = "3bw", "microbatches from the number of ranks", STALE, ("",)


def schedule(ranks, microbatches):
    """Returns one period."""
    check_sizes(NAME, ranks, microbatches)
    behind = [ranks - 1 - rank for rank in range(ranks)]

    def made():
        for rank, late in enumerate(behind):
            age = lambda turn, late=late: 1 + (turn >= late)
            yield row(rank, microbatches, late, microbatches, age, lambda turn: 2)

    return Schedule(
        NAME, ranks, microbatches, Rows(made), line(ranks), tuple(n + 1 for n in behind), bubble,
        flushes=False, warm_up=3, versions=(3,) * ranks, staleness=(2,) * ranks,
    )
'''


def fifth(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a method whose one file is in a folder."""
    with patch.object(schedules, "__path__", [*schedules.__path__, folder]):
        assert "3bw" in schedules.candidates("stale gradients")
        program, batches = program_of(LATE, 2, "adamw", 2)
        losses = [program.step(**batch).item() for batch in batches]
        return losses, program.state_dict()


LATE = Method("3bw", 4, 0, *[lambda s, p, k: max(0, k // 4 - 2)] * 2)


def test_a_fifth_method_is_one_file(tmp_path: Path) -> None:
    """It is planned, and trains as a simulation of gradients that are two updates old."""
    (tmp_path / "three_buffered.py").write_text(FIFTH)
    losses, weights = simulated(LATE, 2, "adamw")
    for told, state in run_ranks(fifth, str(tmp_path), count=2):
        assert told == pytest.approx([losses[0], *losses[:-1]], abs=1e-12)
        assert all((state[k] - v).abs().max() < 1e-12 for k, v in weights.items())


def resumed(
    folder: str, names: list[str], stages: int, ranks: int, how: dict[str, Any]
) -> dict[str, list[tuple[list[float], dict[str, Tensor]]]]:
    """Losses and weights of a run, of one that writes a checkpoint, and of one that reads it."""
    found: dict[str, list[tuple[list[float], dict[str, Tensor]]]] = {}
    for name in names:
        path = f"{folder}/{name}"
        whole, batches = program_of(METHODS[name], stages, "adamw", ranks, **how)
        writes, _ = program_of(METHODS[name], stages, "adamw", ranks, **how)
        reads, _ = program_of(METHODS[name], stages, "adamw", ranks, **how)
        runs: list[list[float]] = [[], [], []]
        for step, batch in enumerate(batches):
            if step == 4:
                writes.save_checkpoint(path)
                torch.manual_seed(dist.get_rank())  # the checkpoint has the state
                reads.load_checkpoint(path)
                runs[2] = list(runs[1])
            for losses, program in zip(runs, (whole, writes, reads), strict=True):
                if program is not reads or step >= 4:
                    losses.append(program.step(**batch).item())
        states = [program.state_dict() for program in (whole, writes, reads)]
        found[name] = list(zip(runs, states, strict=True))
        for program in (whole, writes, reads):
            program.close()
    return found


def check_resumed(folder: Path, names: list[str], stages: int, ranks: int, **how: Any) -> None:
    for rank in run_ranks(resumed, str(folder), names, stages, ranks, how, count=ranks):
        for name, ((losses, weights), *others) in rank.items():
            for told, state in others:
                assert told == losses, name
                assert all(torch.equal(state[k], v) for k, v in weights.items()), name


def test_a_run_that_is_resumed_in_mid_stream_continues_to_the_bit(tmp_path: Path) -> None:
    """Neither the run that writes a checkpoint nor the one that reads it differs from one alone."""
    check_resumed(tmp_path, ["pipedream", "pipemare"], 2, 2)


@pytest.mark.slow
def test_every_method_resumes_in_mid_stream(tmp_path: Path) -> None:
    check_resumed(tmp_path, [*METHODS], 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["ddp", "zero1", "zero2"])
def test_stages_of_two_devices_resume_in_mid_stream(tmp_path: Path, state: str) -> None:
    names = ["pipedream", "2bw", "ampnet of two", *(["bounded"] if state == "ddp" else [])]
    pins = autopar.pins.data_parallel("gpu")
    check_resumed(tmp_path, names, 2, 4, state=state, pins=pins)


def held() -> dict[str, tuple[list[int], list[int]]]:
    """Bytes of older versions on this rank after every step, and those of its parameters."""
    found = {}
    for name in ("pipedream", "vertical", "2bw", "ampnet"):
        program, batches = program_of(METHODS[name], 4, "sgd", 4)
        pipeline = program._executor
        (own,), (stage,) = pipeline.continuous.versions.values(), pipeline.stages.values()
        nbytes = []
        for batch in batches:
            program.step(**batch)
            nbytes.append(own.nbytes)
        found[name] = nbytes, [tensor.nbytes for tensor in stage.tensors]
    return found


@pytest.mark.slow
def test_stages_hold_the_bytes_of_as_many_versions_as_the_closed_form_says() -> None:
    for number, rank in enumerate(run_ranks(held)):
        for name, (nbytes, parameters) in rank.items():
            scheduled = schedule_of(METHODS[name].schedule, 4, METHODS[name].microbatches)
            assert max(nbytes) == (scheduled.versions[number] - 1) * sum(parameters)
            assert nbytes[-1] == max(nbytes)


def evaluated() -> float:
    """The loss of a batch after all steps."""
    program, batches = program_of(METHODS["2bw"], 2, "sgd", 2)
    for batch in batches:
        program.step(**batch)
    return float(program(**batches[0]))


def test_evaluation_sees_all_updates() -> None:
    """A pipeline is drained before anybody looks at its weights."""
    _, weights = simulated(METHODS["2bw"], 2, "sgd")
    model, batches = made(2)
    model.load_state_dict(weights)
    wanted = model(**batches[0]).item()
    assert run_ranks(evaluated, count=2) == pytest.approx([wanted, wanted], rel=1e-12)


def saved(path: str) -> list[float]:
    """Losses of steps of a program that was saved before any."""
    program, batches = program_of(METHODS["pipemare flushed"], 2, "sgd", 2)
    program.save(path)
    return [program.step(**batches[0]).item() for _ in range(6)]


@pytest.mark.slow
def test_a_saved_program_trains_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    losses = run_ranks(saved, str(path), count=2)[0]
    source = (path / "program.py").read_text()
    assert "FLUSHED_STEPS = 3" in source
    assert "ADJUSTMENT = ((0.75, 0.25), 0, 0.3)" in source
    assert "UPDATE0.-1" in source
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(sys.executable, *launch, str(path / "program.py"))
    steps = [line.split() for line in printed.splitlines() if line.startswith("step")]
    assert [step[3] for step in steps[:6]] == [f"{loss:.6f}" for loss in losses]


def closed() -> dict[str, Tensor]:
    """This rank's weights once the program is closed."""
    program, batches = program_of(METHODS["pipedream"], 2, "sgd", 2)
    (stage,) = program._executor.stages.values()
    for batch in batches:
        program.step(**batch)
    program.close()
    return {name: tensor.detach() for name, tensor in stage.named.items()}


def test_what_is_under_way_ends_before_a_program_closes() -> None:
    """Other ranks wait for messages of this one, and their last updates are made."""
    _, weights = simulated(METHODS["pipedream"], 2, "sgd")
    first, second = run_ranks(closed, count=2)
    assert len(first) == len(second) == 2
    for name, tensor in (first | second).items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-12)
