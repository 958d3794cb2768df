"""Differences of hand-written plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from autopar.explain import (
    Difference,
    Figure,
    changes,
    decisions,
    difference,
    figures,
    render_difference,
    signed,
)
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes, format_seconds
from autopar.plan_entries import NodePlan, Prediction
from autopar.stage_plan import StagePlan

LINES = {
    "x": "[8, 16]",
    "up": "[8@node, 16] -sum(gpu); [16, 64@gpu] -sum(node) -> [8@node, 64@gpu]",
    "down": "[8@node, 64@gpu]; [64@gpu, 16] -> [8@node, 16] +sum(gpu)",
}
MESH = Mesh.parse("H100: node=2 @50GB/s 10us, gpu=2 @450GB/s 3us")


def plan(predicted: Prediction | None = None, **lines: str) -> StagePlan:
    nodes = {name: NodePlan.parse(line) for name, line in {**LINES, **lines}.items() if line}
    return StagePlan("mlp sha256:0123abcd", MESH, nodes, predicted=predicted or Prediction(2.0))


def text(found: Difference, everything: bool = False) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        for part in render_difference(found, ("A", "B"), everything=everything):
            console.print(part)
    return captured.get()


def test_only_the_spelling_differs() -> None:
    a = plan(down="[8, 64] -> [8, 16] +sum(node, gpu)")
    b = plan(down="[8, 64] -> [8, 16] +sum(gpu, node)")
    assert str(a.nodes["down"]) != str(b.nodes["down"])
    assert difference(a, b).equal
    assert not difference(a, plan()).equal


@pytest.mark.parametrize(
    "other",
    [
        replace(plan(), graph="mlp sha256:ffffffff"),
        replace(plan(), mesh=Mesh.parse("H100: node=2 @50GB/s 10us, gpu=4 @450GB/s 3us")),
        replace(plan(), pins={"up": "[8, 64]"}),
        plan(Prediction(2.5)),
        plan(Prediction(2.0, 4.0)),
        plan(down="[8@node, 64]; [64, 16] -> [8@node, 16]"),
        plan(down=""),
        plan(more="[8] -> [8]"),
    ],
)
def test_whatever_differs_is_seen_and_shown(other: StagePlan) -> None:
    found = difference(plan(), other)
    assert not found.equal
    assert not difference(other, plan()).equal
    assert text(found) != text(difference(plan(), plan()))


def test_operands_are_shown_where_results_agree() -> None:
    line = "[8@node, 64]; [64, 16] -> [8@node, 16] +sum(gpu)"
    (change,) = changes(decisions(plan()), decisions(plan(down=line)))
    assert (change.before, change.after) == (LINES["down"], line)
    (change,) = changes(decisions(plan()), decisions(plan(down="[8, 64]; [64, 16] -> [8, 16]")))
    assert (change.before, change.after) == ("[8@node, 16] +sum(gpu)", "[8, 16]")


def test_nodes_of_one_plan_only_have_no_layout_in_the_other() -> None:
    found = changes(decisions(plan()), decisions(plan(down="", more="[8] -> [8@gpu]")))
    assert {change.nodes: (change.before, change.after) for change in found} == {
        ("down",): ("[8@node, 16] +sum(gpu)", ""),
        ("more",): ("", "[8@gpu]"),
    }


def test_figures_of_both_plans_stand_side_by_side() -> None:
    before = Prediction(step_seconds=2.0, peak_bytes=8.0)
    after = Prediction(step_seconds=1.5, host_seconds=0.5)
    found = {figure.name: figure for figure in figures(before, after)}
    assert found["step_seconds"] == Figure("step_seconds", 2.0, 1.5)
    assert found["step_seconds"].change == -0.5
    assert found["peak_bytes"].change == -8.0
    assert found["host_seconds"] == Figure("host_seconds", 0.0, 0.5)
    assert found["bubble"] == Figure("bubble", 0.0, 0.0)
    shown = text(difference(plan(before), plan(after)))
    assert "-25.0%" in shown
    assert "copies to and from the host" in shown
    assert "bubble" not in shown
    idle = text(difference(plan(Prediction(bubble=0.25)), plan()))
    assert "bubble" in idle
    assert "25.0%" in idle


def test_rounding_is_no_change() -> None:
    assert sum([0.1] * 10) != 1.0
    assert Figure("step_seconds", 1.0, sum([0.1] * 10)).change == 0.0
    assert Figure("step_seconds", 1.0, 1.0 + 1e-9).change > 0.0


def test_changes_have_a_sign() -> None:
    assert signed(2e-3, format_seconds) == "+2 ms"
    assert signed(-2048, format_bytes) == "-2 KiB"
    assert signed(0, format_seconds) == "0 s"


def test_long_tables_are_cut_and_shown_whole_on_demand() -> None:
    many = {f"node_{number}": f"[{number}] -> [{number}@gpu]" for number in range(2, 40)}
    found = difference(plan(), plan(None, **many))
    assert len(found.changes) == len(many)
    short, whole = text(found), text(found, everything=True)
    assert sum(f"%{name} " in short for name in many) == 16
    assert "and 22 more" in short
    assert all(f"%{name} " in whole for name in many)
