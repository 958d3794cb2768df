"""Plans a model again under additional pins and compares the result with a given plan."""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.cli.common.console import Stages
from autopar.cli.common.model_options import own_rules
from autopar.cli.common.open_plan import CheckedPlan, PlanFile
from autopar.cli.common.price_model import prices
from autopar.cli.explain import explained
from autopar.errors import InfeasibleError, PinError
from autopar.explain import Decision, Difference, decisions, difference, repriced
from autopar.intra_op.node_choices import operand_types, whole_options
from autopar.intra_op.pins.layout_pins import Pin, Pins, joined, parts
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rule import OpRule, resolve
from autopar.intra_op.rule_table import table
from autopar.intra_op.strategy import form_strategies
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.operators.forms import PLAIN, forms_of
from autopar.plan_entries import ModelSpec, NodePlan
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.planner import plan_again
from autopar.planning.prices import limit_of_plan
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Case:
    """The plan in question.

    Attributes:
        plan: the plan, with the figures of its layouts under current prices.
        graph: its prepared graph.
        edited: whether these figures differ from those in the file.
        rules: sharding rules by operator.
        limit: memory of a device in bytes.
        tracer: reports the progress of planning.
        calibration: a file of measured prices.
        whole: the mesh of all stages.
        repeated: for a stage of a pipeline, how often it runs in a step.
        known: the prices of the plan, looked up once for all questions.
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
    known: Prices

    @cached_property
    def names(self) -> Pins:
        """The names of the graph's nodes, as pins use them."""
        return Pins(self.graph, {})

    def again(
        self, pins: dict[str, str], limit: float | None = None, formed: Collection[str] = ()
    ) -> tuple[StagePlan, float]:
        """Plans the model under the plan's own pins and additional ones.

        Args:
            pins: the additional pins.
            limit: memory of a device in bytes, in place of the case's.
            formed: nodes to which the additional pins give another form than the plan's own pins.

        Returns:
            The best plan, and the seconds that planning took.

        Raises:
            PinError: no layouts satisfy the pins.
            InfeasibleError: no plan under the pins fits in memory.
        """
        began = time.perf_counter()
        all_pins = joined([self.pins_without_forms(formed), pins])
        memory = self.limit if limit is None else limit
        options = Options.like(
            self.plan, memory=memory, pins=all_pins, table=self.rules,
            calibration=self.calibration, whole=self.whole,
        )  # fmt: skip
        plan = plan_again(self.graph, self.plan, options, self.tracer, self.repeated, self.known)
        return plan, time.perf_counter() - began

    def pins(self, node: str) -> dict[str, str]:
        """Returns the plan's own pins on a decision."""
        pins, own = self.names, self.plan.pins
        return {
            key: text
            for key, text in own.items()
            if any(pins.speaks(key, Pin.parse(part), self.graph[node]) for part in parts(text))
        }

    def pins_without_forms(self, nodes: Collection[str]) -> dict[str, str]:
        """Returns the plan's own pins, but those of forms only on other nodes than the given."""
        if not nodes:
            return self.plan.pins
        pins, kept = self.names, list[dict[str, str]]()
        for key, text in self.plan.pins.items():
            for part in parts(text):
                pin = Pin.parse(part)
                named = [n.name for n in self.graph.folded if pins.speaks(key, pin, n)]
                if pin.anywhere and not set(named).isdisjoint(nodes):
                    kept += [{f"%{name}": part} for name in named if name not in nodes]
                else:
                    kept.append({key: part})
        return joined(kept)

    def compared(self, other: StagePlan, nodes: Collection[str]) -> Difference:
        """Returns the difference to another plan, without its pins and its changes at `nodes`."""
        price = self.known.collective
        same_pins = replace(other, pins=self.plan.pins)
        full = difference(self.plan, same_pins, (self.graph, self.graph), (price, price))
        others = tuple(change for change in full.changes if not {*change.nodes} & {*nodes})
        return replace(full, changes=others)


@dataclass(frozen=True)
class Alternative:
    """An alternative to a decision, or the reason why there is none.

    Attributes:
        layouts: the alternative's layouts, as a pin writes them; "" if there is none.
        difference: from the plan in question, apart from that decision; None if there is no plan.
        seconds: solving time.
        missing: why there is no plan, or why it does not fit; "" if it fits.
        excess: bytes by which it exceeds the limit.
        busiest: work of the busiest device on the decision's operator, see `busiest_share`.
        unpinned: whether it leaves out a form that the plan's own pins give.
    """

    layouts: str
    difference: Difference | None
    seconds: float
    missing: str = ""
    excess: float = 0.0
    busiest: float = 0.0
    unpinned: bool = False

    def figure(self, name: str) -> tuple[float, float]:
        """Returns a predicted figure, and its change from the plan in question."""
        for figure in self.difference.figures if self.difference else ():
            if figure.name == name:
                return figure.after or 0.0, figure.change
        return 0.0, 0.0


