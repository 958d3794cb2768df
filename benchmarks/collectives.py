"""Compares every algorithm of a collective with gloo's own call, and predicted with measured times.

It runs on four ranks of one host, on two hosts of two and on four hosts of one, which are network
namespaces joined by links of a given rate. First it measures what simulated prices use: the rates
inside a host and between hosts, and the time of an empty round. Then it compares all algorithms as
`autopar calibrate --collectives` does, from which `collectives="auto"` chooses. Last, it measures
all of them again, and the choice with them. Rows go to results/collectives.csv. More than one host
needs root, ip and tc.

    python -m benchmarks.collectives --layouts "one host"
    python -m benchmarks.collectives --layouts "two hosts" --rate 100mbit --inside 1gbit
    python -m benchmarks.collectives --layouts "two hosts" --rate 1gbit --inside 10gbit
    python -m benchmarks.collectives --layouts "two hosts" --rate 10gbit
    python -m benchmarks.collectives --layouts "four hosts" --rate 100mbit
    python -m benchmarks.collectives --layouts "four hosts" --rate 1gbit
    python -m benchmarks.collectives --layouts "four hosts" --rate 10gbit
    python -m benchmarks.collectives --picture

The columns say which algorithm is chosen, how much longer it takes than the fastest, how much
faster it is than gloo's call, by measured times and by simulated prices, and which one is the
cheapest by simulated prices. The price of gloo's call is that of the program which it runs
(`GLOO`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from autopar.cost.algorithms import Level
from autopar.cost.calibration import Calibration
from autopar.cost.measured import MeasuredModel
from autopar.cost.network import Network
from autopar.cost.programs.choice import choose
from autopar.cost.programs.message_simulation import flow_of, simulate_messages
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.compare import (
    ROUNDS,
    Effort,
    compare,
    paired_medians,
    prepared,
    race,
)
from benchmarks.harness import PICTURES, read, write
from benchmarks.hosts import launch, several_hosts

LAYOUTS = {"one host": (1, 4), "two hosts": (2, 2), "four hosts": (4, 1)}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CALL = ("layout", "rate", "inside", "kind", "bytes")
NEAR = 1.05  # how much slower than the fastest a choice may be
GAIN = 1.3  # over gloo's call, by the price, from which a choice on two hosts is judged
# What gloo's calls run: one ring through the ranks in order, and all messages of an all_to_all at
# once. Torch's reduce_scatter is an all_reduce, of which a rank keeps its part.
GLOO = {
    "all_reduce": ("all_reduce", "flat_ring"),
    "all_gather": ("all_gather", "flat_ring"),
    "reduce_scatter": ("all_reduce", "flat_ring"),
    "all_to_all": ("all_to_all", "direct"),
}
LARGE = 1 << 20  # bytes of the smaller of two messages that determine a bandwidth


def seconds(call: Callable[[], object], runs: int, times: int = 1) -> float:
    """Median over runs of the slowest rank's time of one of consecutive calls."""
    found = []
    for _ in range(runs + 1):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            call()
        spent = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        found.append(spent.item())
    return median(found[1:])  # the first one opens connections


def link(first: int, second: int, nbytes: int, runs: int) -> float:
    """Seconds of one message between two ranks, half of there and back."""
    x = torch.zeros(nbytes // 4)

    def there_and_back() -> None:
        rank = dist.get_rank()
        if rank == first:
            dist.send(x, second)
            dist.recv(x, second)
        elif rank == second:
            dist.recv(x, first)
            dist.send(x, first)

    return seconds(there_and_back, runs) / 2


def round_seconds(distance: int, nbytes: int, runs: int) -> float:
    """Seconds of a round in which all ranks exchange at once, as they share cards and processors.

    The partners' numbers differ in the bit of `distance`.
    """
    sent, came = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    partner = dist.get_rank() ^ distance

    def exchange() -> None:
        calls = dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, came, partner)
        for work in dist.batch_isend_irecv(list(calls)):
            work.wait()

    return seconds(exchange, runs)


def rate(taken: Callable[[int], float]) -> float:
    """Bytes/s of large messages, from the time of two sizes.

    It is measured between two large ones, as the first bytes of a burst are not held back.
    """
    return 2 * LARGE / max(taken(3 * LARGE) - taken(LARGE), 1e-9)


