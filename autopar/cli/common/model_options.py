"""The options that name a model and its batch, and the capture of that model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from autopar.cli.common import kept_graphs
from autopar.errors import GraphError, ModelFileError
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph
from autopar.passes.deepen import LEAST, deepen
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.zoo import names

if TYPE_CHECKING:
    from autopar.capture.capture import Captured
    from autopar.planning.pipelines.automatic import AnySize

Command = TypeVar("Command", bound=Callable[..., Any])
MODEL = click.option(
    "--model", metavar="MODEL", help="The model, instead of the plan's, written as for `plan`."
)

RULES = click.option(
    "--rules",
    "rule_files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A Python file to run first, whose RULES are rules for your operators. Repeatable.",
)


def shapes(command: Command) -> Command:
    """Adds the options --batch, --seq and --layers."""
    for name, most, text in (
        ("--layers", 2**14, "Number of blocks, instead of the model's own."),
        ("--seq", 2**31, "Tokens per sample."),
        ("--batch", 2**31, "Samples in the whole batch of a step."),
    ):
        command = click.option(name, type=click.IntRange(1, most), help=text)(command)
    return command


def capture_model(wanted: ModelSpec, options: Options, tracer: Trace) -> Graph:
    """Captures the prepared graph of a model and a batch.

    Weights of models of the zoo and of hf: are never allocated. Of a deep one only a few blocks are
    traced, or read from the cache; the others are copies of them.
    """
    layers = depth_of(wanted)
    if layers is not None and layers > 2 * LEAST:
        few, more = (
            _graph(replace(wanted, layers=count), options, tracer) for count in (LEAST - 1, LEAST)
        )
        try:
            graph = deepen(few, more, layers - LEAST)
        except GraphError:
            pass  # its blocks differ
        else:
            tracer("deepen.txt", lambda: format_graph(graph))
            return graph
    return _graph(wanted, options, tracer)


def depth_of(wanted: ModelSpec) -> int | None:
    """Returns the number of blocks of a model that is data, None if unknown."""
    if not is_data(wanted.source):
        return None

    def count() -> int | None:
        from autopar.zoo.loading import depth

        return depth(wanted.source, wanted.layers)

    return kept_graphs.depth_of(replace(wanted, batch=None, seq=None), count)


def capture_whole(wanted: ModelSpec, options: Options, tracer: Trace) -> Captured:
    """Captures a model, tracing every block."""
    from autopar.planning.capturing import capture_graph
    from autopar.zoo.loading import load

    sizes = {"batch": wanted.batch, "seq": wanted.seq, "layers": wanted.layers}
    module, inputs = load(wanted.source, **sizes)
    return capture_graph(module, (), inputs, options, tracer)


def _graph(wanted: ModelSpec, options: Options, tracer: Trace) -> Graph:
    """Returns a model's graph with every block traced, now or earlier."""

    def trace() -> Graph:
        return capture_whole(wanted, options, tracer).graph

    kept = is_data(wanted.source) and options.table == table()  # the user's rules are code
    # A trace asks for the graph after every pass.
    return kept_graphs.remembered(wanted, options, trace) if kept and not tracer.folder else trace()


def own_rules(files: tuple[Path, ...]) -> tuple[OpRule, ...]:
    """Runs the user's Python files and returns the rules in their RULES.

    A file that only registers operators has no RULES.

    Raises:
        ModelFileError: a file cannot be run, or its RULES are not rules.
    """
    rules: list[OpRule] = []
    for file in files:
        from autopar.zoo.loading import opened  # with torch

        with opened(file) as module:
            given = getattr(module, "RULES", ())
        if not isinstance(given, (tuple, list)) or not all(isinstance(r, OpRule) for r in given):
            raise ModelFileError(
                "the file's RULES are not rules",
                where=str(file),
                todo="write RULES = (autopar.rule(...), ...)",
            )
        rules += given
    return tuple(rules)


def headed(graph: Graph, options: Options) -> str:
    """Returns a line on what is planned: the batch, the optimizer and the precision."""
    batch = ", ".join(f"{leaf.target} {leaf.type}" for leaf in graph.leaves("input"))
    precision = str(options.precision) or "the model's own"
    return f"batch: {batch}; optimizer: {options.update.optimizer}; precision: {precision}"


def model_of_any_size(wanted: ModelSpec, options: Options) -> AnySize:
    """Returns the model for batches of any size, as the search for stages needs it."""
    from autopar.planning.pipelines.automatic import AnySize

    def graph(samples: int, layers: int | None) -> Graph:
        count = wanted.layers if layers is None else layers
        return capture_model(replace(wanted, batch=samples, layers=count), options, Trace(None))

    data = is_data(wanted.source)
    return AnySize(graph, depth_of(wanted), data)


def is_data(source: str) -> bool:
    """Returns whether a model can be built without running the user's code."""
    return source in names() or source.startswith("hf:")
