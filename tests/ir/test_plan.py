"""Plans as files: round trips, atomic writes, and hostile or damaged input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.mesh import Mesh
from autopar.ir.update import Update
from autopar.plan import Plan
from autopar.plan_entries import UNNAMED, ModelSpec, NodePlan, Prediction
from autopar.stage_plan import StagePlan


def example() -> Plan:
    lines = {
        "x": "[8, 16]",
        "fc": "[8@node, 16] -sum(gpu); [16, 64@gpu] -sum(node) -> [8@node, 64@gpu]",
        "down": "[8@node, 64@gpu]; [64@gpu, 16] -> [8@node, 16] +sum(gpu)",
    }
    nodes = {name: NodePlan.parse(line) for name, line in lines.items()}
    assert {name: str(node) for name, node in nodes.items()} == lines
    mesh = Mesh.parse("H100: node=2 @50GB/s 10us, gpu=2")
    predicted = Prediction(step_seconds=1.25e-3)
    stage = StagePlan("mlp sha256:0123abcd", mesh, nodes, predicted=predicted)
    return Plan.of(stage, ModelSpec("mlp.py:run", 8))


# As the first version of the format had it.
OLD = """\
version = 1
graph = "mlp sha256:0123abcd"
mesh = "H100: node=2 @50GB/s 10us, gpu=2"

[model]
source = "mlp.py:run"
batch = 8

[predicted]
step_seconds = 0.00125

[step]
microbatches = 4
bucket = 1000.0

[memory]
limit = 64e9
state = 3.0

[solver]
name = "ilp"
nodes = 3
gap = 0.0
seconds = 0.1

[layouts]
x = "[8, 16]"
fc = "[8@node, 16] -sum(gpu); [16, 64@gpu] -sum(node) -> [8@node, 64@gpu]"
down = "[8@node, 64@gpu]; [64@gpu, 16] -> [8@node, 16] +sum(gpu)"
"""


def test_a_plan_of_the_first_version_reads_as_it_was_meant() -> None:
    plan, now = Plan.from_toml(OLD), example()
    stage = replace(now.stage, microbatches=4, bucket=1000, limit=64e9, update=Update.of_bytes(3.0))
    assert plan == replace(now, stages=(stage,), microbatches=4)
    assert (plan.version, plan.stage.solver.name) == (1, "ilp")
    again = Plan.from_toml(plan.to_toml())
    assert (again, again.version) == (plan, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("limit = 64e9", "limit = 'all'"),
        ("state = 3.0", "stage = 3.0"),
        ("microbatches = 4", "microbatches = 4.5"),
        ("[step]", "[[step]]"),
        ("[layouts]", "[layout]"),
        ("version = 1", "version = 3"),
    ],
)
def test_damaged_plans_of_the_first_version_are_named(old: str, new: str) -> None:
    assert old in OLD
    with pytest.raises(PlanError):
        Plan.from_toml(OLD.replace(old, new))


def test_a_plan_reads_back(tmp_path: Path) -> None:
    plan = example()
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_a_plan_without_a_model_reads_back() -> None:
    plan = replace(example(), model=UNNAMED)
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
        assert set(read.stage.nodes) <= set(plan.stage.nodes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("version = 2", "version = 3"),
        ("version = 2", 'version = "__import__(1)"'),
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
        ("[stages.layouts]", "[stages.layout]"),
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
    plan = example().stage
    plan.check(plan.graph, {"x", "fc", "down"}, Mesh.parse("H100: node=2, gpu=2"))
    with pytest.raises(PlanMismatchError, match="another mesh"):
        plan.check(plan.graph, {"x", "fc", "down"}, Mesh.parse("H100: node=4, gpu=2"))
    with pytest.raises(PlanMismatchError, match="up"):
        plan.check("mlp sha256:ffffffff", {"x", "up", "down"}, plan.mesh)
