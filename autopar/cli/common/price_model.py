"""The prices that commands use for a plan: its calibration, or closed forms."""

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
    help="The calibration that the plan was made with, a file that `autopar calibrate` wrote.",
)


def prices(
    plan: StagePlan, file: Path | None, whole: Mesh | None = None, *, must: bool = False
) -> AnalyticModel | MeasuredModel:
    """Returns measured prices if there is a calibration, else closed forms.

    Warns, or raises with `must`, if these are not the prices that the plan was made with.

    Args:
        plan: the plan of a stage.
        file: the calibration; None for closed forms.
        whole: the mesh of the whole pipeline, which was calibrated, or whose devices wait for one
            another; None for the plan's own mesh.
        must: whether to refuse prices other than the plan's own.

    Returns:
        A cost model, which predicts seconds.

    Raises:
        CalibrationError: the file cannot be read or is for another device or mesh; with `must`,
            the plan was made with another calibration.
    """
    if file is None:
        if plan.calibration:
            missing = f"the plan was made with the calibration {plan.calibration}"
            _differ(missing, "no calibration is given, and closed forms differ from it", must)
        model = AnalyticModel(plan.mesh, in_step=True, whole=whole)
        model.chosen = plan.collectives
        return model
    known = Calibration.load(file)
    measured = MeasuredModel(plan.mesh, known, whole)
    measured.chosen = plan.collectives
    own = plan.calibration or "closed forms"
    if known.fingerprint != plan.calibration:
        what = f"the plan was made with {own}"
        _differ(what, f"{file} is the calibration {known.fingerprint} of {known.date}", must)
    return measured


def _differ(what: str, why: str, must: bool) -> None:
    if must:
        raise CalibrationError(what, why=why, todo="pass the plan's own: --calibration FILE")
    say(f"{what}; {why}", fg="yellow", err=True)
