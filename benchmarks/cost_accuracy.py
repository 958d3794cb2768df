"""Compares predictions with published measurements: `python benchmarks/cost_accuracy.py`.

Nothing runs on an accelerator: every row is a prediction of autopar's cost and memory models for a
system that others have measured, next to the published figure (benchmarks/published.json).
benchmarks/published/ documents how each system was modelled, and which figures were fitted to which
rows. Writes results/cost_accuracy.csv and docs/images/cost_accuracy.svg; `--only TABLE` prints the
rows of a table.

    exact       must be equal, rounded as published
    predicted   no figure was fitted to this table
    fitted      a figure of the device was fitted to these rows, or an assumption was inferred from
                them; the note says which. Figures belong to a device, never to a row
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.cost.model import AnalyticModel
from autopar.cost.overlap import overlap_ratio
from autopar.intra_op.build import build
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.zoo import load
from benchmarks.harness import PICTURES, write
from benchmarks.published import (
    activations,
    alpa,
    megatron,
    megatron_core,
    paro,
    rings,
    torchtitan,
    ulysses,
    vtrain,
)

FACTS = Path(__file__).parent / "published.json"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        table, case, quantity, unit: what is compared.
        kind: "exact", "predicted" or "fitted"; see the module.
        published, predicted: the values.
        tolerance: by how much they may differ: relative, or absolute for what `unit` is in points.
            None if nothing was promised.
        note: what was fitted to which rows.
    """

    table: str
    case: str
    quantity: str
    unit: str
    kind: str
    published: float
    predicted: float
    tolerance: float | None
    note: str = ""

    @property
    def error(self) -> float:
        """Relative, or in points; 0 where both are 0."""
        difference = self.predicted - self.published
        if self.unit in ("points", "yes or no"):
            return difference
        return difference / self.published if self.published else difference

    @property
    def within(self) -> bool | None:
        """Returns whether the promise is kept; None if there was none."""
        return None if self.tolerance is None else abs(self.error) <= self.tolerance


def facts(table: str) -> Any:
    """The published rows of a table."""
    return json.loads(FACTS.read_text(encoding="utf-8"))[table]["rows"]


def megatron_run(row: dict[str, Any]) -> megatron.Run:
    """A row of Megatron's table 1 as it ran."""
    return megatron.Run(
        row["hidden"], row["heads"], row["layers"], row["tp"], row["pp"], row["dp"],
        row["global_batch"], row["micro_batch"], row["virtual_stages"], row["seq"], row["vocab"],
    )  # fmt: skip


def megatron_rows() -> Iterator[Row]:
    """Megatron-LM on A100."""
    note = "matmul_efficiency of A100, on these rows together"
    errors = []
    for row in facts("megatron_sc21_table1_a100_80gb"):
        predicted = megatron.tflops(megatron_run(row))
        head = ("megatron", row["model"], "TFLOP/s a device", "TFLOP/s", "fitted")
        made = Row(*head, row["tflops_per_gpu"], predicted, 0.1, note)
        errors.append(abs(made.error))
        yield made
    mean = 100 * sum(errors) / len(errors)
    yield Row("megatron", "mean", "absolute error", "points", "fitted", 0.0, mean, 5.0, note)


def megatron_core_run(row: dict[str, Any]) -> megatron.Run:
    """A row of Megatron-Core's README; a microbatch and a layer a chunk, which it does not say."""
    pp = row["pp"]
    return megatron.Run(
        row["hidden"], row["heads"], row["layers"], row["tp"], pp, row["dp"], row["global_batch"],
        1, row["layers"] // pp if pp > 1 else 1, row["seq"], row["vocab"], "H100",
    )  # fmt: skip


def megatron_core_rows() -> Iterator[Row]:
    """Megatron-Core on H100."""
    note = "matmul_efficiency of H100, on these rows together"
    for row in facts("megatron_core_r080_h100_weak_scaling"):
        predicted = megatron_core.tflops(megatron_core_run(row))
        head = ("megatron-core", row["model"], "TFLOP/s a device", "TFLOP/s", "fitted")
        yield Row(*head, row["tflops_per_gpu"], predicted, 0.1, note)


