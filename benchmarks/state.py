"""Measures state shardings against torch's DDP and FSDP2, and against one another on two hosts.

    python benchmarks/state.py                # four gloo processes, side by side with torch
    python benchmarks/state.py --hosts        # two emulated hosts of two ranks; needs root, ip, tc

All programs of a run start with the same weights, get the same batches and take turns step by step.
A step's time is that of the slowest process, and a ratio is the median over rounds with its
quartiles. Steps in which processes compare their batches do not count. Peak bytes are those of all
live tensors of the first process at the peak of a step: parameters, gradients, optimizer state,
buckets and activations (`benchmarks/alive.py`).

The emulated hosts are two network namespaces that a shaped link joins (`benchmarks/hosts.py`).
There only our programs run, with eight microbatches in a step and parameters gathered again for the
backward, as PaRO counts it, next to the published speed-ups (arXiv:2310.06003, section 5: LLaMA-7B
and 65B on 32 and 128 A100).
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.folder import join_process_group
from autopar.zoo import build, example_inputs
from benchmarks.alive import Alive
from benchmarks.baselines import FullySharded, Replicated, Rival, Setting
from benchmarks.end_to_end import TINY
from benchmarks.harness import markdown, middle, read, write
from benchmarks.hosts import launch, two_hosts

ROOT = Path(__file__).parent.parent
RIVALS: dict[str, Callable[[nn.Module, Setting], Rival]] = {
    "DDP": Replicated,
    "FSDP2, kept": functools.partial(FullySharded, reshard=False),
    "FSDP2": FullySharded,
    "FSDP2, hybrid": functools.partial(FullySharded, replicas=2),
}
PAIRS = {
    "ddp": "DDP",
    "zero2": "FSDP2, kept",
    "zero3, kept": "FSDP2, kept",
    "zero3, gathered again": "FSDP2",
    "hsdp, gathered again": "FSDP2, hybrid",
}
# Of our own programs on two hosts: what PaRO publishes of the first over the second.
PUBLISHED = {
    "paro-igg, gathered again": ("zero3, gathered again", "1.19 to 1.37"),
    "paro-iig, gathered again": ("zero3, gathered again", "1.35 to 2.50"),
    "paro-nig": ("zero2", "1.70 to 2.25"),
}


@dataclass
class Runner:
    """A program that is measured.

    Attributes:
        name: a state sharding or a rival.
        step: one step; the loss, on every process.
    """

    name: str
    step: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0


class Bench:
    """One model and one batch on four processes."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.spec = given, TINY["llama-tiny"]
        self.world = dist.get_world_size()
        self.mesh = f"cpu: node=2 @{given.link}B/s 50us, gpu={self.world // 2}"
        torch.manual_seed(0)
        self.model = build(self.spec, layers=given.layers, meta=False)
        self.batch = example_inputs(self.spec, given.batch, given.seq, device="cpu")
        factory = functools.partial(torch.optim.AdamW, lr=1e-4)
        self.setting = Setting(torch.device("cpu"), factory, 2, 1)
        self.plans: dict[str, Any] = {}

    def make(self, name: str) -> Runner:
        """A program of its own weights."""
        model = copy.deepcopy(self.model)
        if name in RIVALS:
            rival = RIVALS[name](model, self.setting)
            return Runner(name, lambda: rival.step(self.batch))
        program = autopar.compile(
            model,
            self.mesh,
            optimizer=self.setting.optimizer,
            plan=self.plans.get(name),
            pins=autopar.pins.data_parallel(),
            microbatches=self.given.microbatches,
            recompute="none",
            state=name,
            example_inputs=self.batch,
        )
        self.plans[name] = program.plan
        model.to("meta")  # the program has weights of its own
        return Runner(name, lambda: program.step(**self.batch))

    def time(self, runner: Runner, measured: bool) -> None:
        """One step."""
        dist.barrier()
        began = time.perf_counter()
        loss = runner.step()
        spent = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        runner.losses.append(float(loss))
        if dist.get_rank() == 0:
            print(f"{runner.name}: {float(spent):.2f} s", file=sys.stderr, flush=True)
        if measured:
            runner.seconds.append(float(spent))

    def peak(self, name: str) -> int:
        """The most bytes of tensors that are alive in a step of a program."""
        runner = self.make(name)
        with Alive(read=True) as alive:
            for _ in range(2):  # which make the optimizer's state
                runner.step()
            gc.collect()
            alive.curve.clear()
            runner.step()
        highest: int = max(nbytes for _, nbytes in alive.curve)
        return highest


