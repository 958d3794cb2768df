"""Measures convergence with compressed gradients, and with torch's own PowerSGD hook.

`python -m benchmarks.compression` trains a small network on scikit-learn's digits, on two gloo
processes with a half of every batch each: by plain DistributedDataParallel, by it with its hook
`powerSGD_hook`, and by autopar with every method of `autopar/ir/compression/` and none. All have
the same weights, batches and AdamW. Losses are means of blocks of steps; accuracies are on digits
that were held out; bytes are what a rank brings to the exchange of gradients in one step. Rows go
to results/compression.csv, and a picture to docs/images.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.ir.storage import REDUCED
from autopar.pins import data_parallel
from benchmarks import small_tasks
from benchmarks.harness import PICTURES, write

RANKS, BATCH, BLOCK, HELD_OUT, RATE = 2, 64, 20, 360, 3e-3
TORCH = ("torch DDP", "torch PowerSGD hook, rank 4")
OURS = ("none", "int8", "int4 blocks", "1-bit", "top-k 10 %", "top-k 1 %", "powersgd rank 4")
MESH = "cpu: gpu=2 @10MB/s 50us"
COLOURS = ("#444444", "#b2182b", "#999999", "#1b7837", "#5aae61", "#2166ac", "#762a83", "#c2a5cf",
           "#f4a582")  # fmt: skip


class Net(nn.Module):
    """Two hidden layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return F.cross_entropy(self.layers(x), y)


def digits() -> tuple[Tensor, Tensor]:
    """Images of handwritten digits, 8 by 8, and which they are, in a fixed random order."""
    images, labels = small_tasks.digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def batches(steps: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Random batches; the same for every method."""
    x, y = digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(HELD_OUT, len(x), (BATCH,), generator=generator)
        yield {"x": x[chosen], "y": y[chosen]}


def net(seed: int) -> Net:
    """The network before training."""
    torch.manual_seed(seed)
    return Net()


def accuracy(state: dict[str, Tensor]) -> float:
    """The share of the digits held out that a network with these weights recognises."""
    model, (x, y) = net(0), digits()
    model.load_state_dict(state)
    with torch.no_grad():
        found = model.layers(x[:HELD_OUT]).argmax(1)
    return float((found == y[:HELD_OUT]).float().mean())


def by_torch(method: str, seed: int, steps: int) -> tuple[list[float], float, float]:
    """Losses, accuracy and bytes of a step, trained by DistributedDataParallel."""
    model = DistributedDataParallel(net(seed))
    state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    if method != TORCH[0]:
        model.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in batches(steps, seed):
        own = {name: value.chunk(RANKS)[dist.get_rank()] for name, value in batch.items()}
        optimizer.zero_grad()
        loss = model(**own)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / RANKS)
    elements = sum(parameter.numel() for parameter in model.parameters())
    if method != TORCH[0]:
        _, before, after = state.compression_stats()
        elements = elements * after / before
    return losses, accuracy(model.module.state_dict()), 4.0 * elements


def by_autopar(method: str, seed: int, steps: int) -> tuple[list[float], float, float]:
    """The same, trained by a program with compressed gradients."""
    given = list(batches(steps, seed))
    session = autopar.compile(
        net(seed), MESH, optimizer=functools.partial(torch.optim.AdamW, lr=RATE),
        example_inputs=given[0], pins=data_parallel(), state="ddp",
        gradients=None if method == "none" else method,
    )  # fmt: skip
    losses = [float(session.step(**batch)) for batch in given]
    executor: Any = session._executor
    nbytes = sum(
        hop.call.nbytes
        for weight in executor.weights.all
        for hop in weight.hops
        if hop.when in REDUCED
    )
    state = session.state_dict()
    session.close()
    return losses, accuracy(state), float(nbytes)


def run(rank: int, folder: str, seeds: int, steps: int) -> None:
    """One process of all runs."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    rows: list[dict[str, Any]] = []
    for method in (*TORCH, *OURS):
        for seed in range(seeds):
            trained = by_torch if method in TORCH else by_autopar
            losses, right, nbytes = trained(method, seed, steps)
            for at in range(0, steps, BLOCK):
                block = losses[at : at + BLOCK]
                rows.append(
                    {"method": method, "seed": seed, "step": at + len(block),
                     "loss": round(sum(block) / len(block), 5), "accuracy": round(right, 4),
                     "bytes": round(nbytes)}
                )  # fmt: skip
            if rank == 0:
                print(
                    f"{method:<28}{seed}  loss {losses[-1]:.4f}  right {right:.1%}  {nbytes:8.0f} B"
                )
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def picture(rows: list[dict[str, Any]]) -> str:
    """Losses over steps, on a logarithmic scale from 1e-3 to 10, as SVG."""
    width, height, left, top = 720, 360, 50, 10
    last = max(int(row["step"]) for row in rows)
    scale = (width - left - 200) / last
    lines = []
    for number, (method, colour) in enumerate(zip((*TORCH, *OURS), COLOURS, strict=True)):
        curve: dict[int, list[float]] = {}
        for row in rows:
            if row["method"] == method:
                curve.setdefault(int(row["step"]), []).append(float(row["loss"]))
        points = []
        for step, losses in sorted(curve.items()):
            decades = torch.tensor(sum(losses) / len(losses)).clamp(1e-3, 10).log10().item()
            points.append(f"{left + scale * step:.1f},{top + height * (1 - decades) / 4:.1f}")
        y = top + 14 + 16 * number
        lines.append(
            f'<polyline fill="none" stroke="{colour}" points="{" ".join(points)}"/>'
            f'<text x="{width - 190}" y="{y}" fill="{colour}">{method}</text>'
        )
    ticks = "".join(
        f'<text x="4" y="{top + 5 + height * (1 - power_of) / 4}">1e{power_of}</text>'
        for power_of in range(1, -4, -1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 30}" '
        f'font-family="sans-serif" font-size="12">{ticks}{"".join(lines)}'
        f'<text x="{left}" y="{height + 26}">loss over {last} steps</text></svg>\n'
    )


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (folder, options.seeds, options.steps), nprocs=RANKS)
        rows = torch.load(Path(folder, "rows.pt"))
    print(write("compression", rows))
    (PICTURES / "compression.svg").write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
