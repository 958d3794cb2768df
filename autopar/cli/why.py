"""`autopar why` and `autopar why-not`: a decision of a plan, and the price of alternatives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from autopar.cli.common.console import JSON, print_json, print_out, stages
from autopar.cli.common.model_options import MODEL, RULES, shapes
from autopar.cli.common.price_model import CALIBRATION
from autopar.cli.common.replan import (
    Alternative,
    Case,
    busiest_share,
    by_form,
    instead,
    named,
    next_best,
    open_case,
    pinned,
    with_forms,
)
from autopar.errors import PinError
from autopar.explain import Decision, decisions, render_difference, signed
from autopar.ir.units import format_bytes, format_seconds
from autopar.operators.forms import PLAIN
from autopar.stage_plan import StagePlan

_SECONDS = ("step_seconds", "compute_seconds", "exchange_seconds", "reshard_seconds")
BUSIEST = (
    "in operators: communication inside them; busiest: the work of the busiest device on this "
    "operator, compared with an equal share for each device"
)
MOST = 12  # decisions that one `why` solves again
STAGE = click.option(
    "--stage", "number", type=click.IntRange(min=0),
    help="The stage of a pipeline, if NAME occurs in several.",
)  # fmt: skip
MEMORY = click.option(
    "--memory", metavar="SIZE", help='Memory limit per device, instead of the plan\'s: "80GiB".'
)
ALL = click.option("--all", "everything", is_flag=True, help="Show every row of long tables.")


def common(command: Any) -> Any:
    """Adds the options that both commands share."""
    options = (MODEL, RULES, shapes, STAGE, MEMORY, CALIBRATION, ALL, JSON)
    for option in reversed(options):
        command = option(command)
    return command


@click.command("why")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("name", metavar="NAME")
@click.option(
    "-n", "--others", default=2, show_default=True, type=click.IntRange(1, 20),
    help="Number of alternatives to search for.",
)  # fmt: skip
@common
def command(
    file: Path, name: str, others: int, everything: bool, as_json: bool, **given: Any
) -> None:
    """Show the plan's layout for NAME, the next best layouts, and what they cost.

    NAME is a parameter, an input, a module, a node such as %add_3 (all with wildcards, as in pins),
    or a line of the model's source. The model is planned again with the plan's layout excluded; the
    same blocks are recomputed and offloaded, unless no such plan fits. For a pipeline, the stage
    that contains NAME is planned, and all figures are per microbatch. Where an operator of NAME has
    several forms, such as attention in a ring, all of them are priced.

    \b
    autopar why plan.toml "transformer.h.*.mlp.c_fc.weight"
    autopar why plan.toml model.py:41
    """
    with stages(quiet=as_json) as stage:
        case = open_case(file, name, stage, **given)
        nodes = named(case.names, name)
        if len(nodes) > MOST:
            raise PinError(
                f"{name!r} names {len(nodes)} decisions, more than the {MOST} that can be compared",
                why=f"it names {', '.join(f'%{node}' for node in nodes[:MOST])}, ...",
                todo="give a name that matches fewer",
            )
        chosen = decisions(case.plan, case.graph)
        formed = with_forms(case, name)
        answers = {node: tuple(next_best(case, chosen[node], others)) for node in nodes}
        forms = {node: by_form(case, node) for node in formed[:MOST]}
    if as_json:
        found = [_json(chosen[node], answers.get(node, ())) for node in {**answers, **forms}]
        for entry in found:
            entry["forms"] = {k: asdict(v) for k, v in forms.get(entry["node"], {}).items()}
        print_json(found)
        return
    _head(case)
    for node, by_name in forms.items():
        _print_forms(case, chosen[node], by_name)
    for node in nodes:
        _print(case, chosen[node], answers[node], everything)


@click.command("why-not")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("name", metavar="NAME")
@click.argument("layout", metavar="LAYOUT")
@common
def why_not(
    file: Path, name: str, layout: str, everything: bool, as_json: bool, **given: Any
) -> None:
    """Show what it costs to keep NAME in LAYOUT, written as a pin.

    The model is planned again under the plan's own pins and this one; NAME is as for `why`. A form,
    "by ring", replaces the form that the plan's own pins give.

    \b
    autopar why-not plan.toml transformer.wte.weight "[50257@gpu, 768]"
    autopar why-not plan.toml transformer.wte.weight "[50257@gpu, 768] => [50257, 768] -sum(gpu)"
    autopar why-not plan.toml %add_3 "[8@node, 1024, 768] along node"
    """
    with stages(quiet=as_json) as stage:
        case = open_case(file, name, stage, **given)
        nodes, key = pinned(case, name, layout)
        answer = instead(case, nodes, {key: layout})
    chosen = decisions(case.plan, case.graph)
    if as_json:
        values = {"decisions": [asdict(chosen[node]) for node in nodes], **asdict(answer)}
        print_json({**values, "fits": not answer.missing})
        return
    _head(case)
    for node in nodes:
        print_out(_title(chosen[node]))
        print_out(f"chosen   {chosen[node].layout}")
    print_out(f"instead  {answer.layouts or layout}")
    own = _times(max(busiest_share(case, case.plan, node) for node in nodes))
    if own != _times(answer.busiest):
        print_out(
            f"The busiest device does {_times(answer.busiest)} an equal share of this operator's "
            f"work, instead of {own}."
        )
    _print_difference(case.plan, answer, everything)


def _json(decision: Decision, answers: tuple[Alternative, ...]) -> dict[str, Any]:
    return {**asdict(decision), "others": [asdict(answer) for answer in answers]}


def _head(case: Case) -> None:
    print_out(Text(f"{case.plan.graph} on {case.plan.mesh}", style="bold"), "")
    if case.edited:
        note = "The plan was edited or prices have changed since; the figures are recomputed."
        print_out(Text(note, style="yellow"), "")


def _title(decision: Decision) -> Text:
    times = f"  × {decision.times}" if decision.times > 1 else ""
    node = "" if decision.name.startswith("%") else f"  %{decision.node}"
    text = Text(f"{decision.name}{times}", style="bold")
    return text.append(f"  {decision.op}  {decision.place}{node}", style="dim")


def _print(
    case: Case, decision: Decision, answers: tuple[Alternative, ...], everything: bool
) -> None:
    """Prints a table of the alternatives, and the difference to the best of them."""
    print_out(_title(decision))
    rows = Table(box=None, pad_edge=False)
    for number, heading in enumerate(("", "layout", "a step", "change", "a device", "change", "")):
        rows.add_column(heading, justify="right" if number > 1 else "left", overflow="fold")
    predicted = case.plan.predicted
    own = (format_seconds(predicted.step_seconds), format_bytes(predicted.peak_bytes))
    rows.add_row("chosen", decision.layout, own[0], "", own[1], "", "")
    for number, answer in enumerate(answers, start=1):
        if answer.difference is None:
            continue
        (step, slower), (peak, larger) = answer.figure("step_seconds"), answer.figure("peak_bytes")
        rows.add_row(
            f"{number}.", answer.layouts, format_seconds(step), signed(slower, format_seconds),
            format_bytes(peak), signed(larger, format_bytes), f"solved in {answer.seconds:.2f} s",
        )  # fmt: skip
    print_out(rows, "")
    for answer in answers:
        if answer.missing:
            print_out(answer.missing, "")
    if answers[0].difference is not None:
        _print_difference(case.plan, answers[0], everything)


def _print_forms(case: Case, decision: Decision, answers: dict[str, Alternative]) -> None:
    """Prints the time of a step with the chosen form and with each other form."""
    print_out(Text("Forms of ").append(_title(decision)))
    headings = (
        "form", "a step", "compute", "in operators", "resharding", "a device", "busiest", "",
    )  # fmt: skip
    rows = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        justify: Any = "right" if 0 < number < len(headings) - 1 else "left"
        rows.add_column(heading, justify=justify, overflow="fold")
    own = case.plan.predicted
    layout, _, form = decision.layout.partition(" by ")
    rows.add_row(
        f"{form or PLAIN} (chosen)", *(format_seconds(getattr(own, f)) for f in _SECONDS),
        format_bytes(own.peak_bytes), _times(busiest_share(case, case.plan, decision.node)), layout,
    )  # fmt: skip
    for name, answer in answers.items():
        if answer.difference is None:
            rows.add_row(name, *[""] * (len(headings) - 2), answer.missing)
            continue
        seconds = (format_seconds(answer.figure(figure)[0]) for figure in _SECONDS)
        notes = "does not fit" if answer.missing else answer.layouts.partition(" by ")[0]
        peak = format_bytes(answer.figure("peak_bytes")[0])
        rows.add_row(name, *seconds, peak, _times(answer.busiest), notes)
    print_out(rows)
    print_out(Text(BUSIEST, style="dim"), "")


def _times(share: float) -> str:
    return f"{share:.2f} ×" if share else ""


def _print_difference(plan: StagePlan, answer: Alternative, everything: bool) -> None:
    """Prints everything that the alternative changes."""
    if answer.missing:
        print_out(Text(f"It does not fit. {answer.missing}", style="yellow"))
        print_out(f"The fastest plan with it exceeds memory by {format_bytes(answer.excess)}.", "")
    difference = answer.difference
    assert difference is not None
    for part in render_difference(difference, ("chosen", "instead"), everything=everything):
        print_out(part, "")
    if not difference.changes:
        print_out("No other layout changes.")
    gain = -answer.figure("step_seconds")[1]
    if gain > 0 and not answer.missing:
        why = "the plan was edited, or made with other prices or less memory (--memory)."
        if answer.unpinned:
            why = "the plan's own pins give another form."
        elif gain <= plan.solver.gap * plan.predicted.step_seconds:
            why = f"the search for the plan ended within {plan.solver.gap:.1%} of the optimum."
        print_out(Text(f"It is faster than the plan: {why}", style="yellow"))
    print_out(Text(f"solved in {answer.seconds:.2f} s", style="dim"))
