"""A model, optimizers that mix the elements of a matrix, and plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

Batch = dict[str, Tensor]
RATES = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.8, 0.9)}


class Shampoo(torch.optim.Optimizer):
    """Two preconditioners of a matrix, by inverse fourth roots; SGD for the rest."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self._preconditioned(p) if p.ndim == 2 else p.grad
                    p.sub_(group["lr"] * update)

    def _preconditioned(self, p: nn.Parameter) -> Tensor:
        state, update = self.state[p], p.grad
        assert update is not None
        for side, name in ((0, "left"), (1, "right")):
            gradient = p.grad if side == 0 else p.grad.T  # type: ignore[union-attr]
            if name not in state:
                state[name] = 1e-3 * torch.eye(p.shape[side], dtype=p.dtype)
            state[name] += gradient @ gradient.T  # type: ignore[union-attr, operator]
            values, vectors = torch.linalg.eigh(state[name])
            root = (vectors * values.clamp(min=1e-12) ** -0.25) @ vectors.T
            update = root @ update if side == 0 else update @ root
        return update


class Words(nn.Module):
    """An embedding, two matrices of several shapes, a norm and a head, with uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.fc = nn.Linear(12, 20)
        self.proj = nn.Linear(20, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 7, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.table(x)
        h = self.norm(h + self.proj(torch.tanh(self.fc(h))))
        return F.mse_loss(self.head(h), target)


def words(dtype: torch.dtype = torch.float64) -> Words:
    """Returns the model, alike whenever it is called."""
    torch.manual_seed(0)
    return Words().to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Returns batches of eight samples."""
    torch.manual_seed(1)
    return [
        {"x": torch.randint(11, (8, 3)), "target": torch.randn(8, 3, 7, dtype=dtype)}
        for _ in range(count)
    ]


def torchs_muon(model: nn.Module, steps: list[Batch]) -> list[float]:
    """Trains by torch's own Muon and AdamW, rounding nothing to bf16; returns the losses."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("table")]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    pair = torch.optim.Muon(matrices, **RATES), torch.optim.AdamW(others, **ADAMW)
    losses = []
    with patch.object(Tensor, "bfloat16", lambda x: x.clone()):
        for batch in steps:
            model.zero_grad()
            loss = model(**batch)
            loss.backward()
            for optimizer in pair:
                optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def alone(model: nn.Module, factory: Callable[..., Any], steps: list[Batch]) -> list[float]:
    """Trains by an optimizer in plain torch; returns the losses."""
    optimizer, losses = factory(model.parameters()), []
    for batch in steps:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


FACTORIES: dict[str, Any] = {
    "muon": autopar.muon(dtype="own", adamw=ADAMW, **RATES),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-8, 1e-3)),
    "shampoo": Shampoo,
}


def reference(name: str, steps: list[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and parameters of plain torch in one process."""
    model = words()
    if name == "muon":
        losses = torchs_muon(model, steps)
    else:
        losses = alone(model, FACTORIES[name], steps)
    return losses, {key: value.detach() for key, value in model.state_dict().items()}