def torchtitan_run(row: dict[str, Any]) -> torchtitan.Run:
    """A row of torchtitan's pages as it ran; since 2025 it compiles its loss too."""
    options, hardware = row["options"].lower(), row["hardware"]
    newer = row["table"] in ("h200", "ao")
    degrees = dict.fromkeys(("fsdp", "tp", "cp"), 1)
    for word in row["parallelism"].lower().split(","):
        name = word.rstrip("0123456789")
        degrees[name] = int(word[len(name) :])
    cp = degrees["cp"]
    return torchtitan.Run(
        model="70B" if "70B" in row["model"] else "8B",
        fsdp=degrees["fsdp"] * cp,
        tp=degrees["tp"],
        batch=row["local_batch"],
        compiled="compile" in options,
        float8="float8" in options,
        asynchronous="async" in options,
        full=row["activation_ckpt"] == "full",
        rowwise="rowwise" in options,
        blockwise="mxfp8" in options,
        seq=row["seq"] // cp,
        cp=cp,
        device=next((n for n in ("H200", "B200", "MI300X") if n in hardware), torchtitan.DEVICE),
        loss="compiled" if newer else "",
    )


def torchtitan_rows() -> Iterator[Row]:
    """torchtitan on H100s of 500 W."""
    notes = {
        8192: "matmul_efficiency of H100-96, on the two rows of 8 devices in bf16",
        32768: "attention_efficiency of H100-96, on this row",
    }
    for row in facts("torchtitan_h100"):
        run = torchtitan_run(row)
        fit = run.cp == 1 and run.model == "8B" and run.float8 == (run.seq == 32768)
        case = f"{run.model} {row['parallelism']} seq {row['seq']} {row['options']} {row['table']}"
        kind, why = ("fitted", notes[run.seq]) if fit else ("predicted", "")
        published = row["tokens_per_s_per_gpu"]
        speed = torchtitan.tokens_per_second(run)
        if run.cp > 1:
            whole = run.tokens / torchtitan.unbalanced_seconds(run)
            why = f"attention balanced, as torch's code says; {whole:.0f} tokens/s were it not"
        head = ("torchtitan", case, "tokens/s a device", "tokens/s", kind)
        yield Row(*head, published, speed, 0.1, why)
        if "memory_gib" in row:
            memory = torchtitan.memory_gib(run)
            head = ("torchtitan", case, "memory a device", "GiB", "predicted")
            yield Row(*head, row["memory_gib"], memory, 0.15)


def alpa_run(row: dict[str, Any]) -> alpa.Run:
    """A row of Alpa's ablation."""
    hidden = next(int(word[1:]) for word in row["spec"].split() if word[0] == "H")
    mesh = row.get("logical_mesh")
    logical = None
    if mesh is not None:
        data, tensor = map(int, mesh.strip("()").split(","))
        logical = (data, tensor)
    return alpa.Run(hidden, row["gpus"], row["method"], logical)


def alpa_rows() -> Iterator[Row]:
    """Alpa's intra-operator ablation on V100."""
    note = "matmul_efficiency of V100, on these rows together"
    whole = "that gradients stay whole is inferred from ZeRO-2's peaks of these rows"
    measured, found = [], []
    orders: dict[int, list[tuple[float, float]]] = {}
    for row in facts("alpa_gpt_intra_op_ablation_p3_16xlarge"):
        run = alpa_run(row)
        case = f"H{run.hidden} {run.gpus} devices {run.method} {run.mesh or ''}".strip()
        memory = alpa.memory_bytes(run)
        refused, expected = float(memory > alpa.MEMORY), float(row["oom"])
        head = ("alpa", case, "out of memory", "yes or no", "fitted")
        yield Row(*head, expected, refused, 0.0, whole)
        if row["oom"]:
            continue
        seconds = alpa.step_seconds(run)
        measured.append(row["latency_s"])
        found.append(seconds)
        if run.mesh is not None:
            orders.setdefault(run.hidden, []).append((row["latency_s"], seconds))
        yield Row("alpa", case, "step", "s", "fitted", row["latency_s"], seconds, None, note)
        head = ("alpa", case, "memory a device", "GiB", "fitted")
        yield Row(*head, row["peak_mem_gb"], memory / 2**30, None, whole)
    for hidden, pairs in orders.items():
        same = sorted(pairs) == sorted(pairs, key=lambda pair: pair[1])
        head = ("alpa", f"H{hidden}", "order of logical meshes", "yes or no", "predicted")
        yield Row(*head, 1.0, float(same), 0.0)
    rank = 100 * alpa.rank_correlation(measured, found)
    yield Row("alpa", "all", "rank correlation", "points", "predicted", 100.0, rank, 10.0)


