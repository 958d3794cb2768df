"""Measures the convergence and the speed of asynchronous pipelines.

`python benchmarks/asynchronous.py convergence` trains small networks in four stages on four gloo
processes, on data that packages ship (scikit-learn's digits; characters of Python's help pages), by
every method, with SGD and AdamW, and writes the losses of every step and a picture. A method that
updates after every microbatch uses a correspondingly smaller learning rate. Diverging runs are
shown as they are.

`python benchmarks/asynchronous.py throughput` runs stages that wait a fixed time instead of
computing, so that four processes can share fewer cores, and writes seconds of a step next to the
simulation of the same rows.

`python benchmarks/asynchronous.py throughput --rate 100mbit` does so on two hosts of two ranks:
network namespaces with a link of that rate, on which a message is timed in the same run. It needs
root, ip and tc.

`python benchmarks/asynchronous.py convergence --data digits` trains on one of the data, and keeps
the other's rows of the CSV.

`python benchmarks/asynchronous.py --table` prints the tables of docs/results.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.errors import NonFiniteError
from autopar.inter_op.complete import complete
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.steady_state import steady
from autopar.plan import Plan
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.runtime.pipeline.stage import Stage
from benchmarks.collectives import link
from benchmarks.harness import PICTURES, has, markdown, read, write
from benchmarks.hosts import launch, two_hosts
from benchmarks.small_tasks import BATCH, CHARACTERS, CONTEXT, DATA, Net, batches, net

RANKS, MICROBATCHES = 4, 8
STEPS = {"convergence": 120, "throughput": 20}
BLOCK = 5  # steps whose mean loss is written
MESH = "cpu: stage=4"
METHODS = {
    "1f1b": "1f1b",
    "pipedream": "pipedream",
    "2bw": "2bw",
    "pipemare": "pipemare annealed={quarter} flushed={tenth}",
    "pipemare, uncorrected": "pipemare correction=0",
    "ampnet": "ampnet",
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
RATES = {("digits", "sgd"): 0.1, ("digits", "adamw"): 3e-3, ("text", "sgd"): 0.1,
         ("text", "adamw"): 3e-3}  # fmt: skip
SECONDS = 0.02  # of a forward, and of each half of a backward
# On two hosts messages are large enough for a slow link, and stages wait longer.
WIDE, WIDER, SLOW = 512, 32, 0.06
TIMED = ("1f1b", "zb_v", "2bw", "pipedream", "ampnet", "pipemare")
COLOURS = ("#444444", "#1b7837", "#2166ac", "#b2182b", "#f4a582", "#762a83")


def trained(
    method: str, data: str, optimizer: str, seed: int, steps: int, plan: Plan | None
) -> Any:
    """Losses of one run in their order, NaN from where it broke, and the plan."""
    schedule = METHODS[method].format(quarter=steps // 4, tenth=steps // 10)
    each = method in ("pipedream", "ampnet")
    rate = RATES[data, optimizer] / (MICROBATCHES if each else 1)
    made = functools.partial(OPTIMIZERS[optimizer], lr=rate)
    given = list(batches(data, steps, seed))
    how: dict[str, Any] = {"stages": RANKS, "microbatches": MICROBATCHES, "schedule": schedule}
    how = {"plan": plan} if plan is not None else how | {"allow": "stale gradients"}
    program = autopar.compile(
        net(data, seed), MESH, optimizer=made, example_inputs=given[0], on_nonfinite="continue",
        **how,
    )  # fmt: skip
    losses: list[float] = []
    with suppress(NonFiniteError):
        losses += (float(program.step(**batch)) for batch in given)
    late = 0 if method == "1f1b" else 1  # a step gives the loss of the one before
    flushed = steps // 10 if method == "pipemare" else 0
    losses = losses[: flushed + late] + losses[flushed + 2 * late :] if late else losses
    found = program.plan
    program.close()
    return losses, found


def run_convergence(rank: int, folder: str, seeds: int, steps: int, chosen: list[str]) -> None:
    """One process of all runs."""
    _begin(rank, folder)
    rows: list[dict[str, Any]] = []
    for data in chosen:
        for method in METHODS:
            plan: Plan | None = None
            for optimizer in OPTIMIZERS:
                for seed in range(seeds):
                    losses, plan = trained(method, data, optimizer, seed, steps, plan)
                    if rank == 0:
                        print(data, method, optimizer, seed, f"{losses[-1]:.3f}", flush=True)
                    for at in range(0, len(losses), BLOCK):
                        block = losses[at : at + BLOCK]
                        rows.append(
                            {"data": data, "method": method, "optimizer": optimizer, "seed": seed,
                             "step": at + len(block), "loss": round(sum(block) / len(block), 4)}
                        )  # fmt: skip
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _begin(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)


def run_throughput(rank: int, folder: str, steps: int, warmup: int) -> None:
    """One process of the stages that wait, all on one host."""
    _begin(rank, folder)
    batch = next(batches("text", 1, 0))
    time_schedules(folder, steps, warmup, net("text", 0), batch, SECONDS, [0.0] * (RANKS - 1))


def run_on_hosts(folder: str, steps: int, warmup: int) -> None:
    """One process of the stages that wait, on the first two or on the last two of four ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = {k: torch.cat([v] * WIDER) for k, v in next(batches("text", 1, 0)).items()}
    torch.manual_seed(0)
    model = Net(True, CONTEXT, CHARACTERS, WIDE)
    nbytes = 4 * WIDE * BATCH * WIDER // MICROBATCHES
    hops = [link(at, at + 1, nbytes, 5) for at in range(RANKS - 1)]
    time_schedules(folder, steps, warmup, model, batch, SLOW, hops)


