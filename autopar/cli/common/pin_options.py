"""The options of `autopar plan` that pin layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from autopar import pins
from autopar.errors import PinError, PlanError
from autopar.intra_op.pins.named_dims import layout
from autopar.plan import Plan
from autopar.stage_plan import StagePlan

Command = TypeVar("Command", bound=Callable[..., Any])
PLANS: dict[str, Callable[..., pins.PinFunction]] = {
    "data_parallel": pins.data_parallel,
    "fsdp": pins.fsdp,
    "megatron": pins.megatron,
    "megatron_sp": pins.megatron_sp,
    "gshard": pins.gshard,
    "alexnet_split": pins.alexnet_split,
}
MANY = ("data_parallel", "fsdp")  # take any number of axes


def pin_options(command: Command) -> Command:
    """Adds the options --pin, --form, --pins, --layout and --from."""
    for option in (
        click.option(
            "--form",
            "forms",
            metavar="NAME=FORM",
            multiple=True,
            help='Fix how operators run: "*.self_attn=ring zigzag". Repeatable.',
        ),
        click.option(
            "--from",
            "source",
            type=click.Path(path_type=Path),
            metavar="PLAN",
            help="Keep the pins of this plan file, which you may have edited.",
        ),
        click.option(
            "--layout",
            "layouts",
            metavar="DIM=AXES",
            multiple=True,
            help='Split a named dimension: "heads=gpu", "batch=node,gpu". Repeatable.',
        ),
        click.option(
            "--pins",
            "plans",
            metavar="PLAN[:AXES]",
            multiple=True,
            help=f"Apply a published plan along axes: {', '.join(PLANS)}. Repeatable.",
        ),
        click.option(
            "--pin",
            "texts",
            metavar="NAME=LAYOUT",
            multiple=True,
            help='Pin a layout: "transformer.h.*.mlp.c_fc.weight=[768, 3072@gpu]". Repeatable.',
        ),
    ):
        command = option(command)
    return command


def read_pins(
    texts: tuple[str, ...],
    plans: tuple[str, ...],
    layouts: tuple[str, ...],
    source: Path | None,
    forms: tuple[str, ...] = (),
) -> list[Mapping[str, str] | pins.PinFunction]:
    """Returns the pins of these options, as `pins=` of `autopar.compile` takes them.

    Args:
        texts: values of --pin.
        plans: values of --pins.
        layouts: values of --layout.
        source: the plan file of --from.
        forms: values of --form.

    Raises:
        PinError: one of them cannot be parsed.
        PlanError: the file is not a plan, or has no pins.
    """
    result: list[Mapping[str, str] | pins.PinFunction] = [_kept(source)] if source else []
    result += [_plan(text) for text in plans]
    if layouts:
        result.append(layout(dict(_pair(text, '--layout "heads=gpu"') for text in layouts)))
    result += [pins.form(*_pair(text, '--form "*.self_attn=ring"')) for text in forms]
    return [*result, *(dict([_pair(text, '--pin "NAME=[8, 16@gpu]"')]) for text in texts)]


def plan_to_change(source: Path) -> StagePlan:
    """Returns the plan of --from; raises PlanError if it is none, or a pipeline's."""
    plan = Plan.load(source)
    if plan.is_pipeline:
        raise PlanError(
            "--from takes the plan of a model in one stage",
            where=str(source),
            why="this one is a pipeline",
            todo="plan again with the options that it was made with, and further pins",
        )
    return plan.stage


def _plan(text: str) -> pins.PinFunction:
    """Parses a published plan and its axes, "megatron:gpu"."""
    name, _, given = text.partition(":")
    axes = [axis.strip() for axis in given.split(",") if axis.strip()]
    if name not in PLANS or (len(axes) != 1 and name not in MANY):
        raise PinError(
            f"cannot read the plan {text!r}",
            why=f"{name} takes one axis" if name in PLANS else f"plans are {', '.join(PLANS)}",
            todo='write e.g. "megatron:gpu", "fsdp:node,gpu" or "data_parallel" for all axes',
        )
    return PLANS[name](*axes)


def _pair(text: str, form: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise PinError(f"cannot read the pin {text!r}", todo=f"write {form}")
    return name.strip(), value.strip()


def _kept(source: Path) -> dict[str, str]:
    """Returns the pins of a plan file."""
    kept = plan_to_change(source).pins
    if not kept:
        raise PlanError(
            "the plan has no pins to keep",
            where=str(source),
            why="it has no table [pins]; the planner chose all its layouts",
            todo='add the table with lines such as "lm_head.weight" = "[50257@gpu, 768]"',
        )
    return kept
