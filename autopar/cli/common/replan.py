"""A plan under question: it is made again under more pins, and the two compared."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from autopar.cli.common.console import Stages
from autopar.cli.common.model_options import own_rules
from autopar.cli.common.opened import Opened, PlanFile
from autopar.cli.common.price_model import prices
from autopar.cli.explain import explained
from autopar.errors import InfeasibleError, PinError
from autopar.explain import Decision, Difference, decisions, difference, repriced
from autopar.intra_op.pins.layout_pins import Pin, Pins, joined
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.planner import make_plan
from autopar.planning.prices import limit_of_plan
from autopar.stage_plan import StagePlan


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
        whole: the mesh of all stages.
        repeated: of a pipeline's stage, how often it runs in a step.
    """

    plan: StagePlan
    graph: Graph
    edited: bool
    rules: dict[str, OpRule]
    limit: float
    tracer: Stages
    calibration: Path | None
    whole: Mesh
    repeated: Repeated | None

    def again(self, pins: dict[str, str], limit: float | None = None) -> tuple[StagePlan, float]:
        """The best plan under the plan's own pins and more, and the seconds it took.

        Raises:
            PinError: the pins leave nothing.
            InfeasibleError: what they leave does not fit.
        """
        began = time.perf_counter()
        said = joined([self.plan.pins, pins])
        memory = self.limit if limit is None else limit
        options = Options.like(
            self.plan, memory=memory, pins=said, table=self.rules, calibration=self.calibration,
            whole=self.whole,
        )  # fmt: skip
        made = make_plan(self.graph, self.plan.mesh, options, self.tracer, self.repeated)
        return made, time.perf_counter() - began

    def pins(self, node: str) -> dict[str, str]:
        """The plan's own pins on a decision."""
        names = Pins(self.graph, {}).names[node]
        return {key: text for key, text in self.plan.pins.items() if _names(key, names)}

    def compared(self, other: StagePlan, nodes: Collection[str]) -> Difference:
        """How another plan for the same model differs beside some nodes; pins do not count."""
        price = prices(self.plan, self.calibration, self.whole, must=True).collective
        alike = replace(other, pins=self.plan.pins)
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


def open_case(file: Path, name: str, stage: Callable[[str], None], **given: Any) -> Case:
    """The plan with its model; of a pipeline the stage in question.

    Args:
        file: the plan.
        name: what is asked about, which says which stage if nothing else does.
        stage: is told what is done.
        given: the options of the command line.

    Raises:
        AutoparError: see `PlanFile.open`.
        PinError: the name is in several stages or in none.
    """
    known, number = table(own_rules(given["rule_files"])), given["number"]
    sizes = ModelSpec("", given["batch"], given["seq"], given["layers"])
    calibration: Path | None = given["calibration"]
    asked = PlanFile(file, given["model"], sizes, known, calibration)
    asked.stage(number)
    opened = asked.open(stage)
    part = opened.stage(_stage_of(opened, name) if number is None else number)
    plan, graph, repeated = part.plan, part.graph, part.repeated
    memory: str | None = given["memory"]
    limit = limit_of_plan(plan) if memory is None else parse_quantity(memory, "B")
    by = prices(plan, calibration, part.whole, must=True)
    explanation = explained(graph, plan, limit, known, by, repeated)
    plan = replace(plan, predicted=repriced(explanation, graph))
    edited = explanation.stale
    tracer = Stages(None, stage)
    return Case(plan, graph, edited, known, limit, tracer, calibration, part.whole, repeated)


def _stage_of(opened: Opened, name: str) -> int:
    """The one stage in which a name means something."""
    if len(opened.graphs) == 1:
        return 0
    found, missing = list[int](), list[PinError]()
    for number, graph in enumerate(opened.graphs):
        try:
            named(graph, name)
            found.append(number)
        except PinError as error:
            missing.append(error)
    if not found:  # of several hints one that knows a name like it
        raise max(missing, key=lambda error: error.todo.startswith("did you mean"))
    if len(found) > 1:
        raise PinError(
            f"{name!r} is in {len(found)} stages",
            why=f"it is in the stages {', '.join(map(str, found))}",
            todo="say which one: --stage N",
        )
    return found[0]


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
        excess = max(made.predicted.peak_bytes - case.limit, 0.0)
        missing = f"{error.what}: {error.why}" if error.why else error.what
    new = decisions(made, case.graph)
    layouts = "; ".join(dict.fromkeys(new[node].layout for node in nodes))
    return Answer(layouts, case.compared(made, nodes), seconds, missing, excess)


def pinned(case: Case, name: str, layout: str) -> tuple[list[str], str]:
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
