"""Mixed precision, groups and averages written by hand in plain torch on one device, as oracles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.precision import Precision
from autopar.operators.interpret import TORCH_DTYPES
from autopar.pins import PinContext, data_parallel

MESH = "toy[1TFLOP/s 64GiB 1TB/s]: node=2 @1GB/s 10us, gpu=2 @10GB/s 1us"
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PAIR = "toy[1TFLOP/s 64GiB 1TB/s]: gpu=2 @10GB/s 1us"
Batch = dict[str, Tensor]


def used_whole(context: PinContext) -> dict[str, str]:
    """Pins of data parallelism that leave open how parameters lie."""
    pins = data_parallel()(context)
    return {key: text.rpartition("=> ")[2] for key, text in pins.items()}


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of low rank (LoRA, arXiv:2106.09685)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) / width)
        self.b = nn.Parameter(torch.randn(width, rank) / width)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Net(nn.Module):
    """Two residual blocks, with adapters if asked for, between an embedding and a tied head."""

    def __init__(self, adapted: bool = False, width: int = 16, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        kinds = (partial(Adapted, rank=4) if adapted else partial(nn.Linear, out_features=width),)
        self.layers = nn.ModuleList(kinds[0](width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, width))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        logits = self.head(self.norm(x) + self.shift.to(x.dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def net(dtype: torch.dtype = torch.float32, adapted: bool = False) -> tuple[nn.Module, Batch]:
    """The model and a batch of 16 samples; the same at every call."""
    torch.manual_seed(0)
    model = Net(adapted).to(dtype)
    tokens = torch.randint(0, 12, (16, 4))
    return model, {"tokens": tokens, "labels": (tokens + 1) % 12}


def no_decay(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of `GROUPS`, as one makes them for torch."""
    plain = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim != 2]
    return [{"params": plain}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}]


GROUPS = {"*.bias": {"weight_decay": 0.0, "lr": 3e-2}, "norm.*": {"weight_decay": 0.0, "lr": 3e-2}}


@dataclass
class Judged:
    """A run on one device: losses, the parameters, and their average if one is kept."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)


def judge(
    model: nn.Module,
    batch: Batch,
    precision: Precision,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    steps: int = 3,
    microbatches: int = 1,
    ema: float | None = None,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    scheduled: bool = False,
) -> Judged:
    """The model computes in one dtype, its copy in another is updated; no autopar in it."""
    low, found = copy.deepcopy(model), Judged()
    for parameter in low.parameters() if precision.compute else ():
        parameter.data = parameter.data.to(TORCH_DTYPES[precision.compute])
    made = optimizer(groups(model))
    schedule = torch.optim.lr_scheduler.LinearLR(made, 0.5, total_iters=3) if scheduled else None
    pairs = list(zip(model.parameters(), low.parameters(), strict=True))
    means = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(steps):
        made.zero_grad()
        for master, parameter in pairs:
            parameter.data.copy_(master.data)
        losses = []
        for part in zip(*(value.chunk(microbatches) for value in batch.values()), strict=True):
            loss = low(**dict(zip(batch, part, strict=True))) / microbatches
            loss.backward()
            losses.append(loss.item())
            for master, parameter in pairs:
                if parameter.grad is not None:
                    new = parameter.grad.to(master.dtype)
                    master.grad = new if master.grad is None else master.grad + new
                    parameter.grad = None
        made.step()
        if schedule is not None:
            schedule.step()
        for name, master in model.named_parameters():
            if ema is not None:
                means[name] = ema * means[name] + (1 - ema) * master.detach()
        found.losses.append(sum(losses))
    found.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    found.average = found.state | means | {"head.weight": means["embed.weight"]}
    return found


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[k].double() - v.double()).norm() / v.double().norm().clamp(min=1e-3))
        for k, v in wanted.items()
    )
