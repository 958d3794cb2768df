"""Trains small networks by every outer method, for `benchmarks/local_updates.py`.

Replicas, seeds, methods and numbers of local steps are rows of one stacked network, so a thousand
runs take minutes on one core. Rounds, methods and buckets are the library's own, with a channel
that averages rows instead of asking other ranks; `confirm` compares some of the runs with those of
`autopar.compile` on four gloo processes.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.errors import NonFiniteError
from autopar.ir.replicas.outer_value import Outer
from autopar.runtime.outer.buckets import Bucket
from autopar.runtime.outer.methods import method_of
from autopar.runtime.outer.rounds import Rounds
from benchmarks.small_tasks import BATCH, DATA, batches, net

RANKS, BLOCK = 4, 48  # replicas, and steps whose mean loss is written: all tau divide it
EVERY = 4 * BLOCK  # after so many steps
PARALLEL = "data parallel"
TAUS = (1, 3, 6, 12, 24, 48)
METHODS = {
    "local": "local over data, tau={}",
    "overlap": "overlap over data, tau={}",
    "slowmo": "slowmo over data, tau={}",
    "co2": "co2 over data, tau={}",
    "co2, no penalty": "co2 over data, tau={}, penalty=off",
    "co2, no clip": "co2 over data, tau={}, clip=off",
    "co2, neither": "co2 over data, tau={}, penalty=off, clip=off",
    "co2, clip 0.01": "co2 over data, tau={}, clip=0.01",
    "diloco": "diloco over data, tau={}",
}
# Settings of CO2; the other methods have their defaults: what it compares an average with, and how
# far the anchor goes.
SETTINGS = {
    "local": "local over data, tau={}",
    "overlap": "overlap over data, tau={}",
    "slowmo": "slowmo over data, tau={}",
    "co2": "co2 over data, tau={}",
    "co2, no penalty": "co2 over data, tau={}, penalty=off",
    "co2, beta 0": "co2 over data, tau={}, beta=0",
    "co2, beta 0.5": "co2 over data, tau={}, beta=0.5",
    "co2, rate 2": "co2 over data, tau={}, rate=2",
    "co2, of round": "co2 over data, tau={}, origin=round",
    "co2, of round, beta 0": "co2 over data, tau={}, origin=round, beta=0",
    "co2, of round, beta 0.5": "co2 over data, tau={}, origin=round, beta=0.5",
    "co2, of round, rate 2": "co2 over data, tau={}, origin=round, rate=2",
}
TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)  # the rates of `RATES`
CONSTANT, COSINE = "constant", "cosine"
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
RATES = {("digits", "sgd"): 0.1, ("digits", "adamw"): 3e-3, ("text", "sgd"): 0.1,
         ("text", "adamw"): 3e-3}  # fmt: skip
Case = tuple[str, int, str]  # method, tau, text of the outer method


def cases_of(taus: Sequence[int]) -> list[Case]:
    """Data parallelism, and every method with every number of local steps."""
    found = [(name, tau, text.format(tau)) for name, text in METHODS.items() for tau in taus]
    return [(PARALLEL, 1, ""), *found]


class Stacked(nn.Module):
    """The network of `small_tasks`, once for every row of its parameters f32[rows, ...]."""

    def __init__(self, data: str, seeds: int, cases: int) -> None:
        super().__init__()
        first = [dict(net(data, seed).named_parameters()) for seed in range(seeds)]
        self.values = nn.ParameterDict()
        for name in first[0]:
            own = torch.stack([parameters[name].detach() for parameters in first])
            rows = own[None, :, None].expand(cases, -1, RANKS, *own.shape[1:])
            self.values[name.replace(".", "/")] = nn.Parameter(rows.flatten(0, 2).clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of every row, for x [rows, batch, ...] and y [rows, batch]."""
        rows = len(x)
        if "embed/weight" in self.values:
            table = self.values["embed/weight"]
            x = table[torch.arange(rows)[:, None, None], x].flatten(2)
        h = torch.tanh(self._linear("first", x))
        layers = sum(name.startswith("layers") for name in self.values) // 2
        for number in range(layers):
            h = h + torch.tanh(self._linear(f"layers/{number}", h))
        logits = self._linear("last", h)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(rows, -1).mean(1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.values[f"{name}/weight"], self.values[f"{name}/bias"]
        return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


class Peers:
    """A channel whose peers are rows: it sums flat tensors of [seeds, replicas, ...] parts."""

    ranks = tuple(range(RANKS))

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def all_reduce_async(self, flat: Tensor) -> Peers:
        """Replaces every replica's part by the sum; a report, equal on all, by its multiple."""
        sizes = [tensor.numel() for tensor in self._tensors]
        if flat.numel() != sum(sizes):
            flat.mul_(RANKS)
            return self
        for part, tensor in zip(flat.split(sizes), self._tensors, strict=True):
            rows = part.view(tensor.shape)
            rows.copy_(rows.sum(1, keepdim=True).expand_as(rows))
        return self

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Returns True."""
        return True


def rounds_of(case: Case, tensors: list[Tensor]) -> Rounds:
    """Returns the rounds of one case, whose tensors are views [seeds, replicas, ...]."""
    outer = Outer.parse(case[2])
    method = method_of(outer)
    bucket = Bucket(tensors, list(range(len(tensors))), 0, torch.device("cpu"))
    bucket.restart(method)
    channel: Any = Peers(tensors)
    return Rounds(method, outer.tau, [bucket], channel, lambda seconds: seconds, lambda: None)


def parts_of(data: str, seeds: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields x and y of every step, [seeds, replicas, a replica's rows, ...]."""
    for given in zip(*(batches(data, steps, seed) for seed in range(seeds)), strict=True):
        shape = (seeds, RANKS, BATCH // RANKS)
        x, y = (torch.stack([batch[name] for batch in given]) for name in ("x", "y"))
        yield x.view(*shape, *x.shape[2:]), y.view(shape)


def losses_of(
    data: str,
    optimizer: str,
    cases: Sequence[Case],
    seeds: int,
    steps: int,
    times: float = 1.0,
    schedule: str = CONSTANT,
) -> list[dict[str, Any]]:
    """Returns rows of mean losses over replicas, a row for a case, a seed and some blocks.

    Args:
        data, optimizer, cases, seeds: what is trained, and how often.
        steps: number of batches.
        times: factor of the rate in `RATES`.
        schedule: of the rate: CONSTANT, or COSINE, to zero.
    """
    model, highest = Stacked(data, seeds, len(cases)), times * RATES[data, optimizer]
    update = OPTIMIZERS[optimizer](model.parameters(), lr=highest, fused=True)
    shape = (len(cases), seeds, RANKS)
    views = [p.detach().view(*shape, *p.shape[1:]) for p in model.parameters()]
    going = {
        at: rounds_of(case, [view[at] for view in views])
        for at, case in enumerate(cases)
        if case[2]
    }
    block = torch.zeros(len(cases), seeds, dtype=torch.float64)
    found: list[dict[str, Any]] = []
    for step, (x, y) in enumerate(parts_of(data, seeds, steps), start=1):
        x, y = (v[None].expand(len(cases), *v.shape).flatten(0, 2) for v in (x, y))
        losses = model(x, y)
        update.zero_grad()
        losses.sum().backward()
        for at, case in enumerate(cases):
            if not case[2]:
                for view, p in zip(views, model.parameters(), strict=True):
                    assert p.grad is not None
                    gradients = p.grad.view(view.shape)[at]
                    gradients.copy_(gradients.mean(1, keepdim=True).expand_as(gradients))
        rate = highest
        if schedule == COSINE:
            rate *= (1 + math.cos(math.pi * (step - 1) / steps)) / 2
        update.param_groups[0]["lr"] = rate
        update.step()
        losses = losses.detach().view(shape).mean(2).double()
        for at, rounds in going.items():
            rounds.step(losses[at].mean(), rate)
        block += losses
        if step % EVERY == 0 or step == steps:
            found += [
                {"data": data, "optimizer": optimizer, "method": name, "tau": tau, "seed": seed,
                 "step": step, "loss": _written(float(block[at, seed]) / BLOCK)}
                for at, (name, tau, _) in enumerate(cases)
                for seed in range(seeds)
            ]  # fmt: skip
        if step % BLOCK == 0:
            block.zero_()
    return found


def _written(loss: float) -> float | str:
    return round(loss, 4) if math.isfinite(loss) else "diverged"


def settings_of(
    data: str, optimizer: str, tau: int, seeds: int, steps: int
) -> list[dict[str, Any]]:
    """Returns the last rows of every setting under several rates and both schedules."""
    cases = [(PARALLEL, 1, ""), *((name, tau, text.format(tau)) for name, text in SETTINGS.items())]
    return [
        {**row, "schedule": schedule, "times": times}
        for schedule in (CONSTANT, COSINE)
        for times in TIMES
        for row in losses_of(data, optimizer, cases, seeds, steps, times, schedule)
        if row["step"] == steps
    ]


# On four processes --------------------------------------------------------------------------------


def compiled(case: Case, data: str, optimizer: str, steps: int) -> list[float]:
    """Mean losses over replicas in blocks of steps, by autopar on this rank and its peers."""
    made = functools.partial(OPTIMIZERS[optimizer], lr=RATES[data, optimizer])
    given = list(batches(data, steps, 0))
    session = autopar.compile(
        net(data, 0), f"cpu: data={RANKS}", optimizer=made, example_inputs=given[0],
        on_nonfinite="continue", outer=case[2] or None, state="ddp",
    )  # fmt: skip
    losses: list[Tensor] = []
    with suppress(NonFiniteError):
        losses += [session.step(**batch).double() for batch in given]
    session.close()
    row = torch.stack(losses)
    if case[2]:
        dist.all_reduce(row)
        row /= RANKS
    return [float(block.mean()) for block in row.split(BLOCK)]


def run_confirmation(rank: int, folder: str, steps: int, cases: Sequence[Case]) -> None:
    """Compares, on one of four ranks, and lets the first one write."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    rows: list[dict[str, Any]] = []
    for data in DATA:
        for optimizer in OPTIMIZERS:
            blocks = losses_of(data, optimizer, cases, 1, steps) if rank == 0 else []
            for name, tau, text in cases:
                losses = compiled((name, tau, text), data, optimizer, steps)
                own = [row["loss"] for row in blocks if (row["method"], row["tau"]) == (name, tau)]
                if rank == 0:
                    rows.append(
                        {"data": data, "optimizer": optimizer, "method": name, "tau": tau,
                         "steps": steps, "on_ranks": round(losses[-1], 4), "stacked": own[-1]}
                    )  # fmt: skip
                    print(rows[-1], flush=True)
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def confirm(steps: int, taus: Sequence[int]) -> list[dict[str, Any]]:
    """Returns rows that compare stacked runs with runs of four gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_confirmation, (folder, steps, cases_of(taus)), nprocs=RANKS)
        rows: list[dict[str, Any]] = torch.load(Path(folder, "rows.pt"), weights_only=True)
    return rows
