"""Options of `autopar plan --task generate`, and its output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from autopar.cli.common.console import print_json, print_out, say, stages
from autopar.cli.common.model_options import own_rules
from autopar.cli.common.pin_options import read_pins
from autopar.intra_op.rule_table import table
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.precision import Precision
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options

Command = TypeVar("Command", bound=Callable[..., Any])
PROMPT, NEW_TOKENS, BATCH = 128, 128, 8
# Options of a training that a generation has, too; others are refused.
_SHARED = (
    "model", "mesh_text", "batch", "layers", "memory", "precision", "solver", "calibration",
    "rule_files", "unknown_ops", "stage_count", "texts", "plans", "layouts", "forms", "output",
    "as_json",
)  # fmt: skip


def generation_options(command: Command) -> Command:
    """Adds --task, --prompt and --new-tokens; without the task, runs `command`."""

    @functools.wraps(command)
    def run(task: str, prompt: int | None, new_tokens: int | None, **given: Any) -> None:
        if task == "generate":
            _plan(prompt or PROMPT, new_tokens or NEW_TOKENS, given)
            return
        if prompt is not None or new_tokens is not None:
            raise click.UsageError("--prompt and --new-tokens are for --task generate")
        command(**given)

    sizes = (
        ("--new-tokens", f"With --task generate: tokens that follow (by default {NEW_TOKENS})."),
        ("--prompt", f"With --task generate: tokens of a prompt (by default {PROMPT})."),
    )
    wrapped: Any = run
    for name, text in sizes:
        wrapped = click.option(name, type=click.IntRange(1, 2**31), help=text)(wrapped)
    task = click.option(
        "--task",
        type=click.Choice(["train", "generate"]),
        default="train",
        help="generate plans a prefill and a decode, with caches, over the same parameters.",
    )
    return task(wrapped)  # type: ignore[no-any-return]


def _plan(prompt: int, new_tokens: int, given: dict[str, Any]) -> None:
    """Plans a generation and prints it."""
    from autopar.cli.common import generation_view
    from autopar.planning.generation.graphs import Sizes

    for name, value in given.items():
        if name not in _SHARED and value not in (None, (), False):
            raise click.UsageError(f"--{name.replace('_', '-')} is not for --task generate")
    options = _options(given)
    mesh = Mesh.parse(given["mesh_text"])
    spec = ModelSpec(given["model"], given["batch"] or BATCH, None, given["layers"])
    sizes = Sizes(spec.batch or BATCH, prompt, new_tokens)
    quiet, output = given["as_json"], given["output"]
    with stages(quiet=quiet) as stage:
        found = generation_view.planned(spec, mesh, options, sizes, stage)
    if quiet:
        print_json(generation_view.figures(found.plan, found.graphs[1], found.tried))
    else:
        print_out(*generation_view.render_plan(found))
    if output is not None:
        found.plan.save(Path(output))
        say(f"written to {output}; next: autopar explain {output}", err=True)


def _options(given: dict[str, Any]) -> Options:
    """Returns the options of planning that a generation shares with a training."""
    memory, precision = given["memory"], given["precision"]
    own = {
        "stages": given["stage_count"],
        "memory": None if memory is None else parse_quantity(memory, "B"),
        "precision": None if precision is None else Precision.read(precision),
        **{name: given[name] for name in ("solver", "calibration", "unknown_ops")},
    }
    return replace(
        Options(),
        table=table(own_rules(given["rule_files"])),
        pins=read_pins(given["texts"], given["plans"], given["layouts"], None, given["forms"]),
        **{name: value for name, value in own.items() if value is not None},
    )
