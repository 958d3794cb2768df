"""Models as commands name them: their options, their graphs, and the plans that are for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from autopar.cli.console import Stages
from autopar.cost.device import device
from autopar.errors import ModelFileError, PlanError
from autopar.intra_op import legal
from autopar.intra_op.rule import OpRule
from autopar.ir.capture import Captured
from autopar.ir.text import fingerprint
from autopar.plan import Plan
from autopar.planning import Options, Trace, capture_graph
from autopar.zoo import load, names
from autopar.zoo.load import opened

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
    size = click.IntRange(min=1)
    for name, text in (
        ("--layers", "Number of blocks, in place of the model's own."),
        ("--seq", "Tokens of a sample."),
        ("--batch", "Samples of the whole batch of a step."),
    ):
        command = click.option(name, type=size, help=text)(command)
    return command


def capture_model(wanted: Wanted, options: Options, tracer: Trace) -> Captured:
    """The prepared graph of a model and a batch; weights of the zoo and of hf: are never made."""
    module, inputs = load(wanted.source, batch=wanted.batch, seq=wanted.seq, layers=wanted.layers)
    return capture_graph(module, (), inputs, options, tracer)


def open_plan(
    file: Path,
    model: str | None,
    given: Wanted,
    known: dict[str, OpRule],
    stage: Callable[[str], None],
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
    options = Options(table=known)
    captured = capture_model(Wanted(**wanted), options, Stages(None, stage))  # type: ignore[arg-type]
    stage("strategies")
    graph = captured.graph
    chosen.check(fingerprint(graph), {node.name for node in graph.folded}, chosen.mesh)
    legal.check(graph, chosen, known)
    return chosen, captured


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


def _source(chosen: Plan, file: Path) -> str:
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
