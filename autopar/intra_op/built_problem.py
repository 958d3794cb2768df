"""A strategy problem with what its choices mean: figures, and the layouts of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.overlap import saved
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Matrix, Problem, evaluate
from autopar.ir.graph import Graph
from autopar.plan_entries import NodePlan, Prediction

Figures = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Built:
    """A Problem and what its choices mean.

    Attributes:
        problem: the strategy problem.
        names: IR node of each problem node (a parameter's share stands for both).
        options: the meaning of each choice.
        replicated: operators that run whole for want of a rule.
        exchanged: node -> seconds of each choice that it takes to ask other devices.
        backward: node -> seconds of each choice for the kernels of the backward.
        beside: parameter's share -> seconds of each choice for synchronising the gradient next to
            the parameter, for which the backward does not wait.
        sums: node -> bytes of each choice: of a parameter with gradient, optimizer state and the
            gathered copy, of an operator what it keeps for the backward, in all blocks.
        points: what each time of the problem is to a person.
        once: parameter's share -> for each choice the seconds that a step takes once for reducing
            the gradient, and for gathering the parameter when it is updated.
        again: node -> how many of its blocks compute it again in the backward.
        slowdown: how many times as long kernels and collectives take side by side.
        forward: node -> seconds of each choice for the kernels of the forward.
        fetched, refetched: parameter's share -> seconds of each choice for gathering it in the
            forward and in the backward, while the block before computes.
        stowed: node -> seconds of each choice for taking what it keeps to host memory, and again
            for bringing it back, while other blocks compute.
        host: node -> bytes of each choice in host memory.
        coming: seconds that a byte of optimizer state takes to come from there and go back, for
            one microbatch.
        overlapped: edge, by number -> seconds that each pair of choices takes less because linears
            run meanwhile; the edge's cost is without them.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    replicated: tuple[str, ...]
    exchanged: Mapping[str, tuple[float, ...]]
    backward: Mapping[str, tuple[float, ...]]
    beside: Mapping[str, tuple[float, ...]]
    slowdown: float
    sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    points: tuple[str, ...] = ()
    once: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    again: Mapping[str, int] = field(default_factory=dict)
    forward: Figures = field(default_factory=dict)
    fetched: Figures = field(default_factory=dict)
    refetched: Figures = field(default_factory=dict)
    stowed: Figures = field(default_factory=dict)
    host: Figures = field(default_factory=dict)
    coming: float = 0.0
    overlapped: Mapping[int, Matrix] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[tuple[Figures, tuple[Figures, ...]], ...]:
        """Kernels, and what is sent beside them: of the forward, of the backward."""
        found = (
            (self.forward, (self.fetched, self.stowed)),
            (self.backward, (self.beside, self.refetched, self.stowed)),
        )
        return tuple(side for side in found if any(side[1]))

    def side_by_side(self, choice: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Of each of `sides` the seconds of its kernels and of its collectives."""
        chosen = dict(zip(self.names, choice, strict=True))

        def total(*parts: Figures) -> float:
            return math.fsum(each[chosen[name]] for part in parts for name, each in part.items())

        return tuple((total(kernels), total(*beside)) for kernels, beside in self.sides)

    def hidden(self, choice: tuple[int, ...]) -> float:
        """Seconds saved by not waiting for gradients and parameters."""
        return math.fsum(
            saved(kernels, collectives, self.slowdown)
            for kernels, collectives in self.side_by_side(choice)
        )

    def figures(self, choice: tuple[int, ...]) -> Prediction:
        """Seconds and bytes per device of a choice, by cause.

        `peak_bytes` is the most that the problem counts at any of its times, less than the sum of
        bytes, since no step holds all of them at once; `step_seconds` is the sum of the seconds
        less `hidden_seconds`.
        """
        causes = ("compute_seconds", "exchange_seconds", "parameter_seconds", "reshard_seconds")
        sizes = ("parameter_bytes", "activation_bytes", "host_bytes")
        totals = dict.fromkeys((*causes, "host_seconds", *sizes), 0.0)
        for node, options, index in zip(self.problem.nodes, self.options, choice, strict=True):
            parameter = options[index].stored is not None
            inside = self.exchanged[node.name][index] if node.name in self.exchanged else 0.0
            totals["exchange_seconds"] += inside
            nbytes = self.host[node.name][index] if node.name in self.host else 0.0
            copied = 2 * self.stowed[node.name][index] if node.name in self.stowed else 0.0
            copied += nbytes * self.coming * parameter
            if nbytes:
                totals["host_seconds"] += copied
                totals["host_bytes"] += nbytes
            cause = "parameter_seconds" if parameter else "compute_seconds"
            totals[cause] += node.cost[index] - inside - copied
            held = self.sums[node.name][index] if node.name in self.sums else 0.0
            totals["parameter_bytes" if parameter else "activation_bytes"] += held
        hidden = self.hidden(choice)
        for number, edge in enumerate(self.problem.edges):
            parameter = self.options[edge.a][choice[edge.a]].stored is not None
            cause = "parameter_seconds" if parameter else "reshard_seconds"
            pair = choice[edge.a], choice[edge.b]
            less = float(self.overlapped[number][pair]) if number in self.overlapped else 0.0
            totals[cause] += float(edge.cost[pair]) + less
            hidden += less
        step = sum(value for name, value in totals.items() if name.endswith("seconds")) - hidden
        peak = evaluate(self.problem, choice).peak
        return Prediction(step_seconds=step, peak_bytes=peak, hidden_seconds=hidden, **totals)

    def replicated_seconds(self, choice: tuple[int, ...]) -> dict[str, float]:
        """Seconds of each operator that runs whole for want of a rule."""
        rows = zip(self.names, self.problem.nodes, choice, strict=True)
        return {name: node.cost[at] for name, node, at in rows if name in self.replicated}


def layouts(built: Built, graph: Graph, choice: tuple[int, ...]) -> dict[str, NodePlan]:
    """The plan's entries for a choice: node -> its layouts, with shapes."""
    plan: dict[str, NodePlan] = {}
    for name, options, index in zip(built.names, built.options, choice, strict=True):
        node, option = graph[name], options[index]
        plan[name] = option.entry(graph, node)
        if option.storage is not None:
            leaf = graph[graph.template[node.inputs[0]]]
            lies = tuple((leaf.type.shape, layout) for layout in option.storage.layouts)
            plan[leaf.name] = NodePlan((), lies)
    return plan
