"""The oracle: plain torch trains the whole model in one process, by the same recipe."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from autopar.runtime.optimizers.muon import MuonFactory
from tests.features.feature import Recipe
from tests.features.models import OPTIMIZERS, batches, family, make, schedule

STEPS, SEED = 4, 1
LOW = {"bf16": torch.bfloat16, "f16": torch.float16}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """Results of a run.

    Attributes:
        losses: of every step.
        state: the model's state_dict.
        average: the same with averages of what is trained; empty without.
        moments: the optimizer's state, by the parameter's name and its own, "wte.weight exp_avg".
        norms: of the gradients of every step before clipping; empty without clipping.
        rates: of the optimizer's groups at the end, ordered.
    """

    losses: list[float]
    state: State
    average: State = field(default_factory=dict)
    moments: State = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def errors(self, other: Trained) -> dict[str, float]:
        """The largest relative error of every part; `other` is right."""
        return {
            "losses": _between(self.losses, other.losses),
            "norms": _between(self.norms, other.norms),
            "rates": _between(self.rates, other.rates),
            "parameters": _of_tensors(self.state, other.state),
            "averages": _of_tensors(self.average, other.average),
            "moments": _of_tensors(self.moments, other.moments),
        }


def _between(mine: list[float], its: list[float]) -> float:
    if len(mine) != len(its):
        return float("inf")
    return max((abs(a - b) / abs(b) for a, b in zip(mine, its, strict=True)), default=0.0)


def _of_tensors(mine: Mapping[str, Tensor], its: Mapping[str, Tensor]) -> float:
    """Relative to a tensor's norm; what is zero but for rounding, to a part of what others have."""
    if mine.keys() != its.keys():
        return float("inf")
    names = [name for name in its if its[name].is_floating_point()]
    mine = {name: value.cpu() for name, value in mine.items()}
    equal = all(torch.equal(mine[name], its[name]) for name in its if name not in names)
    size = {name: float(its[name].norm()) / max(its[name].numel(), 1) ** 0.5 for name in names}
    errors = [0.0 if equal else float("inf")]
    for name in names:
        kind = [size[other] for other in names if other.split()[1:] == name.split()[1:]]
        scale = max(size[name], 1e-4 * max(kind)) * its[name].numel() ** 0.5
        difference = float((mine[name] - its[name]).norm())
        errors.append(difference / scale if difference == difference else float("inf"))
    return max(errors)


def train(recipe: Recipe) -> Trained:
    """Train by a recipe."""
    model = Masters(make(recipe, plain=True), recipe)
    trained = {name: p for name, p in model.whole.named_parameters() if p.requires_grad}
    optimizer = OPTIMIZERS[recipe.optimizer](_grouped(recipe, model.whole, trained))
    rates = schedule(optimizer) if recipe.scheduled else None
    keeps = 0.0 if recipe.ema is None else recipe.ema
    average = {name: p.detach().clone() for name, p in trained.items()}
    losses, norms = [], []
    torch.manual_seed(SEED)
    for batch in batches(recipe, STEPS):
        optimizer.zero_grad()
        loss, finite = model.backward(batch, recipe.microbatches)
        losses.append(loss)
        if recipe.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(trained.values(), recipe.clip)))
        if finite:
            optimizer.step()
            for name, mean in average.items():
                mean.mul_(keeps).add_(trained[name].detach(), alpha=1 - keeps)
        if rates is not None:
            rates.step()
    state = model.whole.state_dict(keep_vars=True)
    names = {id(p): name for name, p in trained.items()}
    means = {name: average.get(names.get(id(p), ""), p.detach()) for name, p in state.items()}
    moments = {
        f"{name} {key}": value
        for name, p in trained.items()
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor) and value.ndim
    }
    return Trained(
        losses,
        {name: value.detach() for name, value in state.items()},
        {} if recipe.ema is None else means,
        moments,
        norms,
        sorted(group["lr"] for group in optimizer.param_groups),
    )


class Masters:
    """A model that is updated, and its copy in the dtype in which a recipe computes.

    With `scaled` the loss is multiplied by what torch.amp.GradScaler begins with, which is halved
    where gradients overflow.
    """

    def __init__(self, whole: nn.Module, recipe: Recipe) -> None:
        self.whole, self.low = whole, whole
        self.scale = 2.0**16 if recipe.scaled else 1.0
        if recipe.compute in LOW:
            self.low = copy.deepcopy(whole)
            for parameter in self.low.parameters():
                parameter.data = parameter.data.to(LOW[recipe.compute])

    def backward(self, batch: Mapping[str, Tensor], count: int) -> tuple[float, bool]:
        """Backward of one microbatch after the other; their mean loss, and whether it is finite."""
        pairs = list(zip(self.whole.parameters(), self.low.parameters(), strict=True))
        total = 0.0
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        for number in range(count):
            part = {name: value.chunk(count)[number] for name, value in batch.items()}
            loss = self.low(**part) / count
            (loss * self.scale).backward()
            total += loss.item()
            for master, parameter in pairs if self.low is not self.whole else ():
                if parameter.grad is not None:
                    new = parameter.grad.to(master.dtype)
                    master.grad = new if master.grad is None else master.grad + new
                    parameter.grad = None
        gradients = [p.grad for p in self.whole.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        self.scale *= 1.0 if finite else 0.5
        return total, finite


def _grouped(
    recipe: Recipe, model: nn.Module, trained: Mapping[str, nn.Parameter]
) -> list[dict[str, object]]:
    patterns = family(recipe).groups if recipe.grouped else {}
    factory = OPTIMIZERS[recipe.optimizer]
    roles = factory.roles(model) if isinstance(factory, MuonFactory) else {}
    groups: dict[str, dict[str, object]] = {}
    for name, parameter in trained.items():
        options: dict[str, object] = {**roles.get(name, {})}
        for pattern, given in patterns.items():
            if fnmatchcase(name, pattern):
                options = {**options, **given}
        group = groups.setdefault(repr(sorted(options.items())), {"params": [], **options})
        group["params"].append(parameter)  # type: ignore[attr-defined]
    return list(groups.values())
