"""`autopar devices`: what prices were fitted to, and fits of new devices."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli import main
from autopar.cost.device import devices


def test_every_device_is_listed_with_what_it_was_fitted_to() -> None:
    found = CliRunner().invoke(main, ["devices", "--json"])
    rows = {row["device"]: row for row in json.loads(found.stdout)}
    assert list(rows) == [entry.name for entry in devices()]
    assert rows["H200"]["products"] == "as H100"
    assert rows["H100"]["products"].endswith("%")
    assert rows["L40S"]["products"] == "1.0% fitted, else as RTX-4090"
    assert "A100-80" in CliRunner().invoke(main, ["devices"]).stdout


COLUMNS = (
    "m", "n", "k", "batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "nbytes",
    "op_name", "num_gpus", "total_bytes", "latency_ms",
)  # fmt: skip
MOVED, RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}, 90e9


def imagined() -> Iterator[dict[str, object]]:
    """Measurements of a device that no table knows, by formulas of its own, each off by 3 %."""
    dice = random.Random(11)

    def milliseconds(seconds: float) -> float:
        return float(f"{1e3 * seconds * dice.uniform(0.97, 1.03):.6g}")

    for size in range(10, 31):
        for nbytes in (2**size, 3 * 2**size):
            yield {"nbytes": nbytes, "latency_ms": milliseconds(7e-6 + nbytes / 1.1e12)}
    for m, n, k in product((64, 512, 4096, 16384), (256, 2048, 8192), (512, 1024, 4096, 8192)):
        moved, flops = 2 * (m * k + k * n + m * n), 2 * m * n * k
        seconds = 7e-6 + max(moved / 1.2e12, flops / 280e12)
        yield {"m": m, "n": n, "k": k, "latency_ms": milliseconds(seconds)}
    for batch, tokens, heads in product((1, 2, 4, 8), (128, 512, 2048, 8192), (4, 16, 64)):
        seconds = 20e-6 + 2 * batch * heads * tokens**2 * 128 / 100e12
        yield {
            "batch_size": batch, "isl": tokens, "num_heads": heads, "num_key_value_heads": heads,
            "head_dim": 128, "latency_ms": milliseconds(seconds),
        }  # fmt: skip
    for kind, count, size in product(MOVED, (2, 4, 8), range(12, 30, 3)):
        sent = MOVED[kind] * (count - 1) / count * 2**size
        seconds = MOVED[kind] * (count - 1) * 4e-6 + sent / RING
        yield {
            "op_name": kind, "num_gpus": count, "total_bytes": 2**size,
            "latency_ms": milliseconds(seconds),
        }  # fmt: skip


def test_a_described_device_is_fitted_from_one_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(imagined())
    words = ["devices", "fit", str(path), "--device", "mine[400TFLOP/s 64GiB 1.6TB/s]"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    figures = {
        name: float(value) for name, sign, value in (x.partition(" = ") for x in lines) if sign
    }
    bandwidth = 1.6e12 * figures["memory_efficiency"]
    assert bandwidth == pytest.approx(1.1e12, rel=0.05)
    started = figures["launch"] + figures["memory_ramp"] / bandwidth
    assert started == pytest.approx(7e-6, rel=0.1)
    assert figures["intra_bandwidth"] == pytest.approx(RING, rel=0.05)
    assert figures["intra_latency"] == pytest.approx(4e-6, rel=0.1)
    errors = [tuple(map(float, re.findall(r"[\d.]+", x)[-2:])) for x in lines if "error " in x]
    for place in (at for at, x in enumerate(lines) if x.startswith("# tables/")):
        row = dict(zip(lines[place + 1].split(","), lines[place + 2].split(","), strict=True))
        assert (row["device"], row["measured"]) == ("mine", "mine")
        errors.append((float(row["error"]), float(row["spread"])))
    assert len(errors) == 4
    # Formulas of memory and collectives are of the right form, so that only noise is left.
    assert all(0 < error < 0.03 and spread < 0.06 for error, spread in errors[:2])
    assert all(error < 0.12 and error <= spread for error, spread in errors[2:])


def test_few_constants_are_fitted_to_few_measurements() -> None:
    """The row of the table is what the command prints of the published measurements."""
    path = Path(__file__).parents[2] / "benchmarks" / "kernel_measurements.csv"
    words = ["devices", "fit", str(path), "--device", "L40S", "--only", "efficiency"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    head, line = found.stdout.splitlines()[1:3]
    row = dict(zip(head.split(","), line.split(","), strict=True))
    table = next(entry for entry in devices() if entry.name == "L40S").products
    assert float(row["efficiency"]) == pytest.approx(table.efficiency, rel=2e-3)
    assert float(row["error"]) == pytest.approx(table.error, abs=1e-3)
    assert float(row["throttle"]) == table.throttle
    assert row["base"] == table.base == "RTX-4090"
    few = CliRunner().invoke(main, [*words[:-1], "efficiency,throttle"])
    assert few.exit_code == 2
    assert "too few to fit 2 constants" in few.output
    unknown = CliRunner().invoke(main, [*words[:-1], "speed"])
    assert unknown.exit_code == 2
    assert "no constant is named speed" in unknown.output


def test_a_file_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text("device,m,n,k,latency_ms\nH100,1,2,3,4\n", encoding="utf-8")
    found = CliRunner().invoke(main, ["devices", "fit", str(path), "--device", "B200"])
    assert found.exit_code == 2
    assert "B200" in found.output
