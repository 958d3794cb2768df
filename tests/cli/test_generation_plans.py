"""`autopar plan --task generate` and `autopar explain` of its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli import main
from autopar.cli.common import generation_view
from autopar.explain.views import VIEWS, view
from autopar.generation_plan import GenerationPlan
from autopar.ir.mesh import Mesh
from autopar.plan_entries import ModelSpec
from autopar.planning.generation.graphs import Sizes
from autopar.planning.options import Options

SIZES = ("--batch", "4", "--prompt", "16", "--new-tokens", "8", "--layers", "2")


def run(*args: object) -> str:
    result = CliRunner().invoke(main, [str(each) for each in args])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_the_plan_says_among_how_many_stages_it_chose(tmp_path: Path) -> None:
    asked = ("plan", "gpt2", "--mesh", "H100: gpu=2", "--task", "generate", "--stages", "auto")
    printed = run(*asked, *SIZES, "-o", tmp_path / "plan.toml")
    plan = GenerationPlan.load(tmp_path / "plan.toml")
    figures = json.loads(run(*asked, *SIZES, "--json"))
    assert set(figures["seconds_by_stages"]) == {"1", "2"}
    assert figures["seconds_by_stages"][str(figures["stages"])] == pytest.approx(plan.seconds)
    assert min(figures["seconds_by_stages"].values()) == pytest.approx(plan.seconds)
    assert f"stages              {len(plan.decode.stages)}, the fastest of 1 (" in printed


@pytest.mark.slow
def test_views_of_a_generation_add_up_with_its_caches() -> None:
    spec, mesh = ModelSpec("gpt2", 4, None, 2), Mesh.parse("H100: gpu=2")
    found = generation_view.planned(spec, mesh, Options(), Sizes(4, 16, 8), lambda stage: None)
    for _, explained in generation_view._explanations(found.plan, found.graphs, None):
        # Two layers, keys and values: 4 sequences of 24 positions and 768 features in float32.
        assert explained.memory["caches"] in [2 * 2 * 4 * 24 * 768 * 4 / parts for parts in (1, 2)]
        for by in VIEWS:
            held = sum(row.held for row in view(explained, by))
            assert held == pytest.approx(sum(explained.memory.values()))
