"""Losses of models in bf16: as under torch.autocast, compared with plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import ProgramError

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "nll_loss": lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels),
    "written out": lambda logits, labels: (
        torch.logsumexp(logits, -1) - logits.gather(-1, labels[:, None])[:, 0]
    ).mean(),
    "mse_loss": lambda logits, labels: F.mse_loss(logits, F.one_hot(labels, 64).to(logits.dtype)),
    "bce": lambda logits, labels: F.binary_cross_entropy_with_logits(
        logits, F.one_hot(labels, 64).to(logits.dtype)
    ),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 64))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_in_float32(name: str) -> None:
    x, labels = torch.randn(8, 16), torch.arange(8)
    loss_fn = LOSSES[name]

    def of(output: Tensor, labels: Tensor) -> Tensor:
        return loss_fn(output, labels)

    batch = {"input": x, "labels": labels}
    given = {"example_inputs": batch, "loss_fn": of}
    loss = autopar.compile(model(), "cpu: gpu=1", precision="bf16", **given).step(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model().bfloat16()(x.bfloat16())
    wanted = loss_fn(logits.float(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
    pure = autopar.compile(model(), "cpu: gpu=1", precision="bf16 pure", **given)
    assert pure.step(**batch).dtype == torch.bfloat16
    assert str(pure.plan.precision) == "bf16 pure"


def test_a_program_refuses_to_run_in_autocast() -> None:
    batch = {"input": torch.randn(4, 16), "labels": torch.arange(4)}
    program = autopar.compile(model(), "cpu: gpu=1", loss_fn=F.cross_entropy, example_inputs=None)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ProgramError, match="precision"):
        program.step(**batch)
