"""Replicas that train independently: convergence, speed on slow networks, and Muon.

`python benchmarks/local_updates.py convergence` trains a small network on digits and on characters
of Python's help pages as four replicas, by every outer method and number of local steps, with SGD
and AdamW and three seeds. `--data digits --optimizers sgd` is one of four parts.

`python benchmarks/local_updates.py settings --data digits --optimizers sgd --taus 6 --steps 480`
trains with CO2's settings varied, under five rates and with rates that decay.

`python benchmarks/local_updates.py confirm` compares runs of every method with those of four gloo
processes.

`python benchmarks/local_updates.py throughput --rates 100mbit` runs two emulated hosts behind a
slow link (network namespaces; needs root) and writes samples per second of each method, of data
parallelism and of ZeRO, beside those of hosts that never synchronise. `--methods co2,local` runs
some of them; every method runs three times (`--repeats`).

`python benchmarks/local_updates.py muon` writes Muon's seconds, bytes and parity, and
`python benchmarks/local_updates.py published` CO2's throughputs beside predictions.

`python benchmarks/local_updates.py --table` prints the tables of docs/results, and `--picture`
draws.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks import muon, outer_throughput
from benchmarks.harness import PICTURES, markdown, read, write
from benchmarks.outer_convergence import (
    BLOCK,
    METHODS,
    OPTIMIZERS,
    PARALLEL,
    TAUS,
    cases_of,
    confirm,
    losses_of,
    settings_of,
)
from benchmarks.published.co2 import overlaps, throughputs
from benchmarks.small_tasks import DATA

PREFIX = "local_updates"
COLOURS = ("#1b7837", "#2166ac", "#b2182b", "#762a83", "#c51b7d", "#8c510a", "#01665e", "#f4a582",
           "#d9a400")  # fmt: skip
# What CO2 publishes: perplexity of GPT-2 small, and which method is better than which.
PAPER = {"data parallel": 7.44, "local": 7.95, "overlap": 8.11, "slowmo": 7.34, "co2": 7.37}


def converge(options: argparse.Namespace) -> None:
    """Trains, and writes the losses of blocks of steps."""
    torch.set_num_threads(1)
    taus = [int(tau) for tau in options.taus.split(",")]
    rows: list[dict[str, Any]] = []
    for data in options.data.split(","):
        for optimizer in options.optimizers.split(","):
            rows += losses_of(data, optimizer, cases_of(taus), options.seeds, options.steps)
    keys = ("data", "optimizer", "method", "tau", "seed", "step")
    print(write(f"{PREFIX}_convergence", rows, keys=keys))


def settings(options: argparse.Namespace) -> None:
    """Trains with settings of CO2, and writes the losses of the last block of steps."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for data in options.data.split(","):
        for optimizer in options.optimizers.split(","):
            for tau in options.taus.split(","):
                rows += settings_of(data, optimizer, int(tau), options.seeds, options.steps)
    keys = ("data", "optimizer", "tau", "schedule", "times", "method", "seed")
    print(write(f"{PREFIX}_settings", rows, keys=keys))


def throughput(options: argparse.Namespace) -> None:
    """Measures and writes, at every rate of the link."""
    names = options.methods or ",".join(list(outer_throughput.METHODS)[1:])
    rows: list[dict[str, Any]] = []
    for rate in options.rates.split(","):
        rows += outer_throughput.on_two_hosts(
            rate, options.seconds, options.repeats, names.split(",")
        )
    for row in rows:
        print(row)
    print(write(f"{PREFIX}_throughput", rows, keys=("rate", "method")))


# Tables and pictures ------------------------------------------------------------------------------


def final() -> dict[tuple[str, str, str, int], float]:
    """Returns the mean loss over seeds of the last block, by data, optimizer, method and tau."""
    rows = read(f"{PREFIX}_convergence")
    last = max(int(row["step"]) for row in rows)
    found: dict[tuple[str, str, str, int], list[float]] = {}
    for row in rows:
        if int(row["step"]) == last:
            key = (row["data"], row["optimizer"], row["method"], int(row["tau"]))
            loss = math.nan if row["loss"] == "diverged" else float(row["loss"])
            found.setdefault(key, []).append(loss)
    return {key: sum(losses) / len(losses) for key, losses in found.items()}


