"""`autopar solve`: solves a strategy problem in the JSON of the contest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from autopar.cli.common.console import FILE, JSON, SECONDS, print_json, stages
from autopar.errors import ProblemError
from autopar.files.kinds import Kind
from autopar.intra_op.contest import read_problem
from autopar.intra_op.problem import evaluate
from autopar.intra_op.solvers import solve
from autopar.intra_op.solvers.pulp import written

SOLUTION = Kind(
    "the solution", ProblemError, "pass a file that -o wrote", bad="this is not a solution"
)


@click.command("solve")
@click.argument("instance", type=click.Path(path_type=Path))
@click.option(
    "--time-limit",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds, including the reading of the file.",
)
@click.option(
    "--method",
    "--solver",
    "solver",
    default="auto",
    show_default=True,
    help="Name of the solver; pulp:HiGHS names a backend of PuLP.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Seed of the solver's random numbers.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the choices as JSON.")
@click.option(
    "--start",
    type=click.Path(path_type=Path),
    help="Start from a solution that -o wrote.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the integer program as an LP file, and do not solve it.",
)
@click.option("--bound", "only_bound", is_flag=True, help="Print only the proven bound.")
@JSON
def command(
    instance: Path,
    output: Path | None,
    write: Path | None,
    only_bound: bool,
    as_json: bool,
    **search: Any,
) -> None:
    """Solve INSTANCE, a problem in the JSON of the ASPLOS 2025 contest, optionally gzipped.

    \b
    autopar solve example.json
    autopar solve instance.json.gz --time-limit 60 -o solution.json
    autopar solve example.json --method mcmc
    autopar solve example.json --write example.lp
    """

    began = time.perf_counter()
    with stages(quiet=as_json) as stage:
        stage("read")
        problem = read_problem(instance)
        if write is not None:
            FILE.write(write, written(problem))
            return
        left = max(search["time_limit"] - (time.perf_counter() - began), 0.0)
        options: dict[str, Any] = {
            "time_limit": left,
            "work": search["time_limit"],
            "seed": search["seed"],
        }
        options["progress"] = lambda text: stage(text.strip())
        if search["start"] is not None:
            options["start"] = _choices(search["start"])
        solution = solve(problem, search["solver"], **options)
    result = evaluate(problem, solution)
    gap = (result.cost - solution.bound) / abs(result.cost) if result.cost else 0.0
    values = {
        "cost": result.cost,
        "bound": solution.bound,
        "gap": gap,
        "peak": result.peak,
        "memory_limit": problem.memory_limit,
        "feasible": result.feasible,
        "seconds": time.perf_counter() - began,
        "solver": solution.solver,
        "ended": solution.ended,
    }
    if output is not None:
        FILE.write(output, json.dumps({"solution": list(solution.choice)}) + "\n")
    if as_json:
        print_json(values)
    elif only_bound:
        click.echo(f"{solution.bound:.15g}")
    else:
        _print(values)


def _print(values: dict[str, Any]) -> None:
    limit = values["memory_limit"]
    share = "" if limit is None else f" of {limit:.15g}"
    full = "" if not limit else f" ({100 * values['peak'] / limit:.2f} %)"
    click.echo(f"cost     {values['cost']:.15g}")
    click.echo(f"bound    {values['bound']:.15g}")
    click.echo(f"gap      {values['gap']:.3g}" + (" (optimal)" if values["gap"] <= 1e-6 else ""))
    click.echo(f"peak     {values['peak']:.15g}{share}{full}")
    click.echo(f"seconds  {values['seconds']:.2f}")
    if values["ended"]:
        click.echo(f"ended by {values['ended']}")


def _choices(path: Path) -> list[int]:
    """Returns the choices in a file that `-o` wrote.

    Raises:
        ProblemError: the file cannot be read or is not a solution.
    """
    try:
        choice = SOLUTION.json(SOLUTION.text(path), str(path))["solution"]
        if not all(type(index) is int for index in choice):
            raise TypeError("expected a list of whole numbers")
        return list(choice)
    except (ValueError, KeyError, TypeError) as error:
        raise ProblemError(
            SOLUTION.bad, where=str(path), why=f"{type(error).__name__}: {error}"
        ) from error
