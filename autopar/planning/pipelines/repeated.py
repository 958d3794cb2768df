"""What a stage of a pipeline does in a step: the same on every microbatch, with others in flight.

A problem is built for one forward and one backward of a microbatch. Here it becomes that of a
stage: the other microbatches in flight keep what autograd keeps of them and the gathered copies of
parameters, and what is reduced once a step has the last backward alone to hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.intra_op.built_problem import Built
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Choices, Held
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.stage_graphs import SENT

Figures = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Repeated:
    """How often a stage runs in a step.

    Attributes:
        microbatches: in a step.
        in_flight: of how many at a time the backward has not ended; a fraction where ranks hold
            several stages.
        beside: what all stages of a device keep, in units of what this one keeps. They compute in
            turn, so that what one needs for a while the next one may have again.
        further: copies of the weights that are held beside them: older versions, for the most part.
        late_loss: whether replicas may be steps apart; they would meet where the loss is added up.
    """

    microbatches: int
    in_flight: float = 1.0
    beside: float = 1.0
    further: int = 0
    late_loss: bool = False

    def of(self, built: Built, graph: Graph, mesh: Mesh) -> Built:
        """The problem of one microbatch in the midst of a step, given that of a step of one.

        Args:
            built: of a stage.
            graph: of it, prepared.
            mesh: of it.
        """
        whole, part = len(built.points), 1 / self.microbatches
        nodes = []
        rows = zip(built.problem.nodes, built.names, built.options, strict=True)
        for node, name, options in rows:
            more: list[Held] = []
            if (self.in_flight > 1 or self.beside > 1) and whole:
                kept = copies(built, graph, mesh, name, options)
                once = built.sums.get(node.name, (0.0,) * len(kept))
                more.append(((0, whole), tuple(map(self.others, once, kept))))
            if self.further and whole and options[0].stored is not None:
                own, count = graph[name].type, self.further * graph.multiplicity[name]
                layouts = [option.storage.held for option in options if option.storage is not None]
                nbytes = (float(count * layout.local_bytes(own, mesh)) for layout in layouts)
                more.append(((0, whole), tuple(nbytes)))
            nodes.append(_with(node, [held for held in more if any(held[1])]))
        return replace(
            built,
            problem=replace(built.problem, nodes=tuple(nodes)),
            backward=_times(part, dict(built.backward)),
        )

    def others(self, once: float, kept: float) -> float:
        """Bytes of the other microbatches in flight and the other stages.

        Args:
            once: that are held for one microbatch in flight.
            kept: that each one keeps; what is sent is kept, though its maker does not hold it.
        """
        here = max(once, kept) + (self.in_flight - 1) * kept
        return (self.in_flight - 1) * kept + (self.beside - 1) * here


def copies(
    built: Built, graph: Graph, mesh: Mesh, name: str, options: tuple[Option, ...]
) -> tuple[float, ...]:
    """Bytes that each choice of a node keeps for every microbatch in flight.

    Its part of the batch stays as well, and results until the backward begins with their gradients.
    """
    if graph[name].op == "input":
        return tuple(float(o.results[0].local_bytes(graph[name].type, mesh)) for o in options)
    if options[0].stored is None:
        kept = built.sums.get(name, (0.0,) * len(options))
        if name not in {node for user, node in graph.outputs if user.startswith(SENT)}:
            return kept
        sent = (option.results[0].local_bytes(graph[name].type, mesh) for option in options)
        return tuple(nbytes + more for nbytes, more in zip(kept, sent, strict=True))
    # A block that recomputes gathers its parameters again.
    leaf, count = graph[name].type, graph.multiplicity[name] - built.again.get(name, 0)
    return tuple(
        float(count * storage.kept.local_bytes(leaf, mesh))
        if storage.kept.dims != storage.held.dims
        else 0.0
        for storage in (option.storage for option in options)
        if storage is not None
    )


def _with(node: Choices, more: list[Held]) -> Choices:
    return replace(node, more=(*node.more, *more))


def _times(factor: float, figures: Figures) -> Figures:
    return {name: tuple(factor * n for n in seconds) for name, seconds in figures.items()}