def open_case(file: Path, name: str, stage: Callable[[str], None], **given: Any) -> Case:
    """Opens a plan and captures its model; for a pipeline, the stage that contains `name`.

    Args:
        file: the plan.
        name: the name in question.
        stage: reports progress.
        given: the options of the command line.

    Raises:
        AutoparError: see `PlanFile.open`.
        PinError: the name occurs in several stages or in none.
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
    by = Prices(plan.mesh, prices(plan, calibration, part.whole, must=True))
    explanation = explained(graph, plan, limit, known, by, repeated)
    plan = replace(plan, predicted=repriced(explanation, graph))
    edited = explanation.stale
    tracer = Stages(None, stage)
    return Case(plan, graph, edited, known, limit, tracer, calibration, part.whole, repeated, by)


def _stage_of(opened: CheckedPlan, name: str) -> int:
    """Returns the number of the only stage in which a name occurs; raises PinError if ambiguous."""
    if len(opened.graphs) == 1:
        return 0
    matches, missing = list[int](), list[PinError]()
    for number, graph in enumerate(opened.graphs):
        try:
            named(Pins(graph, {}), name)
            matches.append(number)
        except PinError as error:
            missing.append(error)
    if not matches:  # prefer an error that suggests a name
        raise max(missing, key=lambda error: error.todo.startswith("did you mean"))
    if len(matches) > 1:
        raise PinError(
            f"{name!r} is in {len(matches)} stages",
            why=f"it is in stages {', '.join(map(str, matches))}",
            todo="choose one: --stage N",
        )
    return matches[0]


def named(pins: Pins, name: str) -> list[str]:
    """Returns the nodes whose decisions a name, a pattern or a line "model.py:41" matches.

    Raises:
        PinError: it matches none; suggests similar names.
    """
    graph, names = pins.graph, pins.names
    matches = {node.name for node in graph.folded if _names(name, names[node.name])}
    # A parameter's decision belongs to its share.
    leaves = {node for node in matches if graph[node].op == "param" and graph.users[node]}
    matches = matches - leaves | {graph.template[graph.users[leaf][0]] for leaf in leaves}
    if not matches:
        line = re.fullmatch(r"(?:.*/)?([^/]+\.\w+:\d+)", name)
        here = [n for n in graph.folded if line is not None and _place(n) == line[1]]
        # Views and shares compute nothing; take them only if the line has no other operator.
        matches = {n.name for n in here if n.alias is None} or {n.name for n in here}
    if matches:
        return [node.name for node in graph.folded if node.name in matches]
    known = {n for own in names.values() for n in own if not n.startswith("%")}
    known |= {_place(node) for node in graph.nodes} - {""}
    near = difflib.get_close_matches(name.lstrip("%"), sorted(known), n=5, cutoff=0.5)
    raise PinError(
        f"nothing in {graph.name} is named {name!r}",
        why="a name is a parameter, an input, a module, a node, or a line of the source",
        todo=f"did you mean {', '.join(near)}?" if near else "see `autopar explain` for names",
    )


def _names(key: str, names: Collection[str]) -> bool:
    return key in names or any(fnmatchcase(name, key) for name in names)


def _place(node: Node) -> str:
    """Returns the user's line, "model.py:41"; "" for leaves and if it is unknown."""
    source = node.source
    return f"{Path(source.file).name}:{source.line}" if source.file and not node.is_leaf else ""


def next_best(case: Case, decision: Decision, count: int) -> Iterator[Alternative]:
    """Yields the best plans with other layouts for a decision, each different, the best first."""
    op = case.graph[decision.node].op
    excluded = [_excluded(decision.layout, op)]
    for _ in range(count):
        pin = {f"%{decision.node}": "; ".join(f"not {layout}" for layout in excluded)}
        try:
            plan, seconds = case.again(pin)
        except PinError as error:
            own = ", ".join(f"{key!r} = {text!r}" for key, text in case.pins(decision.node).items())
            why = f"the plan's own pins fix it: {own}" if own else error.why
            yield Alternative("", None, 0.0, f"There is no other layout: {why}")
            return
        except InfeasibleError as error:
            yield Alternative("", None, 0.0, f"No other layout fits: {error.what}: {error.why}")
            return
        layouts = decisions(plan, case.graph)[decision.node].layout
        yield Alternative(layouts, case.compared(plan, [decision.node]), seconds)
        excluded.append(_excluded(layouts, op))


def with_forms(case: Case, name: str) -> list[str]:
    """Returns operators of a name, or in the module of that name, that have forms on the mesh."""
    graph, mesh = case.graph, case.plan.mesh
    pin, pins = Pin.parse(f"by {PLAIN}"), case.names
    nodes = [node for node in graph.folded if pins.speaks(name, pin, node)]
    return [
        node.name for node in nodes if any(form_strategies(node, operand_types(graph, node), mesh))
    ]


