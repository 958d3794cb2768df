"""Compares two plans of a stage: predicted figures, decisions and collectives, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.explain.decisions import Change, changes, decisions
from autopar.explain.explanation import Explanation
from autopar.explain.moves import moves
from autopar.explain.node_names import module_pattern, parameter_name
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.plan_entries import Prediction
from autopar.stage_plan import StagePlan

ROUNDING = 1e-12  # summing the same prices in another order changes a sum by less
Calls = tuple[int, int]  # calls in a step, bytes that one device sends in them
Place = tuple[str, str, str, bool]  # parameter, module or node; kind; axes; backward


@dataclass(frozen=True)
class Figure:
    """A predicted figure of both plans.

    Attributes:
        name: ends in "seconds" or "bytes", which is its unit; "bubble" is a fraction.
        before, after: the figure of the first and of the second plan.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """The increase from the first plan to the second; 0 if they differ by rounding only."""
        before, after = self.before, self.after
        return 0.0 if math.isclose(before, after, rel_tol=ROUNDING) else after - before


@dataclass(frozen=True)
class Traffic:
    """The calls of a collective in both plans, or the sum of all calls of one kind over some axes.

    Attributes:
        name: the parameter, module or node that it serves; "" for a sum.
        kind, axes: kind and axes of the collective.
        backward: whether it runs in the backward pass; a sum counts both directions.
        before, after: calls in a step, and the payload of one device in them in bytes.
    """

    name: str
    kind: str
    axes: str
    backward: bool
    before: Calls
    after: Calls


@dataclass(frozen=True)
class Difference:
    """The difference of two plans.

    Attributes:
        head: "graph" and "mesh" -> the texts of both plans, if they differ.
        pins: name of each pin that differs -> its texts in both plans, "" in a plan without it.
        figures: all predicted figures, including equal ones.
        changes: decisions that differ.
        totals: collectives by kind and axes, including equal ones; None if not compared.
        traffic: collectives that differ; None if not compared.
    """

    head: dict[str, tuple[str, str]]
    pins: dict[str, tuple[str, str]]
    figures: tuple[Figure, ...]
    changes: tuple[Change, ...]
    totals: tuple[Traffic, ...] | None = None
    traffic: tuple[Traffic, ...] | None = None

    @property
    def equal(self) -> bool:
        """Returns whether the plans agree."""
        figures = any(figure.before != figure.after for figure in self.figures)
        return not (self.head or self.pins or self.changes or figures)


def difference(
    a: StagePlan,
    b: StagePlan,
    graphs: tuple[Graph, Graph] | None = None,
    prices: tuple[Callable[[Collective], float], Callable[[Collective], float]] | None = None,
) -> Difference:
    """Returns the difference from plan `a` to plan `b`.

    Args:
        a, b: the plans, for any models and meshes.
        graphs: their graphs, if known; they give decisions the user's names.
        prices: predict the seconds of one collective on each mesh; collectives are compared only
            if graphs and prices are given.

    Returns:
        Figures, decisions and collectives of both plans.

    Raises:
        PlanMismatchError: a plan has no layout for a node of its graph.
        LayoutError: a layout does not fit its value.
    """
    first, second = graphs or (None, None)
    compared = Difference(
        _head(a, b),
        pairs(a.pins, b.pins),
        figures(a.predicted, b.predicted),
        changes(decisions(a, first), decisions(b, second)),
    )
    if graphs is None or prices is None:
        return compared
    before, after = (
        traffic(graph, plan, price)
        for graph, plan, price in zip(graphs, (a, b), prices, strict=True)
    )
    detail = tuple(t for t in _traffic(before, after) if t.before != t.after)
    totals = _traffic(_summed(before), _summed(after))
    return replace(compared, totals=totals, traffic=detail)


def figures(a: Prediction, b: Prediction) -> tuple[Figure, ...]:
    """Pairs the figures of two predictions; a simulation counts if both were simulated."""
    if not (a.simulated_seconds and b.simulated_seconds):
        a, b = (replace(one, simulated_seconds=0.0) for one in (a, b))
    after = b.figures()
    return tuple(Figure(name, before, after[name]) for name, before in a.figures().items())


