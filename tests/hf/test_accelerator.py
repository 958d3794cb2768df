"""Loops of accelerate on sessions, compared with the same loop in torch on one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from autopar.errors import OptionError, ProgramError
from autopar.hf import Accelerator
from tests.support.one_process import close
from tests.support.ranks import environment_of_launcher, run_ranks

LINE = "cpu: data=2 @1TB/s 1ns"
ROWS, EPOCHS = 20, 2  # of 2 rows on 2 ranks: 5 batches, in accumulations of 2, 2 and 1


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 8, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (ROWS,), generator=draw))


def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW without decay of biases, and a schedule whose first rate is small."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-2, weight_decay=0.3)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, 0.1 * (step + 1)))


def loop(accelerator: accelerate.Accelerator, folder: Path, resumed: bool) -> dict[str, Any]:
    model = Classifier()
    optimizer, schedule = parts(model)
    batches = DataLoader(data(), batch_size=2)
    model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, batches)
    losses = []
    if resumed:
        accelerator.load_state(str(folder))
    for epoch in range(resumed, EPOCHS):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = model(x, y)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(str(folder))
    model.eval()
    logits = [accelerator.gather_for_metrics(model(x=x, y=y)["logits"]) for x, y in batches]
    return {
        "losses": losses, "logits": torch.cat(logits),
        "weights": dict(accelerator.unwrap_model(model).state_dict()),
    }  # fmt: skip


def plain() -> dict[str, Any]:
    """The same training in torch alone."""
    model, losses = Classifier(), []
    optimizer, schedule = parts(model)
    for _ in range(EPOCHS):
        for batches in ([0, 4], [8, 12], [16]):
            parted = [data()[first : first + 4] for first in batches]
            found = [model(x, y)["loss"] for x, y in parted]
            (sum(found) / 2).backward()  # as accelerate does, also where one batch is left
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            schedule.step()  # once for each process, as accelerate's schedules do
            losses.append(sum(loss.item() for loss in found))
    model.eval()
    return {
        "losses": losses, "logits": model(*data()[:])["logits"].detach(),
        "weights": dict(model.state_dict()),
    }  # fmt: skip


def refuse() -> None:
    model = Classifier()
    accelerator = Accelerator(mesh=LINE, cpu=True)
    x, y = data()[:4]
    alone = accelerator.prepare(Classifier())
    with pytest.raises(ProgramError, match="no optimizer"):
        alone(x, y)
    model, _ = accelerator.prepare(model, parts(model)[0])
    loss = model(x, y)["loss"]
    with pytest.raises(ProgramError, match="before backward"):
        model(x, y)
    with pytest.raises(ProgramError, match="loss that the model returned"):
        accelerator.backward(loss * 2)
    accelerator.backward(loss)
    with pytest.raises(OptionError, match=r'"clip_norm": 1\.0'):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(AttributeError, match="no_grad"):
        model(x, y).logits  # noqa: B018


def on_ranks(folder: Path) -> list[dict[str, Any]]:
    os.environ |= environment_of_launcher()
    found = []
    for resumed in (False, True):
        accelerator = Accelerator(
            mesh=LINE, options={"clip_norm": 0.5}, cpu=True, gradient_accumulation_steps=2
        )
        found.append(loop(accelerator, folder, resumed))
    refuse()
    return found


def test_a_loop_trains_as_on_one_process(tmp_path: Path) -> None:
    first, resumed = run_ranks(on_ranks, tmp_path, count=2)[0]
    wanted = plain()
    complete = [1, 3, 4, 6, 8, 9]  # whose losses are sums over an accumulation
    assert [first["losses"][n] for n in complete] == pytest.approx(wanted["losses"], rel=1e-9)
    assert not any(loss for n, loss in enumerate(first["losses"]) if n not in complete)
    assert resumed["losses"] == first["losses"][5:]
    close(first["logits"], wanted["logits"])
    for found in (first, resumed):
        close(found["weights"], wanted["weights"])


@pytest.mark.parametrize("name", ["fsdp_plugin", "deepspeed_plugin", "parallelism_config"])
def test_another_parallelism_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        Accelerator(mesh=LINE, **{name: object()})
