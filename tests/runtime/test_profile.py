"""The profile of a measured step: every action on every rank, on one clock, in one file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import pins
from autopar.errors import ProgramError
from autopar.inter_op.schedules import schedule
from autopar.runtime.profile import Event, merged
from autopar.runtime.step_parts import CLOCK
from tests.support import models
from tests.support.ranks import run_ranks

MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: gpu=4 @10GB/s 1us"


def profile(folder: str) -> None:
    """A step in one piece, one in stages, and one that cannot be written."""
    torch.manual_seed(0)
    model, batch = models.mlp((8, 8, 8, 8, 8))
    given: dict[str, Any] = {"loss_fn": models.squared_error, "example_inputs": batch}
    plain = autopar.compile(model, MESH, pins=pins.data_parallel(), **given)
    staged = autopar.compile(model, MESH, stages=4, microbatches=4, schedule="zb_h1", **given)
    for program, name in ((plain, "plain.json"), (staged, "staged.json")):
        program.step(**batch)
        program.step(**batch, profile=Path(folder, name))
    with pytest.raises(ProgramError, match="cannot write the profile"):
        plain.step(**batch, profile=Path(folder, "missing", "trace.json"))
    plain.step(**batch)  # nobody waits for anybody


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiles")
    run_ranks(profile, str(made))
    return made


def events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return found


def test_every_rank_does_its_row_in_order(folder: Path) -> None:
    found = events(folder / "staged.json")
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert [name.split()[1] for name in names] == list("0123")
    for rank, row in enumerate(schedule("zb_h1", 4, 4).rows):
        done = [e for e in found if e.get("cat") == "action" and e["pid"] == rank]
        assert [e["name"] for e in sorted(done, key=lambda e: e["ts"])] == list(map(str, row))


def test_ranks_have_one_clock(folder: Path) -> None:
    """No stage begins before what it needs has ended, on whatever rank."""
    done = {e["name"]: e for e in events(folder / "staged.json") if e.get("cat") == "action"}
    end = {name: e["ts"] + e["dur"] for name, e in done.items()}
    for batch in range(4):
        for stage in range(1, 4):
            assert end[f"F{stage - 1}.{batch}"] <= done[f"F{stage}.{batch}"]["ts"]
            assert end[f"I{stage}.{batch}"] <= done[f"I{stage - 1}.{batch}"]["ts"]


def test_what_is_sent_is_shown(folder: Path) -> None:
    def sent(file: str, rank: int) -> set[str]:
        found = events(folder / file)
        return {e["name"] for e in found if e.get("cat") == "communication" and e["pid"] == rank}

    assert {"gloo:send", "gloo:recv"} <= sent("staged.json", 1)
    assert all("gloo:all_reduce" in sent("plain.json", rank) for rank in range(4))


def test_parts_of_a_step_follow_one_another(folder: Path) -> None:
    found = [e for e in events(folder / "plain.json") if e.get("cat") == "phase" and e["pid"] == 2]
    found.sort(key=lambda e: e["ts"])
    assert [e["name"] for e in found] == ["batch", "forward", "backward", "optimizer"]
    for one, other in itertools.pairwise(found):
        assert one["ts"] + one["dur"] <= other["ts"]


def test_clocks_of_hosts_are_set_alike() -> None:
    """Two hosts whose clocks differ by an hour; the last rank of each leaves the barrier at 0."""
    hour = 3.6e9
    ranks = [
        ("a", [Event("step", CLOCK, "", 10.0, 1.0), Event("step", "action", "F0.0", 15.0, 2.0)]),
        ("a", [Event("step", CLOCK, "", 12.0, 1.0), Event("step", "action", "F1.0", 18.0, 2.0)]),
        ("b", [Event("step", CLOCK, "", hour, 1.0), Event("step", "action", "F2.0", hour + 9, 1)]),
    ]
    found = [e for e in json.loads(merged(ranks))["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"]) for e in found] == [
        (0, "F0.0", 3.0), (1, "F1.0", 6.0), (2, "F2.0", 9.0)
    ]  # fmt: skip


def test_what_overlaps_stands_in_rows_of_its_own() -> None:
    sent = [Event("network", "communication", str(n), 10.0 * n, 15.0) for n in range(4)]
    trace = merged([("a", [Event("step", CLOCK, "", 0.0, 0.0), *sent])])
    found = [e for e in json.loads(trace)["traceEvents"] if e["ph"] == "X"]
    rows = {n: [e for e in found if e["tid"] == n] for n in {e["tid"] for e in found}}
    assert len(rows) == 2
    for row in rows.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(row))
