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


def simulated(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[dict[str, Tensor]],
    replicas: int,
    text: str,
) -> Simulated:
    method, tau, given = _read(text)
    number = {k: float(v) for k, v in given.items() if v not in ("off", "rate", "full", "round")}
    networks = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [optimizer(network.parameters()) for network in networks]
    gamma = optimizers[0].param_groups[0]["lr"]
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    anchor = {k: v.clone() for k, v in start.items()}
    momentum = {k: torch.zeros_like(v) for k, v in start.items()}
    late: Values | None = None
    began = dict(start)  # where the round that the late average ends has begun
    losses: list[list[float]] = [[] for _ in networks]
    rounds = 0
    for step, batch in enumerate(batches, 1):
        for own, network in enumerate(networks):
            rows = len(batch["labels"]) // replicas
            part = slice(own * rows, (own + 1) * rows)
            optimizers[own].zero_grad()
            value = loss(network(batch["input"][part]), batch["labels"][part])
            value.backward()
            optimizers[own].step()
            losses[own].append(value.item())
        if step % tau:
            continue
        rounds += 1
        with torch.no_grad():
            late = _round(networks, method, number, given, (anchor, momentum, late, began, gamma))
    last = [{k: v.detach().clone() for k, v in n.named_parameters()} for n in networks]
    mean = {k: sum(each[k] for each in last) / replicas for k in start}
    return Simulated(losses, last, mean if method == "local" else anchor, rounds)


def _round(
    networks: list[nn.Module],
    method: str,
    number: dict[str, float],
    given: dict[str, str],
    state: tuple[Values, Values, Values | None, Values, float],
) -> Values | None:
    anchor, momentum, late, began, gamma = state
    own = [dict(network.named_parameters()) for network in networks]
    sent: Values = {}
    for name in anchor:
        values = [each[name] for each in own]
        mean = torch.stack([v.detach() for v in values]).mean(0)
        a, m = anchor[name], momentum[name]
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
            of_round = given.get("origin") == "round"
            here = a
            if late is not None:
                penalty = 2.0 if given["penalty"] == "rate" else 1.0  # the rate is constant
                m = number["beta"] * m + ((began[name] if of_round else a) - late[name]) / penalty
                if "clip" in number:
                    m = m.clamp(-number["clip"], number["clip"])
                a = a - m
            if late is not None or of_round:
                new = [a] * len(own)
            sent[name], began[name] = mean, here
        else:
            raise ValueError(method)
        anchor[name], momentum[name] = a.clone(), m
        for value, result in zip(values, new, strict=True):
            value.copy_(result)
    return sent or None
