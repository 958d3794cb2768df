"""`autopar why` and `autopar why-not`: a choice of a plan, and what others would cost."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from autopar.cli.console import JSON, Stages, print_json, print_out, stages
from autopar.cli.explain import explained
from autopar.cli.model import MODEL, RULES, Wanted, open_plan, own_rules, shapes
from autopar.cli.prices import CALIBRATION, prices
from autopar.cost.device import device
from autopar.errors import InfeasibleError, PinError
from autopar.explain import (
    Decision,
    Difference,
    decisions,
    difference,
    render_difference,
    repriced,
    signed,
)
from autopar.intra_op.pins import Pin, Pins, joined
from autopar.intra_op.rule import OpRule
from autopar.intra_op.table import table
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import parse_quantity
from autopar.ir.units import format_bytes, format_seconds
from autopar.plan import Plan
from autopar.planning.single import Options, make_plan

MOST = 12  # choices that one `why` solves again
MEMORY = click.option(
    "--memory", metavar="SIZE", help='Another limit a device than the plan was made under: "80GiB".'
)
ALL = click.option("--all", "everything", is_flag=True, help="Every row of long tables.")


@dataclass(frozen=True)
class Case:
    """A plan under question.

    Attributes:
        plan: with the figures that its layouts have under today's prices.
        graph: what it is for.
        edited: whether the plan's own figures are others.
        rules: by operator.
        limit: memory of a device in bytes.
        tracer: is told how far planning is.
        calibration: a file of measured prices.
    """

    plan: Plan
    graph: Graph
    edited: bool
    rules: dict[str, OpRule]
    limit: float
    tracer: Stages
    calibration: Path | None = None

    def again(self, pins: dict[str, str], limit: float | None = None) -> tuple[Plan, float]:
        """The best plan under the plan's own pins and more, and the seconds it took.

        Raises:
            PinError: the pins leave nothing.
            InfeasibleError: what they leave does not fit.
        """
        began = time.perf_counter()
        said = joined([self.plan.pins, pins])
        memory = self.limit if limit is None else limit
        options = Options(
            memory=memory,
            pins=said,
            table=self.rules,
            calibration=self.calibration,
            microbatches=self.plan.microbatches,
            state=self.plan.state or None,
            precision=self.plan.precision,
            fuse=self.plan.fuse,
        )
        state = self.plan.memory.get("state", 2.0)
        made = make_plan(self.graph, self.plan.mesh, options, self.tracer, state)
        return made, time.perf_counter() - began

    def pins(self, node: str) -> dict[str, str]:
        """The plan's own pins on a decision."""
        names = Pins(self.graph, {}).names[node]
        return {key: text for key, text in self.plan.pins.items() if _names(key, names)}

    def compared(self, other: Plan, nodes: Collection[str]) -> Difference:
        """How another plan for the same model differs beside some nodes; pins do not count."""
        price = prices(self.plan, self.calibration, must=True).collective
        alike = replace(other, pins=self.plan.pins, model=self.plan.model)
        found = difference(self.plan, alike, (self.graph, self.graph), (price, price))
        others = tuple(change for change in found.changes if not {*change.nodes} & {*nodes})
        return replace(found, changes=others)


@dataclass(frozen=True)
class Answer:
    """Another choice: its layouts, the plan with it, or why there is none.

    Attributes:
        layouts: of the decision in question, as a pin writes them; "" if there is no other.
        difference: from the plan in question, beside that decision; None if there is no such plan.
        seconds: that it took to solve.
        missing: why it cannot be, or does not fit.
        excess: bytes that it needs beyond the limit.
    """

    layouts: str
    difference: Difference | None
    seconds: float
    missing: str = ""
    excess: float = 0.0

    def figure(self, name: str) -> tuple[float, float]:
        """A predicted figure, and how much more it is than the plan's."""
        for figure in self.difference.figures if self.difference else ():
            if figure.name == name:
                return figure.after or 0.0, figure.change
        return 0.0, 0.0


