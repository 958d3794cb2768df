"""Searches for the number of pipeline stages with which a model generates fastest.

A batch passes the stages one after another, so that a generation has no microbatches and no
schedule to choose: only the number of stages is searched. Every number that divides the mesh into
equal parts is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class FoundGeneration:
    """The fastest plan of a generation.

    Attributes:
        plan: the plan.
        graphs: the graphs of prefill and decode.
        tried: seconds of a generation by the number of stages, None where there is no plan.
    """

    plan: GenerationPlan
    graphs: Graphs
    tried: dict[int, float | None]


def plan_generation(model: nn.Module, mesh: Mesh, options: Options, sizes: Sizes) -> GenerationPlan:
    """Captures a model and returns the fastest plan of its prefill and decode.

    Raises:
        CaptureError, InfeasibleError: see `capture_generation` and `plan_serving`.
    """

    def capture(own: Options) -> Graphs:
        prefill, decode = capture_generation(model, sizes, own)
        return prefill.graph, decode.graph

    return fastest_generation(capture, mesh, options, sizes).plan


def fastest_generation(
    capture: Callable[[Options], Graphs], mesh: Mesh, options: Options, sizes: Sizes
) -> FoundGeneration:
    """Returns the fastest plan of a prefill and a decode, and what else was planned.

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
    tried: dict[int, float | None] = {}
    failed: AutoparError | None = None
    asked = options.stages
    for count in (asked,) if isinstance(asked, int) else _counts(mesh):
        try:
            own = generating_options(replace(options, global_batch=None, stages=count))
            if own.is_pipeline not in captured:
                captured[own.is_pipeline] = capture(own)
            graphs = captured[own.is_pipeline]
            planned.append((plan_graphs(*graphs, mesh, own, sizes), graphs))
            tried[count] = planned[-1][0].seconds
        except AutoparError as error:
            failed = failed or error
            tried[count] = None
    if not planned:
        assert failed is not None
        raise failed
    # Of equally fast plans, the one with the fewest stages.
    return FoundGeneration(*min(planned, key=lambda each: each[0].seconds), tried)


def _counts(mesh: Mesh) -> tuple[int, ...]:
    """Returns the numbers of equal parts into which a mesh divides, from 1."""

    def divides(count: int) -> bool:
        try:
            equal_parts(mesh, count)
        except MeshError:
            return False
        return True

    return tuple(n for n in range(1, mesh.size + 1) if mesh.size % n == 0 and divides(n)) or (1,)
