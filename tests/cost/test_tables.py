"""The tables of kernels: their rows, and the fit that makes them."""

from __future__ import annotations

import dataclasses
import random
from importlib import resources
from pathlib import Path
from unittest.mock import patch

import pytest

from autopar.cost.device import Device, devices
from autopar.cost.fitting.device_fit import errors, fit_attention, fit_products
from autopar.cost.fitting.measurements import samples
from autopar.cost.fitting.simplex import simplex
from autopar.cost.kernel_tables import Attention, Products
from autopar.cost.work import Work
from autopar.errors import CostError

CHIP = next(entry for entry in devices() if entry.name == "A100-80")


def measured(path: Path, chip: Device, count: int) -> Path:
    """A file of products on an imagined device, each off by up to 2 %."""
    dice = random.Random(5)
    lines = ["# an imagined device", "m,n,k,latency_ms"]
    for _ in range(count):
        m, n, k = (2 ** dice.randint(5, 13) + dice.randint(0, 1) for _ in range(3))
        path.write_text(f"m,n,k,latency_ms\n{m},{n},{k},1\n", encoding="utf-8")
        seconds = samples(path)[0].predicted(chip)
        lines.append(f"{m},{n},{k},{1e3 * seconds * dice.uniform(0.98, 1.02):.6g}")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_fit_finds_a_device_that_differs_from_where_it_began(tmp_path: Path) -> None:
    table = dataclasses.replace(CHIP.products, efficiency=0.6, memory=0.5, memory_small=0.4)
    other = dataclasses.replace(CHIP, products=table, launch=6e-6)
    found = samples(measured(tmp_path / "gemm.csv", other, 60))
    before = errors(CHIP, found)
    products, launch = fit_products(CHIP, found)
    assert products.measured == "A100-80"
    assert products.error < 0.05 < before[len(before) // 2]
    assert launch == pytest.approx(6e-6, rel=0.1)
    fitted = dataclasses.replace(CHIP, products=products, launch=launch)
    outside = errors(fitted, [each for each in found if not each.fitted])
    assert outside[len(outside) // 2] == pytest.approx(products.error, abs=1e-3)


def test_attention_is_fitted_to_calls(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv"
    head = "device,batch_size,isl,num_heads,num_key_value_heads,head_dim,latency_ms"
    lines = [head, "other,1,128,1,1,64,99"]
    shapes = [
        (b, s, h, d) for b in (1, 4) for s in (64, 512, 2048) for h in (4, 32) for d in (64, 128)
    ]
    shapes += [(b, s, h, 128) for b in (2, 8, 16) for s in (128, 1024, 4096) for h in (8, 16, 48)]
    for b, s, h, d in shapes:
        flops = 2.0 * b * h * s * s * d
        lines.append(f"A100-80,{b},{s},{h},{h},{d},{1e3 * (20e-6 + flops / 100e12):.6g}")
    path.write_text("\n".join(lines), encoding="utf-8")
    found = samples(path, "A100-80")
    assert len(found) == len(shapes)
    table = fit_attention(CHIP, found)
    assert table.error < 0.12
    assert 15e-6 < table.call < 22e-6


def test_the_simplex_finds_the_bottom_of_a_bent_valley() -> None:
    """Rosenbrock's function, whose least value is at (1, 1)."""
    found = simplex(
        lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2, [-1.2, 1.0], 0.5, 300
    )
    assert found == pytest.approx([1.0, 1.0], abs=1e-3)


def test_a_measurement_names_its_dtype_and_what_measuring_added(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    text = "m,n,k,dtype,overhead_ms,latency_ms\n64,32,16,f32,0.002,0.005\n64,32,16,,,0.005\n"
    path.write_text(text, encoding="utf-8")
    wide, plain = (each for each in samples(path))
    assert isinstance(wide.what, Work)
    assert isinstance(plain.what, Work)
    assert (wide.what.dtype, plain.what.dtype) == ("f32", "bf16")
    assert wide.what.nbytes == 2 * plain.what.nbytes
    assert (wide.seconds, plain.seconds) == pytest.approx((3e-6, 5e-6))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("m,n,k\n1,2,3\n", "latency_ms"),
        ("x,latency_ms\n1,1\n", "of no kind"),
        ("m,n,k,nbytes,latency_ms\n1,2,3,4,1\n", "products and memory"),
        ("op_name,num_gpus,total_bytes,latency_ms\nmix,2,8,1\n", "'mix'"),
        ("op_name,num_gpus,total_bytes,latency_ms\nall_gather,1,8,1\n", "1 device"),
        ("m,n,k,latency_ms\n1,2,x,1\n", "invalid literal"),
        ("m,n,k,latency_ms\n1,2,3,nan\n", "nan"),
        ("m,n,k,latency_ms\n1,2,3,-1\n", "-1"),
        ("m,n,k,latency_ms\n1,0,3,1\n", "lengths"),
        ("m,n,k,latency_ms,overhead_ms\n1,2,3,1,2\n", "not positive after overhead_ms"),
        ("m,n,k,latency_ms,dtype\n1,2,3,1,f12\n", "'f12'"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostError) as caught:
        samples(path)
    assert why in caught.value.why
    assert "row 1" in caught.value.where


def test_too_few_measurements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="too few"):
        fit_products(CHIP, samples(measured(tmp_path / "few.csv", CHIP, 12)))


def test_every_device_has_a_row_that_says_what_it_was_fitted_to() -> None:
    names = {entry.name for entry in devices()}
    for entry in devices():
        for table in (entry.products, entry.attention):
            assert table.measured in names | {""}
            assert bool(table.error) == (table.measured == entry.name)
            assert table.base in names - {entry.name} | {""}
    assert CHIP.products.error < 0.08
    assert CHIP.products.spread < 0.25
    assert CHIP.attention.error < 0.12


def test_a_device_without_rows_is_priced_as_the_nearest(tmp_path: Path) -> None:
    """A slower H200 by another name; its constants are H100's, as nothing else was measured."""
    text = resources.files("autopar.cost").joinpath("devices.toml").read_text("utf-8")
    made = text[text.index("[H200]") : text.index("[B200]")].replace("[H200]", "[Z9000]")
    made = made.replace("memory_bandwidth = 4.8e12", "memory_bandwidth = 4e12")
    (tmp_path / "devices.toml").write_text(text + made, encoding="utf-8")
    with patch.object(resources, "files", lambda _: tmp_path):
        found = devices.__wrapped__()[-1]
    h100 = next(entry for entry in devices() if entry.name == "H100")
    assert (found.name, found.memory_bandwidth) == ("Z9000", 4e12)
    assert found.products == dataclasses.replace(h100.products, error=0.0, spread=0.0)
    assert found.attention == dataclasses.replace(h100.attention, error=0.0, spread=0.0)
    assert found.links is None


@pytest.mark.parametrize("table", [Products, Attention])
def test_a_device_without_a_row_is_refused(table: type[Products] | type[Attention]) -> None:
    with pytest.raises(CostError, match="no row"):
        table.of("Z9000")


def test_tiles_of_gpus_lose_by_what_they_load() -> None:
    rates = {(rows, columns): rate for rows, columns, rate in CHIP.products.tiles}
    assert rates[256, 128] == 1
    assert all(rates[rows, columns] == rates[columns, rows] for rows, columns in rates if rows < 64)
    assert rates[256, 128] > rates[128, 128] > rates[64, 64] > rates[16, 64]
