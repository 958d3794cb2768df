"""The command line: `autopar plan | explain | emit`. The only file that prints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from rich.console import Console, RenderableType
from rich.status import Status

from autopar.codegen import folder
from autopar.codegen.emit import emit as emit_source
from autopar.compile import Options, Trace, as_mesh, capture_graph, make_plan
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.errors import AutoparError, PlanError, ProgramError
from autopar.explain import (
    Cost,
    Explanation,
    explain,
    moves,
    render,
    render_parameters,
    render_summary,
)
from autopar.intra_op import legal
from autopar.intra_op.build import Builder
from autopar.intra_op.options import Option
from autopar.intra_op.pins import Pins
from autopar.intra_op.rules import rules
from autopar.ir.capture import Captured
from autopar.ir.graph import Graph
from autopar.ir.mesh import parse_quantity
from autopar.ir.tensor import Layout
from autopar.ir.text import fingerprint, format_graph
from autopar.plan import NodePlan, Plan
from autopar.zoo import load, names

WIDTH = 120  # of text that goes into a file or a pipe
Command = TypeVar("Command", bound=Callable[..., Any])


class _Group(click.Group):
    """Commands whose named errors are printed in red, with exit code 2 and no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            click.secho(str(error), fg="red", err=True)
            ctx.exit(2)


@click.group(cls=_Group)
def main() -> None:
    """Plan how a model trains in parallel, see why, and write the program.

    \b
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" -o plan.toml
    autopar explain plan.toml
    autopar emit plan.toml -o program
    """


@dataclass(frozen=True)
class Wanted:
    """A model as the command line or a plan spells it; None is the model's own default."""

    source: str
    batch: int | None
    seq: int | None
    layers: int | None

    def table(self) -> dict[str, str | int]:
        """The plan's entry `model`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _shapes(command: Command) -> Command:
    """The options --batch, --seq and --layers."""
    size = click.IntRange(min=1)
    for name, text in (
        ("--layers", "Number of blocks, in place of the model's own."),
        ("--seq", "Tokens of a sample."),
        ("--batch", "Samples of the whole batch of a step."),
    ):
        command = click.option(name, type=size, help=text)(command)
    return command


_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
_MODEL = click.option(
    "--model", metavar="MODEL", help="The model, where the plan does not name it: as for `plan`."
)


@main.command()
@click.argument("model")
@click.option("--mesh", "mesh_text", required=True, help='The devices: "H100: node=2, gpu=8".')
@_shapes
@click.option("--memory", metavar="SIZE", help='Limit a device: "80GiB"; else its whole memory.')
@click.option(
    "--unknown-ops",
    type=click.Choice(["replicate", "error"]),
    default="replicate",
    show_default=True,
    help="Run operators without a sharding rule whole, or refuse them.",
)
@click.option(
    "--pin",
    "pin_texts",
    metavar="NAME=LAYOUT",
    multiple=True,
    help='Fix a layout: "transformer.h.*.mlp.c_fc.weight=[768, 3072@gpu]". Repeatable.',
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
@_JSON
def plan(
    model: str,
    mesh_text: str,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    memory: str | None,
    unknown_ops: str,
    pin_texts: tuple[str, ...],
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
    """
    mesh = as_mesh(mesh_text)
    limit = device(mesh).memory if memory is None else parse_quantity(memory, "B")
    options = Options(None, limit, unknown_ops, trace, _pins(pin_texts))
    if output is not None and not output.parent.is_dir():
        raise ProgramError(f"there is no folder {output.parent}", todo="make it, or correct -o")
    wanted = Wanted(model, batch, seq, layers)
    with _stages(quiet=as_json) as stage:
        tracer = _Stages(trace, stage)
        graph = _capture(wanted, options, tracer).graph
        stage("strategies")
        made = replace(make_plan(graph, mesh, options, tracer), model=wanted.table())
        explanation = explained(graph, made, limit)
    if as_json:
        _print_json({**_plan_json(made), "memory_limit": limit, "whole": explanation.whole})
    else:
        _print(render_summary(explanation), "", render_parameters(explanation))
        _warn_whole(explanation)
    if output is not None:
        with _writing(output):
            made.save(output)
        more = "" if _is_data(model) else f" --model {model}"
        click.echo(f"written to {output}; next: autopar explain {output}{more}", err=True)


