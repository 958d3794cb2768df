"""Times outer methods on two emulated hosts, for `benchmarks/local_updates.py`."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from benchmarks.hosts import launch, two_hosts

WIDTH, ROWS = 1024, 64  # of the network, and its batch on two hosts
SETTLED = 4  # rounds before those that are timed; tau is chosen from what they measure
ALONE = "never"
METHODS: dict[str, dict[str, Any]] = {
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
    """Returns samples per second of one method, over whole rounds of at least so many seconds."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, WIDTH)}
    session = autopar.compile(Wide(), "cpu: node=2", example_inputs=batch, **METHODS[name])
    apart = name != ALONE and "outer" in METHODS[name]
    for _ in range(3):
        session.step(**batch)
    began, settling = time.perf_counter(), apart
    while not apart and not _first_says(time.perf_counter() - began > seconds):
        session.step(**batch)  # a machine may be faster or slower after some seconds of work
    while settling:
        number, tau = session.rounds.number, session.rounds.tau
        while session.rounds.number == number:
            session.step(**batch)
        late = time.perf_counter() - began > 2 * seconds and number > 1
        steady = session.rounds.number >= SETTLED and session.rounds.tau == tau
        settling = not _first_says(late or steady)
    length = session.rounds.tau if apart else 16
    began = time.perf_counter()
    for _ in range(length):
        session.step(**batch)
    steps = length * _first_says(math.ceil(seconds / (time.perf_counter() - began)))
    dist.barrier()
    taus, began = list[int](), time.perf_counter()
    for _ in range(steps):  # nothing but the method itself makes the hosts wait for each other
        session.step(**batch)
        taus.append(session.rounds.tau if apart else 1)
    spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(spent)
    speed = ROWS * steps * dist.get_world_size() / float(spent)
    row = {"method": name, "tau": max(taus), "samples_per_s": round(speed, 2)}
    row["waited_ms"] = round(1e3 * session.rounds.waited, 2) if apart else 0.0
    session.close()
    return row


def _first_says(value: int) -> int:
    """Returns the first rank's number on all ranks."""
    said = torch.tensor(int(value))
    dist.broadcast(said, 0)
    return int(said)


def worker(rate: str, seconds: float, repeats: int, out: str, methods: Sequence[str]) -> None:
    """Measures methods on one rank; the first one writes rows to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [{"rate": rate, **row} for row in compared(methods, seconds, repeats)]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def compared(methods: Sequence[str], seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Returns a row for each method, and one for replicas that never synchronise.

    A machine's speed drifts. Therefore replicas that never synchronise run before and after every
    run of a method, and a ratio is that to the mean of these two. A method's row is the one with
    the median ratio of all repeats; the row also contains the smallest and the largest ratio.
    """
    alone = [timed(ALONE, seconds)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for name in [*methods] * repeats:
        row = timed(name, seconds)
        alone.append(timed(ALONE, seconds))
        near = statistics.mean(other["samples_per_s"] for other in alone[-2:])
        found[name].append({**row, "of_alone": round(row["samples_per_s"] / near, 4)})
        if dist.get_rank() == 0:
            print(found[name][-1], file=sys.stderr, flush=True)
    mean = statistics.mean(row["samples_per_s"] for row in alone)
    found[ALONE] = [{**row, "of_alone": round(row["samples_per_s"] / mean, 4)} for row in alone]
    return [_median(rows) for rows in found.values()]


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row whose ratio is the median, with the smallest and the largest ratio."""
    rows = sorted(rows, key=lambda row: row["of_alone"])
    return {
        **rows[len(rows) // 2],
        "of_alone_min": rows[0]["of_alone"],
        "of_alone_max": rows[-1]["of_alone"],
    }


def on_two_hosts(
    rate: str, seconds: float, repeats: int, methods: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns rows of methods on two network namespaces with a link of a rate, "100mbit"."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = ["-m", "benchmarks.local_updates", "worker", "--rates", rate]
        script += ["--seconds", str(seconds), "--repeats", str(repeats)]
        script += ["--methods", ",".join(methods), "--out", str(out)]
        with two_hosts(rate) as hosts:
            if code := launch(hosts, 1, [sys.executable, *script]):
                sys.exit(f"a rank at {rate} ended with {code}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found
