"""The problem of a stage of a few blocks, and what it says of stages of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import side_by_side
from autopar.inter_op.stage_values import Candidate
from autopar.intra_op.built_problem import Built
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageProblem:
    """A stage's problem of some layers, and which of its figures grow with the number of blocks.

    Attributes:
        built: the problem.
        grows: for each problem node the run whose blocks it stands for, or -1.
        edges: the same of each edge.
        counts: blocks of each run.
        update: seconds of each choice for the optimizer, by problem node.
        copies: bytes of each choice that every microbatch in flight keeps, by problem node.
        recompute: what the blocks compute again, "none" or "full".
    """

    built: Built
    grows: tuple[int, ...]
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    update: tuple[Floats, ...]
    copies: tuple[tuple[float, ...], ...]
    recompute: str

    def chosen_in(self, other: StageProblem, choice: tuple[int, ...]) -> tuple[int, ...] | None:
        """A choice in the terms of another problem of the stage, None if it leaves one out."""
        if self.built.names != other.built.names:
            return None
        found = []
        rows = zip(self.built.options, other.built.options, choice, strict=True)
        for mine, theirs, index in rows:
            if mine[index] not in theirs:
                return None
            found.append(theirs.index(mine[index]))
        return tuple(found)

    def scaled(
        self,
        ratios: Sequence[float],
        in_flight: int,
        memory: float,
    ) -> Problem:
        """The problem of longer runs with so many microbatches in flight."""
        built = self.built
        nodes = []
        for node, kept, run in zip(built.problem.nodes, self.copies, self.grows, strict=True):
            ratio = 1.0 if run < 0 else ratios[run]
            cost = tuple(ratio * seconds for seconds in node.cost)
            held = tuple(
                ratio * (max(nbytes, more) + (in_flight - 1) * more)
                for nbytes, more in zip(
                    built.sums.get(node.name, (0.0,) * len(cost)), kept, strict=True
                )
            )
            nodes.append(Choices(node.name, node.labels, cost, held, (0, 1)))
        edges = tuple(
            edge if run < 0 or ratios[run] == 1 else Edge(edge.a, edge.b, ratios[run] * edge.cost)
            for edge, run in zip(built.problem.edges, self.edges, strict=True)
        )
        return Problem(built.problem.name, tuple(nodes), edges, memory)

    def candidate(
        self, ratios: Sequence[float], choice: tuple[int, ...], microbatches: int, label: str
    ) -> Candidate:
        """The figures of one choice, with each run `ratios` times as long."""
        built = self.built
        whole = beside = reduced = gathered = backward = update = fixed = each = small = 0.0
        for at, (node, index, run) in enumerate(
            zip(built.problem.nodes, choice, self.grows, strict=True)
        ):
            ratio = 1.0 if run < 0 else ratios[run]
            whole += ratio * node.cost[index]
            backward += ratio * _at(built.backward, node.name, index)
            beside += ratio * _at(built.beside, node.name, index)
            if node.name in built.once:
                reduced += ratio * built.once[node.name][index][0]
                gathered += ratio * built.once[node.name][index][1]
            update += ratio * float(self.update[at][index])
            kept = ratio * self.copies[at][index]
            # A result that is sent is kept, though its maker does not keep it.
            alone = max(_at(built.sums, node.name, index), self.copies[at][index])
            small += alone
            fixed += ratio * alone - kept
            each += kept
        for edge, run in zip(built.problem.edges, self.edges, strict=True):
            ratio = 1.0 if run < 0 else ratios[run]
            whole += ratio * float(edge.cost[choice[edge.a], choice[edge.b]])
        seconds = whole - (reduced + gathered) / microbatches
        # Kernels take half as long forwards; what is computed again counts as backward, and
        # communication is about the same in both directions.
        kernels = backward if self.recompute == "none" else 1.5 * backward
        after = min(kernels + (seconds - kernels - backward / 2) / 2, seconds)
        # What a step does once: reductions beside the last backward, then the update.
        inside = min(reduced, microbatches * beside)  # none where the backward waits
        once = side_by_side(backward, inside, built.slowdown) - backward + reduced - inside
        once += gathered + update
        peak = evaluate(built.problem, choice).peak
        return Candidate(
            forward=seconds - max(after, 0.0),
            backward=max(after, 0.0),
            once=max(once, 0.0),
            fixed=fixed,
            per_microbatch=each,
            transient=max(peak - small, 0.0),
            label=label,
            recompute=self.recompute,
        )


def _at(rows: Mapping[str, tuple[float, ...]], name: str, index: int) -> float:
    return rows[name][index] if name in rows else 0.0