@main.command("explain")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@_MODEL
@_shapes
@click.option("--all", "everything", is_flag=True, help="Operators that take no time, too.")
@_JSON
def explain_command(
    file: Path,
    model: str | None,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Say where time and memory of a plan go, line by line of the model's source.

    A plan is data: a model that is a Python file is never run because a plan names it, only because
    --model does.

    \b
    autopar explain plan.toml
    autopar explain plan.toml --model train.py:model
    """
    with _stages(quiet=as_json) as stage:
        chosen, captured = _open(file, model, Wanted("", batch, seq, layers), stage)
        explanation = explained(captured.graph, chosen, device(chosen.mesh).memory)
    if as_json:
        _print_json({**asdict(explanation), "seconds": explanation.seconds})
    else:
        _print(render(explanation, everything=everything))


@main.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the program.",
)
@_MODEL
@_shapes
def emit(
    file: Path,
    output: Path,
    model: str | None,
    batch: int | None,
    seq: int | None,
    layers: int | None,
) -> None:
    """Write the program of a plan: ordinary PyTorch, without weights.

    A plan that was edited by hand is checked against the rules first.

    \b
    autopar emit plan.toml -o program
    """
    with _stages(quiet=False) as stage:
        chosen, captured = _open(file, model, Wanted("", batch, seq, layers), stage)
        stage("emit")
        source = emit_source(captured.graph, chosen, AnalyticModel(chosen.mesh).collective)
    tied = {k: v for k, v in captured.parameter_names.items() if k != v}
    files = {
        "program.py": folder.standalone(source),
        "plan.toml": chosen.to_toml(),
        "graph.txt": format_graph(captured.graph),
        "program.toml": folder.settings(tied, torch.optim.AdamW, None),
    }
    with _writing(output):
        folder.write(output, files, {})
    program = output / "program.py"
    click.echo(
        f"{program}: {len(files['program.py'].splitlines())} lines\n"
        f"put weights.safetensors and batch.safetensors beside it, under the names of its "
        f"parameters() and INPUTS, then\n"
        f"  torchrun --nproc-per-node {chosen.mesh.size} {program}"
    )


def _capture(wanted: Wanted, options: Options, tracer: Trace) -> Captured:
    """The prepared graph of a model and a batch; weights of the zoo and of hf: are never made."""
    module, inputs = load(wanted.source, batch=wanted.batch, seq=wanted.seq, layers=wanted.layers)
    return capture_graph(module, (), inputs, options, tracer)


def _open(
    file: Path, model: str | None, given: Wanted, stage: Callable[[str], None]
) -> tuple[Plan, Captured]:
    """A plan and the captured model that it is for.

    Raises:
        PlanError: no usable plan, one that names code to run, or layouts that are not possible.
        PlanMismatchError: it is for another model.
    """
    chosen = Plan.load(file)
    device(chosen.mesh)
    flags = {k: v for k, v in given.table().items() if k != "source"}
    named = {"source": model} if model else {"source": _source(chosen, file)}
    wanted = {"batch": None, "seq": None, "layers": None, **chosen.model, **flags, **named}
    captured = _capture(Wanted(**wanted), Options(), _Stages(None, stage))  # type: ignore[arg-type]
    stage("strategies")
    graph = captured.graph
    chosen.check(fingerprint(graph), {node.name for node in graph.folded}, chosen.mesh)
    legal.check(graph, chosen, rules())
    return chosen, captured


def _source(chosen: Plan, file: Path) -> str:
    """The model that a plan names, if it is data: a name of the zoo or a configuration."""
    source = str(chosen.model.get("source", ""))
    if _is_data(source):
        return source
    raise PlanError(
        "the plan does not say by itself which model it is for",
        where=str(file),
        why=f"it names {source!r}, and a plan is data: nothing that it names is run"
        if source
        else "it has no entry [model]",
        todo=f"say it: --model {source or 'file.py:function'}",
    )


def _is_data(source: str) -> bool:
    """Whether building the model runs no code of the user's."""
    return source in names() or source.startswith("hf:")


def _pins(texts: tuple[str, ...]) -> dict[str, str]:
    pins = {}
    for text in texts:
        name, sign, layout = text.partition("=")
        if not sign:
            raise PlanError(f"cannot read the pin {text!r}", todo='write "NAME=[8, 16@gpu]"')
        pins[name.strip()] = layout.strip()
    return pins


def explained(graph: Graph, chosen: Plan, limit: float) -> Explanation:
    """The explanation of a plan whose layouts are known to be possible."""
    price = AnalyticModel(chosen.mesh)
    pins = Pins(graph, {})
    builder = Builder(graph, chosen.mesh, price, rules(), 0.0, "replicate", pins)
    for node in graph.folded:
        share = node.op == "autopar.share" and graph[node.inputs[0]].op == "param"
        if node.op != "param" and not share:
            builder.add(node)
    # The planner's price of the loss contains its reduction, which is listed as a move.
    ending = sum(m.seconds for m in moves(graph, chosen, price.collective) if not m.reader)
    costs = {}
    for choices, options in zip(builder.choices, builder.options, strict=True):
        entry = _key(chosen.nodes[choices.name])
        fitting = [i for i, option in enumerate(options) if _option_key(option) == entry]
        index = min(fitting, key=lambda i: choices.cost[i])
        seconds = choices.cost[index] - (ending if choices.name == graph.loss else 0.0)
        costs[choices.name] = Cost(seconds, choices.memory[index])
    return explain(graph, chosen, price.collective, costs, limit=limit, whole=builder.replicated)


def _key(entry: NodePlan) -> object:
    sides = (entry.operands, entry.results)
    return tuple(tuple(_plain(layout) for _, layout in side) for side in sides)


def _option_key(option: Option) -> object:
    return tuple(tuple(_plain(layout) for layout in s) for s in (option.operands, option.results))


def _plain(layout: Layout) -> object:
    return layout.dims, frozenset(layout.partial), frozenset(layout.varying)


class _Stages(Trace):
    """A trace that also tells how far planning is."""

    def __init__(self, folder: Path | None, stage: Callable[[str], None]) -> None:
        super().__init__(folder)
        self.stage = stage

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        if name == "problem.json":
            self.stage("solve")
        with _writing(self.folder):
            super().__call__(name, text)


@contextmanager
def _stages(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that names the stage at work; nothing unless a person watches."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda name: None
        return
    began = time.perf_counter()
    with Status("capture", console=console) as status:
        yield lambda name: status.update(f"{name}  ({time.perf_counter() - began:.0f} s)")


@contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProgramError(f"cannot write {path}", why=str(error)) from error


def _print(*parts: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for part in parts:
        console.print(part)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=1))


def _plan_json(made: Plan) -> dict[str, object]:
    return {
        "graph": made.graph,
        "mesh": str(made.mesh),
        "model": made.model,
        "predicted": made.predicted,
        "layouts": {name: str(node) for name, node in made.nodes.items()},
    }


def _warn_whole(explanation: Explanation) -> None:
    if explanation.whole:
        found = ", ".join(f"%{name}" for name in explanation.whole)
        click.secho(f"whole on every device for want of a rule: {found}", fg="yellow", err=True)
