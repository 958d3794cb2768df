"""`autopar plan`: searches for the fastest plan of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli import frontier as frontier_view
from autopar.cli.common.console import JSON, Stages, print_json, print_out, say, stages
from autopar.cli.common.generation_options import generation_options
from autopar.cli.common.given_stages import show_given, stage_options, stages_of
from autopar.cli.common.model_options import (
    RULES,
    capture_model,
    headed,
    is_data,
    model_of_any_size,
    own_rules,
    shapes,
)
from autopar.cli.common.pin_options import pin_options, plan_to_change, read_pins
from autopar.cli.common.planning_profile import PROFILE
from autopar.cli.common.replicas import fastest, method, replica, rounds_json, with_rounds
from autopar.cli.common.single_plan_view import plan_json, solver_line
from autopar.cli.explain import explained
from autopar.cost.device import device
from autopar.errors import ProgramError
from autopar.explain import Explanation, render_fused, render_parameters, render_summary
from autopar.inter_op.schedules import LOCAL_UPDATES, allowed
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rule_table import table
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.executed.execution import Execution
from autopar.ir.fusion import ASKED_FOR, choose
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.precision import Precision
from autopar.ir.replicas.outer_value import Outer
from autopar.ir.units import format_bytes
from autopar.ir.update import ADAMW
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning import frontier
from autopar.planning.options import AUTO, Options
from autopar.planning.planner import Planner, make_plan
from autopar.planning.prices import check_prices, cost_model
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan

if TYPE_CHECKING:
    from autopar.planning.local_rounds import Rounds


@click.command("plan")
@click.argument("model")
@click.option("--mesh", "mesh_text", required=True, help='The devices: "H100: node=2, gpu=8".')
@shapes
@click.option(
    "--global-batch",
    type=click.IntRange(1, 2**31),
    help="Samples in a step; cuts the model into pipeline stages and the batch into microbatches.",
)
@RULES
@click.option(
    "--memory",
    metavar="SIZE",
    help='Memory limit per device: "80GiB". Default: its memory minus a reserve for fragmentation.',
)
@click.option(
    "--unknown-ops",
    type=click.Choice(["replicate", "error"]),
    help="Replicate operators without a sharding rule (the default), or refuse them.",
)
@click.option(
    "--allow",
    metavar="WHAT",
    help='What may change the result of training. "stale gradients", with --global-batch, admits '
    'schedules that update weights while microbatches are in flight (such as 2bw); "local updates" '
    "also considers replicas that synchronise rarely, and takes the fastest plan.",
)
@pin_options
@click.option(
    "--state",
    metavar="NAME",
    help='Sharding of state over replicas: zero3, "paro-iig over node", NIG. Default: the fastest.',
)
@click.option(
    "--precision",
    metavar="NAME",
    help="bf16 or fp16: compute and store weights in it, and update a master copy in fp32; "
    '"bf16 communication=bf16" also sends gradients in it, "bf16 sums=f32" adds activations over '
    "devices in fp32. weights=int8 and gradients=int8 communicate in int8 blocks, which changes "
    "numerics. Default: the model's own dtypes.",
)
@click.option(
    "--solver",
    metavar="NAME",
    help="ilp (the default) searches for the fastest plan; propagate follows pins.",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Predict times from this file, which `autopar calibrate` wrote.",
)
@click.option(
    "--recompute",
    metavar="WHAT",
    help="Recompute blocks in the backward: auto (the default), none, full, selective, or a number "
    "of blocks, 'full 8'.",
)
@click.option(
    "--offload",
    metavar="WHAT",
    help="Keep in host memory: none (the default), auto, optimizer, activations, "
    "optimizer+activations, or a number of blocks, 'activations 8'.",
)
@click.option(
    "--collectives",
    metavar="HOW",
    help="Algorithms of collectives: auto, or rows joined by ';', such as 'all_reduce over node, "
    "gpu from 65536: 2d_torus'. Default: those of NCCL or gloo.",
)
@click.option(
    "--outer",
    metavar="HOW",
    help="Train replicas independently along mesh axes, and synchronise them by this method: "
    "'co2 over node, tau=12'. Every replica takes its part of the batch.",
)
@click.option(
    "--expert-load",
    metavar="LOAD",
    help="How often experts are chosen: equal (the default), 'zipf 0.8', or a share for each.",
)
@click.option(
    "--documents",
    metavar="LENGTHS",
    help="Lengths of documents packed into a row, for prices: a sample, '4096 512 512 128'.",
)
@click.option(
    "--fuse/--no-fuse",
    default=None,
    help="Whether to replace groups of operators by fused kernels.",
)
@click.option(
    "--fuse-also",
    "also",
    multiple=True,
    type=click.Choice(ASKED_FOR),
    help="Also apply this fusion, which is off by default: collectives that overlap with linears.",
)
@click.option(
    "--frontier",
    "as_frontier",
    is_flag=True,
    help="Show the fastest plans under decreasing memory limits. Writes no plan.",
)
@click.option(
    "--trace",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the result of every planning step to this folder.",
)
@PROFILE
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan to this file.",
)
@stage_options
@JSON
@generation_options
def command(
    model: str,
    mesh_text: str,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    global_batch: int | None,
    allow: str | None,
    rule_files: tuple[Path, ...],
    memory: str | None,
    unknown_ops: str | None,
    texts: tuple[str, ...],
    plans: tuple[str, ...],
    layouts: tuple[str, ...],
    forms: tuple[str, ...],
    source: Path | None,
    state: str | None,
    precision: str | None,
    solver: str | None,
    calibration: Path | None,
    recompute: str | None,
    offload: str | None,
    collectives: str | None,
    outer: str | None,
    expert_load: str | None,
    documents: str | None,
    fuse: bool | None,
    also: tuple[str, ...],
    as_frontier: bool,
    trace: Path | None,
    output: Path | None,
    stage_count: int | str | None,
    microbatches: int | None,
    accumulate: int | None,
    mean_loss: bool,
    schedule: str | None,
    execution: str | None,
    as_json: bool,
) -> None:
    """Find the fastest way to train MODEL within the memory of the devices.

    MODEL is a name of the zoo, hf:path/to/config.json, or file.py:function; the function returns
    the model and keyword arguments for it. Needs no GPU and no weights. Assumes AdamW.

    \b
    autopar plan llama-3-8b --mesh "H100: node=4, gpu=8" --batch 64 -o plan.toml
    autopar plan train.py:model --mesh "A100-80: gpu=4" --memory 60GiB
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" --pins data_parallel:node --pins megatron:gpu
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" --layout batch=node --layout heads=gpu
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" --from plan.toml
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" --state "paro-iig over node"
    autopar plan llama-3-8b --mesh "H100: gpu=8" --precision bf16
    autopar plan llama-3-8b --mesh "H100: gpu=8" --frontier
    autopar plan gpt-3-175b --mesh "A100-80: node=128, gpu=8" --global-batch 1536
    autopar plan gpt2 --mesh "H100: pp=4, gpu=2" --stages 4 --microbatches 8 --batch 8
    autopar plan gpt2 --mesh "H100: gpu=8" --accumulate 4 --batch 256
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" --global-batch 64 --allow "stale gradients"
    autopar plan llama-3-8b --mesh "H100: gpu=8" --task generate --batch 32 --prompt 512
    """
    devices, way = Mesh.parse(mesh_text), Outer.read(outer)
    before = plan_to_change(source) if source else None
    fused = before.fuse if before and fuse is None else choose(bool(fuse))
    given: dict[str, Any] = {
        "unknown_ops": unknown_ops,
        "solver": solver,
        "recompute": recompute,
        "offload": offload,
        "collectives": _algorithms(collectives),
        "expert_load": expert_load,
        "documents": documents,
        "state": state,
        "precision": None if precision is None else Precision.read(precision),
        **stages_of(stage_count, batch, global_batch),
        **_microbatches(microbatches, accumulate, mean_loss),
        "schedule": schedule,
        "execution": None if execution is None else Execution.read(execution),
        "allow": allow,
    }
    options = replace(
        Options() if before is None else Options.like(before),
        memory=_limit(memory, devices, before),
        trace=trace,
        pins=read_pins(texts, plans, layouts, source, forms),
        table=table(own_rules(rule_files)),
        calibration=calibration,
        fuse=choose((*fused, *also)),
        **{name: value for name, value in given.items() if value is not None},
    )
    _check_folder(output)
    if way is None and LOCAL_UPDATES in allowed(options.allow):
        way = fastest(ModelSpec(model, batch, seq, layers), devices, options, as_json)
    mesh, batch = replica(devices, way, batch, options.global_batch)
    if way is not None:
        options = replace(options, update=method(way).added_to(ADAMW, way.goes_on))
    staged = options.searches_stages or options.is_pipeline
    check_prices(mesh, options, staged)  # refuses bad options before a model is traced
    spec = ModelSpec(model, batch, seq, layers)
    if staged:
        show = _pipeline if options.searches_stages else show_given
        show(spec, mesh, options, output, as_json)
        return
    if as_frontier:
        _frontier(spec, mesh, options, as_json)
        return
    with stages(quiet=as_json) as stage:
        tracer = Stages(trace, stage)
        graph = capture_model(spec, options, tracer)
        known = Prices(mesh, cost_model(mesh, options))
        best = make_plan(graph, mesh, options, tracer, known=known)
        plan, rounds = with_rounds(graph, Plan.of(best, spec), way, devices)
        peak = best.predicted.peak_bytes
        explanation = explained(graph, best, best.limit, options.table, known, peak=peak)
    if as_json:
        limits = {"memory_limit": best.limit, "whole": explanation.whole}
        print_json({**plan_json(plan), **limits, **rounds_json(rounds)})
    else:
        _print(best, explanation, headed(graph, options), rounds)
    _save(plan, model, output)


def _limit(memory: str | None, mesh: Mesh, before: StagePlan | None) -> float | None:
    """Returns the limit of a device in bytes; None if each of unlike devices has its own."""
    if memory is not None:
        return parse_quantity(memory, "B")
    if mesh.unlike:
        return None
    usable = device(mesh).usable
    return usable if before is None else min(before.limit, usable)


def _microbatches(
    microbatches: int | None, accumulate: int | None, mean_loss: bool
) -> dict[str, Any]:
    """Returns the options of microbatches; raises UsageError if they contradict one another."""
    loss = {"whole_loss": False if mean_loss else None}
    if accumulate in (None, 1):
        return {"microbatches": microbatches, **loss}
    if microbatches is not None:
        raise click.UsageError("--accumulate is --microbatches without stages; pass one of them")
    return {"microbatches": accumulate, **loss}


def _check_folder(output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise ProgramError(f"there is no folder {output.parent}", todo="create it, or correct -o")


def _save(plan: Plan, model: str, output: Path | None) -> None:
    """Writes a plan, if a file is given, and says what to do next."""
    if output is not None:
        plan.save(output)
        more = "" if is_data(model) else f" --model {model}"
        say(f"written to {output}; next: autopar explain {output}{more}", err=True)


def _print(best: StagePlan, explanation: Explanation, head: str, rounds: Rounds | None) -> None:
    """Prints a heading, the plan's summary and parameters, and the solver's report."""
    say(head)
    print_out(render_summary(explanation), "", render_parameters(explanation))
    print_out(*render_fused(best.fused))
    say("\n".join([solver_line(best), *([] if rounds is None else [rounds.text()])]))
    if explanation.whole:
        names = ", ".join(f"%{name}" for name in explanation.whole)
        say(f"replicated, because they have no rule: {names}", fg="yellow", err=True)


def _algorithms(text: str | None) -> ChosenAlgorithms | str | None:
    """Parses `--collectives`; raises CollectiveError for a malformed row."""
    if text is None or text == AUTO:
        return text
    return ChosenAlgorithms.parse([row.strip() for row in text.split(";")])


def _frontier(spec: ModelSpec, mesh: Mesh, options: Options, as_json: bool) -> None:
    """Prints the fastest plans within less and less memory, down to the least possible."""
    plans: list[StagePlan] = []
    with stages(quiet=as_json) as stage:
        tracer = Stages(None, stage)
        graph = capture_model(spec, options, tracer)
        planner = Planner(graph, mesh, options, Trace(None))

        def planned(limit: float) -> StagePlan:
            stage(f"{len(plans)} plans; next within {format_bytes(limit)}")
            return planner.plan(limit)

        for plan in frontier.frontier(planned):
            plans.append(plan)
    print_json(frontier_view.to_json(plans)) if as_json else print_out(frontier_view.render(plans))


def _pipeline(
    spec: ModelSpec, mesh: Mesh, options: Options, output: Path | None, as_json: bool
) -> None:
    """Searches for the fastest pipeline and prints it; the options apply to each stage."""
    from autopar.cli.pipeline import render, to_json
    from autopar.planning.pipelines.automatic import plan_pipeline

    batch = options.global_batch
    assert batch is not None
    model = model_of_any_size(spec, options)
    with stages(quiet=as_json) as stage:
        tracer = Stages(None if options.trace is None else Path(options.trace), stage)
        searched, plan = plan_pipeline(model, batch, mesh, options, tracer, stage)
    plan = replace(plan, model=replace(spec, batch=batch))
    if as_json:
        print_json(to_json(searched, plan))
    else:
        print_out(*render(searched, plan))
    if output is not None:
        plan.save(output)
        say(f"written to {output}", err=True)
