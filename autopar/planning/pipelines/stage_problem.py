"""The problem of a stage of a few blocks, and its scaling to stages of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import side_by_side
from autopar.inter_op.stage_values import Candidate
from autopar.intra_op.built_problem import Built
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate
from autopar.ir.graph import Graph
from autopar.planning.pipelines.issuing import Issued

Floats = NDArray[np.float64]
_Longer = tuple[tuple[tuple[float, ...], ...], tuple[Edge, ...]]


@dataclass(frozen=True)
class StageProblem:
    """The problem of a stage of a few layers, with the nodes whose figures grow with the layers.

    Attributes:
        built: the problem.
        grows: for each node of the problem, the run whose blocks it represents, or -1.
        edges: the same for each edge.
        counts: number of blocks of each run.
        update: seconds of the optimizer for each choice, by node.
        copies: bytes that every microbatch in flight keeps for each choice, by node.
        recompute: how blocks are recomputed, "none" or "full".
        further: bytes that an asynchronous schedule adds for each choice, by node, with one
            microbatch in flight.
        taken: number of microbatches whose gradients one update takes.
        late: whether gradients are summed during later steps.
        issued: seconds in which the host issues a node's kernels, forwards and backwards; it bounds
            a microbatch.
    """

    built: Built
    grows: tuple[int, ...]
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    update: tuple[Floats, ...]
    copies: tuple[tuple[float, ...], ...]
    recompute: str
    further: tuple[tuple[float, ...], ...]
    taken: int
    late: bool = False
    issued: Issued = field(default_factory=dict)

    def chosen_in(self, other: StageProblem, choice: tuple[int, ...]) -> tuple[int, ...] | None:
        """Translates a choice to another problem of the stage; None if that lacks an option."""
        if self.built.names != other.built.names:
            return None
        translated = []
        rows = zip(self.built.options, other.built.options, choice, strict=True)
        for own, others, index in rows:
            if own[index] not in others:
                return None
            translated.append(others.index(own[index]))
        return tuple(translated)

    def scaled(
        self,
        ratios: Sequence[float],
        in_flight: int,
        memory: float,
    ) -> Problem:
        """Returns the problem of longer runs with several microbatches in flight.

        Args:
            ratios: the factor by which each run is longer.
            in_flight: number of microbatches in flight.
            memory: bytes of a device.
        """
        costs, edges = self._longer(tuple(ratios))
        nodes = []
        for node, cost, (alone, more), run in zip(
            self.built.problem.nodes, costs, self._held, self.grows, strict=True
        ):
            held = (1.0 if run < 0 else ratios[run]) * (alone + (in_flight - 1) * more)
            nodes.append(Choices(node.name, node.labels, cost, tuple(held.tolist()), (0, 1)))
        return Problem(self.built.problem.name, tuple(nodes), edges, memory)

    @cached_property
    def _held(self) -> tuple[tuple[Floats, Floats], ...]:
        """Bytes of each node's choices with one microbatch in flight, and of each further one."""
        rows = []
        for node, kept, extra in zip(
            self.built.problem.nodes, self.copies, self.further, strict=True
        ):
            more = np.array(kept)
            alone = np.maximum(self.built.sums.get(node.name, 0.0), more) + np.array(extra)
            rows.append((alone, more))
        return tuple(rows)

    def _longer(self, ratios: tuple[float, ...]) -> _Longer:
        """Returns the costs of nodes and the edges of longer runs, kept for all memory limits."""
        if ratios not in self._known:
            problem = self.built.problem
            costs = tuple(
                tuple(((1.0 if run < 0 else ratios[run]) * np.array(node.cost)).tolist())
                for node, run in zip(problem.nodes, self.grows, strict=True)
            )
            edges = tuple(
                edge
                if run < 0 or ratios[run] == 1
                else Edge(edge.a, edge.b, ratios[run] * edge.cost)
                for edge, run in zip(problem.edges, self.edges, strict=True)
            )
            self._known[ratios] = costs, edges
        return self._known[ratios]

    @cached_property
    def _known(self) -> dict[tuple[float, ...], _Longer]:
        return {}

    def candidate(
        self, ratios: Sequence[float], choice: tuple[int, ...], microbatches: int, label: str
    ) -> Candidate:
        """Returns the seconds and bytes of a choice, with each run `ratios` times as long."""
        built = self.built
        whole = synchronised = reduced = gathered = update = fixed = each = small = 0.0
        forward = backward = again = 0.0  # of kernels
        host_forward = host_backward = 0.0
        for at, (node, index, run) in enumerate(
            zip(built.problem.nodes, choice, self.grows, strict=True)
        ):
            ratio = 1.0 if run < 0 else ratios[run]
            whole += ratio * node.cost[index]
            ahead, behind = self.issued.get(built.names[at], (0.0, 0.0))
            if self.recompute == "full" and run >= 0:
                behind += ahead
            host_forward += ratio * ahead
            host_backward += ratio * behind
            once_forward = ratio * _at(built.forward, node.name, index)
            forward += once_forward
            count = self.counts[run] if run >= 0 else 1
            again += once_forward * built.again.get(node.name, 0) / count
            backward += ratio * _at(built.backward, node.name, index)
            synchronised += ratio * _at(built.synchronised, node.name, index)
            if node.name in built.once:
                reduced += ratio * built.once[node.name][index][0]
                gathered += ratio * built.once[node.name][index][1]
            update += ratio * float(self.update[at][index])
            kept = ratio * self.copies[at][index]
            # A value that is sent is kept, even if its operator does not save it.
            alone = max(_at(built.sums, node.name, index), self.copies[at][index])
            small += alone
            fixed += ratio * (alone + self.further[at][index]) - kept
            each += kept
        for edge, run in zip(built.problem.edges, self.edges, strict=True):
            ratio = 1.0 if run < 0 else ratios[run]
            whole += ratio * float(edge.cost[choice[edge.a], choice[edge.b]])
        seconds = whole - (reduced + gathered) / self.taken
        # Recomputation counts as backward; communication takes about as long in both directions,
        # and once more as in the forward if that runs again.
        sent = seconds - forward - backward - again
        share = 2 / 3 if self.recompute == "full" else 1 / 2
        after = min(backward + again + share * sent, seconds)
        # For each update: reductions, which overlap with the last backward, then the optimizer.
        inside = min(reduced, self.taken * synchronised)  # 0 if the backward waits
        once = side_by_side(backward, inside, built.slowdown) - backward + reduced - inside
        if built.ahead:  # beside the next step's first forward
            gathered = side_by_side(forward, gathered, built.slowdown) - forward
        once = (0.0 if self.late else once) + gathered + update
        peak = evaluate(built.problem, choice).peak
        return Candidate(
            forward=max(seconds - max(after, 0.0), host_forward),
            backward=max(after, host_backward),
            once=max(once, 0.0) * microbatches / self.taken,
            fixed=fixed,
            per_microbatch=each,
            transient=max(peak - small, 0.0),
            label=label,
            recompute=self.recompute,
            sums=reduced if self.late else 0.0,
            sent=max(sent, 0.0),
            again=again + (max(sent, 0.0) / 3 if self.recompute == "full" else 0.0),
        )


def growing(built: Built, graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the `grows` and `edges` of the problem of a graph with repeated blocks."""
    run = {n: r for r, repeat in enumerate(graph.repeats) for n in repeat.iterations[0]}
    entries = {
        (entry, node)
        for repeat in graph.repeats
        for entry, _ in repeat.carried
        for node in repeat.iterations[0]
    }
    grows = tuple(run.get(name, -1) for name in built.names)
    edges = tuple(
        -1 if (built.names[edge.a], built.names[edge.b]) in entries else grows[edge.b]
        for edge in built.problem.edges
    )
    return grows, edges


def _at(rows: Mapping[str, tuple[float, ...]], name: str, index: int) -> float:
    return rows[name][index] if name in rows else 0.0