def time_schedules(
    folder: str,
    steps: int,
    warmup: int,
    model: nn.Module,
    batch: dict[str, Tensor],
    seconds: float,
    hops: list[float],
) -> None:
    """Writes measured and simulated seconds of a step of every schedule.

    Args:
        folder: for the rows.
        steps, warmup: that are timed, and before them.
        model, batch: what is trained.
        seconds: of a rank's forward of a microbatch, and of each half of its backward.
        hops: seconds of a message between neighbouring ranks.
    """
    rows, rank = [], dist.get_rank()
    for schedule in TIMED:
        program = autopar.compile(
            copy.deepcopy(model), MESH, example_inputs=batch, microbatches=MICROBATCHES,
            stages=8 if schedule == "zb_v" else RANKS, schedule=schedule, allow="stale gradients",
        )  # fmt: skip
        made = schedule_of(schedule, RANKS, MICROBATCHES)
        part = seconds * RANKS / made.stages
        halves = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
        with ExitStack() as stack:
            for name, count in halves.items():
                given = lasting(getattr(Stage, name), count * part)
                stack.enter_context(patch.object(Stage, name, given))
            for _ in range(warmup):
                program.step(**batch)
            began = time.perf_counter()
            for _ in range(steps):
                program.step(**batch)
            spent = torch.tensor((time.perf_counter() - began) / steps)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        program.close()
        promised = promise(schedule, seconds, hops)
        rows.append(
            {"schedule": schedule, "microbatches": MICROBATCHES, "ms": 1e3 * float(spent),
             "steps_per_second": 1 / float(spent), "simulated_ms": 1e3 * promised,
             "ratio": float(spent) / promised, "message_ms": 1e3 * max(hops)}
        )  # fmt: skip
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def promise(schedule: str, seconds: float, hops: list[float]) -> float:
    """Seconds of a step, or of a period in the steady state, without a runtime.

    Arguments as of `time_schedules`.
    """
    made = schedule_of(schedule, RANKS, MICROBATCHES)
    part = seconds * RANKS / made.stages
    costs = [StageCost(part, part, part)] * made.stages
    (ranks,) = made.placement
    between = [hops[min(pair)] if pair[0] != pair[1] else 0.0 for pair in pairwise(ranks)]
    if made.flushes:
        return simulate(made, costs, between).seconds
    return steady(complete(made), costs, between)[0]


