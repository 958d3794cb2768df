"""Gradients of many owners: a reduce for each owner's piece, against one call for all of them.

Two ranks on each of two emulated hosts have gradients that ZeRO-1 and ZeRO-2 split over owners: of
dense layers over all ranks, of experts over their replicas, which lie on different hosts. They go
as reduces of pieces that end where a tensor or an owner's part ends, as in DeepSpeed before
multi-rank bucketing; packed into one all_reduce, as there after it; and packed into one
reduce_scatter, as here. Prices simulate the same calls over the links that the run measures. Rows
go to results/buckets.csv. Needs root, ip and tc.

    python -m benchmarks.buckets --rate 1gbit
    python -m benchmarks.buckets --rate 100mbit
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.algorithms import Level
from autopar.cost.programs.message_simulation import flow_of, simulate_messages
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.group import Group
from benchmarks.collectives import empty_rounds, measured_levels, seconds
from benchmarks.harness import write
from benchmarks.hosts import launch, several_hosts

HOSTS, EACH, TENSORS = 2, 2, 48
SIZES = (1 << 10, 1 << 14)  # elements of a tensor
AXES = {"dense": ("node", "gpu"), "experts": ("node",)}


def pieces(size: int, owners: int) -> Iterator[tuple[int, int, int]]:
    """Owner, start and length of every piece of the flat gradients."""
    part = -(-TENSORS * size // owners)
    borders = {*range(0, TENSORS * size, size), *range(0, TENSORS * size, part)}
    edges = [*sorted(borders), TENSORS * size]
    for start, end in itertools.pairwise(edges):
        yield start // part, start, end - start


def calls(group: Group, size: int) -> dict[str, Callable[[], object]]:
    """The three ways by name; packing is part of the time."""
    gradients = [torch.ones(size) for _ in range(TENSORS)]
    flat, handle = torch.ones(TENSORS * size), group.calls.handle
    owned = torch.empty(TENSORS * size // group.size)

    def reduces() -> None:
        for owner, start, length in pieces(size, group.size):
            dist.reduce(flat[start : start + length], group.calls.ranks[owner], group=handle)

    def packed() -> Tensor:
        return torch.cat(gradients)

    return {
        "a reduce for each piece": reduces,
        "one all_reduce": lambda: group.calls.all_reduce(packed()),
        "one reduce_scatter": lambda: group.calls.reduce_scatter(owned, packed()),
    }


def prices(levels: list[Level], size: int) -> dict[str, float]:
    """Simulated seconds of the three; a reduce is a broadcast down a tree, run backwards."""
    shape = tuple(level.size for level in levels)
    ranks, whole = levels[0].size * (levels[1].size if len(levels) > 1 else 1), 4 * TENSORS * size
    tree = flow_of("broadcast", "binomial_tree", shape)
    many = sum(
        simulate_messages(tree, levels, 4 * length).seconds for _, _, length in pieces(size, ranks)
    )
    return {
        "a reduce for each piece": many,
        "one all_reduce": simulate_messages(
            flow_of("all_reduce", "flat_ring", shape), levels, whole
        ).seconds,
        "one reduce_scatter": simulate_messages(
            flow_of("reduce_scatter", "flat_ring", shape), levels, whole
        ).seconds,
    }


def worker(options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh.parse(f"cpu: node={HOSTS}, gpu={EACH}")
    comm, rows = Communicator(mesh), []
    _, latency = empty_rounds(comm, mesh.names, options.runs)
    levels = measured_levels(HOSTS, EACH, options.runs, latency)
    for what, axes in AXES.items():
        for size in SIZES:
            said = prices(levels if len(axes) > 1 else levels[:1], size)
            for way, call in calls(comm.group(axes), size).items():
                rows.append(
                    {
                        "gradients": what,
                        "rate": options.rate,
                        "tensors": TENSORS,
                        "bytes": 4 * size,
                        "way": way,
                        "measured_ms": round(1e3 * seconds(call, options.runs), 3),
                        "played_ms": round(1e3 * said[way], 3),
                    }
                )
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link between the hosts")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        script = ["-m", "benchmarks.buckets", "--worker", str(out)]
        script += ["--rate", options.rate, "--runs", str(options.runs)]
        with several_hosts(HOSTS, options.rate) as found:
            if code := launch(found, EACH, [sys.executable, *script]):
                sys.exit(f"a rank ended with {code}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    for row in rows:
        print({key: row[key] for key in ("gradients", "bytes", "way", "measured_ms", "played_ms")})
    print(write("buckets", rows, keys=("rate", "gradients", "bytes", "way")))


if __name__ == "__main__":
    main()
