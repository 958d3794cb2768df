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
    help="In seconds, with the reading.",
)
@click.option("--solver", default="auto", show_default=True, help="Name of the solver.")
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
@click.option("--bound", "only_bound", is_flag=True, help="Print only the proven bound.")
@JSON
def command(
    instance: Path,
    time_limit: float,
    solver: str,
    seed: int,
    output: Path | None,
    start: Path | None,
    only_bound: bool,
    as_json: bool,
) -> None:
    """Solve INSTANCE, a problem in the JSON of the ASPLOS 2025 contest, optionally gzipped.

    \b
    autopar solve example.json
    autopar solve instance.json.gz --time-limit 60 -o solution.json
    """

    began = time.perf_counter()
    with stages(quiet=as_json) as stage:
        stage("read")
        problem = read_problem(instance)
        left = max(time_limit - (time.perf_counter() - began), 0.0)
        options: dict[str, Any] = {}
        if solver not in ("brute_force", "greedy"):
            options = {"time_limit": left, "seed": seed}
            options["progress"] = lambda text: stage(text.strip())
        if start is not None:
            options["start"] = _choices(start)
        solution = solve(problem, solver, **options)
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