def common(command: Any) -> Any:
    """The arguments and options of both commands; the plan comes first."""
    options = (MODEL, RULES, shapes, MEMORY, CALIBRATION, ALL, JSON)
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
    or a line of the model's source. The plan is made again with the choice excluded.

    \b
    autopar why plan.toml "transformer.h.*.mlp.c_fc.weight"
    autopar why plan.toml model.py:41
    """
    with stages(quiet=as_json) as stage:
        case = _open(file, stage, **given)
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
        case = _open(file, stage, **given)
        found, key = _pinned(case, name, layout)
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


def _open(file: Path, stage: Any, **given: Any) -> Case:
    """The plan with its model; see `open_plan` for what is raised."""
    known = table(own_rules(given["rule_files"]))
    wanted = Wanted("", given["batch"], given["seq"], given["layers"])
    plan, graph = open_plan(file, given["model"], wanted, known, stage)
    memory: str | None = given["memory"]
    limit = plan.memory.get("limit", device(plan.mesh).usable)
    limit = limit if memory is None else parse_quantity(memory, "B")
    calibration: Path | None = given["calibration"]
    by = prices(plan, calibration, must=True)
    explanation = explained(graph, plan, limit, known, by)
    plan = replace(plan, predicted=repriced(explanation, graph))
    return Case(plan, graph, explanation.stale, known, limit, Stages(None, stage), calibration)


def named(graph: Graph, name: str) -> list[str]:
    """The decisions that a name, a pattern or a line "model.py:41" means, in order.

    Raises:
        PinError: there is none; tells of names that are alike.
    """
    names = Pins(graph, {}).names
    found = {node.name for node in graph.folded if _names(name, names[node.name])}
    # A parameter is chosen with its share.
    leaves = {node for node in found if graph[node].op == "param" and graph.users[node]}
    found = found - leaves | {graph.template[graph.users[leaf][0]] for leaf in leaves}
    if not found:
        line = re.fullmatch(r"(?:.*/)?([^/]+\.\w+:\d+)", name)
        here = [n for n in graph.folded if line is not None and _place(n) == line[1]]
        # Views and shares compute nothing, and follow what the line does.
        found = {n.name for n in here if n.alias is None} or {n.name for n in here}
    if found:
        return [node.name for node in graph.folded if node.name in found]
    known = {n for own in names.values() for n in own if not n.startswith("%")}
    known |= {_place(node) for node in graph.nodes} - {""}
    near = difflib.get_close_matches(name.lstrip("%"), sorted(known), n=5, cutoff=0.5)
    raise PinError(
        f"{name!r} names nothing in {graph.name}",
        why="a name is that of a parameter, an input, a module or a node, or a line of the source",
        todo=f"did you mean {', '.join(near)}?" if near else "take a name from `autopar explain`",
    )


def _names(key: str, names: Collection[str]) -> bool:
    return key in names or any(fnmatchcase(name, key) for name in names)


def _place(node: Node) -> str:
    """The user's line, "model.py:41"; "" for leaves and where it is not known."""
    source = node.source
    return f"{Path(source.file).name}:{source.line}" if source.file and not node.is_leaf else ""


def next_best(case: Case, decision: Decision, count: int) -> Iterator[Answer]:
    """The best plans that split it otherwise, best first, each otherwise than those before it."""
    excluded = [without_sums(decision.layout)]
    for _ in range(count):
        pin = {f"%{decision.node}": "; ".join(f"not {layout}" for layout in excluded)}
        try:
            made, seconds = case.again(pin)
        except PinError as error:
            own = ", ".join(f"{key!r} = {text!r}" for key, text in case.pins(decision.node).items())
            why = f"the plan's own pins say so: {own}" if own else error.why
            yield Answer("", None, 0.0, f"There is no other choice: {why}")
            return
        except InfeasibleError as error:
            yield Answer("", None, 0.0, f"No other choice fits: {error.what}: {error.why}")
            return
        layouts = decisions(made, case.graph)[decision.node].layout
        yield Answer(layouts, case.compared(made, [decision.node]), seconds)
        excluded.append(without_sums(layouts))


def without_sums(layouts: str) -> str:
    """The layout that a pin speaks of, of several results the first, whatever its gradient owes.

    Where the sum of a gradient stands is often open: at a parameter or behind a transpose of it.
    """
    return layouts.partition(";")[0].partition(" -sum(")[0]


def instead(case: Case, nodes: list[str], pins: dict[str, str]) -> Answer:
    """The best plan under more pins; where it does not fit, the best that memory would allow.

    Raises:
        PinError: the pins cannot be kept; names what contradicts them.
    """
    missing, excess = "", 0.0
    try:
        made, seconds = case.again(pins)
    except InfeasibleError as error:
        made, seconds = case.again(pins, math.inf)
        excess = max(made.predicted["peak_bytes"] - case.limit, 0.0)
        missing = f"{error.what}: {error.why}" if error.why else error.what
    new = decisions(made, case.graph)
    layouts = "; ".join(dict.fromkeys(new[node].layout for node in nodes))
    return Answer(layouts, case.compared(made, nodes), seconds, missing, excess)


def _pinned(case: Case, name: str, layout: str) -> tuple[list[str], str]:
    """The decisions that a pin is on, and its key; a line must have one value of that shape."""
    found = named(case.graph, name)
    shape = Pin.parse(layout.partition(";")[0]).shape
    names = Pins(case.graph, {}).names
    if any(_names(name, names[node]) for node in found):
        return found, name
    fitting = [node for node in found if case.graph[node].type.shape == shape]
    if len(fitting) != 1:
        shapes = ", ".join(f"%{node} {list(case.graph[node].type.shape)}" for node in found)
        raise PinError(
            f"{name} has {len(fitting) or 'no'} values of shape {list(shape)}",
            why=f"its values are {shapes}",
            todo="name one of them",
        )
    return fitting, f"%{fitting[0]}"


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
    own = (format_seconds(said["step_seconds"]), format_bytes(said["peak_bytes"]))
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
