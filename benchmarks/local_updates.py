"""Replicas that train apart: how they converge, and how fast they are on slow networks.

`python benchmarks/local_updates.py convergence` trains a small network on digits and on characters
of Python's help pages, on four gloo processes that are a replica each, by every outer method and
number of local steps, with SGD and AdamW, and writes the losses that all replicas have on average.

`python benchmarks/local_updates.py throughput` runs two emulated hosts behind slow links (network
namespaces; needs root) and writes samples per second of each method, of data parallelism and of
ZeRO, in one run, beside those of hosts that never synchronise.

`python benchmarks/local_updates.py --table` prints the tables of docs/results.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.errors import NonFiniteError
from benchmarks.asynchronous import OPTIMIZERS, RATES
from benchmarks.harness import markdown, read, write
from benchmarks.hosts import launch, two_hosts
from benchmarks.small_tasks import batches, net

RANKS, BLOCK = 4, 48  # replicas, and steps whose mean loss is written: all tau divide it
TAUS = (1, 3, 6, 12, 24, 48)
METHODS = {
    "local": "local over data, tau={}",
    "overlap": "overlap over data, tau={}",
    "slowmo": "slowmo over data, tau={}",
    "co2": "co2 over data, tau={}",
    "co2, no penalty": "co2 over data, tau={}, penalty=off",
    "co2, no clip": "co2 over data, tau={}, clip=off",
    "co2, neither": "co2 over data, tau={}, penalty=off, clip=off",
    "diloco": "diloco over data, tau={}",
}
WIDTH, ROWS = 1024, 64  # of the network whose throughput is measured, and its batch on two hosts
ALONE = "never"
TIMED: dict[str, dict[str, Any]] = {
    ALONE: {"outer": "local over node, tau=1000000"},
    "data parallel": {"state": "ddp"},
    "zero1": {"state": "zero1"},
    "zero3": {"state": "zero3"},
    "local": {"outer": "local over node, tau=auto"},
    "slowmo": {"outer": "slowmo over node, tau=auto"},
    "diloco": {"outer": "diloco over node, tau=auto"},
    "overlap": {"outer": "overlap over node, tau=auto"},
    "co2": {"outer": "co2 over node, tau=auto"},
}


def losses_of(outer: str | None, data: str, optimizer: str, seed: int, steps: int) -> list[float]:
    """Mean losses over replicas in blocks of steps, to where training broke."""
    made = functools.partial(OPTIMIZERS[optimizer], lr=RATES[data, optimizer])
    given = list(batches(data, steps, seed))
    session = autopar.compile(
        net(data, seed), f"cpu: data={RANKS}", optimizer=made, example_inputs=given[0],
        on_nonfinite="continue", outer=outer, state="ddp",
    )  # fmt: skip
    losses: list[Tensor] = []
    with suppress(NonFiniteError):
        losses += [session.step(**batch).double() for batch in given]
    session.close()
    row = torch.stack(losses)
    if outer is not None:
        dist.all_reduce(row)
        row /= RANKS
    return [float(block.mean()) for block in row.split(BLOCK)]


def run_convergence(
    rank: int, folder: str, seeds: int, steps: int, taus: Sequence[int], chosen: Sequence[str]
) -> None:
    """Makes all runs, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    rows: list[dict[str, Any]] = []
    cases: list[tuple[str, int, str | None]] = [("data parallel", 1, None)]
    cases += [(name, tau, text.format(tau)) for name, text in METHODS.items() for tau in taus]
    for data in chosen:
        for optimizer in OPTIMIZERS:
            for name, tau, text in cases:
                for seed in range(seeds):
                    losses = losses_of(text, data, optimizer, seed, steps)
                    if rank == 0:
                        print(data, optimizer, name, tau, seed, f"{losses[-1]:.4f}", flush=True)
                    rows += [
                        {"data": data, "optimizer": optimizer, "method": name, "tau": tau,
                         "seed": seed, "step": BLOCK * (at + 1), "loss": round(loss, 4)}
                        for at, loss in enumerate(losses)
                    ]  # fmt: skip
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def convergence(options: argparse.Namespace) -> None:
    """Runs and writes what methods converge to."""
    with tempfile.TemporaryDirectory() as folder:
        taus = [int(tau) for tau in options.taus.split(",")]
        given = (folder, options.seeds, options.steps, taus, options.data.split(","))
        spawn(run_convergence, given, nprocs=RANKS)
        rows = torch.load(Path(folder, "rows.pt"), weights_only=True)
    keys = ("data", "optimizer", "method", "tau", "seed", "step")
    print(write("local_updates_convergence", rows, keys=keys))


