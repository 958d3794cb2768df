"""Placement learned by reinforcement (ColocRL), for comparison with `inter_op/placement`.

Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning" (ICML 2017): an LSTM
reads the tasks, a second one with attention chooses a device for each; REINFORCE with a moving
average as the baseline rewards a placement by the negative square root of its seconds. Here the
simulation of `inter_op/placement` gives the seconds, and a placement that does not fit counts as
ten times the seconds of all tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.errors import InfeasibleError
from autopar.inter_op.placement.placement_problem import (
    Placed,
    PlacementProblem,
    simulate_placement,
)

HIDDEN = 64
SAMPLES = 16  # placements drawn for one step
RATE = 3e-3  # of Adam
KEPT = 0.9  # weight of the past in the baseline
CLIP = 1.0  # most norm of a gradient
UNFIT = 10.0  # cost of a placement that does not fit, relative to the seconds of all tasks


@dataclass(frozen=True)
class Learned:
    """The best placement drawn, and the learning curve.

    Args:
        placed: the best placement.
        mean: mean seconds of the placements of every step.
        best: least seconds up to every step.
    """

    placed: Placed
    mean: tuple[float, ...]
    best: tuple[float, ...]


class Policy(nn.Module):
    """Draws devices for a sequence of tasks."""

    def __init__(self, features: int, devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.read = nn.Linear(features, HIDDEN)
        self.encoder = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.decoder = nn.LSTMCell(2 * HIDDEN, HIDDEN)
        self.before = nn.Embedding(devices + 1, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.choose = nn.Linear(2 * HIDDEN, devices)

    def forward(self, tasks: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Draws `count` placements of tasks, (tasks, features).

        Returns devices, (count, tasks), and the logarithms of their probabilities, (count,).
        """
        states, (hidden, cell) = self.encoder(self.read(tasks)[None])
        states = states[0]
        hidden, cell = hidden[0].expand(count, -1), cell[0].expand(count, -1)
        last = torch.full((count,), self.devices)
        drawn: list[Tensor] = []
        chances = torch.zeros(count)
        for state in states:
            given = torch.cat([self.before(last), state.expand(count, -1)], dim=1)
            hidden, cell = self.decoder(given, (hidden, cell))
            weights = torch.softmax(hidden @ self.key(states).T / math.sqrt(HIDDEN), dim=1)
            logits = self.choose(torch.cat([hidden, weights @ states], dim=1))
            choices = torch.distributions.Categorical(logits=logits)
            last = choices.sample()
            chances = chances + choices.log_prob(last)
            drawn.append(last)
        return torch.stack(drawn, dim=1), chances


def learn(problem: PlacementProblem, *, steps: int = 200, seed: int = 0) -> Learned:
    """Trains a policy on one problem.

    Raises:
        InfeasibleError: no placement drawn fits.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _learn(problem, steps)


def _learn(problem: PlacementProblem, steps: int) -> Learned:
    order, tasks = problem.order, _features(problem)
    policy = Policy(tasks.shape[1], problem.devices)
    optimizer = torch.optim.Adam(policy.parameters(), RATE)
    worst = UNFIT * sum(max(task.seconds) for task in problem.tasks)
    best: Placed | None = None
    baseline: float | None = None
    means: list[float] = []
    bests: list[float] = []
    for _ in range(steps):
        drawn, chances = policy(tasks, SAMPLES)
        seconds: list[float] = []
        for row in drawn.tolist():
            devices = [0] * len(order)
            for v, device in zip(order, row, strict=True):
                devices[v] = device
            placed = simulate_placement(problem, devices) if problem.fits(devices) else None
            if placed and (best is None or placed.seconds < best.seconds):
                best = placed
            seconds.append(placed.seconds if placed else worst)
        reward = -torch.tensor(seconds).sqrt()
        mean = float(reward.mean())
        baseline = mean if baseline is None else KEPT * baseline + (1 - KEPT) * mean
        loss = -((reward - baseline) * chances).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        means.append(sum(seconds) / len(seconds))
        bests.append(best.seconds if best else math.inf)
    if best is None:
        raise InfeasibleError(
            "no placement drawn fits",
            where=f"placement problem {problem.name!r}",
            todo="train longer, or use another method",
        )
    return Learned(best, tuple(means), tuple(bests))


def _features(problem: PlacementProblem) -> Tensor:
    """Returns seconds, memory, traffic and neighbours of the tasks in topological order."""
    rows: list[list[float]] = []
    place = {v: k for k, v in enumerate(problem.order)}
    for v in problem.order:
        task = problem.tasks[v]
        near = [0.0] * len(place)
        for t in problem.inputs[v]:
            near[place[t.a]] = 1.0
        for t in problem.outputs[v]:
            near[place[t.b]] = -1.0
        into = sum(t.nbytes for t in problem.inputs[v])
        out = sum(t.nbytes for t in problem.outputs[v])
        rows.append([*task.seconds, task.memory, into, out, *near])
    table = torch.tensor(rows)
    return table / table.abs().amax(dim=0).clamp(min=1e-30)
