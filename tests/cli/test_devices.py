"""`autopar devices`: what prices were fitted to, and fits of new devices."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from autopar.cli import main
from autopar.cost.device import devices


def test_every_device_is_listed_with_what_it_was_fitted_to() -> None:
    found = CliRunner().invoke(main, ["devices", "--json"])
    rows = {row["device"]: row for row in json.loads(found.stdout)}
    assert list(rows) == [entry.name for entry in devices()]
    assert rows["H200"]["products"] == "as H100"
    assert rows["H100"]["products"].endswith("%")
    assert "A100-80" in CliRunner().invoke(main, ["devices"]).stdout


def test_a_fit_prints_the_row_of_a_described_device(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    lines = ["batch_size,isl,num_heads,num_key_value_heads,head_dim,latency_ms"]
    for batch in (1, 2, 4, 8):
        for tokens in (128, 512, 2048, 8192):
            for heads in (4, 16, 64):
                flops = 2.0 * batch * heads * tokens**2 * 128
                lines.append(f"{batch},{tokens},{heads},{heads},128,{0.02 + flops / 1e11:.5g}")
    path.write_text("\n".join(lines), encoding="utf-8")
    words = ["devices", "fit", str(path), "--device", "mine[400TFLOP/s 64GiB 1.6TB/s]"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    where, head, row = found.stdout.splitlines()
    assert where == "# tables/attention.csv"
    values = dict(zip(head.split(","), row.split(","), strict=True))
    assert (values["device"], values["measured"]) == ("mine", "mine")
    assert 0 < float(values["error"]) < 0.2
    assert 1e-5 < float(values["call"]) < 2.5e-5


def test_a_file_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text("device,m,n,k,latency_ms\nH100,1,2,3,4\n", encoding="utf-8")
    found = CliRunner().invoke(main, ["devices", "fit", str(path), "--device", "B200"])
    assert found.exit_code == 2
    assert "B200" in found.output
