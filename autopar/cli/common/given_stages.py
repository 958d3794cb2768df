"""Options of `autopar plan` for given stages and for how kernels run, and its output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from autopar.cli.common.console import Stages, print_json, print_out, say, stages
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes, format_seconds
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.options import AUTO, Options

Command = TypeVar("Command", bound=Callable[..., Any])


def _stage_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """Returns a number of stages, or "auto"; click refuses anything else."""
    if value in (None, AUTO):
        return value
    return int(click.IntRange(1, 2**20)(value, param, ctx))


def stage_options(command: Command) -> Command:
    """Adds the options of microbatches, stages and their execution."""
    for option in (
        click.option(
            "--execution",
            metavar="HOW",
            help="How the system runs kernels, for predictions: 'compiled=blocks merged loss=steps "
            "host=compiled optimizer=28'. Default: one kernel per operator.",
        ),
        click.option(
            "--schedule",
            metavar="NAME",
            help="The order of stages and microbatches: 1f1b (the default), gpipe, "
            "'interleaved_1f1b chunks=2'.",
        ),
        click.option(
            "--accumulate",
            type=click.IntRange(1, 2**20),
            help="Without stages: number of microbatches whose gradients one update adds up.",
        ),
        click.option(
            "--mean-loss",
            is_flag=True,
            help="Train on the mean of the microbatches' losses, even if the batch's differs.",
        ),
        click.option(
            "--microbatches",
            type=click.IntRange(1, 2**20),
            help="Number of microbatches of a batch.",
        ),
        click.option(
            "--stages",
            "stage_count",
            metavar="NUMBER|auto",
            callback=_stage_count,
            help="Number of pipeline stages, along the outermost axis of the mesh; auto chooses "
            "stages, sub-meshes and microbatches for the whole --batch.",
        ),
    ):
        command = option(command)
    return command


def stages_of(
    count: int | str | None, batch: int | None, global_batch: int | None
) -> dict[str, Any]:
    """Returns the options of a given number of stages, or of a search for them.

    Raises:
        UsageError: the options contradict one another, or the samples in a step are missing.
    """
    if count in (None, AUTO) and global_batch is not None:
        return {"stages": AUTO, "global_batch": global_batch}
    if global_batch is not None:
        raise click.UsageError(
            f"--global-batch chooses the stages itself; pass --batch with --stages {count}"
        )
    if count == AUTO and batch is None:
        raise click.UsageError("--stages auto needs the samples in a step; pass --batch")
    return {"stages": count, "global_batch": batch if count == AUTO else None}


def show_given(
    spec: ModelSpec, mesh: Mesh, options: Options, output: Path | None, as_json: bool
) -> None:
    """Plans the stages that the options request, and prints and writes the plan."""
    from autopar.planning.capturing import Call, capture_call
    from autopar.planning.plan_model import plan_captured
    from autopar.zoo import load

    with stages(quiet=as_json) as stage:
        trace = Stages(None if options.trace is None else Path(options.trace), stage)
        module, inputs = load(spec.source, batch=spec.batch, seq=spec.seq, layers=spec.layers)
        call = Call.of(module, inputs)
        captured = capture_call(call, options, trace, options.microbatches)
        plan = plan_captured(captured, mesh, options, trace)
    plan = Plan(**{**vars(plan), "model": spec})
    print_json(_json(plan)) if as_json else print_out(_head(plan), "", _table(plan))
    if output is not None:
        plan.save(output)
        say(f"written to {output}; next: autopar simulate {output}", err=True)


def _head(plan: Plan) -> str:
    """Returns a line on the whole step."""
    from autopar.cli.pipeline import step_range

    cut = f"{plan.schedule}, {plan.microbatches} microbatches, {len(plan.stages)} stages"
    if len(plan.stages) == 1:
        cut = f"{plan.microbatches} microbatches accumulated"
    return (
        f"{cut}: "
        f"{format_seconds(plan.predicted.step_seconds)} a step{step_range(plan)} (simulated), "
        f"{plan.predicted.bubble:.1%} bubble, {format_bytes(plan.predicted.peak_bytes)}"
    )


def _table(plan: Plan) -> Table:
    """Returns a row for each stage."""
    table = Table(box=None, header_style="bold")
    for name in ("stage", "ranks", "mesh", "a microbatch", "memory"):
        table.add_column(name)
    for number, one in enumerate(plan.stages):
        ranks, predicted = one.ranks(), one.predicted
        table.add_row(
            str(number),
            f"{ranks[0]}-{ranks[-1]}",
            str(one.mesh),
            format_seconds(predicted.step_seconds),
            format_bytes(predicted.peak_bytes),
        )
    return table


def _json(plan: Plan) -> dict[str, object]:
    return {
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "model": plan.model.table(),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "predicted": plan.predicted.figures(),
        "stages": [
            {"mesh": str(one.mesh), "ranks": list(one.ranks()), **one.predicted.figures()}
            for one in plan.stages
        ],
    }