def activation_rows() -> Iterator[Row]:
    """Activation memory by formula."""
    for name, sizes in {"22B": (6144, 64, 2048, 4, 8), "175B": (12288, 96, 2048, 1, 8)}.items():
        for case, formula, counted in activations.compared(*sizes):
            head = ("activations", f"{name} {case}", "bytes a layer", "MB", "exact")
            yield Row(*head, formula / 1e6, counted / 1e6, 1e-12)


def paro_rows() -> Iterator[Row]:
    """Memory and volumes of state shardings."""
    for row in facts("paro_memory_per_gpu"):
        for key, value in paro.memory(row["strategy"]).items():
            digits = 2 if key == "total_GB" else 3
            head = ("paro", row["strategy"], key.removesuffix("_GB"), "GB", "exact")
            yield Row(*head, row[key], round(value, digits), 0.0)
    for row in facts("paro_total_volume"):
        for key, value in paro.volume(row["method"]).items():
            head = ("paro", row["method"], key.removesuffix("_Telem"), "10^12 elements", "exact")
            yield Row(*head, row[key], round(value, 3), 0.0)
    for name, value in {"ddp": 1.0, "zero1": 1.0, "zero2": 1.0, "zero3": 1.5}.items():
        head = ("paro", name, "volume in all_reduces", "1", "exact")
        yield Row(*head, value, paro.relative_volume(name), 1e-12)


def communication_rows() -> Iterator[Row]:
    """Rings over two levels, sequence parallelism, asynchronous all_reduces."""
    note = "two figures of PaRO's network, on these three"
    for name, value in facts("ho_ring_ms").items():
        head = ("rings", name, "all_gather of 1 GB", "ms", "fitted")
        yield Row(*head, value, rings.all_gather_ms(name), 0.1, note)
    note = "a token's kernels, on the row without sequence parallelism"
    for row in facts("deepspeed_ulysses_table"):
        predicted = ulysses.speedup(row["gpus"], row["bsz"], row["seq"], row["sp"])
        kind = "fitted" if row["sp"] == 1 else "predicted"
        case = f"{row['gpus']} devices, sequences of {row['seq']}, {row['sp']} ways"
        yield Row("ulysses", case, "speed-up", "1", kind, row["speedup"], predicted, 0.1, note)
    co2 = facts("co2")
    for steps, percent in co2["overlap_ratio_pct"].items():
        ratio = overlap_ratio(int(steps), co2["step_compute_s"], co2["allreduce_s"])
        head = ("co2", f"{steps} local steps", "overlap", "points", "predicted")
        yield Row(*head, percent, 100 * ratio, 4.0)


def vtrain_rows() -> Iterator[Row]:
    """vTrain's iterations on one node, those that nothing was fitted to."""
    held = [row for row in vtrain.rows() if row.held_out]
    errors = [abs(vtrain.iteration_seconds(row.run) / row.seconds - 1) for row in held]
    mean = 100 * sum(errors) / len(errors)
    head = ("vtrain", f"{len(held)} iterations")
    yield Row(*head, "mean absolute error", "points", "predicted", 0.0, mean, 10.0)
    for among, least in ((1, None), (3, 5.0)):
        share = 100 * vtrain.fastest_found(held, among)
        what = f"fastest way in the first {among}"
        yield Row(*head, what, "points", "predicted", 100.0, share, least)


