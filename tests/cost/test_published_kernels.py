"""Prices of single kernels against measurements that others published for each device."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from autopar.cost.device import Device, devices
from autopar.cost.fitting.device_fit import errors
from autopar.cost.fitting.measurements import ATTENTION, PRODUCTS, Sample, samples
from autopar.cost.kernel_tables import Attention, Products

FILE = Path(__file__).parents[2] / "benchmarks" / "kernel_measurements.csv"
CHIPS = {entry.name: entry for entry in devices()}
FITTED = ["V100", "B200", "GB200", "H100-PCIe", "L40S", "RTX-4090", "MI300X"]


def published(name: str, kind: str) -> list[Sample]:
    return [each for each in samples(FILE, name) if each.kind == kind]


def judge(chip: Device, found: list[Sample]) -> tuple[float, float]:
    """The median and the 90th percentile of the errors on those that were not fitted, if any."""
    outside = [each for each in found if not each.fitted] if len(found) >= 40 else found
    missed = errors(chip, outside)
    return median(missed), missed[int(0.9 * len(missed))]


def row(chip: Device, kind: str) -> Products | Attention:
    return chip.products if kind == PRODUCTS else chip.attention


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, PRODUCTS) for name in FITTED]
    + [(name, ATTENTION) for name in ("B200", "GB200", "RTX-4090")],
)
def test_a_fitted_row_misses_by_what_it_states(name: str, kind: str) -> None:
    table = row(CHIPS[name], kind)
    assert table.measured == name
    found = judge(CHIPS[name], published(name, kind))
    assert found == pytest.approx((table.error, table.spread), abs=3e-3)
    if name != "MI300X":  # whose library chooses kernels badly for some shapes
        assert table.error < 0.08
        assert table.spread < 0.27


def test_products_on_an_h100_agree_with_a_table_that_was_not_fitted() -> None:
    """XLA's kernel times, which are 2.4 us above those of NVIDIA's collections at every size."""
    found = published("H100", PRODUCTS)
    missed = errors(CHIPS["H100"], found)
    assert len(found) == 125
    assert median(missed) < 0.05
    assert missed[int(0.9 * len(missed))] < 0.13


@pytest.mark.parametrize(
    ("name", "best"),
    # The best of cubes of 1024 to 10240 in 16 bits, in TFLOP/s, by the database of
    # github.com/zzc0721/torch-performance-test-data; of several cards the range.
    [
        ("V100", (88.9, 97.4)),
        ("A100-80", (258.7, 264.5)),
        ("H100", (758, 797.5)),
        ("H200", (759.4, 790.3)),
        ("H100-PCIe", (458, 503.8)),
        ("B200", (1627, 1696)),
        ("L40S", (264, 269.2)),
        ("RTX-4090", (158.9, 173.3)),
    ],
)
def test_the_best_cube_is_as_fast_as_published(
    name: str, best: tuple[float, float], tmp_path: Path
) -> None:
    dtype = "f16" if name == "V100" else "bf16"
    path = tmp_path / "cubes.csv"
    cubes = (1024, 2048, 4096, 8192, 10240)
    lines = [f"{dtype},{size},{size},{size},1" for size in cubes]
    path.write_text("\n".join(["dtype,m,n,k,latency_ms", *lines]), encoding="utf-8")
    chip, found = CHIPS[name], samples(path)
    rates = [1e-12 * 2 * n**3 / s.predicted(chip) for n, s in zip(cubes, found, strict=True)]
    assert 0.9 * best[0] < max(rates) < 1.1 * best[1]


def test_attention_of_a_slow_memory_does_not_wait_for_it() -> None:
    """FlashAttention 2 on RTX 4090: added to computing, memory alone would exceed a half of it."""
    chip = CHIPS["RTX-4090"]
    found = published("RTX-4090", ATTENTION)
    assert len(found) == 4
    for each in found:
        assert each.predicted(chip) == pytest.approx(each.seconds, rel=0.1)
