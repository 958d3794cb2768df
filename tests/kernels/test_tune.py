"""The tuner writes the fastest launches into the table of its architecture, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from autopar_kernels.registry import launch
from autopar_kernels.registry.launch import Launch
from autopar_kernels.registry.operator import Operator
from benchmarks.gpu import tune

FASTEST = Launch(block=512, warps=2)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the committed table, for a GPU that is not there."""
    path = tmp_path / "launches.toml"
    shutil.copy(launch.TABLE, path)
    monkeypatch.setattr(tune, "TABLE", path)
    monkeypatch.setattr(tune, "architecture", lambda: "sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return path


def timed(operator: Operator, size: int, row: Launch) -> float:
    """One row is fast, those of many warps fail, and the rest is slow."""
    if row.warps > 16:
        return float("inf")
    return 1.0 if (row.block, row.warps) == (FASTEST.block, FASTEST.warps) else 2.0


def test_it_writes_the_fastest_rows_of_what_is_named(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = launch.read(table)
    monkeypatch.setattr(tune, "milliseconds", timed)
    monkeypatch.setattr("sys.argv", ["tune", "adamw_", "rms_norm"])
    tune.main()
    after = launch.read(table)
    assert after["adamw_"]["sm_90"] == (FASTEST,)  # half of the block that is committed
    # Nothing is faster than what there is: the rows stay, each for its sizes.
    assert after["rms_norm"]["sm_90"] == before["rms_norm"]["any"]
    for kernel, archs in before.items():
        own = {"sm_90"} if kernel in ("adamw_", "rms_norm") else set()
        assert after[kernel]["any"] == archs["any"]
        assert set(after[kernel]) == set(archs) | own
    assert "None has been timed" in table.read_text()  # comments are kept


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune"])
    with pytest.raises(SystemExit, match="no GPU"):
        tune.main()
