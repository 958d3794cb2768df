"""`autopar why` and `autopar why-not`: a choice of a plan, and what others would cost."""

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
from autopar.cli.common.replan import Answer, Case, instead, named, next_best, open_case, pinned
from autopar.errors import PinError
from autopar.explain import Decision, decisions, render_difference, signed
from autopar.ir.units import format_bytes, format_seconds

MOST = 12  # choices that one `why` solves again
STAGE = click.option(
    "--stage", "number", type=click.IntRange(min=0),
    help="Of a pipeline this stage, where NAME is in several.",
)  # fmt: skip
MEMORY = click.option(
    "--memory", metavar="SIZE", help='Another limit a device than the plan was made under: "80GiB".'
)
ALL = click.option("--all", "everything", is_flag=True, help="Every row of long tables.")


def common(command: Any) -> Any:
    """The arguments and options of both commands; the plan comes first."""
    options = (MODEL, RULES, shapes, STAGE, MEMORY, CALIBRATION, ALL, JSON)
    for option in reversed(options):
        command = option(command)
    return command


@click.command("why")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("name", metavar="NAME")
@click.option(
    "-n", "--others", default=2, show_default=True, type=click.IntRange(1, 20),
    help="How many of the next best choices are looked for.",
)  # fmt: skip
@common
def command(
    file: Path, name: str, others: int, everything: bool, as_json: bool, **given: Any
) -> None:
    """Say what the plan chose for NAME, the next best choices, and what they would cost.

    NAME is a parameter, an input, a module, a node such as %add_3, all with wildcards as in pins,
    or a line of the model's source. The plan is made again with the choice excluded. Of a pipeline
    the plan is that of the stage which has NAME, and its figures are those of a microbatch.

    \b
    autopar why plan.toml "transformer.h.*.mlp.c_fc.weight"
    autopar why plan.toml model.py:41
    """
    with stages(quiet=as_json) as stage:
        case = open_case(file, name, stage, **given)
        found = named(case.graph, name)
        if len(found) > MOST:
            raise PinError(
                f"{name!r} names {len(found)} choices, and {MOST} are answered for at once",
                why=f"it names {', '.join(f'%{node}' for node in found[:MOST])}, ...",
                todo="name fewer",
            )
        chosen = decisions(case.plan, case.graph)
        answers = {node: tuple(next_best(case, chosen[node], others)) for node in found}
    if as_json:
        print_json([_json(chosen[node], answers[node]) for node in found])
        return
    _head(case)
    for node in found:
        _print(case, chosen[node], answers[node], everything)


@click.command("why-not")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("name", metavar="NAME")
@click.argument("layout", metavar="LAYOUT")
@common
def why_not(
    file: Path, name: str, layout: str, everything: bool, as_json: bool, **given: Any
) -> None:
    """Say what it would cost to hold NAME in LAYOUT, written as a pin.

    The plan is made again under its own pins and this one. NAME is as for `why`.

    \b
    autopar why-not plan.toml lm_head.weight "[50257@gpu, 768]"
    autopar why-not plan.toml lm_head.weight "[50257@gpu, 768] => [50257, 768] -sum(gpu)"
    autopar why-not plan.toml %add_3 "[8@node, 1024, 768] along node"
    """
    with stages(quiet=as_json) as stage:
        case = open_case(file, name, stage, **given)
        found, key = pinned(case, name, layout)
        answer = instead(case, found, {key: layout})
    chosen = decisions(case.plan, case.graph)
    if as_json:
        values = {"decisions": [asdict(chosen[node]) for node in found], **asdict(answer)}
        print_json({**values, "fits": not answer.missing})
        return
    _head(case)
    for node in found:
        print_out(_title(chosen[node]))
        print_out(f"chosen   {chosen[node].layout}")
    print_out(f"instead  {answer.layouts or layout}")
    _print_difference(answer, everything)


def _json(decision: Decision, answers: tuple[Answer, ...]) -> dict[str, Any]:
    return {**asdict(decision), "others": [asdict(answer) for answer in answers]}


def _head(case: Case) -> None:
    print_out(Text(f"{case.plan.graph} on {case.plan.mesh}", style="bold"), "")
    if case.edited:
        note = "The plan's layouts were edited, or prices are others since: its figures are new."
        print_out(Text(note, style="yellow"), "")


def _title(decision: Decision) -> Text:
    times = f"  × {decision.times}" if decision.times > 1 else ""
    node = "" if decision.name.startswith("%") else f"  %{decision.node}"
    text = Text(f"{decision.name}{times}", style="bold")
    return text.append(f"  {decision.op}  {decision.place}{node}", style="dim")


def _print(case: Case, decision: Decision, answers: tuple[Answer, ...], everything: bool) -> None:
    """The choices in a table, and the difference of the first runner-up."""
    print_out(_title(decision))
    rows = Table(box=None, pad_edge=False)
    for number, heading in enumerate(("", "layout", "a step", "change", "a device", "change", "")):
        rows.add_column(heading, justify="right" if number > 1 else "left", overflow="fold")
    said = case.plan.predicted
    own = (format_seconds(said.step_seconds), format_bytes(said.peak_bytes))
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
        _print_difference(answers[0], everything)


def _print_difference(answer: Answer, everything: bool) -> None:
    """Item by item what the other choice changes."""
    if answer.missing:
        print_out(Text(f"It does not fit. {answer.missing}", style="yellow"))
        print_out(
            f"The fastest plan with it needs {format_bytes(answer.excess)} more than there are.", ""
        )
    found = answer.difference
    assert found is not None
    for part in render_difference(found, ("chosen", "instead"), everything=everything):
        print_out(part, "")
    if not found.changes:
        print_out("No other layout changes.")
    if answer.figure("step_seconds")[1] < 0 and not answer.missing:
        print_out(
            Text(
                "It is faster than the plan, which was edited, or made under other prices or less "
                "memory (--memory).",
                style="yellow",
            )
        )
    print_out(Text(f"solved in {answer.seconds:.2f} s", style="dim"))
