"""`autopar diff`: compares two plans."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from autopar.cli.common.console import JSON, print_json, print_out, say, stages
from autopar.cli.common.model_options import MODEL, RULES, capture_model, is_data, own_rules
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.cost.device import device
from autopar.cost.uncertainty import error_seconds
from autopar.errors import AutoparError
from autopar.explain import (
    Difference,
    difference,
    heads,
    plan_difference,
    render_difference,
    render_plan_difference,
)
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.units import format_seconds
from autopar.plan import Plan
from autopar.plan_entries import Prediction
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan

_LAYOUTS_ONLY = "collectives are not compared, because"


@click.command("diff")
@click.argument("first", type=click.Path(path_type=Path), metavar="A")
@click.argument("second", type=click.Path(path_type=Path), metavar="B")
@MODEL
@RULES
@click.option("--layouts", "plain", is_flag=True, help="Compare only the files; capture no models.")
@click.option("--all", "everything", is_flag=True, help="Show every row of long tables.")
@CALIBRATION
@JSON
@click.pass_context
def command(
    ctx: click.Context,
    first: Path,
    second: Path,
    model: str | None,
    rule_files: tuple[Path, ...],
    plain: bool,
    everything: bool,
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Compare plan B with plan A: figures, layouts, collectives.

    Exits with status 0 if the plans agree, 1 if they differ, 2 after an error. Collectives are
    compared only if the models that the plans or --model name can be captured. For pipelines,
    compares figures, schedules and cuts, and the layouts stage by stage.

    \b
    autopar diff a.toml b.toml
    autopar diff a.toml b.toml --model train.py:model
    """
    known = table(own_rules(rule_files))
    plans = a, b = Plan.load(first), Plan.load(second)
    if a.is_pipeline or b.is_pipeline:
        ctx.exit(0 if _pipelines(a, b, everything, as_json) else 1)
    compared, note = replace(difference(a.stage, b.stage), head=heads(a, b)), ""
    with stages(quiet=as_json) as stage:
        stage("capture")
        if not (compared.equal or plain):
            compared, note = _in_full(plans, compared, model, known, calibration)
    if as_json:
        print_json({"equal": compared.equal, **asdict(compared), "note": note})
    elif not compared.equal:
        for part in render_difference(compared, ("A", "B"), everything=everything):
            print_out(part, "")
        if nearly := _nearly_equal(a.stage, b.stage):
            say(nearly, err=True)
        if note:
            say(note, err=True)
    ctx.exit(0 if compared.equal else 1)


def _nearly_equal(a: StagePlan, b: StagePlan) -> str:
    """Returns a note if two plans differ in time by less than prices are off, else nothing.

    Both are priced by the same tables, so that the error is that of the difference alone.
    """
    if a.calibration or b.calibration or a.mesh.device != b.mesh.device:
        return ""
    first, second = a.predicted, b.predicted
    computed = abs(first.compute_seconds - second.compute_seconds)
    sent = abs(_sent(first) - _sent(second))
    error = error_seconds(device(a.mesh), computed, sent)
    apart = abs(first.step_seconds - second.step_seconds)
    if not apart or apart > error:
        return ""
    return (
        f"the plans' steps differ by {format_seconds(apart)}, which is less than the prices of "
        f"what differs are off ({format_seconds(error)}): take them for equally fast"
    )


def _sent(predicted: Prediction) -> float:
    return predicted.exchange_seconds + predicted.parameter_seconds + predicted.reshard_seconds


def _pipelines(a: Plan, b: Plan, everything: bool, as_json: bool) -> bool:
    """Prints the difference of two plans, at least one a pipeline; returns whether they agree."""
    compared = plan_difference(a, b)
    if as_json:
        print_json({"equal": compared.equal, **asdict(compared)})
    elif not compared.equal:
        for part in render_plan_difference(compared, ("A", "B"), everything=everything):
            print_out(part, "")
    return compared.equal


def _in_full(
    plans: tuple[Plan, Plan],
    compared: Difference,
    model: str | None,
    known: dict[str, OpRule],
    calibration: Path | None,
) -> tuple[Difference, str]:
    """Adds the user's names and collectives to a difference.

    Returns:
        The full difference and "", or `found` unchanged and the reason.
    """
    graphs: dict[str, Graph] = {}
    for plan in plans:
        if plan.graph in graphs:
            continue
        source = model or plan.model.source
        if not (model or is_data(source)):
            if not source:
                return compared, f"{_LAYOUTS_ONLY} a plan names no model"
            return compared, f"{_LAYOUTS_ONLY} {source!r} is run only if --model names it"
        wanted = replace(plan.model, source=source)
        try:
            options = Options.like(plan.stage, table=known)
            graph = capture_model(wanted, options, Trace(None))
        except AutoparError as error:
            return compared, f"{_LAYOUTS_ONLY} of an error: {error}"
        if fingerprint(graph) != plan.graph:
            return (
                compared,
                f"{_LAYOUTS_ONLY} {source} is now {fingerprint(graph)}, not {plan.graph}",
            )
        graphs[plan.graph] = graph
    a, b = plans
    one, other = a.stage, b.stage
    by = (prices(one, calibration).collective, prices(other, calibration).collective)
    try:
        full = difference(one, other, (graphs[a.graph], graphs[b.graph]), by)
        return replace(full, head=compared.head), ""
    except AutoparError as error:
        return compared, f"{_LAYOUTS_ONLY} of an error: {error}"
