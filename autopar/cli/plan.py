"""`autopar plan`: the fastest plan of a model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from autopar.cli import frontier as frontier_view
from autopar.cli.common.console import JSON, Stages, print_json, print_out, say, stages
from autopar.cli.common.model_options import (
    RULES,
    capture_model,
    is_data,
    model_of_any_size,
    own_rules,
    shapes,
)
from autopar.cli.common.pin_options import fixed_beforehand, words
from autopar.cli.explain import explained
from autopar.cli.pipeline import render, to_json
from autopar.cost.device import device
from autopar.errors import ProgramError
from autopar.explain import Explanation, render_fused, render_parameters, render_summary
from autopar.intra_op.rule_table import table
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.fusion import ASKED_FOR, choose
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.precision import Precision
from autopar.ir.units import format_bytes
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning import frontier
from autopar.planning.options import AUTO, Options
from autopar.planning.pipelines.automatic import plan_pipeline
from autopar.planning.planner import Planner, make_plan
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.runtime.ranks.processes import as_mesh
from autopar.stage_plan import StagePlan


@click.command("plan")
@click.argument("model")
@click.option("--mesh", "mesh_text", required=True, help='The devices: "H100: node=2, gpu=8".')
@shapes
@click.option(
    "--global-batch",
    type=click.IntRange(1, 2**31),
    help="Samples of a step; cuts the model into pipeline stages and the batch into microbatches.",
)
@RULES
@click.option(
    "--memory",
    metavar="SIZE",
    help='Tensors of a device, at most: "80GiB"; else its memory less what its allocator wastes.',
)
@click.option(
    "--unknown-ops",
    type=click.Choice(["replicate", "error"]),
    help="Run operators without a sharding rule whole, as by default, or refuse them.",
)
@click.option(
    "--allow",
    metavar="WHAT",
    help='With --global-batch: "stale gradients" lets the search take schedules that update '
    "weights while microbatches are under way (2bw), which changes what is computed.",
)
@fixed_beforehand
@click.option(
    "--state",
    metavar="NAME",
    help='How far states of replicas are split: zero3, "paro-iig over node", NIG; else chosen.',
)
@click.option(
    "--precision",
    metavar="NAME",
    help="bf16 or fp16: computed and held so, with a master in fp32 that the optimizer updates; "
    '"bf16 communication=bf16" sends gradients so, "bf16 sums=f32" sums activations over devices '
    "in fp32; else as the model is. Numerics change by weights=int8 and gradients=int8, which "
    "gather and reduce in int8 blocks.",
)
@click.option(
    "--solver",
    metavar="NAME",
    help="ilp (the default) searches for the cheapest plan, propagate follows pins.",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Prices that `autopar calibrate` measured on such machines.",
)
@click.option(
    "--recompute",
    metavar="WHAT",
    help="Blocks computed again in the backward: auto (the default), none, full, selective, or "
    "such as 'full 8'.",
)
@click.option(
    "--offload",
    metavar="WHAT",
    help="Kept in host memory: none (the default), auto, optimizer, activations, both with +, or "
    "such as 'activations 8'.",
)
@click.option(
    "--collectives",
    metavar="HOW",
    help="Algorithms of collectives: auto, or rows joined by ';', such as 'all_reduce over node, "
    "gpu from 65536: 2d_torus'; else the library's own.",
)
@click.option(
    "--fuse/--no-fuse",
    default=None,
    help="Whether kernels take the place of what a model writes out.",
)
@click.option(
    "--fuse-also",
    "also",
    multiple=True,
    type=click.Choice(ASKED_FOR),
    help="What is fused only where it is named: collectives beside the linears around them.",
)
@click.option(
    "--frontier",
    "as_frontier",
    is_flag=True,
    help="Step time against memory: the fastest plans that need less and less. Writes none.",
)
@click.option(
    "--trace",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder to which every value on the way is written.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan to this file.",
)
@JSON
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
    source: Path | None,
    state: str | None,
    precision: str | None,
    solver: str | None,
    calibration: Path | None,
    recompute: str | None,
    offload: str | None,
    collectives: str | None,
    fuse: bool | None,
    also: tuple[str, ...],
    as_frontier: bool,
    trace: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest way to train MODEL within the memory of the devices.

    MODEL is a name of the zoo, hf:path/to/config.json, or file.py:function, which returns the
    model and keyword arguments for it. Needs no GPU and no weights. Planned for AdamW.

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
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" --global-batch 64 --allow "stale gradients"
    """
    mesh = as_mesh(mesh_text)
    before = Plan.load(source).stage if source else None
    limit = device(mesh).usable if before is None else min(before.limit, device(mesh).usable)
    fused = before.fuse if before and fuse is None else choose(bool(fuse))
    given: dict[str, Any] = {
        "unknown_ops": unknown_ops,
        "solver": solver,
        "recompute": recompute,
        "offload": offload,
        "collectives": _algorithms(collectives),
        "state": state,
        "precision": None if precision is None else Precision.read(precision),
        "stages": None if global_batch is None else "auto",
        "global_batch": global_batch,
        "allow": allow,
    }
    options = replace(
        Options() if before is None else Options.like(before),
        memory=limit if memory is None else parse_quantity(memory, "B"),
        trace=trace,
        pins=words(texts, plans, layouts, source),
        table=table(own_rules(rule_files)),
        calibration=calibration,
        fuse=choose((*fused, *also)),
        **{name: value for name, value in given.items() if value is not None},
    )
    if output is not None and not output.parent.is_dir():
        raise ProgramError(f"there is no folder {output.parent}", todo="make it, or correct -o")
    prices = cost_model(mesh, options)  # refused, if at all, before a model is traced
    spec = ModelSpec(model, batch, seq, layers)
    if options.searches_stages:
        _pipeline(spec, mesh, options, output, as_json)
        return
    if as_frontier:
        _frontier(spec, mesh, options, as_json)
        return
    with stages(quiet=as_json) as stage:
        tracer = Stages(trace, stage)
        graph = capture_model(spec, options, tracer)
        stage("strategies")
        found = make_plan(graph, mesh, options, tracer)
        plan = Plan.of(found, spec)
        explanation = explained(graph, found, found.limit, options.table, prices)
    if as_json:
        print_json({**_plan_json(plan), "memory_limit": found.limit, "whole": explanation.whole})
    else:
        print_out(render_summary(explanation), "", render_parameters(explanation))
        print_out(*render_fused(found.fused))
        say(_found(found))
        _warn_whole(explanation)
    if output is not None:
        plan.save(output)
        more = "" if is_data(model) else f" --model {model}"
        say(f"written to {output}; next: autopar explain {output}{more}", err=True)