def empty_rounds(comm: Communicator, axes: tuple[str, ...], runs: int) -> tuple[float, float]:
    """Seconds of a round of empty messages: of autopar's programs, and of gloo's own calls.

    Links delay nothing here, so it is the time of processors, which all levels share.
    """
    ranks = dist.get_world_size()
    x = torch.zeros(ranks)
    ours = prepared(comm.group(axes, "halving_doubling"), "all_reduce", x)
    gloo = prepared(comm.group(axes), "all_reduce", x)
    per_round = (2 * int(math.log2(ranks)), 2 * (ranks - 1))
    return seconds(ours, runs, 20) / per_round[0], seconds(gloo, runs, 20) / per_round[1]


def measured_levels(hosts: int, each: int, runs: int, latency: float) -> list[Level]:
    """The network as messages find it, while all ranks communicate and while one is alone."""
    found = []
    for size, peer, name in ((hosts, each, "between"), (each, 1, "inside")):
        if size == 1:
            continue
        together = rate(partial(round_seconds, peer, runs=runs))
        alone = rate(partial(link, 0, peer, runs=runs))
        found.append(Level(size, together, latency, alone=alone, resource=name))
    return found


def adding_seconds(runs: int) -> float:
    """Seconds in which a byte is added here."""
    x, y = torch.zeros(LARGE), torch.ones(LARGE)
    return seconds(lambda: x.add_(y), runs) / x.nbytes


def simulated(levels: Sequence[Level], kind: str, by: str, nbytes: int, adding: float) -> float:
    """Seconds of an algorithm, or of gloo's call, simulated over the network."""
    shape = tuple(level.size for level in levels)
    if by == LIBRARY:
        flow = flow_of(*GLOO[kind], (math.prod(shape),))
    else:
        way = Algorithm.parse(by)
        flow = flow_of(kind, way.name, shape, way.pieces)
    return simulate_messages(flow, levels, nbytes, adding).seconds


