"""Fits the tables of kernels (`tables/*.csv`) to measured seconds of a device.

Half of the measurements, dealt by a hash of their shapes, are fitted: the constants have the least
mean absolute logarithm of predicted over measured seconds that the simplex method of Nelder & Mead
("A Simplex Method for Function Minimization", Computer Journal 7(4), 1965) finds from the constants
before. The other half says how far the fit is off for shapes that it has not seen.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autopar.cost.attention_seconds import NAMES
from autopar.cost.compute import kernel_seconds
from autopar.cost.device import Device
from autopar.cost.kernel_tables import Attention, Products
from autopar.cost.work import Gemm, Work
from autopar.errors import CostError

# Constants that are fitted: name -> (largest value that makes sense, value to begin at if it is 0).
_PRODUCTS = {
    "efficiency": (1.0, 0.9), "k_half": (1e3, 100.0), "k_latency": (1e-7, 1e-9),
    "small_tile": (2.0, 0.1), "split": (1e-4, 3e-6), "memory": (0.95, 0.9),
    "memory_small": (0.95, 0.8), "memory_ramp": (1e10, 1e8), "throttle": (1.0, 0.2),
    "throttle_after": (1.0, 1e-3),
}  # fmt: skip
_ATTENTION = {
    "efficiency": (1.0, 0.8), "softmax": (128.0, 30.0), "start": (32.0, 1.0),
    "block_latency": (1e-4, 2e-6), "memory": (0.95, 0.6), "call": (1e-3, 1e-5),
}  # fmt: skip
_LEAST = 40  # measurements, of which half are fitted


@dataclass(frozen=True)
class Sample:
    """A kernel and its measured seconds; `key` names its shape and decides its half."""

    key: str
    work: Work
    seconds: float

    @property
    def fitted(self) -> bool:
        """Returns whether it is of the half that constants are fitted to."""
        return hashlib.sha256(self.key.encode()).digest()[0] % 2 == 0


def samples(path: Path, device: str | None = None) -> tuple[Sample, ...]:
    """Reads measured kernels from a CSV file whose first lines may be comments.

    Columns are `m, n, k, latency_ms` for products of bf16, or `batch_size, isl, num_heads,
    num_key_value_heads, head_dim, latency_ms` for the forward of causal attention; with a column
    `device` only the rows of `device` count.

    Raises:
        CostError: the file cannot be read, has other columns, or a figure that is not positive.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read {path}", why=str(error), todo="give a CSV file") from error
    rows = list(csv.DictReader(lines))
    if device is not None and rows and "device" in rows[0]:
        rows = [row for row in rows if row["device"] == device]
    return tuple(_sample(row, f"{path}, row {number}") for number, row in enumerate(rows, 1))


def _sample(row: dict[str, str], where: str) -> Sample:
    try:
        seconds = float(row["latency_ms"]) / 1e3
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"latency_ms is {row['latency_ms']}")
        if "m" in row:
            return _product(int(row["m"]), int(row["n"]), int(row["k"]), seconds)
        names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
        return _causal([int(row[name]) for name in names], seconds)
    except (KeyError, ValueError, TypeError) as error:
        raise CostError(
            "a measurement cannot be read",
            where=where,
            why=str(error),
            todo="give columns m, n, k, latency_ms, or batch_size, isl, num_heads, "
            "num_key_value_heads, head_dim, latency_ms",
        ) from error


def _product(m: int, n: int, k: int, seconds: float) -> Sample:
    if min(m, n, k) < 1:
        raise ValueError(f"lengths of {m}, {n} and {k}")
    gemm = Gemm(1, m, n, k)
    work = Work("aten.mm", gemm.flops, 2.0 * (m * k + k * n + m * n), "bf16", gemm)
    return Sample(f"{m} {n} {k}", work, seconds)


