"""Two plans side by side: predicted figures, decisions and collectives, as data."""

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

ROUNDING = 1e-12  # sums of the same prices in another order differ by less
Calls = tuple[int, int]  # calls of a step, bytes that one device sends in them
Place = tuple[str, str, str, bool]  # whose, kind, axes, backward


@dataclass(frozen=True)
class Figure:
    """A predicted figure of both plans.

    Its name ends in "seconds" or "bytes", which is its unit; a "bubble" is a fraction.
    """

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """How much more it is in the second plan; 0 where only rounding tells them apart."""
        before, after = self.before, self.after
        return 0.0 if math.isclose(before, after, rel_tol=ROUNDING) else after - before


@dataclass(frozen=True)
class Traffic:
    """A collective that the plans make differently, or the sum of all of one kind and axes.

    Attributes:
        name: whose: a parameter, a module or a node; "" for a sum.
        kind, axes: of the collective.
        backward: whether it belongs to the backward; a sum counts both directions.
        before, after: calls of a step, and bytes of payload that one device brings to them.
    """

    name: str
    kind: str
    axes: str
    backward: bool
    before: Calls
    after: Calls


@dataclass(frozen=True)
class Difference:
    """What differs between two plans.

    Attributes:
        head: "graph" and "mesh" -> how the plans write them, if they differ.
        pins: the name of each pin that differs -> how the plans write it, "" where it is none.
        figures: all predicted figures, those that agree among them.
        changes: decisions that differ.
        totals: collectives by kind and axes, those that agree among them; None if not known.
        traffic: collectives that differ; None if not known.
    """

    head: dict[str, tuple[str, str]]
    pins: dict[str, tuple[str, str]]
    figures: tuple[Figure, ...]
    changes: tuple[Change, ...]
    totals: tuple[Traffic, ...] | None = None
    traffic: tuple[Traffic, ...] | None = None

    @property
    def equal(self) -> bool:
        """Whether the plans say the same."""
        figures = any(figure.before != figure.after for figure in self.figures)
        return not (self.head or self.pins or self.changes or figures)


def difference(
    a: StagePlan,
    b: StagePlan,
    graphs: tuple[Graph, Graph] | None = None,
    prices: tuple[Callable[[Collective], float], Callable[[Collective], float]] | None = None,
) -> Difference:
    """How plan `b` differs from plan `a`.

    Args:
        a, b: the plans, for any model and mesh.
        graphs: what they are for, if known; names decisions as the user knows them.
        prices: of one collective on either mesh; with them and the graphs collectives are compared.

    Raises:
        PlanMismatchError: a plan has no layout for a node of its graph.
        LayoutError: a layout does not fit its value.
    """
    first, second = graphs or (None, None)
    found = Difference(
        _head(a, b),
        pairs(a.pins, b.pins),
        figures(a.predicted, b.predicted),
        changes(decisions(a, first), decisions(b, second)),
    )
    if graphs is None or prices is None:
        return found
    before, after = (
        traffic(graph, plan, price)
        for graph, plan, price in zip(graphs, (a, b), prices, strict=True)
    )
    detail = tuple(t for t in _traffic(before, after) if t.before != t.after)
    totals = _traffic(_summed(before), _summed(after))
    return replace(found, totals=totals, traffic=detail)


def figures(a: Prediction, b: Prediction) -> tuple[Figure, ...]:
    """Returns all figures of two predictions, side by side."""
    after = b.figures()
    return tuple(Figure(name, before, after[name]) for name, before in a.figures().items())


def repriced(explanation: Explanation, graph: Graph) -> Prediction:
    """The figures of a plan's layouts: its own, or if it was edited, what they add up to now."""
    if not explanation.stale:
        return Prediction(**explanation.predicted)
    operators = [o for s in explanation.sections for line in s.lines for o in line.operators]
    moved = [move for o in operators for move in (*o.before, *o.after)]
    seconds, activations = explanation.seconds, explanation.memory["activations"]
    # The planner counts the sum of the loss among the seconds of operators.
    ending = sum(move.seconds for move in moved if not move.reader)
    inside = sum(move.seconds for move in moved if move.inside)
    # It counts what is done to a view of a parameter among activations.
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
        compute_seconds=seconds["compute"] + ending,
        exchange_seconds=inside,
        parameter_seconds=seconds["parameters"] - views,
        reshard_seconds=seconds["activations"] + views - inside - ending,
        parameter_bytes=held - activations,
        activation_bytes=activations,
        hidden_seconds=explanation.hidden,
    )


def _is_parameter(graph: Graph, value: str) -> bool:
    """Whether a value is a parameter, or the share of one."""
    node = graph[value]
    node = graph[node.inputs[0]] if node.op == "autopar.share" else node
    return node.op == "param"


def traffic(
    graph: Graph, plan: StagePlan, price: Callable[[Collective], float]
) -> dict[Place, Calls]:
    """The collectives of a step, by whose they are, kind, axes and direction."""
    found: dict[Place, Calls] = {}
    for move in moves(graph, plan, price):
        node = graph[graph.template[move.parameter or move.value]]
        if node.is_leaf:
            name = parameter_name(graph, node)
        else:
            name = module_pattern(graph, node) or f"%{node.name}"
        for call in move.calls:
            place = (name, call.kind, ", ".join(call.axes), call.backward)
            calls, sent = found.get(place, (0, 0))
            found[place] = (calls + move.count(call), sent + move.count(call) * call.nbytes)
    return found


def _head(a: StagePlan, b: StagePlan) -> dict[str, tuple[str, str]]:
    def said(plan: StagePlan) -> dict[str, str]:
        return {"graph": plan.graph, "mesh": str(plan.mesh)}

    return pairs(said(a), said(b))


def pairs(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What two mappings write differently."""
    both = {name: (a.get(name, ""), b.get(name, "")) for name in dict.fromkeys((*a, *b))}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _summed(found: Mapping[Place, Calls]) -> dict[Place, Calls]:
    totals: dict[Place, Calls] = {}
    for (_, kind, axes, _), (calls, sent) in found.items():
        before = totals.get(("", kind, axes, False), (0, 0))
        totals["", kind, axes, False] = (before[0] + calls, before[1] + sent)
    return totals


def _traffic(a: Mapping[Place, Calls], b: Mapping[Place, Calls]) -> tuple[Traffic, ...]:
    """Both sides of every place, what changes by most bytes first."""
    found = (
        Traffic(*place, a.get(place, (0, 0)), b.get(place, (0, 0)))
        for place in dict.fromkeys((*a, *b))
    )
    return tuple(sorted(found, key=lambda t: -abs(t.after[1] - t.before[1])))
