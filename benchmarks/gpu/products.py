"""Times matrix products of several dtypes on one GPU: `python -m benchmarks.gpu.products`.

Shapes are those of small and large language models, aligned and not: a vocabulary of 50257 words
makes rows that begin at any address. `--predict` compares the rows with the cost model, anywhere.
Writes results/products.csv.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.cost.compute import kernel_seconds
from autopar.cost.device import device, name_of_product
from autopar.cost.work import Gemm
from autopar.ir.mesh import Mesh
from benchmarks.harness import middle, read, write

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32}
SHAPES = (
    (16384, 768, 768), (16384, 2304, 768), (16384, 3072, 768), (16384, 768, 3072),
    (16384, 50257, 768), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192),
    (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 128256, 4096),
    (2048, 1024, 1024), (256, 768, 768), (256, 3072, 768), (512, 4096, 4096),
)  # fmt: skip
MOST = 3e12  # multiplications, of products in f32
Row = dict[str, Any]


def measured() -> Iterator[Row]:
    """A row for each dtype and shape that the GPU can do."""
    from triton.testing import do_bench

    for dtype in ("bf16", "f32", "tf32", "f8"):
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        for m, n, k in SHAPES:
            if (dtype in ("f32", "tf32") and m * n * k > MOST) or (dtype == "f8" and n % 16):
                continue
            call = _product(dtype, m, n, k)
            seconds = do_bench(call, warmup=5, rep=25, return_mode="median")
            yield {
                "device": torch.cuda.get_device_name(), "dtype": dtype, "m": m, "n": n, "k": k,
                "latency_ms": round(seconds, 6),
            }  # fmt: skip


def _product(dtype: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """A product of an [m, k] matrix with a transposed [n, k] matrix, as linears have it."""
    a, b = (torch.randn(rows, k, device="cuda").to(DTYPES.get(dtype)) for rows in (m, n))
    if dtype != "f8":
        return lambda: torch.mm(a, b.t())
    x, y, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), a.new_ones(())
    return lambda: torch._scaled_mm(
        x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def predicted() -> None:
    """Prints the measured rows beside the cost model, and the median error of each dtype."""
    errors: dict[str, list[float]] = {}
    for row in read("products"):
        dtype, (m, n, k) = row["dtype"], (int(row[name]) for name in "mnk")
        chip = device(Mesh.parse(f"{name_of_product(row['device'], 1.0)}: gpu=1"))
        size = {"bf16": 2, "f32": 4, "tf32": 4, "f8": 1}[dtype]
        out = 2 if dtype == "f8" else size
        nbytes = size * (m * k + n * k) + out * m * n
        gemm = Gemm(1, m, n, k, math.gcd(n, k))
        found = 1e3 * kernel_seconds(chip, "aten.mm", gemm.flops, nbytes, dtype, gemm)
        error = found / float(row["latency_ms"]) - 1
        errors.setdefault(dtype, []).append(abs(error))
        print(f"{dtype:5} {m:6} {n:7} {k:6} {row['latency_ms']:>10} {found:10.4f} {error:+.1%}")
    print({dtype: f"{middle(sorted(found)):.1%}" for dtype, found in errors.items()})


def main() -> None:
    """Measures, or compares with predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="compare the rows with predictions")
    if parser.parse_args().predict:
        predicted()
    else:
        print(write("products", measured()))


if __name__ == "__main__":
    main()
