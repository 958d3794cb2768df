"""`autopar explain`: shows where the time and memory of a plan go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli import dim_table as dims
from autopar.cli.common.console import JSON, print_json, print_out, stages
from autopar.cli.common.model_options import MODEL, RULES, own_rules, shapes
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.cost.model import AnalyticModel, CostModel
from autopar.cost.overlap import saved
from autopar.explain import (
    PARTS,
    VIEWS,
    Cost,
    Explanation,
    Move,
    StepFigures,
    explain,
    moves,
    render,
    render_fused,
    view,
)
from autopar.generation_plan import generates
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.builder import Builder
from autopar.intra_op.node_choices import Option
from autopar.intra_op.pins.layout_pins import Pins
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.executed.execution import Execution
from autopar.ir.graph import Graph
from autopar.ir.stage_graphs import is_trained
from autopar.ir.tensor import Layout
from autopar.ir.update import NO_STATES
from autopar.lower.program import lower
from autopar.plan_entries import ModelSpec, NodePlan
from autopar.planning.kernel_savings import linears
from autopar.planning.peak import simulated_peak
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.prices import limit_of_plan, slowdown_of
from autopar.stage_plan import StagePlan

if TYPE_CHECKING:
    from autopar.cli.common.open_plan import PlanFile


@click.command("explain")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@MODEL
@RULES
@shapes
@click.option("--by", type=click.Choice(PARTS), help="Show only the totals and this table.")
@click.option("--all", "everything", is_flag=True, help="Also list operators that take no time.")
@click.option("--dims", "named", is_flag=True, help="List named dimensions and how they are split.")
@click.option("--stage", "number", type=click.IntRange(min=0), help="A pipeline stage, from 0.")
@click.option(
    "--trace-json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the simulated step of a pipeline to this file, for ui.perfetto.dev.",
)
@CALIBRATION
@JSON
def command(
    file: Path,
    model: str | None,
    rule_files: tuple[Path, ...],
    calibration: Path | None,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    by: str | None,
    everything: bool,
    named: bool,
    number: int | None,
    trace_json: Path | None,
    as_json: bool,
) -> None:
    """Show where the time and memory of a plan go.

    Lists them by layer, kind of operator, kind of collective, mesh axis, line of the model's
    source, and parameter; each table adds up to the predicted step time and the predicted peak. For
    a pipeline, shows its stages, their schedule and their memory; with --stage, shows these tables
    for one stage and one microbatch.

    A Python file that a plan names as its model is run only if --model names it too.

    \b
    autopar explain plan.toml
    autopar explain plan.toml --model train.py:model
    autopar explain plan.toml --by layer
    autopar explain plan.toml --dims
    autopar explain pipeline.toml --stage 1 --by collective
    autopar explain generation.toml
    """
    from autopar.cli.common.open_plan import PlanFile

    known = table(own_rules(rule_files))
    if generates(file):
        from autopar.cli.common import generation_view  # with torch

        if number is not None or trace_json is not None or named:
            raise click.UsageError("--stage, --trace-json and --dims are for plans of training")
        generation_view.show(file, model, known, by, as_json)
        return
    asked = PlanFile(file, model, ModelSpec("", batch, seq, layers), known, calibration)
    whole = asked.plan.is_pipeline and number is None
    _refuse(asked, number, whole and bool(by or everything or named), trace_json)
    with stages(quiet=as_json) as progress:
        opened = asked.open(progress)
        part = opened.stage(number or 0)
        if whole:
            progress("simulate")
            assert opened.step
        elif named:
            dim_rows = dims.rows(part.graph, part.plan, known)
        else:
            limit = limit_of_plan(part.plan)
            by_prices = prices(part.plan, calibration, part.whole)
            explanation = explained(part.graph, part.plan, limit, known, by_prices, part.repeated)
    if whole:
        from autopar.cli.common import pipeline_view  # with numba

        pipeline_view.show(opened, trace_json, as_json)
    elif named:
        print_json(dims.to_json(dim_rows)) if as_json else print_out(dims.render(dim_rows))
    elif as_json:
        print_json(_json(explanation, by))
    else:
        print_out(render(explanation, by=by, everything=everything))
        print_out(*(render_fused(part.plan.fused) if by is None else ()))
    outer = asked.plan.outer
    if outer is not None and not as_json and by is None and not named:
        from autopar.planning.local_rounds import rounds_of
        from autopar.runtime.outer.methods import method_of

        rounds = rounds_of(opened.graphs, asked.plan, outer, method_of(outer), asked.plan.mesh)
        print_out("", rounds.text())


def _refuse(asked: PlanFile, number: int | None, parts: bool, trace_json: Path | None) -> None:
    """Raises UsageError if an option does not apply to this plan."""
    if not asked.plan.is_pipeline:
        if number is not None or trace_json is not None:
            raise click.UsageError(
                "--stage and --trace-json are for pipelines; for other plans, autopar simulate"
                " writes the trace"
            )
        return
    asked.stage(number)
    if parts or (number is not None and trace_json is not None):
        raise click.UsageError(
            "--by, --all and --dims need --stage for a pipeline; --trace-json covers all stages"
        )


def _json(explanation: Explanation, by: str | None) -> dict[str, object]:
    """Returns the explanation with its views, or the totals with the table `by`."""
    parts: dict[str, object] = {
        name: [{**asdict(row), "time": row.time, "held": row.held} for row in rows]
        for name, rows in ((name, view(explanation, name)) for name in VIEWS)
    }
    whole = asdict(explanation)
    parts |= {"line": whole["sections"], "parameter": whole["parameters"]}
    if by is not None:
        whole = {k: v for k, v in whole.items() if k not in ("sections", "parameters")}
        return {**whole, "seconds": explanation.seconds, by: parts[by]}
    views = {name: parts[name] for name in VIEWS}
    return {**whole, "seconds": explanation.seconds, **views}


def explained(
    graph: Graph,
    chosen: StagePlan,
    limit: float,
    known: dict[str, OpRule] | None = None,
    price: CostModel | Prices | None = None,
    repeated: Repeated | None = None,
    peak: float | None = None,
) -> Explanation:
    """Explains a plan whose layouts have been checked.

    Args:
        graph: the prepared graph.
        chosen: its plan.
        limit: memory of one device in bytes.
        known: sharding rules by operator; None for the built-in ones.
        price: prices kernels and collectives, or these looked up before; None for closed forms.
        repeated: for a stage of a pipeline, how often it runs in a step. The explanation is then
            that of one microbatch: work that is done once in a step overlaps with the last
            backward only, and activations of other microbatches are in memory.
        peak: bytes of its simulated step, if they are known.

    Returns:
        The explanation: seconds and bytes by cause, operator and parameter.
    """
    if not isinstance(price, Prices):
        price = Prices(chosen.mesh, price or AnalyticModel(chosen.mesh, in_step=True))
    slowdown = slowdown_of(chosen.mesh, graph.execution)
    rules, pins = known or table(), Pins(graph, {})
    builder = Builder(graph, price, rules, pins, _assumptions(chosen))
    *sent, added = _add_all(builder, graph, chosen)
    # The planner's price of the loss contains its reduction, which is listed as a move.
    listed = moves(graph, chosen, price.collective)
    ending = sum(move.seconds for move in listed if not move.reader)
    inside = _inside(listed)
    costs, kernels, turned = {}, [0.0, 0.0], 0.0  # `turned` is hidden in the turns of forms
    offloaded, offload_seconds = 0.0, 0.0
    for choices, options in zip(builder.choices, builder.options, strict=True):
        entry = _key(chosen.nodes[choices.name])
        fitting = [i for i, option in enumerate(options) if _option_key(option) == entry]
        index = min(fitting, key=lambda i: choices.cost[i])
        seconds = choices.cost[index] - (ending if choices.name == graph.loss else 0.0)
        if choices.name in builder.exchanged:  # listed as moves, too
            exposed = builder.exchanged[choices.name][index]
            seconds -= exposed
            turned += inside[choices.name] - exposed
        if choices.name in builder.stowed:
            copied = builder.stowed[choices.name][index]  # each way
            seconds -= 2 * copied
            offloaded += builder.host[choices.name][index]
            offload_seconds += 2 * copied
        kept = builder.sums[choices.name][index] if choices.name in builder.sums else 0.0
        costs[choices.name] = Cost(seconds, kept)
        for side, seconds_of in enumerate((builder.forward, builder.backward)):
            kernels[side] += seconds_of[choices.name][index] if choices.name in seconds_of else 0.0
    kernels[1] = (kernels[1] + added) / (1 if repeated is None else repeated.microbatches)
    pairs = zip(kernels, (side + offload_seconds / 2 for side in sent), strict=True)
    hidden = turned + sum(saved(computed, other, slowdown) for computed, other in pairs)
    program = lower(graph.trained, chosen, price.collective)
    overlaps = linears(program, graph, chosen, rules, price).values()
    hidden += sum(entry.seconds for entry in overlaps) / chosen.microbatches
    if not is_trained(graph):
        peak = None
    elif peak is None:
        peak = simulated_peak(graph, chosen, rules, price, repeated)
    return explain(
        graph,
        chosen,
        price.collective,
        costs,
        StepFigures(
            limit,
            hidden,
            peak,
            offloaded=offloaded,
            offload_seconds=offload_seconds,
            state_byte_seconds=0.0 if builder.away is None else builder.away.seconds,
            added=added,
        ),
        builder.replicated,
    )


def _add_all(builder: Builder, graph: Graph, chosen: StagePlan) -> Iterable[float]:
    """Adds all operators; returns three sums of seconds over the parameters.

    They are of collectives beside the forward and beside the backward, and of adding up gradients.
    """
    overlapped = [(0.0, 0.0, 0.0)]
    for node in graph.folded:
        if node.op == "autopar.share" and graph[node.inputs[0]].op == "param":
            overlapped.append(builder.overlapped_seconds(node, chosen))
        elif node.op != "param":
            builder.add(node)
    return map(sum, zip(*overlapped, strict=True))


def _inside(listed: Iterable[Move]) -> Mapping[str, float]:
    """Returns the seconds that operators communicate inside, by name, hidden ones included."""
    seconds = defaultdict[str, float](float)
    for move in listed:
        if move.inside:
            seconds[move.value] += move.seconds
    return seconds


def _assumptions(plan: StagePlan) -> Assumptions:
    """Returns how a plan's model is trained, without its optimizer states (listed separately)."""
    execution = Execution.read(plan.asked.execution)
    return Assumptions(
        update=NO_STATES,
        slowdown=slowdown_of(plan.mesh, execution),
        recompute=plan.recompute,
        microbatches=plan.microbatches,
        bucket=plan.bucket,
        precision=plan.precision,
        offload=plan.offload,
        execution=execution,
    )


def _key(entry: NodePlan) -> object:
    sides = (entry.operands, entry.results)
    return tuple(tuple(_plain(layout) for _, layout in s) for s in sides), entry.form


def _option_key(option: Option) -> object:
    sides = (option.operands, option.results)
    return tuple(tuple(_plain(layout) for layout in s) for s in sides), option.form


def _plain(layout: Layout) -> object:
    return layout.dims, frozenset(layout.partial), frozenset(layout.varying)
