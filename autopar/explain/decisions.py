"""The decisions of a plan, one for each node of the strategy problem, and differences of two plans.

A parameter and its share are one decision, "stored => used". Given a graph, decisions have the
user's names; without one, they have the names of nodes in the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.explain.node_names import module_pattern, parameter_name
from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import Layout
from autopar.lower.planned_layouts import entry_of
from autopar.plan_entries import NodePlan, Shaped
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Decision:
    """One choice of a plan.

    Attributes:
        node: the node that it is for; a parameter's share.
        name: the user's name of a parameter or input with "*" for the number of its block, else
            the module, else the node, "%add_3".
        op: kind of operator, or "parameter".
        place: the user's line, "file:line".
        times: number of blocks that it is for.
        layout: as a pin writes it: "[8, 16@gpu]", "[32@gpu, 8] => [32, 8] -sum(gpu)".
        entry: operands and results, as the plan writes them; for a parameter its whole storage.
    """

    node: str
    name: str
    op: str
    place: str
    times: int
    layout: str
    entry: str


def decisions(plan: StagePlan, graph: Graph | None = None) -> dict[str, Decision]:
    """Returns the decisions of a plan by node, in order of execution.

    Args:
        plan: the plan of one stage.
        graph: its graph, if known; it gives decisions the user's names.

    Raises:
        PlanMismatchError: the plan has no layout for a node of the graph.
    """
    if graph is None:
        return {
            name: Decision(name, f"%{name}", "", "", 1, _result(entry, plan), _text(entry, plan))
            for name, entry in plan.nodes.items()
        }
    by_node = {}
    for node in graph.folded:
        if node.op == "param" and graph.users[node.name]:
            continue  # its share has the decision
        entry = entry_of(plan, graph, node.name)
        name, op = _named(graph, node)
        layout = _result(entry, plan)
        text = _text(entry, plan)
        if op == "parameter":
            storage = plan.storage(graph.template[node.inputs[0]], node.name)
            text = f"{storage.format(node.type.shape)} => {layout}"
            layout = f"{_side(entry.operands, plan)} => {layout}"
        source = node.source
        place = f"{source.file}:{source.line}" if source.file and op != "parameter" else ""
        times = graph.multiplicity[node.name]
        by_node[node.name] = Decision(node.name, name, op, place, times, layout, text)
    return by_node


def _named(graph: Graph, node: Node) -> tuple[str, str]:
    """Returns the name and the kind of the decision for a node."""
    if node.op == "autopar.share":
        leaf = graph[graph.template[node.inputs[0]]]
        if leaf.op == "param":
            return parameter_name(graph, leaf), "parameter"
    if node.is_leaf:
        return parameter_name(graph, node), node.op
    op = node.op.split(".")[1] if node.op.startswith("aten.") else node.op.removeprefix("autopar.")
    return module_pattern(graph, node) or f"%{node.name}", op


def _text(entry: NodePlan, plan: StagePlan) -> str:
    left, right = _side(entry.operands, plan), _result(entry, plan)
    return f"{left} -> {right}" if left else right


def _result(entry: NodePlan, plan: StagePlan) -> str:
    """Returns the layouts of the results, and the form if the operator has one."""
    text = _side(entry.results, plan)
    return f"{text} by {entry.form}" if entry.form else text


def _side(side: Iterable[Shaped], plan: StagePlan) -> str:
    """Formats layouts canonically, with the axes of partial sums in the order of the mesh."""
    place = {name: number for number, name in enumerate(plan.mesh.names)}

    def ordered(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(axes, key=lambda axis: place.get(axis, len(place))))

    return "; ".join(
        Layout(layout.dims, ordered(layout.partial), ordered(layout.varying)).format(shape)
        for shape, layout in side
    )


@dataclass(frozen=True)
class Change:
    """Decisions of one place that change in the same way between two plans.

    Attributes:
        name, op, place, times: as in `Decision`; `op` lists all kinds, if there are several.
        before, after: layouts of the results, or of operands and results if the results agree; ""
            for a plan without such a node.
        nodes: names of the nodes.
    """

    name: str
    op: str
    place: str
    times: int
    before: str
    after: str
    nodes: tuple[str, ...]


def changes(a: Mapping[str, Decision], b: Mapping[str, Decision]) -> tuple[Change, ...]:
    """Returns the changes from the decisions of plan `a` to those of plan `b`, parameters first."""
    groups: dict[tuple[str, str, int, str, str, bool], list[Decision]] = {}
    for node in dict.fromkeys((*a, *b)):
        old, new = a.get(node), b.get(node)
        if old is not None and new is not None and old.entry == new.entry:
            continue
        before, after = (one.layout if one else "" for one in (old, new))
        if old and new and before == after:
            before, after = old.entry, new.entry
        one = old or new
        assert one is not None
        # Operators of one module are grouped by line; a node without a module is a group by itself.
        key = (one.name, one.place, one.times, before, after, one.op == "parameter")
        groups.setdefault(key, []).append(one)
    grouped = [
        Change(name, _kinds(group), place, times, before, after, tuple(d.node for d in group))
        for (name, place, times, before, after, _), group in groups.items()
    ]
    return tuple(sorted(grouped, key=lambda change: change.op != "parameter"))


def _kinds(group: Iterable[Decision]) -> str:
    counts = Counter(decision.op for decision in group)
    return ", ".join(op + (f" × {count}" if count > 1 else "") for op, count in counts.items())
