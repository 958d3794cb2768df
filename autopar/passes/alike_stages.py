"""Prepares the graphs of stages; torch observes only operators that it has not observed before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.stage_graphs import alike
from autopar.passes.kernel_parts import part_kernels
from autopar.passes.observations import NOTHING, Observations
from autopar.passes.repeats import find_repeats
from autopar.passes.verify import Pass, apply


def finding(known: Observations) -> tuple[Pass, ...]:
    """Returns the passes that analyse a stage, as `FINDING`, of a model that was observed whole."""
    return find_repeats, lambda graph: _annotated(graph, known), part_kernels


def preparing(known: Observations = NOTHING) -> Callable[[Graph], Graph]:
    """Returns a function that prepares one stage after another, as `prepare` does.

    A pipeline of 64 stages has a handful of kinds. Autograd saves the same of all stages of a kind.
    """
    seen: dict[str, Graph] = {}

    def annotate(graph: Graph) -> Graph:
        key = alike(graph)
        if key not in seen:
            seen[key] = _annotated(graph, known)
        return _annotated_like(graph, seen[key])

    return lambda graph: apply(graph, (find_repeats, annotate, part_kernels))


def _annotated(graph: Graph, known: Observations) -> Graph:
    annotated = known.annotated(graph)
    if annotated is None:
        from autopar.operators.interpret import annotate  # with torch

        annotated = annotate(graph)
    return annotated


def _annotated_like(graph: Graph, other: Graph) -> Graph:
    """Returns a graph with the annotations of another, which differs from it only in names."""
    names = {b.name: a.name for a, b in zip(graph.nodes, other.nodes, strict=True)}
    nodes = (
        replace(
            node,
            types=seen.types,
            requires_grad=seen.requires_grad,
            alias=None if seen.alias is None else names[seen.alias],
            saved=tuple(names[name] for name in seen.saved),
            saved_types=seen.saved_types,
        )
        for node, seen in zip(graph.nodes, other.nodes, strict=True)
    )
    return replace(graph, nodes=tuple(nodes))
