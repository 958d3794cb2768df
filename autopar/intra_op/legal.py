"""Is a plan one that the rules allow? Plans are edited by hand; a wrong one must not train."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.intra_op.options import Option, node_options, parameter_options
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import Layout
from autopar.plan import NodePlan, Plan


def check(graph: Graph, plan: Plan, table: dict[str, OpRule]) -> None:
    """Compare every entry of the plan with the strategies of its operator.

    Raises:
        PlanError: naming the entry, the user's line and the layouts that were possible.
    """
    for node in graph.folded:
        if node.op == "param" and graph.users[node.name]:
            continue  # judged with its share
        entry = plan.nodes[node.name]
        share = node.op == "autopar.share" and graph[node.inputs[0]].op == "param"
        if share:
            source = graph[graph.template[node.inputs[0]]]
            options = tuple(parameter_options(source.type, plan.mesh, source.requires_grad))
            stored = plan.nodes[source.name].results
            agrees = _layouts(stored) == _layouts(entry.operands)
        else:
            options, _ = node_options(graph, node, plan.mesh, table)
            agrees = True
        allowed = {_entry(node, option) for option in options}
        if not agrees or _canonical(node, entry) not in allowed:
            known = "; ".join(option.label for option in options[:8])
            raise PlanError(
                f"the plan's layouts of %{node.name} are not possible",
                where=str(node.source),
                why=f"{entry} is no strategy of {node.op}; its strategies are {known}"
                + (", ..." if len(options) > 8 else ""),
                todo="correct that line of the plan, or plan again",
            )


Key = tuple[tuple[Layout, ...], tuple[Layout, ...]]


def _layouts(side: tuple[tuple[tuple[int, ...], Layout], ...]) -> tuple[Layout, ...]:
    return tuple(_sorted(layout) for _, layout in side)


def _sorted(layout: Layout) -> Layout:
    return Layout(layout.dims, tuple(sorted(layout.partial)), tuple(sorted(layout.varying)))


def _canonical(node: Node, entry: NodePlan) -> Key:
    return _layouts(entry.operands), _layouts(entry.results)


def _entry(node: Node, option: Option) -> Key:
    return tuple(map(_sorted, option.operands)), tuple(map(_sorted, option.results))
