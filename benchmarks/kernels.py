"""Measures kernels against memory bandwidth and other providers: `python benchmarks/kernels.py`.

It takes some minutes on one GPU. `--dry-run` runs a small model with all providers on the CPU and
writes nothing.

Every row states how many bytes a kernel moves and how long that takes at the bandwidth at which an
H200 copies memory. On a GPU, rows also contain measurements from the same process: copying, and a
product of bf16 matrices, as ceilings; then each kernel's error against its reference in float64,
from outputs that held NaN, whether two runs give the same bits, and the time of our kernel, of
torch, of torch.compile and of Liger if it is installed, in turns; then steps of a whole model with
and without kernels, and their losses next to eager torch's (`benchmarks/gpu/model.py`). Without a
GPU these columns stay empty. `--only kernels` and `--only model` run one half.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.measure import arithmetic, beyond_32_bits, measured
from benchmarks.gpu.timing import ceilings
from benchmarks.harness import write


def kernels() -> bool:
    """A row for every case, with times where there is a GPU; whether all are right."""
    rows = [arithmetic(case) for case in CASES]
    if not torch.cuda.is_available():
        print("no GPU: bytes and predictions only")
        print(write("kernels", rows))
        return True
    copied, multiplied = ceilings()
    for case, row in zip(CASES, rows, strict=True):
        row |= {
            "device": torch.cuda.get_device_name(),
            "copy_TBps": round(copied / 1e12, 3),
            "matmul_TFLOPs": round(multiplied / 1e12, 1),
        }
        try:
            row |= measured(case, copied)
        except (AssertionError, RuntimeError) as error:  # the others are still worth the run
            row["failed"] = " ".join(str(error).split())[:200] or type(error).__name__
        print(*row.values(), flush=True)
        write("kernels", rows)  # so far: a run that is cut off has not been for nothing
        gc.collect()
        torch.cuda.empty_cache()
    beyond_32_bits()
    print("more than 2^31 elements: right")
    return not any(row["failed"] for row in rows)


def whole_model() -> None:
    """A row for every provider of a model's steps, and their losses, where there is a GPU."""
    from benchmarks.gpu import model  # not at the top: kernels need no compiler

    if not torch.cuda.is_available():
        print(write("kernels_model", model.empty()))
        return
    steps, curve = model.rows()
    print(write("kernels_curve", curve))
    print(write("kernels_model", steps))


def dry_run() -> None:
    """A small model by all providers on the CPU; writes nothing."""
    from benchmarks.gpu import model

    print(f"{len([arithmetic(case) for case in CASES])} cases of kernels")
    for row in model.rows(model.SMALL)[0]:
        print(*row.values(), sep=", ")


def main() -> None:
    """Measures the kernels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--only", choices=("kernels", "model"), help="one half of it")
    asked = parser.parse_args()
    if asked.dry_run:
        dry_run()
        return
    right = asked.only == "model" or kernels()
    if asked.only != "kernels":
        whole_model()
    if not right:
        sys.exit("some kernels failed; see the column `failed`")


if __name__ == "__main__":
    main()