def _algorithms(text: str | None) -> ChosenAlgorithms | str | None:
    """What `--collectives` says; CollectiveError for a row that cannot be read."""
    if text is None or text == AUTO:
        return text
    return ChosenAlgorithms.parse([row.strip() for row in text.split(";")])


def _frontier(spec: ModelSpec, mesh: Mesh, options: Options, as_json: bool) -> None:
    """Step time against memory, down to what is the least."""
    found: list[StagePlan] = []
    with stages(quiet=as_json) as stage:
        tracer = Stages(None, stage)
        graph = capture_model(spec, options, tracer)
        planner = Planner(graph, mesh, options, Trace(None))

        def planned(limit: float) -> StagePlan:
            stage(f"{len(found)} plans; next within {format_bytes(limit)}")
            return planner.plan(limit)

        for plan in frontier.frontier(planned):
            found.append(plan)
    print_json(frontier_view.to_json(found)) if as_json else print_out(frontier_view.render(found))


def _pipeline(
    spec: ModelSpec, mesh: Mesh, options: Options, output: Path | None, as_json: bool
) -> None:
    """The fastest pipeline; what is asked of one plan goes for each of its stages."""
    batch = options.global_batch
    assert batch is not None
    model = model_of_any_size(spec, options)
    with stages(quiet=as_json) as stage:
        tracer = Stages(None if options.trace is None else Path(options.trace), stage)
        found, plan = plan_pipeline(model, batch, mesh, options, tracer, stage)
    made = replace(plan, model=replace(spec, batch=batch))
    if as_json:
        print_json(to_json(found, made))
    else:
        print_out(*render(found, made))
    if output is not None:
        made.save(output)
        say(f"written to {output}", err=True)


def _plan_json(plan: Plan) -> dict[str, object]:
    made = plan.stage
    return {
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "model": plan.model.table(),
        "predicted": plan.predicted.figures(),
        "pins": made.pins,
        "precision": str(made.precision),
        "recompute": {run: str(how) for run, how in made.recompute.items()},
        "offload": made.offload.to_table(),
        "fuse": list(made.fuse),
        "fused": {name: asdict(entry) for name, entry in made.fused.items()},
        "solver": made.solver.table(),
        "layouts": {name: str(node) for name, node in made.nodes.items()},
    }


def _found(made: StagePlan) -> str:
    """How the plan was found, in a sentence."""
    said = made.solver
    left = "" if said.left is None else f"reductions left {said.left}, "
    again = "".join(f"; {run} recomputes {how}" for run, how in made.recompute.items())
    again += f"; in host memory: {made.offload}" if made.offload else ""
    verdict = "optimal" if said.gap <= 1e-6 else f"within {100 * said.gap:.2g} % of the optimum"
    return f"{said.name}: {said.nodes} nodes, {left}{verdict}, {said.seconds:.2f} s{again}"


def _warn_whole(explanation: Explanation) -> None:
    if explanation.whole:
        found = ", ".join(f"%{name}" for name in explanation.whole)
        say(f"whole on every device for want of a rule: {found}", fg="yellow", err=True)
