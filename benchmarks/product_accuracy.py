"""Prices published cases by plain calls of autopar.plan: `python -m benchmarks.product_accuracy`.

Rows of benchmarks/published.json, with the options of benchmarks/published/product.py. Nothing runs
on an accelerator. Writes results/product_accuracy.csv. A system takes two to six minutes;
`--only SYSTEM` replaces its rows. To "fitted" rows a figure of the device was fitted
(devices.toml): step_efficiency of A100 to Megatron's, of H100 to Megatron-Core's, of H100-96 to
torchtitan's two of 8 devices in bf16, of MI300X to torchao's in bf16, of V100 to Alpa's GPT. From
the row of Wide-ResNet on two axes, the split of its plan was inferred.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autopar.plan import Plan
from benchmarks import cost_accuracy
from benchmarks.cost_accuracy import facts
from benchmarks.harness import write
from benchmarks.published import alpa, megatron, megatron_bridge, megatron_core, product

Row = dict[str, Any]
# Devices whose step_efficiency was fitted to their rows in bf16, in the named table.
FITTED = {"H100-96": "T1", "MI300X": "ao"}


def _row(
    system: str, case: str, quantity: str, kind: str, published: float, found: float,
    plan: Plan | None = None,
) -> Row:  # fmt: skip
    """One comparison, with its relative error; of a time also the range that its plan prints."""
    return {
        "system": system, "case": case, "quantity": quantity, "kind": kind,
        "published": published, "product": found, "error": found / published - 1,
        "range": "" if plan is None else product.printed_range(plan),
    }  # fmt: skip


def megatron_rows() -> Iterator[Row]:
    """Megatron-LM on A100, where stages have several layers: a single one is not recomputed."""
    for row in facts("megatron_sc21_table1_a100_80gb"):
        run = cost_accuracy.megatron_run(row)
        if run.layers == run.pp * run.chunks:
            continue
        flops = megatron.iteration_flops(run)
        plan = product.megatron_plan(run)
        found = product.megatron_tflops(plan, run, flops)
        head = ("megatron", row["model"], "TFLOP/s", "fitted")
        yield _row(*head, row["tflops_per_gpu"], found, plan)


def megatron_core_rows() -> Iterator[Row]:
    """Megatron-Core on H100; nothing was fitted to its largest model."""
    for row in facts("megatron_core_r080_h100_weak_scaling"):
        run = cost_accuracy.megatron_core_run(row)
        flops = megatron_core.iteration_flops(run)
        plan = product.megatron_core_plan(run)
        found = product.megatron_tflops(plan, run, flops)
        kind = "predicted" if row["model"] == "462B" else "fitted"
        head = ("megatron-core", row["model"], "TFLOP/s", kind)
        yield _row(*head, row["tflops_per_gpu"], found, plan)


def megatron_golden_rows() -> Iterator[Row]:
    """A functional test of Megatron-Core with a layer a chunk and dropout, in deterministic mode.

    Its memory is the last rank's, whose writer alone records it (megatron/training/global_vars.py).
    """
    for row in facts("megatron_golden"):
        words = -(-row["vocab"] // 128) * 128  # Megatron pads the vocabulary to a multiple of 128
        run = megatron.Run(
            row["hidden"], row["heads"], row["layers"], row["tp"], row["pp"], row["dp"],
            row["global_batch"], row["micro_batch"], row["virtual_stages"], row["seq"],
            words, row["device"], 0.1, row["groups"],
        )  # fmt: skip
        plan = product.megatron_core_plan(run, product.GOLDEN_ON[run.device])
        head = ("megatron-golden", row["device"])
        yield _row(*head, "s a step", "predicted", row["step_s"], plan.predicted.seconds, plan)
        memory = product.last_rank_bytes(run) / 2**30
        yield _row(*head, "GiB a device", "predicted", row["max_gib"], memory)


def megatron_bridge_rows() -> Iterator[Row]:
    """Megatron Bridge's Llama 3 in 8 bits on H100, B200 and GB200."""
    for row in facts("megatron_bridge"):
        run = megatron_bridge.Run.of(row)
        case = f"{run.model} {run.gpus} {run.device} TP{run.tp} PP{run.pp} {run.precision} batch"
        head = ("megatron-bridge", f"{case} {run.global_batch}", "tokens/s a device", "predicted")
        plan, found = megatron_bridge.plan(run), megatron_bridge.tokens_per_second(run)
        yield _row(*head, row["tokens_per_s_per_gpu"], found, plan)


def torchtitan_rows() -> Iterator[Row]:
    """torchtitan on H100s of 500 W and on H200, without context parallelism."""
    tables = ("torchtitan_h100", "torchtitan_h200", "torchtitan_async_8b")
    return _torchtitan("torchtitan", [row for table in tables for row in facts(table)])


def torchao_rows() -> Iterator[Row]:
    """torchtitan on eight devices, as torchao measured its 8-bit formats.

    Its H100 are taken for those of torchtitan's pages, since it does not say which they are. Its
    B200 ran at a limit of power that it does not name, so that only their speed-ups are compared.
    """
    rows = facts("torchao_training")
    yield from _torchtitan("torchao", [row for row in rows if "limited" not in row["hardware"]])
    plain, *others = (row for row in rows if "limited" in row["hardware"])
    published, own = plain["tokens_per_s_per_gpu"], _tokens_per_second(plain)
    for row in others:
        case = f"{row['hardware']}: {row['options']}"
        speedup = row["tokens_per_s_per_gpu"] / published
        found = _tokens_per_second(row) / own
        yield _row("torchao", case, "speed-up over bf16", "predicted", speedup, found)