def ordered(means: dict[tuple[str, str, str, int], float], data: str, optimizer: str) -> str:
    """Returns how many pairs of methods stand as in the paper, over all tau above 1: "31 of 50"."""
    agree = pairs = 0
    for tau in TAUS[1:]:
        losses = {
            name: means[data, optimizer, name, 1 if name == PARALLEL else tau] for name in PAPER
        }
        for better in PAPER:
            for worse in PAPER:
                if PAPER[better] < PAPER[worse]:
                    pairs += 1
                    agree += losses[better] < losses[worse]
    return f"{agree} of {pairs}"


def tables() -> None:
    """Prints the tables of the results page."""
    means = final()
    for data in DATA:
        for optimizer in OPTIMIZERS:
            if (data, optimizer, PARALLEL, 1) not in means:  # a part that has not run
                continue
            print(f"\n{data}, {optimizer}: {ordered(means, data, optimizer)} pairs as in the paper")
            lines = [
                [name, *(f"{means[data, optimizer, name, tau]:.4f}" for tau in TAUS)]
                for name in METHODS
            ]
            alone = f"{means[data, optimizer, PARALLEL, 1]:.4f}"
            lines.insert(0, [PARALLEL, alone, *[""] * (len(TAUS) - 1)])
            print(markdown(("method", *(f"tau = {tau}" for tau in TAUS)), lines))
    heads = {
        "throughput": ("rate", "method", "tau", "samples_per_s", "of_alone", "of_alone_min",
                       "of_alone_max"),
        "muon": ("plan", "optimizer", "ms", "state_bytes", "planned_bytes", "parity"),
        "published": ("model", "row", "gpus", "published", "model_says", "error", "use"),
    }  # fmt: skip
    for name, columns in heads.items():
        print()
        rows = read(f"{PREFIX}_{name}")
        print(markdown(columns, [[row[column] for column in columns] for row in rows]))


def picture() -> None:
    """Draws the loss of the last block over tau, for every method, data and optimizer."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = PREFIX  # the same file from the same rows
    from matplotlib import pyplot

    means = final()
    figure, axes = pyplot.subplots(
        len(DATA),
        len(OPTIMIZERS),
        figsize=(10, 7),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for row, data in enumerate(DATA):
        for column, optimizer in enumerate(OPTIMIZERS):
            axis = axes[row][column]
            if (data, optimizer, PARALLEL, 1) not in means:  # a part that has not run
                axis.set_axis_off()
                continue
            alone = means[data, optimizer, PARALLEL, 1]
            axis.axhline(alone, color="#444444", linestyle="--", label=PARALLEL)
            for name, colour in zip(METHODS, COLOURS, strict=False):
                losses = [means[data, optimizer, name, tau] for tau in TAUS]
                dotted = "," in name
                axis.plot(TAUS, losses, ":" if dotted else "-", marker="x" if dotted else "o",
                          markersize=4, color=colour, label=name)  # fmt: skip
            scale = "log" if alone < 0.1 else "linear"
            axis.set(xscale="log", yscale=scale, title=f"{data}, {optimizer}")
            axis.set_xticks(TAUS, [str(tau) for tau in TAUS])
            axis.minorticks_off()
            if row == len(DATA) - 1:
                axis.set_xlabel("local steps, tau")
            if column == 0:
                axis.set_ylabel(f"loss, mean of the last {BLOCK} steps")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    path = PICTURES / f"{PREFIX}.svg"
    figure.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("convergence", "settings", "confirm", "throughput", "muon", "published", "worker")
    parser.add_argument("what", nargs="?", choices=parts)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--taus", default=",".join(map(str, TAUS)))
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3, help="of every method's throughput")
    parser.add_argument("--methods", default="")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        tables()
    elif options.picture:
        picture()
    elif options.what == "worker":
        names = options.methods.split(",")
        outer_throughput.worker(options.rates, options.seconds, options.repeats, options.out, names)
    elif options.what == "convergence":
        converge(options)
    elif options.what == "settings":
        settings(options)
    elif options.what == "confirm":
        rows = confirm(2 * BLOCK, [int(tau) for tau in options.taus.split(",")])
        print(write(f"{PREFIX}_confirmed", rows))
    elif options.what == "muon":
        print(write(f"{PREFIX}_muon", muon.table()))
    elif options.what == "published":
        print(write(f"{PREFIX}_published", throughputs()))
        print(overlaps())
    else:
        throughput(options)


if __name__ == "__main__":
    main()
