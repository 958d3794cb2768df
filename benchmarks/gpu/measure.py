"""Measures one case on this GPU: its bytes and FLOPs, its error, and the times of all providers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator, listed
from benchmarks.gpu.cases import Args, Case
from benchmarks.gpu.timing import CACHE, Call, interleaved
from tests.kernels.checks import copies, error, expected, launched, tolerance

COPIED = (
    4.3e12  # bytes a second that an H200 copies, of 4.8e12 on its data sheet; a prediction only
)
SETS = 3  # of inputs, at least
Row = dict[str, object]
MEASURED = (
    "device", "copy_TBps", "matmul_TFLOPs", "error", "same_bits", "ms", "spread", "TBps",
    "of_copy", "eager_ms", "compile_ms", "liger_ms", "faster", "failed",
)  # fmt: skip


def arithmetic(case: Case) -> Row:
    """Returns the figures that are known without a GPU."""
    operator = case.kernel
    args = case.make(Draw(torch.bfloat16, "meta"))
    moved = _moved(operator, args)
    row: Row = {
        "kernel": case.operator,
        "size": case.label,
        "megabytes": round(moved / 1e6, 3),
        "predicted_ms": round(moved / COPIED * 1e3, 4),
        "target_of_copy": case.target,
        "rival": case.rival,
        "target_faster": case.faster or "",
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
    operator = case.kernel
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
        providers[name] = [partial(function, *copies(given)) for given in sets]
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
    if case.rival in times:
        row["faster"] = round(times[case.rival].ms / own.ms, 3)
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
