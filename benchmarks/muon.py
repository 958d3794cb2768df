"""Muon's table, for `benchmarks/local_updates.py`: seconds, bytes of state, and parity.

A stack of matrices trains on two gloo processes by Muon and by AdamW under data parallelism,
ZeRO-1, ZeRO-3 and tensor parallelism. Parity is the largest difference of a parameter from torch's
Muon in one process after a few steps in float64, where torch's iteration is given the dtype of the
parameter.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.explain.summary import parameters
from benchmarks.harness import middle

RANKS, WIDTH, LAYERS, ROWS, STEPS, PARITY_STEPS = 2, 384, 4, 64, 12, 4
_SPLIT = {f"up.{n}.weight": f"[{4 * WIDTH}@gpu, {WIDTH}]" for n in range(LAYERS)}
_SPLIT |= {f"down.{n}.weight": f"[{WIDTH}, {4 * WIDTH}@gpu]" for n in range(LAYERS)}
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {"state": "ddp", "pins": [autopar.pins.data_parallel()]},
    "zero1": {"state": "zero1", "pins": [autopar.pins.data_parallel()]},
    "zero3": {"state": "zero3", "pins": [autopar.pins.data_parallel()]},
    "tensor parallel": {"state": "ddp", "pins": _SPLIT},
}
OPTIMIZERS: dict[str, Any] = {"muon": autopar.muon(lr=0.02), "adamw": torch.optim.AdamW}


class Perceptrons(nn.Module):
    """Layers of two matrices each, without biases, so that torch's Muon takes all of them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = range(LAYERS)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in sizes)
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH, bias=False) for _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        h = x
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(torch.tanh(up(h)))
        return h.square().mean()


def network() -> Perceptrons:
    """Returns the network with its first values."""
    torch.manual_seed(0)
    return Perceptrons()


def batch(step: int) -> dict[str, Tensor]:
    """Returns a random batch."""
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))}


def reference() -> dict[str, Tensor]:
    """Returns parameters that torch's Muon has trained in one process in float64."""
    model = network().double()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for step in range(PARITY_STEPS):
        optimizer.zero_grad()
        model(batch(step)["x"].double()).backward()
        with patch.object(Tensor, "bfloat16", lambda value: value):  # its iteration rounds to it
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def parity(plan: str, wanted: dict[str, Tensor]) -> float:
    """Returns the largest difference of a parameter from those of one process."""
    given = {"x": batch(0)["x"].double()}
    session = autopar.compile(
        network().double(), f"cpu: gpu={RANKS}", example_inputs=given,
        optimizer=autopar.muon(lr=0.02, dtype="own"), **PLANS[plan],
    )  # fmt: skip
    for step in range(PARITY_STEPS):
        session.step(x=batch(step)["x"].double())
    own = session.state_dict()
    session.close()
    return max(float((own[name] - value).abs().max()) for name, value in wanted.items())


def measured(plan: str, optimizer: str) -> dict[str, Any]:
    """Returns seconds of a step and bytes of state, measured and planned, on this rank."""
    session = autopar.compile(
        network(), f"cpu: gpu={RANKS}", example_inputs=batch(0), optimizer=OPTIMIZERS[optimizer],
        **PLANS[plan],
    )  # fmt: skip
    spent = []
    for step in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        session.step(**batch(step))
        spent.append(time.perf_counter() - began)
    nbytes = torch.tensor(float(sum(session.update_bytes().values())))
    dist.all_reduce(nbytes)
    planned = sum(row.optimizer for row in parameters(session.graph, session.plan.stage, ()))
    session.close()
    return {
        "plan": plan, "optimizer": optimizer, "ms": round(1e3 * middle(spent[2:]), 2),
        "state_bytes": int(nbytes) // RANKS, "planned_bytes": int(planned),
    }  # fmt: skip


def _run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    wanted = reference()
    rows: list[dict[str, Any]] = []
    for plan in PLANS:
        for optimizer in OPTIMIZERS:
            row = measured(plan, optimizer)
            apart = parity(plan, wanted) if optimizer == "muon" else None
            rows.append({**row, "parity": "" if apart is None else f"{apart:.1e}"})
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def table() -> list[dict[str, Any]]:
    """Returns a row for every plan and optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run, (folder,), nprocs=RANKS)
        rows: list[dict[str, Any]] = torch.load(Path(folder, "rows.pt"), weights_only=True)
    return rows
