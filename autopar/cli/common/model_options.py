"""Models as commands name them: their options, their graphs, and the plans that are for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from autopar.capture.capture import Captured
from autopar.cli.common.console import Stages
from autopar.cost.device import device
from autopar.errors import GraphError, ModelFileError, PlanError
from autopar.intra_op import legal
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.passes.deepen import LEAST, deepen
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.planning.single import Options, Trace, capture_graph
from autopar.zoo import load, names
from autopar.zoo.load import depth, opened

Command = TypeVar("Command", bound=Callable[..., Any])
MODEL = click.option(
    "--model", metavar="MODEL", help="The model, where the plan does not name it: as for `plan`."
)

RULES = click.option(
    "--rules",
    "rule_files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A Python file, run first, whose RULES are rules of own operators. Repeatable.",
)


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


def shapes(command: Command) -> Command:
    """The options --batch, --seq and --layers."""
    for name, most, text in (
        ("--layers", 2**14, "Number of blocks, in place of the model's own."),
        ("--seq", 2**31, "Tokens of a sample."),
        ("--batch", 2**31, "Samples of the whole batch of a step."),
    ):
        command = click.option(name, type=click.IntRange(1, most), help=text)(command)
    return command


def capture_model(wanted: Wanted, options: Options, tracer: Trace) -> Graph:
    """The prepared graph of a model and a batch; weights of the zoo and of hf: are never made.

    Of a deep one of these a few blocks are traced and the others added.
    """
    layers = depth(wanted.source, wanted.layers) if is_data(wanted.source) else None
    if layers is not None and layers > 2 * LEAST:
        few, more = (
            capture_whole(replace(wanted, layers=count), options, tracer).graph
            for count in (LEAST - 1, LEAST)
        )
        try:
            graph = deepen(few, more, layers - LEAST)
        except GraphError:
            pass  # its blocks differ
        else:
            tracer("deepen.txt", lambda: format_graph(graph))
            return graph
    return capture_whole(wanted, options, tracer).graph


def capture_whole(wanted: Wanted, options: Options, tracer: Trace) -> Captured:
    """The captured model, every block traced."""
    module, inputs = load(wanted.source, batch=wanted.batch, seq=wanted.seq, layers=wanted.layers)
    return capture_graph(module, (), inputs, options, tracer)


def open_plan(
    file: Path,
    model: str | None,
    given: Wanted,
    known: dict[str, OpRule],
    stage: Callable[[str], None],
) -> tuple[Plan, Graph]:
    """A plan and the graph of the model that it is for.

    Raises:
        PlanError: no usable plan, one that names code to run, or layouts that are not possible.
        PlanMismatchError: it is for another model.
    """
    chosen, wanted = _read(file, model, given)
    said = Options(table=known, precision=chosen.precision, fuse=chosen.fuse)
    graph = capture_model(wanted, said, Stages(None, stage))
    _check(chosen, graph, known, stage)
    return chosen, graph


def open_whole(
    file: Path,
    model: str | None,
    given: Wanted,
    known: dict[str, OpRule],
    stage: Callable[[str], None],
) -> tuple[Plan, Captured]:
    """A plan and the captured model that it is for; raises what `open_plan` does."""
    chosen, wanted = _read(file, model, given)
    said = Options(table=known, precision=chosen.precision, fuse=chosen.fuse)
    captured = capture_whole(wanted, said, Stages(None, stage))
    _check(chosen, captured.graph, known, stage)
    return chosen, captured


def _read(file: Path, model: str | None, given: Wanted) -> tuple[Plan, Wanted]:
    """A plan and its model."""
    chosen = Plan.load(file)
    return chosen, model_of(chosen, file, model, given)


def model_of(chosen: Plan | PipelinePlan, file: Path, model: str | None, given: Wanted) -> Wanted:
    """The model of a plan, as the command line spells it or else the plan.

    Raises:
        PlanError: it names code to run.
        UnknownDeviceError: there is no such device as it is for.
    """
    device(chosen.mesh)
    flags = {k: v for k, v in given.table().items() if k != "source"}
    named = {"source": model} if model else {"source": _source(chosen, file)}
    wanted = {"batch": None, "seq": None, "layers": None, **chosen.model, **flags, **named}
    return Wanted(**wanted)  # type: ignore[arg-type]


def _check(
    chosen: Plan, graph: Graph, known: dict[str, OpRule], stage: Callable[[str], None]
) -> None:
    stage("strategies")
    chosen.check(fingerprint(graph), {node.name for node in graph.folded}, chosen.mesh)
    legal.check(graph, chosen, known)


def own_rules(files: tuple[Path, ...]) -> tuple[OpRule, ...]:
    """The rules in the user's Python files, which are run; ModelFileError if one is no such file.

    A file that only registers operators has no `RULES`.
    """
    found: list[OpRule] = []
    for file in files:
        with opened(file) as module:
            given = getattr(module, "RULES", ())
        if not isinstance(given, (tuple, list)) or not all(isinstance(r, OpRule) for r in given):
            raise ModelFileError(
                "the file's RULES are no rules",
                where=str(file),
                todo="write RULES = (autopar.rule(...), ...)",
            )
        found += given
    return tuple(found)


def _source(chosen: Plan | PipelinePlan, file: Path) -> str:
    """The model that a plan names, if it is data: a name of the zoo or a configuration."""
    source = str(chosen.model.get("source", ""))
    if is_data(source):
        return source
    raise PlanError(
        "the plan does not say by itself which model it is for",
        where=str(file),
        why=f"it names {source!r}, and a plan is data: nothing that it names is run"
        if source
        else "it has no entry [model]",
        todo=f"say it: --model {source or 'file.py:function'}",
    )


def is_data(source: str) -> bool:
    """Whether building the model runs no code of the user's."""
    return source in names() or source.startswith("hf:")
