"""The command line explains and simulates the plans of all features."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import autopar
from autopar.cli import main
from tests.features.feature import Case
from tests.features.models import batches, make
from tests.features.sharded import MESH
from tests.features.table import FEATURES, FURTHER
from tests.features.zoo import FAMILIES

BOTH = {**FEATURES, **FURTHER}
MODEL = """
from tests.features.feature import Case
from tests.features.models import batches, make
from tests.features.table import FEATURES, FURTHER

def model():
    recipe = Case.of({model!r}, {names!r}, {{**FEATURES, **FURTHER}}).recipe
    return make(recipe), batches(recipe, 1)[0]
"""


def assert_explained(case: Case, folder: Path) -> None:
    recipe, options = case.recipe, dict(case.options)
    options.pop("backend", None)
    plan = autopar.plan(
        make(recipe),
        MESH,
        example_inputs=batches(recipe, 1)[0],
        microbatches=recipe.microbatches,
        **options,
    )
    file, source = folder / "plan.toml", folder / "source.py"
    file.write_text(plan.to_toml(), encoding="utf-8")
    source.write_text(MODEL.format(model=recipe.model, names=case.features), encoding="utf-8")
    runs = [("explain",), ("explain", "--json"), ("simulate",), ("simulate", "--json")]
    if "stages" in options:
        runs += [("explain", "--stage", str(n)) for n in range(options["stages"])]
    for command, *more in runs:
        shown = CliRunner().invoke(main, [command, str(file), "--model", f"{source}:model", *more])
        assert shown.exit_code == 0, (str(case), command, shown.output, repr(shown.exception))


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("name", BOTH)
def test_plans_of_all_features_are_explained(name: str, model: str, tmp_path: Path) -> None:
    for names in {(name,), ("stages", name), ("accumulation", name)}:
        assert_explained(Case.of(model, names, BOTH), tmp_path)
