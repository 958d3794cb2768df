"""`autopar prepare`: compiles the planner and traces models ahead of the first plan."""

from __future__ import annotations

import compileall
import contextlib
import io
import math
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean

import click
import numpy as np

import autopar
from autopar.cli.common.console import say, stages
from autopar.cli.common.kept_graphs import kept_beside_package
from autopar.cli.common.model_options import capture_model
from autopar.errors import AutoparError
from autopar.inter_op.dynamic_program import least_memory
from autopar.intra_op.problem import Choices, Edge, Problem, frugal
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers._large.search_large import large
from autopar.intra_op.solvers._search import Search
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.zoo import names, spec

# Together these run every compiled loop: plans within little memory and with stages, asynchronous
# schedules, and solvers that plans use on hard problems only.
COMMANDS = (
    ("plan", "gpt2", "--layers", "2", "--mesh", "H100: node=2, gpu=2", "--memory", "1.4GiB"),
    ("plan", "gpt2", "--layers", "4", "--mesh", "H100: gpu=2", "--global-batch", "8"),
    ("schedules", "--stages", "2", "--microbatches", "2"),
)
SOLVERS = ("local_search", "mcmc")


@click.command("prepare")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
def command(models: tuple[str, ...]) -> None:
    """Compile the planner and trace models now, so that the first plan need not.

    MODEL is a name of the zoo; all of its models are traced by default, at their usual batch. Code
    and traces are kept beside the package, or in the user's cache folder if the package cannot be
    written; run it once after an installation, or while an image is built. After an interruption,
    run it again: it traces only the models that are missing.

    \b
    autopar prepare
    autopar prepare gpt2 llama-3-8b
    """
    for name in models:
        spec(name)  # refuses an unknown name before any work
    with stages(quiet=False) as stage:
        # An installation by pip has compiled its modules, a checkout has not.
        compileall.compile_dir(Path(autopar.__file__).parent, quiet=2)
        compile_loops(stage)
        _trace_models(tuple(dict.fromkeys(models or names())), strict=bool(models), stage=stage)
    say("the planner is compiled and the models are traced")


def compile_loops(stage: Callable[[str], None]) -> None:
    """Runs every compiled loop once, so that numba keeps its code.

    Args:
        stage: shows the current stage of work.
    """
    from autopar.cli import main

    for words in COMMANDS:
        stage(f"autopar {' '.join(words)}")
        with contextlib.redirect_stdout(io.StringIO()):
            main.main(list(words), prog_name="autopar", standalone_mode=False)
    stage("solvers")
    least_memory(np.zeros((1, 1), np.int64), np.zeros((1, 1)))  # where no pipeline fits
    problem = dense_problem()
    large(Search(problem, math.inf, 0.0, None, work=0.01))
    for solver in SOLVERS:
        solve(problem, solver, time_limit=math.inf, work=0.01)


class Counted(Trace):
    """A trace that counts the models that are traced, which are not those whose graph is kept."""

    def __init__(self) -> None:
        super().__init__(None)
        self.traced = 0

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Counts the first graph of a model."""
        self.traced += name == "capture.txt"


def _trace_models(models: Sequence[str], strict: bool, stage: Callable[[str], None]) -> None:
    """Keeps the graphs of models with the batch and the options that `plan` has by default.

    Reports every model, and how long the others take if they take as long as those traced so far.

    Args:
        models: names.
        strict: whether a model that cannot be traced raises its error, instead of being left out.
        stage: shows the current stage of work.
    """
    spent: list[float] = []
    for number, name in enumerate(models, 1):
        stage(f"{name}: model {number} of {len(models)}")
        began, tracer = time.monotonic(), Counted()
        try:
            with kept_beside_package():
                capture_model(ModelSpec(name, None, None, None), Options(), tracer)
        except AutoparError as error:
            if strict:
                raise
            say(f"{name} is left out: {error.what}", fg="yellow", err=True)
            continue
        done = "kept before"
        if tracer.traced:
            spent.append(time.monotonic() - began)
            done = f"traced in {spent[-1]:.0f} s"
        left = len(models) - number
        rest = f", at most {left * mean(spent):.0f} s left" if spent and left else ""
        say(f"{name}: {done}; model {number} of {len(models)}{rest}", err=True)


def dense_problem() -> Problem:
    """Returns a problem that no reduction shrinks, for the search on large problems."""
    draw = np.random.default_rng(0)
    count, size = 8, 4
    nodes = tuple(
        Choices(f"v{v}", ("",) * size, tuple(draw.random(size)), tuple(draw.random(size)), (0, 1))
        for v in range(count)
    )
    edges = tuple(Edge(*ends, draw.random((size, size))) for ends in combinations(range(count), 2))
    return Problem("dense", nodes, edges, 2 * sum(frugal(nodes)[1].values()))