def rank_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures as one rank; all ranks find the same."""
    hosts, each = LAYOUTS[options.worker]
    mesh, device = Mesh.parse(f"cpu: node={hosts}, gpu={each}"), torch.device("cpu")
    axes = tuple(axis.name for axis in mesh.axes if axis.size > 1)
    comm, rows = Communicator(mesh), []
    latency, library = empty_rounds(comm, axes, options.runs)
    levels = measured_levels(hosts, each, options.runs, latency)
    adding = adding_seconds(options.runs)
    gloos = [level._replace(latency=library) for level in levels]
    effort = Effort(tuple(options.bytes), over=(axes,))
    compared = compare(mesh, device, effort, lambda *where: None)
    calibration = Calibration(mesh, torch.__version__, "", exchanges=tuple(compared))
    model = MeasuredModel(mesh, calibration)
    chosen = choose(Network(mesh, model.device), model.collective, model.compared)
    for kind, nbytes in itertools.product(KINDS, options.bytes):
        said = {c.by: c.time.seconds for c in compared if (c.kind, c.nbytes) == (kind, nbytes)}
        prices = {
            by: simulated(gloos if by == LIBRARY else levels, kind, by, nbytes, adding)
            for by in said
        }
        best = chosen.by(kind, axes, nbytes) or LIBRARY
        x = torch.zeros(nbytes // 4)
        runs = {by: prepared(comm.group(axes, by), kind, x) for by in said}
        samples = race(comm.group(axes), device, ROUNDS, runs, (LIBRARY, best))
        found = paired_medians(samples)
        for by, taken in found.items():
            rows.append(
                {
                    "layout": options.worker,
                    "rate": options.rate if hosts > 1 else "",
                    "inside": options.inside if each > 1 else "",
                    "kind": kind,
                    "bytes": nbytes,
                    "algorithm": "gloo" if by == LIBRARY else by,
                    "measured_ms": round(1e3 * taken, 3),
                    "runs": len(samples[by]),
                    "calibrated_ms": round(1e3 * said[by], 3),
                    "played_ms": round(1e3 * prices[by], 3),
                    "cheapest_by_play": by == min(prices, key=lambda way: prices[way]),
                    "chosen": by == best,
                    "over_fastest": round(taken / min(found.values()), 3),
                    "gloo_over": round(found[LIBRARY] / taken, 3),
                    "gloo_over_by_play": round(prices[LIBRARY] / prices[by], 3),
                }
            )
    return rows


def worker(options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = rank_rows(options)
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
        script += ["--rate", options.rate, "--inside", options.inside, "--runs", str(options.runs)]
        script += ["--bytes", ",".join(map(str, options.bytes))]
        if hosts == 1 and not options.inside:
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(each)]
            subprocess.run([sys.executable, *start, *script], check=True)
        else:
            with several_hosts(hosts, options.rate, options.inside) as found:
                if code := launch(found, each, [sys.executable, *script]):
                    sys.exit(f"a rank on {layout} ended with {code}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def told(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Prints for each call the chosen algorithm, gloo's own and the fastest."""
    chosen = [row for row in rows if row["chosen"]]
    for row in chosen:
        alike = [other for other in rows if all(other[key] == row[key] for key in CALL)]
        best = min(alike, key=lambda other: other["measured_ms"])
        yield (
            f"{row['layout']:<11}{row['kind']:<15}{row['bytes']:>9} B  "
            f"chosen {row['algorithm']:<20}{row['measured_ms']:9.2f} ms "
            f"(calibrated {row['calibrated_ms']:9.2f})  {row['gloo_over']:5.2f} x gloo "
            f"(by the price {row['gloo_over_by_play']:5.2f})  "
            f"{row['over_fastest']:5.3f} x the fastest, {best['algorithm']}"
        )
    near = sum(row["over_fastest"] <= NEAR for row in chosen)
    yield f"{near} of {len(chosen)} choices are at most {NEAR - 1:.0%} slower than the fastest"
    priced = [row for row in chosen if row["gloo_over_by_play"] >= GAIN]
    faster = sum(row["gloo_over"] >= GAIN for row in priced)
    said = f"choices whose price is {GAIN} times better than that of gloo's call"
    yield f"{faster} of {len(priced)} {said} are as much faster"


def draw(rows: Sequence[dict[str, str]]) -> Path:
    """Times of gloo's call, the chosen algorithm and the fastest one, by size."""
    networks = sorted({(row["layout"], row["rate"], row["inside"]) for row in rows})
    figure, axes = plt.subplots(
        len(networks), len(KINDS), figsize=(12, 2.2 * len(networks)), sharex=True, squeeze=False
    )
    for network, line in zip(networks, axes, strict=True):
        for kind, plot in zip(KINDS, line, strict=True):
            own = [
                r
                for r in rows
                if (r["layout"], r["rate"], r["inside"], r["kind"]) == (*network, kind)
            ]
            sizes = sorted({int(row["bytes"]) for row in own})
            for name, marker, (column, value) in (
                ("gloo", "o-", ("algorithm", "gloo")),
                ("chosen", "s-", ("chosen", "True")),
                ("fastest", "x--", ("over_fastest", "1.0")),
            ):
                times = {
                    int(r["bytes"]): float(r["measured_ms"]) for r in own if r[column] == value
                }
                plot.loglog(sizes, [times[size] for size in sizes], marker, label=name)
            plot.set_title(f"{kind}, {' '.join(filter(None, network))}", fontsize=8)
            plot.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("bytes of each rank", fontsize=9)
    figure.supylabel("milliseconds", fontsize=9)
    figure.tight_layout()
    path = PICTURES / "collectives.svg"
    figure.savefig(path)
    return path


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of the links between hosts")
    parser.add_argument("--inside", default="", help="rate inside a host; by default the machine's")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--bytes",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1 << 14, 1 << 17, 1 << 20],
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--picture", action="store_true", help="only draw the rows of the file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    if options.picture:
        print(draw(read("collectives")))
        return
    rows = [row for layout in options.layouts.split(",") for row in measured(layout, options)]
    print("\n".join(told(rows)))
    print(write("collectives", rows, keys=CALL))


if __name__ == "__main__":
    main()
