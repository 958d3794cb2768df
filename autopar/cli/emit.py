"""`autopar emit`: writes the program of a plan, alone or with all files that it needs to run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from autopar.capture.capture import Captured
from autopar.cli.common.console import say, stages, writing
from autopar.cli.common.model_options import MODEL, RULES, is_data, own_rules
from autopar.cli.common.open_plan import PlanFile
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.cli.common.run_tensors import (
    batch_from,
    checked_inputs,
    random_weights,
    weights_from,
)
from autopar.intra_op.rule_table import table
from autopar.plan_entries import ModelSpec
from autopar.planning.trace import Trace
from autopar.runtime import folder
from autopar.runtime.update.update import Training
from autopar.session.compiled import Compiled
from autopar.zoo.loading import random_inputs


class _Batch(click.ParamType[int | Path]):
    """A number of samples, or a file."""

    name = "number or file"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | Path:
        """Returns the number, or the path of a file that exists."""
        if isinstance(value, (int, Path)):
            return value
        if re.fullmatch("[0-9]{1,18}", str(value)):
            return int(value)
        if not os.path.isfile(value):
            self.fail(f"{str(value)[:80]!r} is neither a number nor a file", param, ctx)
        return Path(value)


@dataclass(frozen=True)
class _ExtraFiles:
    """Files to write into a program's folder.

    Attributes:
        weights, batch: files; None for none.
        random: whether to draw what no file gives.
    """

    weights: Path | None
    batch: Path | None
    random: bool

    def tensors(self, asked: PlanFile, captured: Captured) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of each file to write; raises the errors of `run_tensors`."""
        found, count = dict[str, dict[str, Tensor]](), 1
        if asked.plan.is_pipeline:
            count = asked.plan.microbatches
        if self.weights is not None:
            found["weights.safetensors"] = weights_from(self.weights, asked.call.model, captured)
        elif self.random:
            found["weights.safetensors"] = random_weights(asked.call.model, captured)
        if self.batch is not None:
            found["batch.safetensors"] = batch_from(self.batch, captured, count)
        elif self.random:
            spec, inputs = asked.spec, asked.call.kwargs
            if is_data(spec.source):
                inputs = random_inputs(spec.source, batch=spec.batch, seq=spec.seq)
            found["batch.safetensors"] = checked_inputs(inputs, captured, count)
        return found


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
@click.option(
    "--batch",
    type=_Batch(),
    help="Samples in the whole batch of a step; or a safetensors file with the inputs by name, to "
    "write beside the program.",
)
@click.option("--seq", type=click.IntRange(1, 2**31), help="Tokens per sample.")
@click.option(
    "--layers", type=click.IntRange(1, 2**14), help="Number of blocks, instead of the model's own."
)
@click.option(
    "--weights",
    type=click.Path(exists=True, path_type=Path),
    help="Write these weights beside the program: a folder of safetensors such as Hugging Face's, "
    "one such file, or a checkpoint.",
)
@click.option(
    "--random",
    is_flag=True,
    help="Write a random batch and random weights beside the program, unless a file gives them.",
)
@CALIBRATION
def command(
    file: Path,
    output: Path,
    model: str | None,
    rule_files: tuple[Path, ...],
    calibration: Path | None,
    weights: Path | None,
    random: bool,
    **sizes: Any,
) -> None:
    """Write the program of a plan, in ordinary PyTorch.

    A plan that was edited by hand is checked against the rules first.

    \b
    autopar emit plan.toml -o program
    autopar emit plan.toml -o program --weights path/to/model --batch batch.safetensors
    autopar emit plan.toml -o program --random
    """
    known, batch = table(own_rules(rule_files)), sizes.pop("batch")
    samples, given = (None, batch) if isinstance(batch, Path) else (batch, None)
    asked = PlanFile(file, model, ModelSpec("", samples, **sizes), known, calibration)
    plan = asked.plan
    with stages(quiet=False) as progress:
        for stage in plan.stages:
            prices(stage, calibration, plan.mesh)
        captured = asked.captured(progress)
        progress("emit")
        compiled = Compiled.of(captured, plan, asked.options, Trace(None))
        files = compiled.files(Training(torch.optim.AdamW))
        tensors = _ExtraFiles(weights, given, random).tensors(asked, captured)
    with writing(output):
        folder.write(output, files, tensors)
    program = output / "program.py"
    stage_files = [name for name in files if name.startswith("stage_")]
    say(
        f"{program}: {len(files['program.py'].splitlines())} lines"
        f"{', with ' + ', '.join(stage_files) if stage_files else ''}\n"
        + _next(tensors, bool(stage_files))
        + f"run\n  torchrun --nproc-per-node {plan.mesh.size} {program}"
    )


def _next(written: dict[str, dict[str, Tensor]], staged: bool) -> str:
    """Returns a sentence on the files that a program's folder still lacks."""
    names = {
        "weights.safetensors": "parameters() of the stages" if staged else "its parameters()",
        "batch.safetensors": "INPUTS",
    }
    lacking = [name for name in names if name not in written]
    if not lacking:
        return ""
    of = " and ".join(names[name] for name in lacking)
    return f"put {' and '.join(lacking)} beside it, with the names of {of}, and "
