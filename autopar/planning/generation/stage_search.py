"""Searches for the number of pipeline stages with which a model generates fastest.

A batch passes the stages one after another, so that a generation has no microbatches and no
schedule to choose: only the number of stages is searched. Every number that divides the mesh into
equal parts is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from autopar.errors import AutoparError, MeshError
from autopar.generation_plan import GenerationPlan
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.planning.generation.graphs import Sizes, capture_generation
from autopar.planning.generation.serving import generating_options, plan_graphs
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import equal_parts

Graphs = tuple[Graph, Graph]


def plan_generation(model: nn.Module, mesh: Mesh, options: Options, sizes: Sizes) -> GenerationPlan:
    """Captures a model and returns the fastest plan of its prefill and decode.

    Raises:
        CaptureError, InfeasibleError: see `capture_generation` and `plan_serving`.
    """

    def capture(own: Options) -> Graphs:
        prefill, decode = capture_generation(model, sizes, own)
        return prefill.graph, decode.graph

    return fastest_generation(capture, mesh, options, sizes)[0]


def fastest_generation(
    capture: Callable[[Options], Graphs], mesh: Mesh, options: Options, sizes: Sizes
) -> tuple[GenerationPlan, Graphs]:
    """Returns the fastest plan of a prefill and a decode, and their graphs.

    Args:
        capture: returns the graphs of prefill and decode under some options.
        mesh: the devices.
        options: of the user; with stages="auto", every number of stages is planned.
        sizes: sizes of the generation.

    Raises:
        AutoparError: no number of stages can be planned; the error of the smallest one.
    """
    captured: dict[bool, Graphs] = {}  # a graph that is cut into stages is normalised only
    planned: list[tuple[GenerationPlan, Graphs]] = []
    failed: AutoparError | None = None
    for count in _counts(mesh) if options.searches_stages else (options.stages,):
        try:
            own = generating_options(replace(options, global_batch=None, stages=count))
            if own.is_pipeline not in captured:
                captured[own.is_pipeline] = capture(own)
            graphs = captured[own.is_pipeline]
            planned.append((plan_graphs(*graphs, mesh, own, sizes), graphs))
        except AutoparError as error:
            failed = failed or error
    if not planned:
        assert failed is not None
        raise failed
    return min(planned, key=lambda each: each[0].seconds)  # of equally fast ones, fewest stages


def _counts(mesh: Mesh) -> tuple[int, ...]:
    """Returns the numbers of equal parts into which a mesh divides, from 1."""

    def divides(count: int) -> bool:
        try:
            equal_parts(mesh, count)
        except MeshError:
            return False
        return True

    return tuple(n for n in range(1, mesh.size + 1) if mesh.size % n == 0 and divides(n)) or (1,)