def repriced(explanation: Explanation, graph: Graph) -> Prediction:
    """Returns the figures of a plan's layouts.

    Args:
        explanation: explanation of the plan.
        graph: its graph.

    Returns:
        The prediction in the plan's file, or if the plan was edited since, a new one.
    """
    if not explanation.stale:
        return Prediction(**explanation.predicted)
    operators = [o for s in explanation.sections for line in s.lines for o in line.operators]
    moved = [move for o in operators for move in (*o.before, *o.after)]
    seconds, activations = explanation.seconds, explanation.memory["activations"]
    # The planner counts the reduction of the loss as compute.
    ending = sum(move.seconds for move in moved if not move.reader)
    inside = sum(move.seconds for move in moved if move.inside)
    # It counts the resharding of a parameter's view as resharding of activations.
    views = sum(
        move.seconds
        for parameter in explanation.parameters
        for move in parameter.moves
        if not _is_parameter(graph, move.value)
    )
    held = sum(explanation.memory.values())
    return Prediction(
        step_seconds=explanation.step,
        peak_bytes=held if explanation.peak is None else explanation.peak,
        compute_seconds=seconds["compute"] + explanation.added + ending,
        exchange_seconds=inside,
        parameter_seconds=seconds["parameters"] - views,
        reshard_seconds=seconds["activations"] + views - inside - ending,
        parameter_bytes=held - activations,
        activation_bytes=activations,
        hidden_seconds=explanation.hidden,
        update_seconds=explanation.predicted.get("update_seconds", 0.0),
        waiting_seconds=explanation.predicted.get("waiting_seconds", 0.0),
    )


def _is_parameter(graph: Graph, value: str) -> bool:
    """Returns whether a value is a parameter or a parameter's share."""
    node = graph[value]
    node = graph[node.inputs[0]] if node.op == "autopar.share" else node
    return node.op == "param"


def traffic(
    graph: Graph, plan: StagePlan, price: Callable[[Collective], float]
) -> dict[Place, Calls]:
    """Counts the collectives of a step.

    Args:
        graph: the prepared graph.
        plan: its plan.
        price: predicts the seconds of one collective.

    Returns:
        (parameter, module or node; kind; axes; backward) -> (calls in a step, bytes sent by one
        device).
    """
    counts: dict[Place, Calls] = {}
    for move in moves(graph, plan, price):
        node = graph[graph.template[move.parameter or move.value]]
        if node.is_leaf:
            name = parameter_name(graph, node)
        else:
            name = module_pattern(graph, node) or f"%{node.name}"
        for call in move.calls:
            place = (name, call.kind, ", ".join(call.axes), call.backward)
            calls, sent = counts.get(place, (0, 0))
            counts[place] = (calls + move.count(call), sent + move.count(call) * call.nbytes)
    return counts


def _head(a: StagePlan, b: StagePlan) -> dict[str, tuple[str, str]]:
    def head(plan: StagePlan) -> dict[str, str]:
        return {"graph": plan.graph, "mesh": str(plan.mesh)}

    return pairs(head(a), head(b))


def pairs(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns the entries in which two mappings differ, each with both texts."""
    both = {name: (a.get(name, ""), b.get(name, "")) for name in dict.fromkeys((*a, *b))}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _summed(counts: Mapping[Place, Calls]) -> dict[Place, Calls]:
    totals: dict[Place, Calls] = {}
    for (_, kind, axes, _), (calls, sent) in counts.items():
        before = totals.get(("", kind, axes, False), (0, 0))
        totals["", kind, axes, False] = (before[0] + calls, before[1] + sent)
    return totals


def _traffic(a: Mapping[Place, Calls], b: Mapping[Place, Calls]) -> tuple[Traffic, ...]:
    """Pairs the counts of both plans, the largest change in bytes first."""
    paired = (
        Traffic(*place, a.get(place, (0, 0)), b.get(place, (0, 0)))
        for place in dict.fromkeys((*a, *b))
    )
    return tuple(sorted(paired, key=lambda t: -abs(t.after[1] - t.before[1])))
