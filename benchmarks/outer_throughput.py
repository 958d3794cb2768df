"""Times outer methods on two emulated hosts, for `benchmarks/local_updates.py`."""

from __future__ import annotations

import json
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
    while settling:
        number, tau = session.rounds.number, session.rounds.tau
        while session.rounds.number == number:
            session.step(**batch)
        late = time.perf_counter() - began > 2 * seconds and number > 1
        steady = session.rounds.number >= SETTLED and session.rounds.tau == tau
        settling = not _first_says(late or steady)
    dist.barrier()
    steps, going, taus = 0, True, list[int]()
    began = time.perf_counter()
    while going:
        number = session.rounds.number if apart else 0
        session.step(**batch)
        steps += 1
        if (not apart and steps % 4 == 0) or (apart and session.rounds.number > number):
            taus.append(session.rounds.tau if apart else 1)
            going = time.perf_counter() - began < seconds
            going = going if name == ALONE else _first_says(going)
    spent, made = torch.tensor(time.perf_counter() - began), torch.tensor(float(steps))
    for number_of in (spent, made):
        dist.all_reduce(number_of)
    row = {"method": name, "tau": max(taus), "samples_per_s": round(ROWS * float(made / spent), 2)}
    row["waited_ms"] = round(1e3 * session.rounds.waited, 2) if apart else 0.0
    session.close()
    return row


def _first_says(value: bool) -> bool:
    """Returns the first rank's answer on all ranks."""
    said = torch.tensor(float(value))
    dist.broadcast(said, 0)
    return bool(said)


def worker(rate: str, seconds: float, out: str, methods: Sequence[str]) -> None:
    """Measures methods on one rank; the first one writes rows to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [{"rate": rate, **timed(name, seconds)} for name in (ALONE, *methods, ALONE)]
    again = rows.pop()  # before and after, as a machine's speed drifts
    alone = (rows[0]["samples_per_s"] + again["samples_per_s"]) / 2
    rows[0]["samples_per_s"] = round(alone, 2)
    for row in rows:
        row["of_alone"] = round(row["samples_per_s"] / alone, 4)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def on_two_hosts(rate: str, seconds: float, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Returns rows of methods on two network namespaces with a link of a rate, "100mbit"."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = ["-m", "benchmarks.local_updates", "worker", "--rates", rate]
        script += ["--seconds", str(seconds), "--methods", ",".join(methods), "--out", str(out)]
        with two_hosts(rate) as hosts:
            if code := launch(hosts, 1, [sys.executable, *script]):
                sys.exit(f"a rank at {rate} ended with {code}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found
