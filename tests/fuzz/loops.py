"""Plain loops on one process, which judge trainings under random settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from tests.fuzz.settings import OPTIMIZERS, Settings

GAMMA = 0.8  # of the learning rate's schedule
GROUPS = {"blocks.1.*": {"weight_decay": 0.02}, "head.weight": {"lr": 3e-3}}


@dataclass
class Run:
    """Results of a training: losses, evaluations, weights and their averages.

    Attributes:
        stages: the stage of each parameter.
        refused: the error by which the settings were refused.
        crashed: the traceback of any other error.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    refused: str = ""
    crashed: str = ""


def loss_of(output: Any) -> Tensor:
    found: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return found


def group_of(name: str, parameter: Tensor) -> dict[str, Any]:
    """Returns the options of a parameter."""
    return next((given for pattern, given in GROUPS.items() if fnmatch(name, pattern)), {})


class Loop:
    """A plain loop of one process, or of one of several replicas."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.model, self.run = settings, settings.made(), Run()
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p], **(group_of(n, p) if settings.grouped else {})}
            for n, p in self.trained.items()
        ]
        self.optimizer = OPTIMIZERS[settings.optimizer](groups)
        self.scheduler = ExponentialLR(self.optimizer, GAMMA)
        self.averages = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.random = torch.manual_seed(settings.seed).get_state()

    def step(self, batch: dict[str, Tensor]) -> float:
        """Trains one step; returns the learning rate of the first parameter."""
        options = self.settings.options
        torch.set_rng_state(self.random)
        loss = loss_of(self.model.train()(**batch))
        self.random = torch.get_rng_state()
        self.optimizer.zero_grad()
        loss.backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), options["clip_norm"])
        self.optimizer.step()
        self.average()
        self.run.losses.append(float(loss))
        rate: float = self.optimizer.param_groups[0]["lr"]
        if self.settings.scheduled:
            self.scheduler.step()
        return rate

    def average(self) -> None:
        """Takes the weights into their averages."""
        for name, parameter in self.model.named_parameters():
            kept = self.settings.options.get("ema", 0)
            self.averages[name].lerp_(parameter.detach(), 1 - kept)

    def drained(self) -> None:
        """Ends all microbatches under way: here none is."""

    def told(self) -> list[float]:
        """Returns what `step` returns; NaN where it is not compared."""
        return self.run.losses
