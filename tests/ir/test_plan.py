"""Plans as files: round trip, whole or not at all, and hostile or damaged input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.mesh import Mesh
from autopar.plan import NodePlan, Plan


def example() -> Plan:
    lines = {
        "x": "[8, 16]",
        "fc": "[8@node, 16] -sum(gpu); [16, 64@gpu] -sum(node) -> [8@node, 64@gpu]",
        "down": "[8@node, 64@gpu]; [64@gpu, 16] -> [8@node, 16] +sum(gpu)",
    }
    nodes = {name: NodePlan.parse(line) for name, line in lines.items()}
    assert {name: str(node) for name, node in nodes.items()} == lines
    mesh = Mesh.parse("H100: node=2 @50GB/s 10us, gpu=2")
    model: dict[str, str | int] = {"source": "mlp.py:run", "batch": 8}
    return Plan("mlp sha256:0123abcd", mesh, nodes, {"step_seconds": 1.25e-3}, model)


def test_a_plan_reads_back(tmp_path: Path) -> None:
    plan = example()
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_a_plan_without_a_model_reads_back() -> None:
    plan = replace(example(), model={})
    assert "model" not in plan.to_toml()
    assert Plan.from_toml(plan.to_toml()) == plan


def test_a_failed_write_leaves_the_old_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = example()
    plan.save(tmp_path / "plan.toml")

    def fail(self: Plan) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(Plan, "to_toml", fail)
    with pytest.raises(OSError, match="disk full"):
        plan.save(tmp_path / "plan.toml")
    monkeypatch.undo()
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_every_truncation_is_named_or_whole() -> None:
    plan = example()
    text = plan.to_toml()
    for length in range(len(text)):
        try:
            read = Plan.from_toml(text[:length])
        except PlanError:
            continue
        assert set(read.nodes) <= set(plan.nodes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version = 1", "version = 2"),
        ("version = 1", 'version = "__import__(1)"'),
        ("node=2 @50GB/s", "node=two"),
        ("[8, 16]", "__import__('os')"),
        ("0.00125", "'soon'"),
        ("0.00125", "nan"),
        ("0.00125", "-inf"),
        ("0.00125", "1" + "0" * 400),
        ("0.00125", "true"),
        ("batch = 8", "batch = true"),
        ("batch = 8", "batch = 8.0"),
        ("batch = 8", "batch = 0"),
        ("batch = 8", "batch = [8]"),
        ("batch = 8", "command = 'rm'"),
        ('"mlp.py:run"', "1"),
        ("[model]", "[[model]]"),
        ("[layouts]", "[layout]"),
    ],
)
def test_damaged_plans_are_named(old: str, new: str) -> None:
    text = example().to_toml()
    assert old in text
    with pytest.raises(PlanError):
        Plan.from_toml(text.replace(old, new))


def test_missing_and_binary_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\x00\x80")
    for name in ("missing.toml", "binary.toml"):
        with pytest.raises(PlanError):
            Plan.load(tmp_path / name)


def test_a_plan_for_something_else_says_what_differs() -> None:
    plan = example()
    plan.check(plan.graph, {"x", "fc", "down"}, Mesh.parse("H100: node=2, gpu=2"))
    with pytest.raises(PlanMismatchError, match="another mesh"):
        plan.check(plan.graph, {"x", "fc", "down"}, Mesh.parse("H100: node=4, gpu=2"))
    with pytest.raises(PlanMismatchError, match="up"):
        plan.check("mlp sha256:ffffffff", {"x", "up", "down"}, plan.mesh)
