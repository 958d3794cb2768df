"""`autopar simulate`: one training step of a plan on streams, with its memory over time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from autopar.cli.common import pipeline_view
from autopar.cli.common.console import FILE, JSON, print_json, print_out, stages
from autopar.cli.common.model_options import MODEL, RULES, own_rules, shapes
from autopar.cli.common.opened import PlanFile
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.cost.device import Device, device
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel, NodeWork
from autopar.intra_op.kernel_work import works
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph
from autopar.ir.tensor import Layout
from autopar.ir.units import format_bytes
from autopar.plan_entries import ModelSpec, NodePlan
from autopar.simulate import Settings, Timeline, run, settings_on, tasks
from autopar.simulate.picture import render
from autopar.stage_plan import StagePlan


@click.command("simulate")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@MODEL
@RULES
@shapes
@click.option(
    "--wait", is_flag=True, help="As if the program waited for every collective, gradients too."
)
@click.option(
    "--trace-json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every task in time to this file, for ui.perfetto.dev.",
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
    wait: bool,
    trace_json: Path | None,
    as_json: bool,
) -> None:
    """Simulate one training step of a plan on one device: time, overlap and memory.

    Of a pipeline it is every stage, and the schedule in time.

    The optimizer is AdamW. A plan is data: a model that is a Python file is never run because a
    plan names it, only because --model does.

    \b
    autopar simulate plan.toml
    autopar simulate plan.toml --trace-json step.json
    """
    known = table(own_rules(rule_files))
    asked = PlanFile(file, model, ModelSpec("", batch, seq, layers), known, calibration)
    if asked.plan.is_pipeline and wait:
        raise click.UsageError("--wait is for plans of a model in one piece")
    with stages(quiet=as_json) as told:
        opened = asked.open(told)
        told("simulate")
        if asked.plan.is_pipeline:
            assert opened.step
    if asked.plan.is_pipeline:
        pipeline_view.show(opened, trace_json, as_json)
        return
    chosen, graph = asked.plan.stage, opened.graphs[0]
    with stages(quiet=as_json) as told:
        told("simulate")
        chip = device(chosen.mesh)
        settings = settings_on(chosen.mesh.device)
        settings = replace(settings, overlap=frozenset()) if wait else settings
        found = simulated(graph, chosen, known, settings, prices(chosen, calibration))
        figures = utilisations(found, graph, chosen, known, chip)
    if trace_json is not None:
        FILE.write(trace_json, found.to_trace())
    if as_json:
        print_json({"graph": graph.name, "mesh": str(chosen.mesh), **found.to_json(), **figures})
    else:
        shown = {name.replace("_", " "): f"{value:.1%}" for name, value in figures.items()}
        if chip.fragmentation:
            reserved = found.memory.reserved(chip.fragmentation)
            shown[f"memory, {chip.fragmentation:.0%} of it idle in the allocator"] = (
                f"{format_bytes(reserved)} ({reserved / chip.memory:.1%})"
            )
        print_out(f"{graph.name} on {chosen.mesh}")
        print_out(render(found, figures=shown, limit=chip.memory))


def simulated(
    graph: Graph,
    plan: StagePlan,
    known: dict[str, OpRule],
    settings: Settings,
    model: AnalyticModel | MeasuredModel,
) -> Timeline:
    """The timeline of a step under some prices."""
    done = tasks(graph, plan, works(graph, plan, known), model, settings)
    return run(done, model, model.device.slowdown)


def utilisations(
    timeline: Timeline, graph: Graph, plan: StagePlan, known: dict[str, OpRule], chip: Device
) -> dict[str, float]:
    """Model and hardware FLOPs utilisation, of the peak for the dtype of most matrix products."""
    run_here = timeline.products
    if not run_here:
        return {}
    dtype = max(run_here, key=lambda name: run_here[name])
    peak = chip.rate(dtype, True)
    whole = works(graph, _whole(graph, plan), known)
    flops = sum(graph.multiplicity[name] * _products(work) for name, work in whole.items())
    return {
        "model_flops_utilisation": timeline.flops_utilisation(flops / plan.mesh.size, peak),
        "hardware_flops_utilisation": timeline.flops_utilisation(sum(run_here.values()), peak),
    }


def _products(work: NodeWork) -> float:
    return sum(kernel.flops for kernel in (*work.forward, *work.backward) if kernel.gemm)


def _whole(graph: Graph, plan: StagePlan) -> StagePlan:
    """The plan that runs everything whole: the model's own FLOPs."""
    nodes = {}
    for node in graph.folded:
        reads = [graph[name].type.shape for name in node.inputs]
        gives = [tensor.shape for tensor in node.types]
        into, out = (
            tuple((shape, Layout.replicated(len(shape))) for shape in side)
            for side in (reads, gives)
        )
        nodes[node.name] = NodePlan(into, out)
    return replace(plan, nodes=nodes)