# Throughput --------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Four square layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()


def timed(name: str, seconds: float) -> dict[str, Any]:
    """Samples per second of one method."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, WIDTH)}
    session = autopar.compile(Wide(), "cpu: node=2", example_inputs=batch, **TIMED[name])
    apart = name != ALONE and "outer" in TIMED[name]
    for _ in range(3):
        session.step(**batch)
    while apart and session.rounds.number < 6:  # tau is chosen from what these measure
        session.step(**batch)
    dist.barrier()
    began, steps = time.perf_counter(), 0
    tau = session.rounds.tau if apart else 1
    going = torch.ones(())
    while going:
        # Whole rounds, which all ranks end together.
        rounds = session.rounds.number if apart else 0
        session.step(**batch)
        steps += 1
        if (not apart and steps % 4 == 0) or (apart and session.rounds.number > rounds):
            going = torch.tensor(float(time.perf_counter() - began < seconds))
            if name != ALONE:
                dist.broadcast(going, 0)
    spent = torch.tensor(time.perf_counter() - began)
    made = torch.tensor(float(steps))
    for number in (spent, made):
        dist.all_reduce(number)
    row = {"method": name, "tau": tau, "samples_per_s": round(ROWS * float(made / spent), 2)}
    row["waited_ms"] = round(1e3 * session.rounds.waited, 2) if apart else 0.0
    session.close()
    return row


def worker(options: argparse.Namespace) -> None:
    """Measures all methods, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [{"rate": options.rate, **timed(name, options.seconds)} for name in TIMED]
    alone = rows[0]["samples_per_s"]
    for row in rows:
        row["of_alone"] = round(row["samples_per_s"] / alone, 4)
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def throughput(options: argparse.Namespace) -> None:
    """Measures and writes, at every rate of the link."""
    rows: list[dict[str, Any]] = []
    for rate in options.rates.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            script = ["-m", "benchmarks.local_updates", "worker", "--rate", rate]
            script += ["--out", str(out), "--seconds", str(options.seconds)]
            with two_hosts(rate) as hosts:
                if code := launch(hosts, 1, [sys.executable, *script]):
                    sys.exit(f"a rank at {rate} ended with {code}")
            rows += json.loads(out.read_text(encoding="utf-8"))
    for row in rows:
        print(row)
    print(write("local_updates_throughput", rows, keys=("rate", "method")))


def tables() -> None:
    """Prints the tables of the results page."""
    rows = read("local_updates_throughput")
    heads = ("link", "method", "tau", "samples/s", "of hosts that never synchronise")
    names = ("rate", "method", "tau", "samples_per_s", "of_alone")
    print(markdown(heads, [[row[name] for name in names] for row in rows]))
    rows = read("local_updates_convergence")
    last = max(int(row["step"]) for row in rows)
    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if int(row["step"]) == last:
            key = tuple(row[name] for name in ("data", "optimizer", "method", "tau"))
            found.setdefault(key, []).append(float(row["loss"]))
    means = [[*key, f"{sum(each) / len(each):.4f}"] for key, each in found.items()]
    print(markdown(("data", "optimizer", "method", "tau", "loss"), means))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("convergence", "throughput", "worker"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--taus", default=",".join(map(str, TAUS)))
    parser.add_argument("--data", default="digits,text")
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        tables()
    elif options.what == "worker":
        worker(options)
    elif options.what == "convergence":
        convergence(options)
    else:
        throughput(options)


if __name__ == "__main__":
    main()