def speed_rows() -> Iterator[Row]:
    """Processor seconds to price all choices of a large model here; 5 are promised."""
    model, inputs = load("llama-3.1-405b", batch=64, seq=8192)
    options = Options()
    graph = capture_graph(model, (), inputs, options, Trace(None)).graph
    mesh = Mesh.parse("H100: node=64, gpu=8")
    began = time.process_time()
    build(graph, mesh, AnalyticModel(mesh), options.table, memory_limit=1e16)
    seconds = time.process_time() - began
    head = (
        "speed",
        "llama-3.1-405b on 64 x 8",
        "pricing, measured here",
        "processor s",
        "predicted",
    )
    yield Row(*head, 5.0, seconds, None, "the promise is less than 5 s")


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "megatron": megatron_rows,
    "megatron-core": megatron_core_rows,
    "torchtitan": torchtitan_rows,
    "alpa": alpa_rows,
    "activations": activation_rows,
    "paro": paro_rows,
    "communication": communication_rows,
    "vtrain": vtrain_rows,
    "speed": speed_rows,
}
COLOURS = {
    "megatron": "#06c", "megatron-core": "#0b6", "torchtitan": "#c60", "alpa": "#90c",
    "ulysses": "#666", "rings": "#c06",
}  # fmt: skip
SIZE, MARGIN = 400, 50
DECADES = 1.5  # that each axis spans, with the mean in the middle
UNDRAWN = ("GiB", "GB", "points", "yes or no", "processor s")


def drawn(rows: list[Row]) -> str:
    """A picture: predicted against published, each over the geometric mean of its table."""
    whole, middle = SIZE + 2 * MARGIN, MARGIN + SIZE / 2
    parts = [
        f'<rect width="{whole}" height="{whole}" fill="#fff"/>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{SIZE}" height="{SIZE}" fill="none" '
        'stroke="#999"/>',
        f'<text x="{middle - 130}" y="{whole - 18}">published, over the mean of its table (log)'
        "</text>",
        f'<text x="18" y="{middle + 60}" transform="rotate(-90 18 {middle + 60})">predicted '
        "(lines: equal, 10 % off)</text>",
    ]
    for shift, dash in ((0.0, ""), (log10(1.1), "4"), (log10(0.9), "4")):
        half = DECADES / 2
        a, b = _place(-half, shift - half), _place(half, shift + half)
        parts.append(
            f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" '
            f'stroke="#999" stroke-dasharray="{dash}"/>'
        )
    for k, (table, colour) in enumerate(COLOURS.items()):
        y = MARGIN + 16 + 14 * k
        parts.append(f'<text x="{MARGIN + 8}" y="{y}" fill="{colour}">{table}</text>')
        chosen = [row for row in rows if row.table == table and row.unit not in UNDRAWN]
        parts += _dots(chosen, colour)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{whole}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>\n'
    )


def _dots(rows: list[Row], colour: str) -> Iterator[str]:
    """A dot a row, with its case and figures for who points at it."""
    middle = sum(log10(row.published) for row in rows) / max(len(rows), 1)
    for row in rows:
        x, y = _place(log10(row.published) - middle, log10(row.predicted) - middle)
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" fill-opacity="0.6">'
            f"<title>{row.case}: published {row.published:g}, predicted {row.predicted:.4g}"
            "</title></circle>"
        )


def _place(x: float, y: float) -> tuple[float, float]:
    """Pixels of two logarithms; points outside are drawn at the edge."""
    right, up = (min(max(value / DECADES + 0.5, 0.0), 1.0) for value in (x, y))
    return MARGIN + SIZE * right, MARGIN + SIZE * (1 - up)


def main() -> None:
    """Predict every row, print it, and write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TABLES, help="print one table, write nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, table in TABLES.items():
        if options.only in (None, name):
            for row in table():
                verdict = {True: "", False: "NOT WITHIN", None: "-"}[row.within]
                print(
                    f"{row.table:14} {row.case:60} {row.quantity:24} {row.published:10.4g} "
                    f"{row.predicted:10.4g} {row.error:+8.3f} {row.kind:9} {verdict}",
                    flush=True,
                )
                if row.within is False and row.note:
                    print(f"{'':14} ({row.note})", flush=True)
                rows.append(row)
    promised = [row for row in rows if row.within is not None]
    print(f"{sum(bool(row.within) for row in promised)} of {len(promised)} promises kept")
    if options.only is None:
        cells = [{**asdict(row), "error": row.error, "within": row.within} for row in rows]
        print(f"wrote {write('cost_accuracy', cells)}")
        picture = PICTURES / "cost_accuracy.svg"
        picture.write_text(drawn(rows), encoding="utf-8")
        print(f"wrote {picture}")


if __name__ == "__main__":
    main()
