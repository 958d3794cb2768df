"""Kernels against memory and against peers: `python benchmarks/kernels.py`; one GPU, some minutes.

`--dry-run` sends a small model through all providers on the CPU and writes nothing.

Every row says how many bytes a kernel moves and how long that takes at the bandwidth at which an
H200 copies memory. On a GPU they also hold what was measured there, in the same process: copying
and a product of bf16 matrices as ceilings; then each kernel's error against its reference in
float64, from outputs that held NaN, its bits twice, and the time of ours, of torch, of
torch.compile and of Liger where it is installed, in turns; then steps of a whole model with and
without kernels, and their losses beside eager torch's (`benchmarks/gpu/model.py`). Without a GPU
those columns stay empty.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator, listed
from benchmarks.gpu import model
from benchmarks.gpu.cases import CASES, Args, Case
from benchmarks.gpu.timing import CACHE, Call, ceilings, interleaved
from benchmarks.harness import write
from tests.kernels.checks import error, expected, launched, tolerance

COPIED = (
    4.3e12  # bytes a second that an H200 copies, of 4.8e12 on its data sheet; a prediction only
)
SETS = 3  # of inputs, at least
Row = dict[str, object]
MEASURED = (
    "device", "copy_TBps", "matmul_TFLOPs", "error", "same_bits", "ms", "spread", "TBps",
    "of_copy", "eager_ms", "compile_ms", "liger_ms",
)  # fmt: skip


def arithmetic(case: Case) -> Row:
    """What is known without a GPU."""
    operator = operators()[case.operator]
    args = case.make(Draw(torch.bfloat16, "meta"))
    moved = _moved(operator, args)
    row: Row = {
        "kernel": case.operator,
        "size": case.label,
        "megabytes": round(moved / 1e6, 3),
        "predicted_ms": round(moved / COPIED * 1e3, 4),
        "target_of_copy": case.target,
    }
    return row | dict.fromkeys(MEASURED, "")


def _moved(operator: Operator, args: Args) -> int:
    operands = list(operator.operands(args).values())
    return int(operator.nbytes(operands, listed(operator.allocate(*args))))


def judged(operator: Operator, args: Args) -> Row:
    """The largest relative error of a result, and whether a second run gives the same bits.

    Raises:
        AssertionError: a result is less precise than the kernel promises.
    """
    found, again = launched(operator, args), launched(operator, args)
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, again, strict=True)
    )
    del again
    worst = 0.0
    for result, wanted in zip(found, expected(operator, args), strict=True):
        off = error(result, wanted)
        # Compiled arithmetic contracts products and sums, and divides less precisely.
        assert off <= 4 * tolerance(operator, result), f"{operator.name}: {off}"
        worst = max(worst, off)
    return {"error": f"{worst:.1e}", "same_bits": same}


def measured(case: Case, copied: float) -> Row:
    """Error and times of one case on this GPU."""
    operator = operators()[case.operator]
    args = case.make(Draw(torch.bfloat16, "cuda"))
    row = judged(operator, args)
    moved = _moved(operator, args)
    count = max(SETS, -(-4 * CACHE // moved))
    sets = [case.make(Draw(torch.bfloat16, "cuda", seed)) for seed in range(count)]
    outputs = [operator.allocate(*given) for given in sets]

    def calls(function: Any) -> list[Call]:
        return [partial(function, *given) for given in sets]

    ours = [partial(operator.launch, out, *given) for out, given in zip(outputs, sets, strict=True)]
    providers: dict[str, Sequence[Call]] = {"ours": ours}
    if case.eager is not None:
        providers["eager"] = calls(case.eager)
        providers["compile"] = calls(torch.compile(case.eager, dynamic=False))
    for name, function in case.peers.items():
        providers[name] = calls(function)
    times, failed = interleaved(providers)
    for name, reason in failed.items():
        print(f"  {case.operator} {case.label}: {name} has no time ({reason})", flush=True)
    own = times["ours"]
    row |= {
        "ms": round(own.ms, 4),
        "spread": round(own.spread, 3),
        "TBps": round(moved / own.ms / 1e9, 3),
        "of_copy": round(moved / own.ms * 1e3 / copied, 3),
    }
    return row | {
        f"{name}_ms": round(times[name].ms, 4)
        for name in ("eager", "compile", "liger")
        if name in times
    }


def beyond_32_bits() -> None:
    """A kernel on more than 2^31 elements: the last rows are right.

    Raises:
        AssertionError: they are not.
    """
    rows, n = (1 << 19) + 8, 4096
    draw = Draw(torch.bfloat16, "cuda")
    for name in ("swiglu", "add_rms_norm"):
        operator = operators()[name]
        more = (draw.normal(n), 1e-6) if name == "add_rms_norm" else ()
        args = (draw.normal(rows, n), draw.normal(rows, n), *more)
        found = listed(operator.run(*args, strict=True))
        tail = (args[0][-16:], args[1][-16:], *more)
        for result, wanted in zip(found, expected(operator, tail), strict=True):
            assert error(result[-16:], wanted) <= 4 * tolerance(operator, wanted), name
        del found, args


def main() -> None:
    """Write a row for every case, with times where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a small model, on the CPU")
    if parser.parse_args().dry_run:
        print(f"{len([arithmetic(case) for case in CASES])} cases of kernels")
        for row in model.rows(model.SMALL)[0]:
            print(*row.values(), sep=", ")
        return
    rows = [arithmetic(case) for case in CASES]
    if torch.cuda.is_available():
        copied, multiplied = ceilings()
        for case, row in zip(CASES, rows, strict=True):
            row |= {
                "device": torch.cuda.get_device_name(),
                "copy_TBps": round(copied / 1e12, 3),
                "matmul_TFLOPs": round(multiplied / 1e12, 1),
            }
            row |= measured(case, copied)
            print(*row.values(), flush=True)
            write("kernels", rows)  # so far: a run that is cut off has not been for nothing
            gc.collect()
            torch.cuda.empty_cache()
        beyond_32_bits()
        print("more than 2^31 elements: right")
        steps, curve = model.rows()
        print(write("kernels_curve", curve))
    else:
        steps = model.empty()
        print("no GPU: bytes and predictions only")
    print(write("kernels", rows))
    print(write("kernels_model", steps))


if __name__ == "__main__":
    main()