def _causal(lengths: Sequence[int], seconds: float) -> Sample:
    if min(lengths) < 1:
        raise ValueError(f"lengths of {lengths}")
    batch, tokens, heads, groups, width = lengths
    gemm = Gemm(batch * heads, tokens, (tokens + 1) // 2, 2 * width)
    nbytes = 4.0 * batch * tokens * width * (heads + groups)
    work = Work(NAMES[0], gemm.flops, nbytes, "bf16", gemm)
    return Sample(" ".join(map(str, lengths)), work, seconds)


def fit_products(device: Device, measured: Iterable[Sample]) -> tuple[Products, float]:
    """Returns the constants of matrix products, and the seconds of a launch, for a device.

    Raises:
        CostError: too few measurements.
    """
    start = replace(device.products, tile_rows=0, tile_columns=0)

    def made(values: Sequence[float]) -> Device:
        given: dict[str, Any] = dict(zip(_PRODUCTS, values[1:], strict=True))
        table = replace(start, **given)
        table = replace(table, memory_small=min(table.memory_small, table.memory))
        return replace(device, launch=values[0], products=table)

    limits = [1e-3, *(top for top, _ in _PRODUCTS.values())]
    begin = [device.launch, *(getattr(start, n) or v for n, (_, v) in _PRODUCTS.items())]
    found = _fitted(made, begin, limits, tuple(measured))
    chip, error, spread = found
    return replace(chip.products, measured=device.name, error=error, spread=spread), chip.launch


def fit_attention(device: Device, measured: Iterable[Sample]) -> Attention:
    """Returns the constants of fused attention for a device; raises as `fit_products`."""

    def made(values: Sequence[float]) -> Device:
        given: dict[str, Any] = dict(zip(_ATTENTION, values, strict=True))
        return replace(device, attention=replace(device.attention, **given))

    limits = [top for top, _ in _ATTENTION.values()]
    begin = [getattr(device.attention, name) or v for name, (_, v) in _ATTENTION.items()]
    chip, error, spread = _fitted(made, begin, limits, tuple(measured))
    return replace(chip.attention, measured=device.name, error=error, spread=spread)


def errors(device: Device, measured: Iterable[Sample]) -> list[float]:
    """Returns the relative errors of a device's prices, without their signs, in rising order."""
    return sorted(abs(_price(device, each) / each.seconds - 1) for each in measured)


def _fitted(
    made: Callable[[Sequence[float]], Device],
    begin: Sequence[float],
    limits: Sequence[float],
    measured: Sequence[Sample],
) -> tuple[Device, float, float]:
    """Returns the fitted device and, of the measurements held out, the median and 90 % error."""
    inside = [each for each in measured if each.fitted]
    outside = [each for each in measured if not each.fitted]
    if min(len(inside), len(outside)) < _LEAST // 2:
        raise CostError(
            f"{len(measured)} measurements are too few to fit",
            why=f"{len(inside)} would be fitted and {len(outside)} held out",
            todo=f"measure at least {_LEAST} shapes, from small to large",
        )

    def bounded(logs: Sequence[float]) -> list[float]:
        return [min(math.exp(min(x, 50.0)), top) for x, top in zip(logs, limits, strict=True)]

    def loss(logs: Sequence[float]) -> float:
        chip = made(bounded(logs))
        return fmean(abs(math.log(_price(chip, each) / each.seconds)) for each in inside)

    logs = [math.log(min(x, top)) for x, top in zip(begin, limits, strict=True)]
    for size in (0.3, 0.15, 0.1):
        logs = simplex(loss, logs, size, 50 * len(logs))
    chip = made([float(f"{value:.4g}") for value in bounded(logs)])
    far = errors(chip, outside)
    return chip, round(median(far), 4), round(far[int(0.9 * len(far))], 4)


def _price(device: Device, sample: Sample) -> float:
    work = sample.work
    return kernel_seconds(device, work.op, work.flops, work.nbytes, work.dtype, work.gemm)


def simplex(
    loss: Callable[[Sequence[float]], float], begin: Sequence[float], size: float, rounds: int
) -> list[float]:
    """Returns the point of least `loss` after some rounds of Nelder & Mead's method."""
    points = [list(begin)]
    points += [[x + size * (i == k) for i, x in enumerate(begin)] for k in range(len(begin))]
    corners = sorted((loss(point), point) for point in points)
    for _ in range(rounds):
        middle = [fmean(axis) for axis in zip(*(p for _, p in corners[:-1]), strict=True)]
        worst = corners[-1]

        def along(
            share: float, middle: list[float] = middle, worst: list[float] = worst[1]
        ) -> tuple[float, list[float]]:
            point = [m + share * (m - w) for m, w in zip(middle, worst, strict=True)]
            return loss(point), point

        best = along(1.0)
        if best < corners[0]:
            best = min(best, along(2.0))
        elif best >= corners[-2]:
            best = min(best, along(-0.5))
        if best < worst:
            corners[-1] = best
        else:
            least = corners[0][1]
            nearer = ([(x + y) / 2 for x, y in zip(p, least, strict=True)] for _, p in corners[1:])
            corners[1:] = [(loss(point), point) for point in nearer]
        corners.sort()
    return corners[0][1]
