"""The prices under which commands look at a plan: those it was made under, or closed forms."""

from __future__ import annotations

from pathlib import Path

import click

from autopar.cli.common.console import say
from autopar.cost.calibration import Calibration
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel
from autopar.errors import CalibrationError
from autopar.ir.mesh import Mesh
from autopar.stage_plan import StagePlan

CALIBRATION = click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The prices that the plan was made under, if `autopar calibrate` measured them.",
)


def prices(
    plan: StagePlan, file: Path | None, whole: Mesh | None = None, *, must: bool = False
) -> AnalyticModel | MeasuredModel:
    """Measured prices where there is a calibration, else closed forms.

    Where these are not the plan's own, a person is told, or with `must` refused.

    Args:
        plan: of a model in one piece, or of a stage.
        file: the calibration.
        whole: of a stage the mesh of the pipeline, which the calibration is of.
        must: whether these must be the plan's own.

    Raises:
        CalibrationError: the file cannot be read or is of another device or mesh; with `must`, it
            is not the calibration that the plan was made under.
    """
    if file is None:
        if plan.calibration:
            missing = f"the plan was made under the calibration {plan.calibration}"
            _differ(missing, "it is not given, and closed forms are other prices", must)
        model = AnalyticModel(plan.mesh, in_step=True)
        model.chosen = plan.collectives
        return model
    known = Calibration.load(file)
    made = MeasuredModel(plan.mesh, known, whole)
    made.chosen = plan.collectives
    own = plan.calibration or "closed forms"
    if known.fingerprint != plan.calibration:
        what = f"the plan was made under {own}"
        _differ(what, f"{file} is the calibration {known.fingerprint} of {known.date}", must)
    return made


def _differ(what: str, why: str, must: bool) -> None:
    if must:
        raise CalibrationError(what, why=why, todo="give its own: --calibration FILE")
    say(f"{what}; {why}", fg="yellow", err=True)
