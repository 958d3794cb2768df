"""`autopar emit`: the program of a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import torch

from autopar.cli.common import staged
from autopar.cli.common.console import say, stages, writing
from autopar.cli.common.model_options import MODEL, RULES, Wanted, open_whole, own_rules, shapes
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.codegen.emit import emit
from autopar.intra_op.rule import OpRule
from autopar.intra_op.table import table
from autopar.ir.graph_text import format_graph
from autopar.pipeline_plan import PipelinePlan, load_plan
from autopar.runtime import folder
from autopar.runtime.update.update import Training


@click.command("emit")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the program.",
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
    """Write the program of a plan: ordinary PyTorch, without weights; of a pipeline all stages.

    A plan that was edited by hand is checked against the rules first.

    \b
    autopar emit plan.toml -o program
    """
    known = table(own_rules(rule_files))
    wanted, plan = Wanted("", batch, seq, layers), load_plan(file)
    with stages(quiet=False) as stage:
        if isinstance(plan, PipelinePlan):
            files = staged.files(plan, file, model, wanted, known, calibration, stage)
        else:
            files = _files(file, model, wanted, known, calibration, stage)
    with writing(output):
        folder.write(output, files, {})
    program = output / "program.py"
    beside = [name for name in files if name.startswith("stage_")]
    say(
        f"{program}: {len(files['program.py'].splitlines())} lines"
        f"{', beside ' + ', '.join(beside) if beside else ''}\n"
        "put weights.safetensors and batch.safetensors beside it, under the names of "
        f"{'parameters() of the stages' if beside else 'its parameters()'} and its INPUTS, then\n"
        f"  torchrun --nproc-per-node {plan.mesh.size} {program}"
    )


def _files(
    file: Path,
    model: str | None,
    wanted: Wanted,
    known: dict[str, OpRule],
    calibration: Path | None,
    stage: Callable[[str], None],
) -> dict[str, str]:
    """The folder of a plan, name -> text."""
    chosen, captured = open_whole(file, model, wanted, known, stage)
    stage("emit")
    source = emit(captured.graph, chosen, prices(chosen, calibration).collective)
    tied = {k: v for k, v in captured.parameter_names.items() if k != v}
    return {
        "program.py": folder.standalone(source),
        "plan.toml": chosen.to_toml(),
        "graph.txt": format_graph(captured.graph),
        "program.toml": folder.settings(tied, Training(torch.optim.AdamW)),
    }
