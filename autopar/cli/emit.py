"""`autopar emit`: writes the program of a plan."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from autopar.cli.common.console import say, stages, writing
from autopar.cli.common.model_options import MODEL, RULES, own_rules, shapes
from autopar.cli.common.opened import PlanFile
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.intra_op.rule_table import table
from autopar.plan_entries import ModelSpec
from autopar.planning.trace import Trace
from autopar.runtime import folder
from autopar.runtime.update.update import Training
from autopar.session.compiled import Compiled


@click.command("emit")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write.",
)
@MODEL
@RULES
@shapes
@CALIBRATION
def command(
    file: Path,
    output: Path,
    model: str | None,
    rule_files: tuple[Path, ...],
    calibration: Path | None,
    batch: int | None,
    seq: int | None,
    layers: int | None,
) -> None:
    """Write the program of a plan, in ordinary PyTorch, without weights.

    A plan that was edited by hand is checked against the rules first.

    \b
    autopar emit plan.toml -o program
    """
    known = table(own_rules(rule_files))
    asked = PlanFile(file, model, ModelSpec("", batch, seq, layers), known, calibration)
    plan = asked.plan
    with stages(quiet=False) as progress:
        for stage in plan.stages:
            prices(stage, calibration, plan.mesh)
        captured = asked.captured(progress)
        progress("emit")
        compiled = Compiled.of(captured, plan, asked.options, Trace(None))
        files = compiled.files(Training(torch.optim.AdamW))
    with writing(output):
        folder.write(output, files, {})
    program = output / "program.py"
    stage_files = [name for name in files if name.startswith("stage_")]
    say(
        f"{program}: {len(files['program.py'].splitlines())} lines"
        f"{', with ' + ', '.join(stage_files) if stage_files else ''}\n"
        "put weights.safetensors and batch.safetensors beside it, with the names of "
        f"{'parameters() of the stages' if stage_files else 'its parameters()'} and INPUTS, and "
        f"run\n  torchrun --nproc-per-node {plan.mesh.size} {program}"
    )
