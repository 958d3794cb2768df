"""Plain loops of asynchronous pipelines, whose microbatches run on older versions of the weights.

Which version, a closed form tells; see `tests/support/stale_weights.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.fuzz.loops import Loop, loss_of
from tests.fuzz.settings import Settings
from tests.support.stale_weights import METHODS


class StaleLoop(Loop):
    """A loop whose microbatches run on the versions that a method says.

    Args:
        settings: of the training.
        stages: the stage of each parameter.
    """

    def __init__(self, settings: Settings, stages: Mapping[str, int]) -> None:
        super().__init__(settings)
        self.stages, self.method = stages, METHODS[settings.method]
        self.named = dict(self.model.named_parameters())
        self.versions = [self._newest()]
        self.begun, self.first, self.micro = 0, 0, 0

    def _newest(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    def drained(self) -> None:
        """All microbatches under way end; the next one finds the newest weights everywhere."""
        self.begun, self.first = self.micro, len(self.versions) - 1

    def step(self, batch: dict[str, Tensor]) -> float:
        method, total = self.method, 0.0
        self.model.train()
        for number in range(method.microbatches):
            part = {name: value.chunk(method.microbatches)[number] for name, value in batch.items()}
            used = self._used()
            loss = loss_of(functional_call(self.model, used, kwargs=part))
            names = list(self.trained)
            gradients = torch.autograd.grad(
                loss / method.taken, [used[name] for name in names], allow_unused=True
            )
            for name, own in zip(names, gradients, strict=True):
                p = self.trained[name]
                if own is not None:
                    p.grad = own if p.grad is None else p.grad + own
            self.micro += 1
            total += float(loss.detach()) / method.microbatches
            if (number + 1) % method.taken == 0:
                self._update()
        self.run.losses.append(total)
        rate: float = self.optimizer.param_groups[0]["lr"]
        if self.settings.scheduled:
            self.scheduler.step()
        return rate

    def _used(self) -> dict[str, Tensor]:
        """Returns the weights of the next microbatch."""
        count, place = max(self.stages.values()) + 1, self.micro - self.begun
        used = {}
        for name, parameter in self.named.items():
            age = self.first + self.method.forward(self.stages[name], count, place)
            used[name] = self.versions[age][name].clone().requires_grad_(parameter.requires_grad)
        return used

    def _update(self) -> None:
        clip = self.settings.options.get("clip_norm")
        if clip is not None:  # every stage by the norm of its own gradients
            for stage in set(self.stages.values()):
                own = [p for n, p in self.trained.items() if self.stages[n] == stage]
                nn.utils.clip_grad_norm_(own, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average()
        self.versions.append(self._newest())

    def told(self) -> list[float]:
        """Returns the losses of earlier steps, which `step` returns; NaN where none is compared."""
        losses, late = self.run.losses, self.method.late
        if self.settings.evaluated or self.settings.saved:
            return [math.nan] * len(losses)
        return [losses[max(0, number - late)] for number in range(len(losses))]
