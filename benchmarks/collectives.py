"""Compares every algorithm of a collective with gloo's own call, and predicted with measured times.

It runs on four ranks of one host, on two hosts of two and on four hosts of one, which are network
namespaces joined by links of a given rate. The time of a message inside a host and between hosts is
measured first, in the same run, and all prices use these two figures. Rows go to
results/collectives.csv. More than one host needs root, ip and tc.

    python -m benchmarks.collectives --rate 100mbit --bytes 65536,1048576
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.algorithms import Level
from autopar.cost.collectives import algorithms
from autopar.cost.programs.play import flow_of, play
from autopar.ir.chosen_algorithms import Algorithm
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.group import Group
from benchmarks.harness import write
from benchmarks.hosts import launch, several_hosts

LAYOUTS = {"one host": (1, 4), "two hosts": (2, 2), "four hosts": (4, 1)}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PIECES = (1, 4)
LARGE = 1 << 20  # bytes of the smaller of two messages that tell a bandwidth


def seconds(call: Callable[[], object], runs: int) -> float:
    """Median over runs of the slowest rank's time."""
    found = []
    for _ in range(runs + 1):
        dist.barrier()
        began = time.perf_counter()
        call()
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        found.append(spent.item())
    return median(found[1:])  # the first one opens connections


def link(first: int, second: int, nbytes: int, runs: int) -> float:
    """Seconds of one message between two ranks, half of there and back."""
    x = torch.zeros(max(nbytes // 4, 1))

    def there_and_back() -> None:
        rank = dist.get_rank()
        if rank == first:
            dist.send(x, second)
            dist.recv(x, second)
        elif rank == second:
            dist.recv(x, first)
            dist.send(x, first)

    return seconds(there_and_back, runs) / 2


def measured_levels(hosts: int, each: int, runs: int) -> list[Level]:
    """The network as messages find it; ranks of a host share its card."""
    found = []
    for size, peer, name in ((hosts, each, "between"), (each, 1, "inside")):
        if size == 1:
            continue
        latency = link(0, peer, 4, runs)
        # Between two large ones, as the first bytes of a burst are not held back.
        large, larger = (link(0, peer, times * LARGE, runs) for times in (1, 3))
        rate = 2 * LARGE / max(larger - large, 1e-9)
        share = rate / each if name == "between" else rate
        found.append(Level(size, share, latency, alone=rate, resource=name))
    return found


def adding_seconds(runs: int) -> float:
    """Seconds in which a byte is added here."""
    x, y = torch.zeros(LARGE), torch.ones(LARGE)
    return seconds(lambda: x.add_(y), runs) / x.nbytes


def called(group: Group, kind: str, nbytes: int) -> Callable[[], object]:
    """One call with so many bytes on each rank."""
    x = torch.ones(max(nbytes // 4 // group.size, 1) * group.size)
    calls, part = group.calls, x[: x.numel() // group.size].clone()

    def gather() -> Tensor:
        out = x.new_empty(group.size * x.numel())
        calls.all_gather(out, x)
        return out

    return {
        "all_reduce": lambda: calls.all_reduce(x),
        "all_gather": gather,
        "reduce_scatter": lambda: calls.reduce_scatter(part, x),
        "all_to_all": lambda: calls.all_to_all(torch.empty_like(x), x),
    }[kind]


def ways(kind: str) -> Iterator[Algorithm]:
    """The algorithms that are compared."""
    for name in algorithms(kind):
        for pieces in PIECES:
            yield Algorithm(name, pieces)


def rank_rows(layout: str, rate: str, sizes: Sequence[int], runs: int) -> list[dict[str, Any]]:
    """What one rank measures; all ranks find the same."""
    hosts, each = LAYOUTS[layout]
    levels = measured_levels(hosts, each, runs)
    shape, adding = tuple(level.size for level in levels), adding_seconds(runs)
    comm = Communicator(Mesh.parse(f"cpu: node={hosts}, gpu={each}"))
    rows = []
    for kind in KINDS:
        for nbytes in sizes:
            prices = {
                way: play(
                    flow_of(kind, way.name, shape, way.pieces), levels, nbytes, adding
                ).seconds
                for way in ways(kind)
            }
            cheapest = min(prices, key=lambda way: prices[way])
            for way in (None, *prices):
                group = comm.group(("node", "gpu"), "" if way is None else str(way))
                rows.append(
                    {
                        "layout": layout,
                        "rate": rate if hosts > 1 else "",
                        "kind": kind,
                        "bytes": nbytes,
                        "algorithm": "gloo" if way is None else str(way),
                        "measured_ms": round(1e3 * seconds(called(group, kind, nbytes), runs), 3),
                        "played_ms": "" if way is None else round(1e3 * prices[way], 3),
                        "cheapest_by_price": way == cheapest,
                    }
                )
    return rows


def worker(options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = rank_rows(options.worker, options.rate, options.bytes, options.runs)
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one layout."""
    hosts, each = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = ["-m", "benchmarks.collectives", "--worker", layout, "--out", str(out)]
        script += ["--rate", options.rate, "--runs", str(options.runs)]
        script += ["--bytes", ",".join(map(str, options.bytes))]
        if hosts == 1:
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(each)]
            subprocess.run([sys.executable, *start, *script], check=True)
        else:
            with several_hosts(hosts, options.rate) as found:
                if code := launch(found, each, [sys.executable, *script]):
                    sys.exit(f"a rank on {layout} ended with {code}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def told(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each call the cheapest by price, beside the fastest and gloo's own."""
    calls: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        calls.setdefault((row["layout"], row["kind"], row["bytes"]), []).append(row)
    for (layout, kind, nbytes), found in calls.items():
        (gloo,) = (row for row in found if row["algorithm"] == "gloo")
        (chosen,) = (row for row in found if row["cheapest_by_price"])
        best = min(found, key=lambda row: row["measured_ms"])
        yield (
            f"{layout:<11}{kind:<15}{nbytes:>10} B  gloo {gloo['measured_ms']:9.2f} ms  "
            f"chosen {chosen['algorithm']:<20}{chosen['measured_ms']:9.2f} ms "
            f"(played {chosen['played_ms']:9.2f})  "
            f"fastest {best['algorithm']:<20}{best['measured_ms']:9.2f} ms"
        )


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of the links between hosts")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--bytes",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1 << 14, 1 << 18, 1 << 22],
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    rows = [row for layout in options.layouts.split(",") for row in measured(layout, options)]
    print("\n".join(told(rows)))
    print(write("collectives", rows, keys=("layout", "rate", "kind", "bytes", "algorithm")))


if __name__ == "__main__":
    main()
