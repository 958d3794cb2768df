"""Models, optimizers and batches of recipes, for plain torch and for autopar."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

import autopar
from tests.features.feature import Recipe
from tests.features.zoo import FAMILIES, OTHERS, Batch, Family
from tests.support.families import Exact

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=5e-2, momentum=0.9, nesterov=True),
    # With a larger epsilon: it divides by its own size what is zero but for rounding.
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-6, 1e-3)),
    "muon": autopar.muon(lr=1e-2, adamw={"lr": 1e-2}, dtype="own"),
}


class Whole(nn.Module):
    """A model that returns its loss, in float64 or in what it is converted to."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model = Exact(model) if recipe.compute == "f64" else model
        self.second = recipe.second

    def forward(self, **batch: Tensor) -> Tensor:
        output = self.model(**batch)
        if not self.second:
            return output.loss
        # Of the size of the logits, as PaLM has it (arXiv:2204.02311, section 5).
        return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()


def family(recipe: Recipe) -> Family:
    """The kind of a recipe's model."""
    return {**FAMILIES, **OTHERS}[recipe.model]


def make(recipe: Recipe, seed: int = 0, plain: bool = False) -> nn.Module:
    """The model of a recipe in training mode, the same at every call with one seed."""
    kind = family(recipe)
    torch.manual_seed(seed)
    model = Whole(kind.build(recipe, plain).train(), recipe)
    for name, parameter in model.named_parameters():
        if recipe.frozen and any(fnmatchcase(name, pattern) for pattern in kind.frozen):
            parameter.requires_grad_(False)
    return model


def batches(recipe: Recipe, steps: int) -> list[Batch]:
    """A batch for each step."""
    generator = torch.Generator().manual_seed(2)
    return [family(recipe).batch(recipe, generator) for _ in range(steps)]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that changes with every step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