def _tokens_per_second(row: Row) -> float:
    return product.torchtitan_tokens_per_second(cost_accuracy.torchtitan_run(row))


def _torchtitan(system: str, rows: Sequence[Row]) -> Iterator[Row]:
    """Tokens a second, and memory, which is what is reserved."""
    for row in rows:
        run = cost_accuracy.torchtitan_run(row)
        if run.cp > 1:
            continue
        fitted = FITTED.get(run.device) == row["table"] and not run.linears
        kind = "fitted" if fitted or run.seq > 8192 else "predicted"
        case = f"{run.model} {row['parallelism']} seq {row['seq']} {row['options']} {row['table']}"
        case += f" {run.device}" * (system == "torchao")
        plan, speed = product.torchtitan_plan(run), product.torchtitan_tokens_per_second(run)
        head = (system, case)
        yield _row(*head, "tokens/s a device", kind, row["tokens_per_s_per_gpu"], speed, plan)
        if "memory_gib" in row:
            memory = plan.predicted.peak_bytes / 2**30
            yield _row(*head, "GiB a device", "predicted", row["memory_gib"], memory)


def alpa_rows() -> Iterator[Row]:
    """Alpa's ablation of GPT on V100; its peaks are in GiB."""
    for row in facts("alpa_gpt_intra_op_ablation_p3_16xlarge"):
        if not row["oom"]:
            run = cost_accuracy.alpa_run(row)
            case = f"H{run.hidden} {run.gpus} devices {run.method} {run.mesh or ''}".strip()
            yield from _ablation("alpa", case, row, "fitted", product.alpa_plan(run))


def wide_resnet_rows() -> Iterator[Row]:
    """Alpa's ablation of Wide-ResNet; the heuristic's splits have no pin."""
    for row in facts("alpa_wide_resnet_intra_op_ablation_p3_16xlarge"):
        run = _ablated(row, "C")
        if not row["oom"] and (run.method != "heuristic" or run.gpus == 1):
            case = f"C{run.hidden} {run.gpus} devices {run.method} {run.mesh or ''}".strip()
            plan = product.wide_resnet_plan(run)
            kind = "fitted" if run.logical[1] > 1 else "predicted"
            yield from _ablation("wide-resnet", case, row, kind, plan)


def mixture_rows() -> Iterator[Row]:
    """Alpa's ablation of a mixture of experts; the heuristic's splits have no pin."""
    for row in facts("alpa_mixture_intra_op_ablation_p3_16xlarge"):
        run, experts = _ablated(row, "H"), _size(row, "E")
        if not row["oom"] and (run.method != "heuristic" or run.gpus == 1):
            case = f"H{run.hidden} E{experts} {run.gpus} devices {run.method}"
            plan = product.mixture_plan(run, experts)
            yield from _ablation("mixture", case, row, "predicted", plan)


def _size(row: Row, letter: str) -> int:
    return next(int(word[1:]) for word in row["spec"].split() if word[0] == letter)


def _ablated(row: Row, letter: str) -> alpa.Run:
    """A row of an ablation as it ran; its width stands behind `letter`."""
    mesh = row["logical_mesh"]
    logical = None if mesh is None else tuple(map(int, mesh.strip("()").split(",")))
    return alpa.Run(_size(row, letter), row["gpus"], row["method"], logical)  # type: ignore[arg-type]


def _ablation(system: str, case: str, row: Row, kind: str, plan: Plan) -> Iterator[Row]:
    """Seconds and memory of a row of Alpa's."""
    seconds, memory = plan.predicted.seconds, plan.predicted.peak_bytes / 2**30
    yield _row(system, case, "s a step", kind, row["latency_s"], seconds, plan)
    yield _row(system, case, "GiB a device", "predicted", row["peak_mem_gb"], memory)


SYSTEMS: dict[str, Callable[[], Iterator[Row]]] = {
    "megatron": megatron_rows,
    "megatron-core": megatron_core_rows,
    "megatron-golden": megatron_golden_rows,
    "megatron-bridge": megatron_bridge_rows,
    "torchtitan": torchtitan_rows,
    "torchao": torchao_rows,
    "alpa": alpa_rows,
    "wide-resnet": wide_resnet_rows,
    "mixture": mixture_rows,
}


def main() -> None:
    """Prices every row, prints and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SYSTEMS, action="append", help="price this system")
    chosen = parser.parse_args().only or list(SYSTEMS)
    for name in chosen:
        rows = []
        for row in SYSTEMS[name]():
            print(
                f"{row['system']:14} {row['case']:62} {row['quantity']:18} {row['published']:9.4g} "
                f"{row['product']:9.4g} {row['error']:+7.3f} {row['kind']}",
                flush=True,
            )
            rows.append(row)
            write("product_accuracy", rows, keys=("system", "case", "quantity"))
        for unit in dict.fromkeys(row["quantity"] for row in rows):
            errors = [abs(row["error"]) for row in rows if row["quantity"] == unit]
            mean = sum(errors) / len(errors)
            print(f"{name}: {unit}: mean error {mean:.1%}, worst {max(errors):.1%}")
        timed = [row for row in rows if row["range"]]
        inside = sum(abs(row["error"]) <= row["range"] for row in timed)
        print(f"{name}: {inside} of {len(timed)} times are inside their printed range")


if __name__ == "__main__":
    main()
