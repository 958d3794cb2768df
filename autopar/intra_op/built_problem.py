"""A strategy problem together with the layouts and figures of its choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import add

from autopar.cost.overlap import saved
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Matrix, Problem, evaluate
from autopar.ir.graph import Graph
from autopar.plan_entries import NodePlan, Prediction

Figures = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Built:
    """A Problem, with the layouts and figures of each choice.

    Attributes:
        problem: the strategy problem.
        names: IR node of each problem node (the share, for a parameter and its share).
        options: the layouts of each choice.
        replicated: operators that run whole because they have no rule.
        exchanged: node -> for each choice, seconds of communication inside the operator.
        backward: node -> for each choice, seconds of its backward kernels.
        synchronised: parameter's share -> for each choice, seconds of synchronising its gradient,
            for which the backward does not wait.
        sums: node -> bytes of each choice: for a parameter, its own bytes and those of its
            gradient, optimizer state and gathered copy; for an operator, the bytes saved for the
            backward in all blocks.
        points: a description of each time point of the problem.
        once: parameter's share -> for each choice, seconds that a step spends once on reducing the
            gradient and on gathering the updated parameter.
        again: node -> number of its blocks that recompute it in the backward.
        slowdown: slowdown of kernels and collectives that run side by side.
        forward: node -> for each choice, seconds of its forward kernels.
        fetched, refetched: parameter's share -> for each choice, seconds of gathering it in the
            forward and in the backward, while the previous block computes.
        stowed: node -> for each choice, seconds of copying its saved tensors to host memory, and
            again of copying them back, while other blocks compute.
        host: node -> for each choice, bytes in host memory.
        coming: seconds per byte of optimizer state for the round trip to host memory, for one
            microbatch.
        ahead: whether updated parameters are gathered beside the next step's forward.
        overlapped: edge number -> seconds that each pair of choices saves by running linears during
            the collective; already subtracted from the cost of the edge.
        updated: parameter's share -> for each choice, seconds of its update, if that counts.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    replicated: tuple[str, ...]
    exchanged: Mapping[str, tuple[float, ...]]
    backward: Mapping[str, tuple[float, ...]]
    synchronised: Mapping[str, tuple[float, ...]]
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
    ahead: bool = False
    overlapped: Mapping[int, Matrix] = field(default_factory=dict)
    updated: Figures = field(default_factory=dict)

    def with_update(self, seconds: Figures) -> Built:
        """Returns the problem of a step that ends with an update.

        Args:
            seconds: parameter's share -> for each choice, seconds of its update.
        """
        nodes = (
            replace(node, cost=tuple(map(add, node.cost, seconds[name])))
            if name in seconds
            else node
            for node, name in zip(self.problem.nodes, self.names, strict=True)
        )
        return replace(self, problem=replace(self.problem, nodes=tuple(nodes)), updated=seconds)

    @property
    def sides(self) -> tuple[tuple[Figures, tuple[Figures, ...]], ...]:
        """Kernels and the collectives that overlap with them: (forward, backward)."""
        sides = (
            (self.forward, (self.fetched, self.stowed)),
            (self.backward, (self.synchronised, self.refetched, self.stowed)),
        )
        return tuple(side for side in sides if any(side[1]))

    def side_by_side(self, choice: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Returns for each of `sides` the seconds of its kernels and of its collectives."""
        chosen = dict(zip(self.names, choice, strict=True))

        def total(*parts: Figures) -> float:
            return math.fsum(each[chosen[name]] for part in parts for name, each in part.items())

        return tuple((total(kernels), total(*calls)) for kernels, calls in self.sides)

    def hidden(self, choice: tuple[int, ...]) -> float:
        """Returns the seconds saved by running parameters' collectives during kernels."""
        return math.fsum(
            saved(kernels, collectives, self.slowdown)
            for kernels, collectives in self.side_by_side(choice)
        )

    def seconds(self, choice: tuple[int, ...]) -> float:
        """Returns the seconds of a choice, less those hidden by kernels."""
        return evaluate(self.problem, choice).cost - self.hidden(choice)

    def figures(self, choice: tuple[int, ...]) -> Prediction:
        """Returns the seconds and bytes per device of a choice, by cause.

        `peak_bytes` is the maximum over the time points of the problem. It is less than the sum of
        bytes, which are never all alive at once. `step_seconds` is the sum of the seconds less
        `hidden_seconds`.
        """
        causes = ("compute_seconds", "exchange_seconds", "parameter_seconds", "reshard_seconds")
        sizes = ("parameter_bytes", "activation_bytes", "host_bytes")
        totals = dict.fromkeys((*causes, "host_seconds", "update_seconds", *sizes), 0.0)
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
            summed = parameter and node.name in self.backward
            added = self.backward[node.name][index] if summed else 0.0
            totals["compute_seconds"] += added
            update = self.updated[node.name][index] if node.name in self.updated else 0.0
            totals["update_seconds"] += update
            totals[cause] += node.cost[index] - inside - copied - added - update
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
        """Returns the seconds of each operator that runs whole because it has no rule."""
        rows = zip(self.names, self.problem.nodes, choice, strict=True)
        return {name: node.cost[at] for name, node, at in rows if name in self.replicated}


def layouts(built: Built, graph: Graph, choice: tuple[int, ...]) -> dict[str, NodePlan]:
    """Returns the plan entries for a choice: node -> its layouts, with shapes."""
    plan: dict[str, NodePlan] = {}
    for name, options, index in zip(built.names, built.options, choice, strict=True):
        node, option = graph[name], options[index]
        plan[name] = option.entry(graph, node)
        if option.storage is not None:
            leaf = graph[graph.template[node.inputs[0]]]
            stored = tuple((leaf.type.shape, layout) for layout in option.storage.layouts)
            plan[leaf.name] = NodePlan((), stored)
    return plan
