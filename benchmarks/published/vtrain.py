"""vTrain's measurements: GPT under Megatron-DeepSpeed on one node of A100 (vtrain.csv).

Bang et al., "vTrain", MICRO 2024, arXiv 2312.12391; the rows stand in data/ground_truth_single.csv
of github.com/VIA-Research/vTrain (MIT). The system is that of megatron.py, not interleaved. Its
kernels are so short that the host decides: a stage takes the longer of the seconds of its kernels
and of those in which its host issues them, by the row "modules" of cost/tables/hosts.csv. That was
fitted to the half of the rows for which `Row.held_out` is false; only the others are predicted.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autopar.cost.kernel_tables import Host
from autopar.cost.model import AnalyticModel
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.simulate import issue_seconds, tasks
from benchmarks.published import megatron
from benchmarks.published.pipeline import accumulated, pipelined, sends, update
from benchmarks.published.step import chains, fuse, merged

ROWS = Path(__file__).parent / "vtrain.csv"
VOCAB = 50304
COLUMNS = ("gpus", "gbs", "mbs", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")


@dataclass(frozen=True)
class Row:
    """A run of a model, the key of its model, batch and devices, and its measured seconds."""

    run: megatron.Run
    model: tuple[int, ...]
    seconds: float
    held_out: bool


def rows() -> Iterator[Row]:
    """The measured iterations."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()[1:]
    for row in csv.DictReader(lines):
        value = {name: int(row[name]) for name in COLUMNS}
        run = megatron.Run(
            value["hidden"], value["heads"], value["layers"], value["tp"], value["pp"],
            value["dp"], value["gbs"], value["mbs"], 1, value["seq"], VOCAB,
        )  # fmt: skip
        odd = zlib.crc32(" ".join(row[name] for name in COLUMNS).encode()) % 2
        model = tuple(value[n] for n in ("gpus", "gbs", "hidden", "heads", "layers", "seq"))
        yield Row(run, model, float(row["measured_s"]), bool(odd))


@cache
def _layer(run: megatron.Run) -> tuple[float, float, float, float]:
    """Seconds before, in and after a layer, recomputed, and those in which a layer is issued."""
    of, (first, block, last) = megatron.layer(run)
    kernels = megatron.with_loss(of, merged(of, of.works))
    fused = fuse(of, kernels, chains(of, megatron.FUSED))
    inside = {name for names in of.graph.repeats[0].iterations for name in names}
    host, issued = Host.of("modules"), {"forward": 0.0, "backward": 0.0}
    for task in tasks(of.graph, of.plan, fused, of.prices):
        if task.node and task.phase in issued:
            counts = task.node in inside or isinstance(task.what, Collective)
            issued[task.phase] += counts * issue_seconds(task, host)
    count = len(of.graph.repeats[0].iterations)
    each = block.seconds + block.forward.seconds
    return first.seconds, each, last.seconds, (2 * issued["forward"] + issued["backward"]) / count


def iteration_seconds(run: megatron.Run) -> float:
    """Predicted seconds of an iteration."""
    small = replace(run, layers=2, pp=1, dp=1, global_batch=run.micro_batch)
    first, each, last, issued = _layer(small)
    prices = _prices(run.pp, run.dp, run.tp)
    stage = run.layers / run.pp * max(each, issued)
    if run.pp > 1:
        stage += sends(prices, 2.0 * run.seq * run.micro_batch * run.hidden, "pp", 1)
    weights = (12 * run.layers * run.hidden**2 / run.pp + run.vocab * run.hidden) / run.tp
    stage += accumulated(prices, weights, run.microbatches)
    stages = [stage] * run.pp
    stages[0] += first
    stages[-1] += last
    seconds = pipelined(stages, run.microbatches, 1)
    seconds += prices.collective(Collective("all_reduce", ("dp",), int(2 * weights)))
    if run.pp > 1:
        embedding = int(2 * run.vocab * run.hidden / run.tp)
        seconds += prices.collective(Collective("send", ("pp",), embedding))
    return seconds + update(prices, weights, megatron.OPTIMIZER_BYTES)


@cache
def _prices(pp: int, dp: int, tp: int) -> AnalyticModel:
    return AnalyticModel(Mesh.parse(f"A100-80: pp={pp}, dp={dp}, tp={tp}"), in_step=True)


def fastest_found(chosen: list[Row], among: int) -> float:
    """The share of models whose fastest way is `among` so many that are predicted as fastest."""
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in chosen:
        groups.setdefault(row.model, []).append(row)
    found = []
    for group in groups.values():
        if len(group) > 1:
            order = sorted(group, key=lambda row: iteration_seconds(row.run))
            found.append(min(group, key=lambda row: row.seconds) in order[:among])
    return sum(found) / len(found)
