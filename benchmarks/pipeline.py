"""Compares our pipeline runtime with torch.distributed.pipelining: `python benchmarks/pipeline.py`.

Four gloo processes with one thread each train one decoder in stages with both runtimes, with the
same cuts, microbatches, schedule, optimizer and data. Both programs are loaded and their steps
alternate, so that other load affects both; a ratio compares two adjacent steps. A step's time is
that of the slowest process.

In `computing` rows stages compute; with fewer cores than processes, these share them. In `timed`
rows stages wait a fixed time instead, as a host waits for its accelerator, so processes do not
compete, and the step shows only schedule, transfers and the overhead of the runtime. Bubbles are
computed from the timestamps of `program.step(profile=...)`; the simulated bubble is that of the
same actions with their measured mean times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.multiprocessing.spawn import spawn

import autopar
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.pipelines.stages import equal_parts, plan_stages
from autopar.planning.trace import Trace
from autopar.runtime.pipeline.stage import Stage
from benchmarks.decoder import Sizes, Whole, loss_of
from benchmarks.harness import markdown, middle, read, write

RANKS = 4
MESH = "cpu: stage=4"
MICROBATCHES = 8
# Schedules that both have, by our name and torch's.
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b chunks=2": "Interleaved1F1B",
    "zb_h1": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
SECONDS = 0.02  # of a forward, and of each half of a backward, in a rank's part of the model


KINDS = {"computing": Sizes(256, 128), "timed": Sizes(32, 16, 64)}


def batch_of(sizes: Sizes) -> dict[str, Tensor]:
    """The batch of every step."""
    shape = (MICROBATCHES * sizes.samples, sizes.seq)
    tokens, targets = (torch.randint(sizes.vocabulary, shape) for _ in range(2))
    return {"tokens": tokens, "targets": targets}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def planned(kind: str, schedule: str) -> Plan:
    """Our plan, cut between the parts."""
    stages = schedule_of(schedule, RANKS, MICROBATCHES).stages
    torch.manual_seed(0)
    model, mesh = Whole(KINDS[kind], stages), Mesh.parse(MESH)
    captured = capture_call(
        Call.of(model, batch_of(KINDS[kind])), Options(), Trace(None), MICROBATCHES
    )
    last: dict[str, str] = {}
    for node in captured.graph.nodes:
        if node.source.module.startswith("parts.") and not node.is_leaf:
            last[node.source.module.split(".")[1]] = node.name
    ends = [last[str(number)] for number in range(stages - 1)]
    return plan_stages(
        captured.graph, ends, equal_parts(mesh, RANKS), mesh, MICROBATCHES, schedule, Options(),
        Trace(None),
    )  # fmt: skip


class TorchSchedules:
    """torch's runtime on this rank."""

    def __init__(self, model: Whole, schedule: str) -> None:
        rank, stages = dist.get_rank(), len(model.parts)
        kind = get_schedule_class(SCHEDULES[schedule])
        vee = schedule in ("zb_v", "dualpipe_v")
        mine = [rank, stages - 1 - rank] if vee else list(range(rank, stages, RANKS))
        held = [
            PipelineStage(model.parts[number], number, stages, torch.device("cpu"))
            for number in mine
        ]
        single = issubclass(kind, PipelineScheduleSingle)
        self.stages, self.first, self.last = held, 0 in mine, stages - 1 in mine
        self.schedule = kind(held[0] if single else held, MICROBATCHES, loss_fn=loss_of)
        parameters = [p for number in mine for p in model.parts[number].parameters()]
        self.optimizer = optimizer(parameters)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss on the rank of the last stage, else 0."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (tokens,) if self.first else ()
        if self.last:
            self.schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*given, return_outputs=False)
        self.optimizer.step()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0