def measure(bench: Bench, names: Sequence[str]) -> dict[str, Runner]:
    """All programs, in turns."""
    given = bench.given
    runners = [bench.make(name) for name in names]
    for number in range(given.warmup + given.steps):
        at = number % len(runners)  # another one begins every time
        for runner in runners[at:] + runners[:at]:
            bench.time(runner, number >= given.warmup)
    for runner in runners:
        runner.step = _gone
        runner.peak = 0 if given.hosts else bench.peak(runner.name)
    return {runner.name: runner for runner in runners}


def _gone() -> Tensor:
    raise RuntimeError("this program has made room for others")


def row(bench: Bench, ours: Runner, other: Runner, published: str = "") -> dict[str, Any]:
    """Returns the CSV row of a pair; the ratio is of their steps, and inverse to a speed-up."""
    given = bench.given
    ratios = sorted(a / b for a, b in zip(ours.seconds, other.seconds, strict=True))
    apart = [abs(a - b) / abs(b) for a, b in zip(ours.losses, other.losses, strict=True)]
    return {
        "hosts": given.rate if given.hosts else "one",
        "ours": ours.name,
        "other": other.name,
        "ours_ms": 1e3 * middle(ours.seconds),
        "other_ms": 1e3 * middle(other.seconds),
        "ratio": middle(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "rounds": len(ratios),
        "ours_peak_bytes": ours.peak or "",
        "other_peak_bytes": other.peak or "",
        "peak_ratio": ours.peak / other.peak if other.peak else "",
        "published_speedup": published,
        "loss_difference": max(apart),
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "batch": given.batch,
        "seq": given.seq,
        "microbatches": given.microbatches,
    }


def rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    """All pairs of one run."""
    bench = Bench(given)
    pairs = [(ours, other, published) for ours, (other, published) in PUBLISHED.items()]
    if not given.hosts:
        pairs = [(ours, other, "") for ours, other in PAIRS.items()]
    names = dict.fromkeys(name for ours, other, _ in pairs for name in (ours, other))
    runners = measure(bench, list(names))
    return [row(bench, runners[ours], runners[other], said) for ours, other, said in pairs]


def table() -> str:
    """The table of docs/results, from the CSV."""
    heads = ["hosts", "state", "against", "our step", "its step", "ours / it", "our peak / its"]
    lines = []
    for one in read("state"):
        low, high = float(one["ratio_low"]), float(one["ratio_high"])
        ratio = f"{float(one['ratio']):.2f} ({low:.2f} to {high:.2f})"
        if one["published_speedup"]:
            speedup = 1 / float(one["ratio"])
            ratio += f"; {speedup:.2f} times as fast, PaRO {one['published_speedup']}"
        lines.append(
            [
                "one" if one["hosts"] == "one" else f"two, {one['hosts']}",
                one["ours"],
                one["other"],
                f"{float(one['ours_ms']):.0f} ms",
                f"{float(one['other_ms']):.0f} ms",
                ratio,
                f"{float(one['peak_ratio']):.2f}" if one["peak_ratio"] else "-",
            ]
        )
    return markdown(heads, lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", action="store_true", help="on two emulated hosts")
    parser.add_argument("--rate", default="1gbit", help="of the link between them, as tc reads it")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, help="samples of a step; by default 8, or 32")
    parser.add_argument("--seq", type=int, help="by default 128, or 32 on two hosts")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=12, help="steps that do not count")
    parser.add_argument("--output", default="state", help="the CSV's name; none with ''")
    parser.add_argument("--table", action="store_true", help="print the documented table, no more")
    given = parser.parse_args()
    given.batch = given.batch or (32 if given.hosts else 8)
    given.seq = given.seq or (32 if given.hosts else 128)
    given.microbatches = 8 if given.hosts else 1
    given.link = "125M" if given.hosts else "10G"  # for the planner
    return given


def main() -> None:
    """Start processes, measure, write."""
    given = arguments()
    if given.table:
        print(table())
        return
    if "RANK" not in os.environ:
        command = [sys.executable, __file__, *sys.argv[1:]]
        if given.hosts:
            with two_hosts(given.rate) as hosts:
                sys.exit(launch(hosts, 2, command))
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        sys.exit(subprocess.call([command[0], *start, *command[1:]], cwd=ROOT))
    join_process_group()
    torch.set_num_threads(1)
    found = rows(given)
    if dist.get_rank() == 0:
        for one in found:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in one.items()})
        if given.output:
            print(write(given.output, found, keys=("hosts", "ours", "other")))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
