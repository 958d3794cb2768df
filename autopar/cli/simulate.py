"""`autopar simulate`: simulates a training step on streams, with its memory over time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from autopar.cli.common.console import FILE, JSON, print_json, print_out, stages
from autopar.cli.common.model_options import MODEL, RULES, own_rules, shapes
from autopar.cli.common.open_plan import PlanFile
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.cost.device import Device, device
from autopar.cost.measured import MeasuredModel
from autopar.cost.measured_host import named_host
from autopar.cost.model import AnalyticModel
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.intra_op.work.model_flops import model_flops
from autopar.ir.graph import Graph
from autopar.ir.units import format_bytes
from autopar.plan_entries import ModelSpec
from autopar.planning.prices import host_of
from autopar.simulate import Settings, Timeline, run, settings_on, tasks
from autopar.simulate.picture import render
from autopar.stage_plan import StagePlan


@click.command("simulate")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@MODEL
@RULES
@shapes
@click.option("--wait", is_flag=True, help="Simulate without overlap: wait for every collective.")
@click.option(
    "--host",
    type=click.Choice(("modules", "eager", "compiled", "graph")),
    help="Simulate the host that launches kernels. Default: kernels never wait for the host.",
)
@click.option(
    "--trace-json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the timeline to this file, for ui.perfetto.dev.",
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
    host: str | None,
    trace_json: Path | None,
    as_json: bool,
) -> None:
    """Simulate one training step of a plan on one device: time, overlap and memory.

    For a pipeline, simulate every stage and the schedule.

    The optimizer is AdamW. A Python file that a plan names as its model is run only if --model
    names it too.

    \b
    autopar simulate plan.toml
    autopar simulate plan.toml --trace-json step.json
    """
    known = table(own_rules(rule_files))
    asked = PlanFile(file, model, ModelSpec("", batch, seq, layers), known, calibration)
    if asked.plan.is_pipeline and (wait or host):
        raise click.UsageError("--wait and --host are for plans without pipeline stages")
    with stages(quiet=as_json) as progress:
        opened = asked.open(progress)
        progress("simulate")
        if asked.plan.is_pipeline:
            assert opened.step
    if asked.plan.is_pipeline:
        from autopar.cli.common import pipeline_view  # with numba

        pipeline_view.show(opened, trace_json, as_json)
        return
    chosen, graph = asked.plan.stage, opened.graphs[0]
    with stages(quiet=as_json) as progress:
        progress("simulate")
        chip = device(chosen.mesh)
        priced = prices(chosen, calibration)
        settings = settings_on(chosen.mesh.device, graph.execution, host_of(priced))
        settings = replace(settings, overlap=frozenset()) if wait else settings
        settings = replace(settings, host=named_host(host, host_of(priced))) if host else settings
        timeline = simulated(graph, chosen, known, settings, priced)
        figures = utilisations(timeline, graph, chosen, known, chip)
    if trace_json is not None:
        FILE.write(trace_json, timeline.to_trace())
    if as_json:
        head = {"graph": graph.name, "mesh": str(chosen.mesh)}
        print_json({**head, **timeline.to_json(), **figures})
    else:
        shown = {name.replace("_", " "): f"{value:.1%}" for name, value in figures.items()}
        if chip.fragmentation:
            reserved = timeline.memory.reserved(chip.fragmentation)
            shown[f"memory, with {chip.fragmentation:.0%} fragmentation"] = (
                f"{format_bytes(reserved)} ({reserved / chip.memory:.1%})"
            )
        print_out(f"{graph.name} on {chosen.mesh}")
        print_out(render(timeline, figures=shown, limit=chip.memory))


def simulated(
    graph: Graph,
    plan: StagePlan,
    known: dict[str, OpRule],
    settings: Settings,
    model: AnalyticModel | MeasuredModel,
) -> Timeline:
    """Simulates a step.

    Args:
        graph: the prepared graph.
        plan: its plan.
        known: sharding rules by operator.
        settings: the overlap that the simulation assumes.
        model: prices kernels and collectives.

    Returns:
        All tasks of one device in time, in seconds, and its memory in bytes.
    """
    step = tasks(graph, plan, works(graph, plan, known), model, settings)
    return run(step, model, model.device.slowdown, settings.host)


def utilisations(
    timeline: Timeline, graph: Graph, plan: StagePlan, known: dict[str, OpRule], chip: Device
) -> dict[str, float]:
    """Returns model and hardware FLOPs utilisation.

    Args:
        timeline: timeline of a simulated step.
        graph, plan: graph and plan of that step.
        known: sharding rules by operator.
        chip: the device.

    Returns:
        Fractions of the peak FLOP/s of the dtype that most matrix products have; empty if there
        are not matrix products.
    """
    flops_by_dtype = timeline.products
    if not flops_by_dtype:
        return {}
    dtype = max(flops_by_dtype, key=lambda name: flops_by_dtype[name])
    peak = chip.rate(dtype, True)
    flops = sum(model_flops(graph, plan, known).values())
    return {
        "model_flops_utilisation": timeline.flops_utilisation(flops / plan.mesh.size, peak),
        "hardware_flops_utilisation": timeline.flops_utilisation(
            sum(flops_by_dtype.values()), peak
        ),
    }
