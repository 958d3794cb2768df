"""A Llama whose sequence is split trains like one process, whatever form its attention takes.

Rotary positions, the causal mask and labels shifted by one all depend on positions.
"""

from __future__ import annotations

import pytest
import torch

import autopar
from tests.support.parity import Batch, Run, make, optimizer, train_plainly
from tests.support.ranks import run_ranks

LINE = "cpu[1TFLOP/s 64GiB 1TB/s]: cp=2 @10GB/s 1us"
GRID = "cpu[1TFLOP/s 64GiB 1TB/s]: ring=2 @10GB/s 1us, heads=2 @10GB/s 1us"
FORMS = {
    LINE: ("gathered", "ring", "ring zigzag", "ulysses"),
    GRID: ("ulysses ring", "ring zigzag"),
}
STEPS = 3


def llama() -> tuple[torch.nn.Module, Batch]:
    model, batch = make("llama", torch.float64, 0.0)
    return model, {name: tensor[:2] for name, tensor in batch.items()}


def trained(mesh: str) -> list[Run]:
    """The runs of this rank, one for each form."""
    runs = []
    for form in FORMS[mesh]:
        model, batch = llama()
        program = autopar.compile(
            model,
            mesh,
            optimizer=optimizer,
            example_inputs=batch,
            pins=autopar.pins.form("*.self_attn", form),
        )
        losses = [program.step(**batch).item() for _ in range(STEPS)]
        runs.append(Run(losses, program.state_dict(), 0, program.source))
    return runs


@pytest.mark.parametrize(("mesh", "count"), [(LINE, 2), (GRID, 4)])
def test_training_is_that_of_one_device(mesh: str, count: int) -> None:
    model, batch = llama()
    losses = train_plainly(model, batch, optimizer(model.parameters()), STEPS)
    whole = Run(losses, model.state_dict(), 0)
    for rank in run_ranks(trained, mesh, count=count):
        for form, run in zip(FORMS[mesh], rank, strict=True):
            method = form.replace("ring zigzag", "zigzag").replace(" ", "_")
            assert f"mesh.{method}_attention(" in run.source, form
            assert run.error(whole) <= 1e-9, form