def by_form(case: Case, node: str) -> dict[str, Alternative]:
    """Returns the best plan with each form of an operator that the plan has not, or why not."""
    chosen = decisions(case.plan, case.graph)[node].layout.partition(" by ")[2] or PLAIN
    types, answers = operand_types(case.graph, case.graph[node]), {}
    forms = {s.form for s, _ in form_strategies(case.graph[node], types, case.plan.mesh)}
    for name, needs in {PLAIN: "", **_needs(case.graph[node].op)}.items():
        if name == chosen:
            continue
        try:
            answers[name] = instead(case, [node], {f"%{node}": f"by {name}"})
        except PinError as error:
            why = error.why if name in {PLAIN, *forms} else f"it needs {needs}"
            answers[name] = Alternative("", None, 0.0, f"It does not apply: {why}.")
    return answers


def _needs(op: str) -> dict[str, str]:
    return {form.name: form.needs for form in forms_of(op)}


def _excluded(layouts: str, op: str) -> str:
    """Returns a choice as a pin names it, with its form if the operator has several."""
    layout, _, form = layouts.partition(" by ")
    return f"{without_sums(layout)} by {form or PLAIN}" if forms_of(op) else without_sums(layout)


def without_sums(layouts: str) -> str:
    """Returns the layout of the first result without the partial sums of its gradient.

    A gradient can often be summed in several places, such as at a parameter or at its transpose;
    these are not alternatives.
    """
    return layouts.partition(";")[0].partition(" -sum(")[0]


def instead(case: Case, nodes: list[str], pins: dict[str, str]) -> Alternative:
    """Returns the best plan under additional pins, without a memory limit if none fits.

    Args:
        case: the plan in question.
        nodes: the decisions that are pinned.
        pins: the additional pins; a form replaces the one that the plan's own pins give.

    Raises:
        PinError: the pins cannot be satisfied; names the contradiction.
    """
    missing, excess = "", 0.0
    formed = nodes if any(Pin.parse(p).form for text in pins.values() for p in parts(text)) else ()
    try:
        plan, seconds = case.again(pins, formed=formed)
    except InfeasibleError as error:
        plan, seconds = case.again(pins, math.inf, formed)
        excess = max(plan.predicted.peak_bytes - case.limit, 0.0)
        missing = f"{error.what}: {error.why}" if error.why else error.what
    new = decisions(plan, case.graph)
    layouts = "; ".join(dict.fromkeys(new[node].layout for node in nodes))
    busiest = max(busiest_share(case, plan, node) for node in nodes)
    unpinned = joined([case.pins_without_forms(formed)]) != joined([case.plan.pins])
    compared = case.compared(plan, nodes)
    return Alternative(layouts, compared, seconds, missing, excess, busiest, unpinned)


def busiest_share(case: Case, plan: StagePlan, name: str) -> float:
    """Returns the busiest device's FLOPs of a node, as a multiple of an equal share; 0 if none.

    An equal share is what a device computes if all devices divide the node's work evenly.
    """
    graph, node = case.graph, case.graph[name]
    if node.is_leaf or node.alias is not None:  # a parameter, or a view
        return 0.0
    rule = case.rules.get(node.op)
    signature = resolve(rule, node, operand_types(graph, node), node.types) if rule else None

    def flops(entry: NodePlan) -> float:
        operands, results = ([layout for _, layout in s] for s in (entry.operands, entry.results))
        work = node_work(graph, node, operands, results, signature, plan.mesh, entry.form)
        return math.fsum(kernel.flops for kernel in (*work.forward, *work.backward))

    (whole,) = whole_options(graph, node)
    equal = flops(whole.entry(graph, node)) / plan.mesh.size
    return flops(plan.nodes[name]) / equal if equal else 0.0


def pinned(case: Case, name: str, layout: str) -> tuple[list[str], str]:
    """Resolves a name to the decisions that a pin fixes.

    Args:
        case: the plan in question.
        name: a name, a pattern, or a line with exactly one value of the layout's shape.
        layout: the pin's layout.

    Returns:
        The nodes of the decisions, and the key of the pin.

    Raises:
        PinError: nothing has that name, or a line has no or several values of that shape.
    """
    pin, pins = Pin.parse(layout.partition(";")[0]), case.names
    if pin.anywhere and (on := [n.name for n in case.graph.folded if pins.speaks(name, pin, n)]):
        return on, name
    matches, shape, names = named(pins, name), pin.shape, pins.names
    if any(_names(name, names[node]) for node in matches):
        return matches, name
    fitting = [node for node in matches if case.graph[node].type.shape == shape]
    if len(fitting) != 1:
        shapes = ", ".join(f"%{node} {list(case.graph[node].type.shape)}" for node in matches)
        raise PinError(
            f"{name} has {len(fitting) or 'no'} values of shape {list(shape)}",
            why=f"its values are {shapes}",
            todo="name one of them",
        )
    return fitting, f"%{fitting[0]}"
