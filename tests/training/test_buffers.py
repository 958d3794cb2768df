"""Buffers that forwards write, on four ranks, in stages and in recomputed blocks.

`python -m pytest tests/training/test_buffers.py -m ""` trains every model under every plan.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
import autopar.pins
from autopar.errors import ProgramError
from tests.support import buffers
from tests.support.ranks import run_ranks
from tests.support.refusals import refused

MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @10GB/s 1us, y=2 @10GB/s 1us"
WAYS: dict[str, dict[str, Any]] = {
    "solver": {},
    "data_parallel": {"pins": "data_parallel"},
    "fsdp": {"pins": "fsdp"},
    "full recomputation": {"recompute": "full"},
    "two microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "microbatches": 2},
}
QUICK = (("moco", "fsdp"), ("running", "stages"))


def trained(name: str, way: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state after three steps on this rank."""
    model, batches = buffers.make(name)
    options = dict(way)
    if "pins" in options:
        options["pins"] = getattr(autopar.pins, options["pins"])("x", "y")
    program = autopar.compile(
        model, MESH, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **options
    )
    losses = [float(program.step(**batch)) for batch in batches]
    return losses, program.state_dict()


def assert_trains(name: str, way: str) -> None:
    model, batches = buffers.make(name)
    rows = buffers.ROWS // WAYS[way].get("microbatches", 1)
    if name in ("moco", "cache") and rows != buffers.ROWS:
        pytest.skip("its buffers count the rows of a batch")
    expected, state = buffers.eager(model, batches, WAYS[way].get("microbatches", 1))
    for losses, found in run_ranks(trained, name, WAYS[way]):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(("name", "way"), QUICK)
def test_it_trains_as_eager_does(name: str, way: str) -> None:
    assert_trains(name, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", buffers.MODELS)
def test_every_model_trains_under_every_plan(name: str, way: str) -> None:
    assert_trains(name, way)


def one(model: torch.nn.Module, **options: Any) -> autopar.Session:
    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    return autopar.compile(model, "cpu: gpu=1", **{**sgd, **options})


def test_an_evaluation_and_a_failed_step_leave_what_eager_leaves() -> None:
    """An evaluation writes nothing; a step that fails leaves all as it was."""
    model, batches = buffers.make("running")
    reference = copy.deepcopy(model)
    program = one(model)
    expected = reference.eval()(**batches[0])
    torch.testing.assert_close(program(**batches[0]), expected.detach())
    before = program.state_dict()
    assert int(before["steps"]) == 0
    update = program._executor.update  # type: ignore[union-attr]
    step, update.step = update.step, None  # type: ignore[assignment, method-assign]
    program._executor.gradients.collect = None  # type: ignore[union-attr, method-assign]
    with pytest.raises(TypeError):
        program.step(**batches[1])
    update.step = step  # type: ignore[method-assign]
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_switched_or_frozen_after_compile_it_is_refused() -> None:
    model, batches = buffers.make("codebook")
    program = one(model)
    program.step(**batches[0])
    model.eval()
    error = refused(ProgramError, lambda: program.step(**batches[1]))
    assert "train()" in str(error)
    program(**batches[1])  # an evaluation is the same in both
    model.train()
    model.encoder.weight.requires_grad_(False)  # type: ignore[union-attr]
    error = refused(ProgramError, lambda: program.step(**batches[1]))
    assert "encoder.weight" in str(error)
    model.encoder.weight.requires_grad_(True)  # type: ignore[union-attr]
    program.step(**batches[1])


def test_before_the_first_batch_it_is_obeyed() -> None:
    model, batches = buffers.make("codebook")
    program = one(model)
    model.eval()
    counts = model.state_dict()["counts"].clone()
    program.step(**batches[0])
    assert torch.equal(program.state_dict()["counts"], counts)


def test_a_model_that_is_another_one_after_compile_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model.register_module("inner", nn.Sequential(nn.LayerNorm(1)))
    x = torch.ones(4, 4)
    program = autopar.compile(
        model, "cpu: x=1", example_inputs=(x,), loss_fn=lambda y: y.square().mean()
    )
    program.step(x)
    model[1].p = 0.1  # type: ignore[assignment]
    with pytest.raises(ProgramError, match=r"p was set to 0\.1") as raised:
        program.step(x)
    assert raised.value.where == "1"
    model[1].p = 0.5  # type: ignore[assignment]
    program.step(x)
    norm, model.inner[0] = model.inner[0], nn.Identity()  # type: ignore[index, union-attr]
    with pytest.raises(ProgramError, match="a module was replaced") as raised:
        program.step(x)
    assert raised.value.where == "inner"
    model.inner[0] = norm  # type: ignore[operator]
    program.step(x)