def lasting(function: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
    """The function, followed by a wait, so that both take a given time."""

    def run(*args: Any, **kwargs: Any) -> Any:
        until = time.perf_counter() + seconds(*args, **kwargs)
        result = function(*args, **kwargs)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    return run


@contextmanager
def waiting(theirs: TorchSchedules, stages: int) -> Iterator[None]:
    """Inside, all actions of both runtimes take fixed times."""
    part = SECONDS * RANKS / stages
    halves = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
    for stage in theirs.stages:
        stage.forward_one_chunk = lasting(stage.forward_one_chunk, partial(_after, part))  # type: ignore[method-assign]
        stage.backward_one_chunk = lasting(  # type: ignore[method-assign]
            stage.backward_one_chunk,
            lambda *_, full_backward=True, **__: part * (1 + full_backward),
        )
        stage.backward_weight_one_chunk = lasting(  # type: ignore[method-assign]
            stage.backward_weight_one_chunk, partial(_after, part)
        )
    with ExitStack() as stack:
        for name, count in halves.items():
            given = lasting(getattr(Stage, name), partial(_after, count * part))
            stack.enter_context(patch.object(Stage, name, given))
        yield


def _after(seconds: float, *_: Any, **__: Any) -> float:
    return seconds


def run_rank(
    rank: int, folder: str, kind: str, schedules: list[str], steps: int, warmup: int
) -> None:
    """One process: both programs' step times by each schedule, and profiles of ours."""
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    for number, schedule in enumerate(schedules):
        plan = Plan.load(Path(folder, f"plan{number}.toml"))
        torch.manual_seed(0)
        model, batch = Whole(KINDS[kind], len(plan.stages)), batch_of(KINDS[kind])
        ours = autopar.compile(model, MESH, plan=plan, optimizer=optimizer, example_inputs=batch)
        theirs = TorchSchedules(model, schedule)
        held = waiting(theirs, len(plan.stages)) if kind == "timed" else nullcontext()
        with held:
            found = alternate(
                partial(ours.step, **batch), partial(theirs.step, **batch), steps, warmup
            )
            ours.step(**batch, profile=Path(folder, f"trace{number}.json"))
        if rank == 0:
            torch.save(found, Path(folder, f"found{number}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def alternate(
    ours: Callable[[], Any], theirs: Callable[[], Any], steps: int, warmup: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """The losses of both programs' first steps, and the seconds of each of their later ones."""
    losses = [_everywhere(float(ours())) / RANKS, _everywhere(float(theirs()))]  # all have ours
    rounds = []
    for number in range(warmup + steps):
        if number % 2:
            mine, its = timed(ours), timed(theirs)
        else:
            its, mine = timed(theirs), timed(ours)
        rounds.append((mine, its))
    return losses, rounds[warmup:]


def _everywhere(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def timed(program: Callable[[], Any]) -> float:
    """Seconds of one step, the slowest process's."""
    dist.barrier()
    began = time.perf_counter()
    program()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def bubbles(file: Path, schedule: str) -> tuple[float, float]:
    """Measured and simulated: idle parts of the time from the first action to the last one."""
    events = json.loads(file.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e.get("cat") == "action"]
    begin, end = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    measured = 1 - sum(e["dur"] for e in spans) / ((end - begin) * RANKS)
    made = schedule_of(schedule, RANKS, MICROBATCHES)
    mean: dict[tuple[str, int], list[float]] = {}
    for event in spans:
        kind, stage = event["name"].split(".")[0][0], int(event["name"].split(".")[0][1:])
        mean.setdefault((kind, stage), []).append(event["dur"])
    costs = []
    for stage in range(made.stages):
        seconds = {k: sum(v) / len(v) for (k, at), v in mean.items() if at == stage}
        whole = seconds.get("B", 0.0)
        costs.append(StageCost(seconds["F"], seconds.get("I", whole / 2),
                               seconds.get("W", whole / 2)))  # fmt: skip
    return measured, simulate(made, costs).bubble


def simulated(schedule: str) -> Timeline:
    """The timed stages without a runtime."""
    made = schedule_of(schedule, RANKS, MICROBATCHES)
    part = SECONDS * RANKS / made.stages
    return simulate(made, [StageCost(part, part, part)] * made.stages)


def rows(
    kinds: list[str], schedules: list[str], steps: int, warmup: int
) -> Iterator[dict[str, Any]]:
    """One row a schedule and kind."""
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            for number, schedule in enumerate(schedules):
                planned(kind, schedule).save(Path(folder, f"plan{number}.toml"))
            spawn(run_rank, args=(folder, kind, schedules, steps, warmup), nprocs=RANKS)
            for number, schedule in enumerate(schedules):
                losses, found = torch.load(Path(folder, f"found{number}.pt"))
                measured, expected = bubbles(Path(folder, f"trace{number}.json"), schedule)
                row = row_of(kind, schedule, losses, found)
                row |= {"bubble_measured": measured, "bubble_simulated": expected}
                shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                print(shown, flush=True)
                yield row


def row_of(
    kind: str, schedule: str, losses: list[float], found: list[tuple[float, float]]
) -> dict[str, Any]:
    """Returns the CSV row of a schedule's steps."""
    ratios = sorted(ours / theirs for ours, theirs in found)
    quarter = len(ratios) // 4
    return {
        "stages": kind,
        "schedule": schedule,
        "torch_schedule": SCHEDULES[schedule],
        "microbatches": MICROBATCHES,
        "ours_ms": 1e3 * middle([ours for ours, _ in found]),
        "torch_ms": 1e3 * middle([theirs for _, theirs in found]),
        "ratio": middle(ratios),
        "ratio_low": ratios[quarter],
        "ratio_high": ratios[-1 - quarter],
        "rounds": len(ratios),
        "ideal_ms": 1e3 * simulated(schedule).seconds if kind == "timed" else "",
        "loss_difference": abs(losses[0] - losses[1]) / losses[1],
    }


def table() -> str:
    """The table of docs/results, from the CSV."""
    heads = ["schedule", "stages", "ours", "torch", "ours / torch", "bubble, simulated"]
    lines = []
    for row in sorted(read("pipeline"), key=lambda row: row["stages"]):
        ideal = f" of {float(row['ideal_ms']):.0f}" if row["ideal_ms"] else ""
        ratio, low, high = (float(row[key]) for key in ("ratio", "ratio_low", "ratio_high"))
        bubble, expected = (float(row[f"bubble_{key}"]) for key in ("measured", "simulated"))
        lines.append(
            [
                row["schedule"],
                row["stages"],
                f"{float(row['ours_ms']):.0f}{ideal} ms",
                f"{float(row['torch_ms']):.0f} ms",
                f"{ratio:.3f} ({low:.3f} to {high:.3f})",
                f"{bubble:.1%}, {expected:.1%}",
            ]
        )
    return markdown(heads, lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--dry", action="store_true", help="write no file")
    parser.add_argument("--table", action="store_true", help="print the documented table, no more")
    given = parser.parse_args()
    if given.table:
        print(table())
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    found = list(rows(given.kinds, given.schedules, given.steps, given.warmup))
    if not given.dry:
        print(write("pipeline", found, keys=("stages", "schedule")))


if __name__ == "__main__":
    main()
