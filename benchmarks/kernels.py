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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.measure import arithmetic, beyond_32_bits, measured
from benchmarks.gpu.timing import ceilings
from benchmarks.harness import write


def main() -> None:
    """Write a row for every case, with times where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="a small model, on the CPU")
    if parser.parse_args().dry_run:
        from benchmarks.gpu import model

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
        from benchmarks.gpu import model  # behind the kernels, which need no compiler

        steps, curve = model.rows()
        print(write("kernels_curve", curve))
    else:
        from benchmarks.gpu import model

        steps = model.empty()
        print("no GPU: bytes and predictions only")
    print(write("kernels", rows))
    print(write("kernels_model", steps))


if __name__ == "__main__":
    main()
