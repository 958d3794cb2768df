"""Checks a plan against the rules; plans may be edited by hand, and a wrong one must not train."""

from __future__ import annotations

from collections.abc import Hashable

from autopar.errors import AutoparError, PlanError
from autopar.intra_op.node_choices import Option, node_options, parameter_options
from autopar.intra_op.price_cache import kind
from autopar.intra_op.rule import OpRule
from autopar.intra_op.states import allowed_storages
from autopar.ir.graph import EXTEND, WRITE, Graph, Node
from autopar.ir.tensor import Layout
from autopar.plan_entries import Shaped
from autopar.stage_plan import StagePlan

Side = tuple[Shaped, ...]
Allowed = frozenset[tuple[Side, Side, str]]  # operands, results and form of each choice


def check(graph: Graph, plan: StagePlan, table: dict[str, OpRule]) -> None:
    """Compares every entry of the plan with the strategies of its operator.

    Raises:
        PlanError: an entry is not a strategy; names the entry, the user's line and the possible
            layouts.
        StateError: an invalid state sharding.
    """
    allowed_storages(plan.state or None, plan.precision, plan.mesh)
    choices = _Choices(graph, plan, table)
    for node in graph.folded:
        if node.op == "param" and graph.users[node.name]:
            continue  # checked with its share
        entry = plan.nodes[node.name]
        leaf = node
        fault = ""
        if node.op == "autopar.share" and graph[node.inputs[0]].op == "param":
            leaf = graph[graph.template[node.inputs[0]]]
            fault = _fault(plan, leaf.name, node.name)
        elif node.op in (EXTEND, WRITE):
            fault = _copied(graph, node, plan)
        options, allowed = choices.of(node, leaf)
        said = (_canonical(entry.operands), _canonical(entry.results), entry.form)
        if fault or said not in allowed:
            alike = [option for option in options if option.form == entry.form] or options
            known = "; ".join(option.label for option in alike[:8])
            raise PlanError(
                f"the plan's layouts of %{node.name} are not possible",
                where=f"the {leaf.op} {leaf.target!r}" if leaf.is_leaf else str(node.source),
                why=f"{entry} is no strategy of {node.op}; {fault and fault + '; '}"
                f"its strategies are {known}" + (", ..." if len(alike) > 8 else ""),
                todo="correct that line of the plan, or plan again",
            )


class _Choices:
    """The choices of nodes; those that differ only in names have the same."""

    def __init__(self, graph: Graph, plan: StagePlan, table: dict[str, OpRule]) -> None:
        self.graph, self.mesh, self.table = graph, plan.mesh, table
        self.known: dict[Hashable, tuple[tuple[Option, ...], Allowed]] = {}

    def of(self, node: Node, leaf: Node) -> tuple[tuple[Option, ...], Allowed]:
        """Returns the choices of a node and what they allow; `leaf` is a share's parameter."""
        stored = None if leaf is node else (leaf.type, leaf.requires_grad)
        key = kind(self.graph, node), stored
        if key not in self.known:
            if stored is None:
                options, _ = node_options(self.graph, node, self.mesh, self.table)
            else:
                options = tuple(parameter_options(stored[0], self.mesh, stored[1]))
            entries = [option.entry(self.graph, node) for option in options]
            self.known[key] = (
                options,
                frozenset(
                    (_canonical(each.operands), _canonical(each.results), each.form)
                    for each in entries
                ),
            )
        return self.known[key]


def _fault(plan: StagePlan, leaf: str, share: str) -> str:
    """Returns what is wrong with a parameter's entry, given its share's; "" if nothing."""
    try:
        storage = plan.storage(leaf, share)
        shape = plan.nodes[leaf].results[0][0]
        for _, layout in plan.nodes[leaf].results:
            layout.check(shape, plan.mesh)
    except AutoparError as error:
        return f"{plan.nodes[leaf]} is not possible: {error}"
    alike = _canonical(((shape, storage.held),)) == _canonical(plan.nodes[share].operands)
    return "" if alike else f"{plan.nodes[leaf]} is how it is stored"


def _copied(graph: Graph, node: Node, plan: StagePlan) -> str:
    """Returns why a buffer would not be written itself, but a copy of it; "" if it is."""
    cache = plan.nodes[graph.template[node.inputs[0]]].results
    alike = _canonical(cache) == _canonical(plan.nodes[node.name].operands[:1])
    return "" if alike else f"the buffer has the layout {cache[0][1].format(cache[0][0])}"


def _canonical(side: Side) -> Side:
    """Returns one spelling of the layouts: the order of partial axes means nothing."""
    return tuple(
        (shape, Layout(layout.dims, tuple(sorted(layout.partial)), tuple(sorted(layout.varying))))
        for shape, layout in side
    )