def lasting(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The function, followed by a wait, so that both take a given time."""

    def run(*args: Any, **kwargs: Any) -> Any:
        until = time.perf_counter() + seconds
        result = function(*args, **kwargs)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    return run


# What it comes to ---------------------------------------------------------------------------------


def curves(rows: list[dict[str, str]], data: str, optimizer: str) -> dict[str, list[list[float]]]:
    """Losses of every method in blocks of steps, a list for each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if (row["data"], row["optimizer"]) == (data, optimizer):
            runs = found.setdefault(row["method"], {})
            runs.setdefault(row["seed"], []).append(float(row["loss"]))
    return {method: list(runs.values()) for method, runs in found.items()}


def picture(rows: list[dict[str, str]], file: Path) -> None:
    """Draws loss curves: a panel for each data and optimizer, mean and range of the seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "asynchronous"  # the same file from the same rows
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    panels = [(d, o) for d in DATA for o in OPTIMIZERS if any(r["data"] == d for r in rows)]
    high = (len(panels) + 1) // 2
    figure, grid = plt.subplots(high, 2, figsize=(11, 4 * high), squeeze=False, sharex=True)
    for axes, (data, optimizer) in zip(grid.flat, panels, strict=False):
        lines = curves(rows, data, optimizer)
        top = first = max(runs[0][0] for runs in lines.values())
        for colour, method in zip(COLOURS, METHODS, strict=True):
            runs = lines.get(method, [])
            if not runs:
                continue
            seeds = np.array([[min(v, 1e6) if math.isfinite(v) else 1e6 for v in r] for r in runs])
            at = BLOCK * np.arange(1, seeds.shape[1] + 1)
            # AMPNet may lie on top of PipeDream.
            dashes, wide = {"ampnet": ((0, (4, 4)), 1.6), "pipedream": ("-", 3.2)}.get(
                method, ("-", 1.6)
            )
            mean = seeds.mean(axis=0)
            top = max(top, min(mean.max(), 10 * first))
            axes.plot(at, mean, linestyle=dashes, color=colour, label=method, linewidth=wide)
            axes.fill_between(at, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.15)
        axes.set_title(f"{data}, {optimizer} at {RATES[data, optimizer]:g}")
        axes.set_yscale("log")
        axes.set_ylim(top=1.2 * top)  # diverging runs leave the picture
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(True, which="both", alpha=0.25)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.tick_params(labelbottom=True)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def table() -> str:
    """The tables of docs/results, from the CSVs."""
    rows = read("asynchronous_convergence")
    panels = [(d, o) for d in DATA for o in OPTIMIZERS if any(r["data"] == d for r in rows)]
    lines = []
    for method in METHODS:
        cells = [method]
        for data, optimizer in panels:
            last = [one[-1] for one in curves(rows, data, optimizer).get(method, [])]
            mean = sum(last) / len(last) if last else math.nan
            spread = f" ({min(last):.3f} to {max(last):.3f})" if len(last) > 1 else ""
            cells.append(f"{mean:.3f}{spread}" if math.isfinite(mean) else "diverges")
        lines.append(cells)
    heads = ["method", *(f"{data}, {optimizer}" for data, optimizer in panels)]
    parts = [part for part in ("throughput", "hosts") if has(f"asynchronous_{part}")]
    return "\n\n".join([markdown(heads, lines), *map(timed, parts)])


def timed(part: str) -> str:
    """Returns the table of measured and simulated seconds of a part, and of speeds over 1F1B."""
    rows = read(f"asynchronous_{part}")
    exact = next(float(row["ms"]) for row in rows if row["schedule"] == "1f1b")
    heads = ["schedule", "a step", "steps/s", "of 1f1b", "simulated", "measured / simulated"]
    cells = [
        [row["schedule"], f"{float(row['ms']):.0f} ms", f"{1e3 / float(row['ms']):.2f}",
         f"{exact / float(row['ms']):.2f}", f"{float(row['simulated_ms']):.0f} ms",
         f"{float(row['ratio']):.3f}"]
        for row in rows
    ]  # fmt: skip
    message = max(float(row.get("message_ms", 0)) for row in rows)
    said = f"A message between neighbours takes up to {message:.1f} ms." if message else ""
    return "\n\n".join(filter(None, [markdown(heads, cells), said]))


def main() -> None:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["convergence", "throughput"])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", action="store_true", help="draw the curves of the CSV again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="by default 120, or 20 of throughput")
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--rate", help="of the link between two emulated hosts: 100mbit")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or STEPS[arguments.what or "throughput"]
    if arguments.worker:
        run_on_hosts(arguments.worker, arguments.steps, 3)
        return
    if arguments.what:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.what == "convergence":
                given = (folder, arguments.seeds, arguments.steps, arguments.data)
                spawn(run_convergence, args=given, nprocs=RANKS)
            elif arguments.rate:
                with two_hosts(arguments.rate) as hosts:
                    own = [__file__, "--worker", folder, "--steps", str(arguments.steps)]
                    if code := launch(hosts, RANKS // 2, [sys.executable, *own]):
                        sys.exit(code)
            else:
                spawn(run_throughput, args=(folder, arguments.steps, 3), nprocs=RANKS)
            name = f"asynchronous_{'hosts' if arguments.rate else arguments.what}"
            keys = ["data"] if arguments.what == "convergence" else None
            print(write(name, torch.load(Path(folder, "rows.pt")), keys=keys))
        if arguments.what == "convergence":
            file = PICTURES / "asynchronous.svg"
            picture(read(name), file)
            print(file)
    if arguments.picture:
        picture(read("asynchronous_convergence"), PICTURES / "asynchronous.svg")
    if arguments.table:
        print(table())


if __name__ == "__main__":
    main()
