"""`autopar plan`: the fastest plan of a model."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click

from autopar.cli import frontier as frontier_view
from autopar.cli.common.console import JSON, Stages, print_json, print_out, say, stages
from autopar.cli.common.model_options import (
    RULES,
    Wanted,
    capture_model,
    is_data,
    own_rules,
    shapes,
)
from autopar.cli.common.pin_options import fixed_beforehand, words
from autopar.cli.explain import explained
from autopar.cli.pipeline import plan_pipeline, render, to_json
from autopar.cost.device import device
from autopar.errors import ProgramError
from autopar.explain import Explanation, render_fused, render_parameters, render_summary
from autopar.intra_op.table import table
from autopar.ir.fusion import ASKED_FOR, choose
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.precision import Precision
from autopar.ir.units import format_bytes
from autopar.plan import Plan
from autopar.planning import frontier
from autopar.planning.single import (
    Options,
    Planner,
    Trace,
    cost_model,
    make_plan,
)
from autopar.runtime.ranks.processes import as_mesh


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
    default="replicate",
    show_default=True,
    help="Run operators without a sharding rule whole, or refuse them.",
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
    default="ilp",
    show_default=True,
    metavar="NAME",
    help="ilp searches for the cheapest plan, propagate follows pins and annotations.",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Prices that `autopar calibrate` measured on such machines.",
)
@click.option(
    "--recompute",
    default="auto",
    show_default=True,
    metavar="WHAT",
    help="Blocks computed again in the backward: auto, none, full, selective, or such as 'full 8'.",
)
@click.option(
    "--offload",
    default="none",
    show_default=True,
    metavar="WHAT",
    help="Kept in host memory: auto, optimizer, activations, both with +, or 'activations 8'.",
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
    rule_files: tuple[Path, ...],
    memory: str | None,
    unknown_ops: str,
    texts: tuple[str, ...],
    plans: tuple[str, ...],
    layouts: tuple[str, ...],
    source: Path | None,
    state: str | None,
    precision: str | None,
    solver: str,
    calibration: Path | None,
    recompute: str,
    offload: str,
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
    """
    mesh = as_mesh(mesh_text)
    before = Plan.load(source) if source else None
    within = before.memory if before else {}
    state = state or (before.state or None if before else None)
    limit = within.get("limit", device(mesh).usable)
    limit = limit if memory is None else parse_quantity(memory, "B")
    known = table(own_rules(rule_files))
    pins = words(texts, plans, layouts, source)
    fused = before.fuse if before and fuse is None else choose(bool(fuse))
    options = Options(
        None, limit, unknown_ops, trace, pins, solver, known, calibration, recompute,
        microbatches=before.microbatches if before else 1, state=state,
        precision=before.precision if before and precision is None else Precision.read(precision),
        fuse=choose((*fused, *also)),
        offload=offload,
    )  # fmt: skip
    if output is not None and not output.parent.is_dir():
        raise ProgramError(f"there is no folder {output.parent}", todo="make it, or correct -o")
    prices = cost_model(mesh, options)  # refused, if at all, before a model is traced
    wanted = Wanted(model, batch, seq, layers)
    if global_batch is not None:
        if offload not in ("none", "optimizer"):
            raise ProgramError(
                f"a search for a pipeline does not offload {offload!r}",
                why="of which blocks activations go depends on the stages that are searched for",
                todo="pass --offload optimizer, or stages= and offload= to autopar.compile",
            )
        _pipeline(wanted, mesh, global_batch, options, limit, trace, output, as_json)
        return
    state_bytes = within.get("state", 2.0)
    if as_frontier:
        _frontier(wanted, mesh, options, state_bytes, as_json)
        return
    with stages(quiet=as_json) as stage:
        tracer = Stages(trace, stage)
        graph = capture_model(wanted, options, tracer)
        stage("strategies")
        found = make_plan(graph, mesh, options, tracer, state_bytes)
        made = replace(found, model=wanted.table())
        explanation = explained(graph, made, limit, known, prices)
    if as_json:
        print_json({**_plan_json(made), "memory_limit": limit, "whole": explanation.whole})
    else:
        print_out(render_summary(explanation), "", render_parameters(explanation))
        print_out(*render_fused(made.fused))
        say(_found(made))
        _warn_whole(explanation)
    if output is not None:
        made.save(output)
        more = "" if is_data(model) else f" --model {model}"
        say(f"written to {output}; next: autopar explain {output}{more}", err=True)


def _frontier(wanted: Wanted, mesh: Mesh, options: Options, state: float, as_json: bool) -> None:
    """Step time against memory, down to what is the least."""
    found: list[Plan] = []
    with stages(quiet=as_json) as stage:
        tracer = Stages(None, stage)
        graph = capture_model(wanted, options, tracer)
        planner = Planner(graph, mesh, options, Trace(None), state)

        def planned(limit: float) -> Plan:
            stage(f"{len(found)} plans; next within {format_bytes(limit)}")
            return planner.plan(limit)

        for plan in frontier.frontier(planned):
            found.append(plan)
    print_json(frontier_view.to_json(found)) if as_json else print_out(frontier_view.render(found))


def _pipeline(
    wanted: Wanted,
    mesh: Mesh,
    batch: int,
    options: Options,
    limit: float,
    trace: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """The fastest pipeline; what is asked of one plan goes for each of its stages."""
    with stages(quiet=as_json) as stage:
        tracer = Stages(trace, stage)
        found, made = plan_pipeline(wanted, mesh, batch, options, limit, tracer, stage)
    if as_json:
        print_json(to_json(found, made))
    else:
        print_out(*render(found, made))
    if output is not None:
        made.save(output)
        say(f"written to {output}", err=True)


def _plan_json(made: Plan) -> dict[str, object]:
    return {
        "graph": made.graph,
        "mesh": str(made.mesh),
        "model": made.model,
        "predicted": made.predicted,
        "pins": made.pins,
        "precision": str(made.precision),
        "recompute": {run: str(how) for run, how in made.recompute.items()},
        "offload": made.offload.to_table(),
        "fuse": list(made.fuse),
        "fused": {name: asdict(entry) for name, entry in made.fused.items()},
        "solver": made.solver,
        "layouts": {name: str(node) for name, node in made.nodes.items()},
    }


def _found(made: Plan) -> str:
    """How the plan was found, in a sentence."""
    said = made.solver
    left = f"reductions left {said['left']}, " if "left" in said else ""
    gap = float(said["gap"])
    again = "".join(f"; {run} recomputes {how}" for run, how in made.recompute.items())
    again += f"; in host memory: {made.offload}" if made.offload else ""
    verdict = "optimal" if gap <= 1e-6 else f"within {100 * gap:.2g} % of the optimum"
    return f"{said['name']}: {said['nodes']} nodes, {left}{verdict}, {said['seconds']:.2f} s{again}"


def _warn_whole(explanation: Explanation) -> None:
    if explanation.whole:
        found = ", ".join(f"%{name}" for name in explanation.whole)
        say(f"whole on every device for want of a rule: {found}", fg="yellow", err=True)
