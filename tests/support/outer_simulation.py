"""One process that simulates all replicas of an outer method, from the formulas of the papers.

It shares no code with `autopar/runtime/outer/`: parameters are dictionaries of whole tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Values = dict[str, Tensor]


@dataclass
class Simulated:
    losses: list[list[float]]
    parameters: list[Values]
    agreed: Values
    rounds: int


def _read(text: str) -> tuple[str, int, dict[str, Any]]:
    method, _, rest = text.partition(" over ")
    options = dict(part.strip().split("=") for part in rest.split(",") if "=" in part)
    return method, int(options.pop("tau")), options


class Rounds:
    """The outer state of all replicas of a model.

    Attributes:
        tau: steps of a round.
        anchor: the values at the last synchronisation.
        number: of rounds so far.
    """

    def __init__(self, model: nn.Module, text: str) -> None:
        self.method, self.tau, self.given = _read(text)
        words = ("off", "rate", "full", "round")
        self.numbers = {k: float(v) for k, v in self.given.items() if v not in words}
        self.anchor = {k: v.detach().clone() for k, v in model.named_parameters()}
        self.momentum = {k: torch.zeros_like(v) for k, v in self.anchor.items()}
        self.late: Values | None = None
        self.began = dict(self.anchor)  # where the round that the late average ends has begun
        self.number, self.highest = 0, 0.0

    def agreed(self, networks: Sequence[nn.Module]) -> Values:
        """The common weights: the anchor if the method has one, else the average."""
        if self.method != "local":
            return self.anchor
        own = [dict(network.named_parameters()) for network in networks]
        return {k: sum(each[k].detach() for each in own) / len(own) for k in self.anchor}

    @torch.no_grad()
    def step(self, step: int, networks: Sequence[nn.Module], rate: float) -> None:
        """Count a local step, and synchronise if it is due.

        Args:
            step: its number, from 1.
            networks: the replicas after this step.
            rate: learning rate of the step.
        """
        self.highest = max(self.highest, rate)
        if step % self.tau == 0:
            self.number += 1
            self._synchronise(networks, rate)

    def _synchronise(self, networks: Sequence[nn.Module], gamma: float) -> None:
        own = [dict(network.named_parameters()) for network in networks]
        number, given, late, sent = self.numbers, self.given, self.late, Values()
        of_round, method = given.get("origin") == "round", self.method
        for name in self.anchor:
            values = [each[name] for each in own]
            mean = torch.stack([v.detach() for v in values]).mean(0)
            a, m = self.anchor[name], self.momentum[name]
            if method == "local":
                new = [mean] * len(own)
            elif method == "slowmo":
                m = number["beta"] * m + (a - mean) / gamma
                a = a - number["rate"] * gamma * m
                new = [a] * len(own)
            elif method == "diloco":
                g = a - mean
                m = number["beta"] * m + g
                a = a - number["rate"] * (g + number["beta"] * m)
                new = [a] * len(own)
            elif method == "overlap":
                if late is not None:
                    m = number["beta"] * m + (late[name] - a)
                    a = a + m
                new = [v.detach() * (1 - number["alpha"]) + a * number["alpha"] for v in values]
                sent[name] = torch.stack(new).mean(0)
            elif method == "co2":
                new = [v.detach().clone() for v in values]
                here = a
                if late is not None:
                    penalty = 1 + gamma / self.highest if given["penalty"] == "rate" else 1.0
                    began = self.began[name] if of_round else a
                    m = number["beta"] * m + (began - late[name]) / penalty
                    if "clip" in number:
                        m = m.clamp(-number["clip"], number["clip"])
                    a = a - m
                if late is not None or of_round:
                    new = [a] * len(own)
                sent[name], self.began[name] = mean, here
            else:
                raise ValueError(method)
            self.anchor[name], self.momentum[name] = a.clone(), m
            for value, result in zip(values, new, strict=True):
                value.copy_(result)
        self.late = sent or None


def simulated(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[dict[str, Tensor]],
    replicas: int,
    text: str,
) -> Simulated:
    rounds = Rounds(model, text)
    networks = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [optimizer(network.parameters()) for network in networks]
    losses: list[list[float]] = [[] for _ in networks]
    for step, batch in enumerate(batches, 1):
        for own, network in enumerate(networks):
            rows = len(batch["labels"]) // replicas
            part = slice(own * rows, (own + 1) * rows)
            optimizers[own].zero_grad()
            value = loss(network(batch["input"][part]), batch["labels"][part])
            value.backward()
            optimizers[own].step()
            losses[own].append(value.item())
        rounds.step(step, networks, optimizers[0].param_groups[0]["lr"])
    last = [{k: v.detach().clone() for k, v in n.named_parameters()} for n in networks]
    return Simulated(losses, last, rounds.agreed(networks), rounds.number)
