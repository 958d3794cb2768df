"""Turns the problem of one microbatch into that of a pipeline stage, which runs many.

A problem is built for one forward and one backward of a microbatch. A stage has further
microbatches in flight, whose saved activations and gathered parameters stay in memory. Reductions
that run once in a step can overlap with the last backward only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.intra_op.built_problem import Built
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Choices, Held
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.stage_graphs import SENT
from autopar.planning.pipelines.streaming import NO_COPIES, Copies

Figures = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Repeated:
    """Number of runs of a stage in a step, and the other memory of its device.

    Attributes:
        microbatches: number of microbatches in a step.
        in_flight: peak number of microbatches whose backward has not ended; a fraction if ranks
            hold several stages.
        rank_stages: memory of all stages of a device, in units of this stage's. The stages run in
            turn, so they share transient memory.
        further: tensors of the size of the weights that the schedule adds.
        precision: precision of training.
        taken: number of microbatches whose gradients one update takes; 0 for all of a step.
        late_loss: whether replicas may be steps apart, see `StagePlan`.
    """

    microbatches: int
    in_flight: float = 1.0
    rank_stages: float = 1.0
    further: Copies = NO_COPIES
    precision: Precision = AS_IS
    taken: int = 0
    late_loss: bool = False

    def of(self, built: Built, graph: Graph, mesh: Mesh) -> Built:
        """Returns the problem of one of many microbatches, given that of a step of one.

        Args:
            built: the problem of a stage.
            graph: its prepared graph.
            mesh: its mesh.
        """
        whole, part = len(built.points), 1 / self.in_update
        nodes = []
        rows = zip(built.problem.nodes, built.names, built.options, strict=True)
        for node, name, options in rows:
            more: list[Held] = []
            if (self.in_flight > 1 or self.rank_stages > 1) and whole:
                kept = copies(built, graph, mesh, name, options)
                once = built.sums.get(node.name, (0.0,) * len(kept))
                more.append(((0, whole), tuple(map(self.others, once, kept))))
            if self.further and whole:
                nbytes = self.further.of_choices(graph, mesh, name, options, self.precision)
                more.append(((0, whole), nbytes))
            nodes.append(_with(node, [held for held in more if any(held[1])]))
        return replace(
            built,
            problem=replace(built.problem, nodes=tuple(nodes)),
            backward=_times(part, dict(built.backward)),
        )

    @property
    def in_update(self) -> int:
        """Number of microbatches whose gradients one update takes."""
        return self.taken or self.microbatches

    def others(self, once: float, kept: float) -> float:
        """Returns the bytes of the other microbatches in flight and of the other stages.

        Args:
            once: bytes that the planner counts for one microbatch in flight.
            kept: bytes that each microbatch keeps, including values that are sent.
        """
        here = max(once, kept) + (self.in_flight - 1) * kept
        return (self.in_flight - 1) * kept + (self.rank_stages - 1) * here


def copies(
    built: Built, graph: Graph, mesh: Mesh, name: str, options: tuple[Option, ...]
) -> tuple[float, ...]:
    """Returns the bytes of each choice of a node that every microbatch in flight keeps.

    They include the stage's inputs, and its results until the backward begins with their gradients.
    """
    if graph[name].op == "input":
        return tuple(float(o.results[0].local_bytes(graph[name].type, mesh)) for o in options)
    if options[0].stored is None:
        kept = built.sums.get(name, (0.0,) * len(options))
        if name not in {node for user, node in graph.outputs if user.startswith(SENT)}:
            return kept
        sent = (option.results[0].local_bytes(graph[name].type, mesh) for option in options)
        return tuple(nbytes + more for nbytes, more in zip(kept, sent, strict=True))
    # A recomputed block gathers its parameters again and keeps none.
    leaf, count = graph[name].type, graph.multiplicity[name] - built.again.get(name, 0)
    return tuple(
        float(count * storage.kept.local_bytes(leaf, mesh))
        if storage.kept.dims != storage.held.dims
        else 0.0
        for storage in (option.storage for option in options)
        if storage is not None
    )


def kept_each(
    built: Built,
    graph: Graph,
    mesh: Mesh,
    name: str,
    options: tuple[Option, ...],
    each: Copies,
    precision: Precision,
) -> tuple[float, ...]:
    """Returns `copies`, with the versions of weights that every microbatch in flight adds."""
    versions = each.of_choices(graph, mesh, name, options, precision)
    kept = copies(built, graph, mesh, name, options)
    return tuple(a + b for a, b in zip(kept, versions, strict=True))


def _with(node: Choices, more: list[Held]) -> Choices:
    return replace(node, more=(*node.more, *more))


def _times(factor: float, figures: Figures) -> Figures:
    return {name: tuple(factor * n for n in seconds) for name, seconds in figures.items()}
