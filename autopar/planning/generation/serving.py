"""Plans of a model that generates: a prefill and a decode over the same stored parameters.

The plan that is made first chooses the layouts of parameters and caches, and the other plan uses
them. Both orders are planned; the pair with the shortest generation is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from autopar.errors import AutoparError, PinError, ProgramError
from autopar.generation_plan import GenerationPlan
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.plan import Plan
from autopar.planning.generation.graphs import Sizes, capture_generation
from autopar.planning.options import GLOBAL, Options
from autopar.planning.planner import make_plan
from autopar.planning.stored import storages_of, with_equal_blocks
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan

Planned = tuple[Graph, StagePlan]
IN_ANOTHER = (
    "program.save_checkpoint(folder), then other = autopar.compile(model, mesh, "
    "example_inputs=batch), other.load_checkpoint(folder) and other.generate(...)"
)


def generating_options(options: Options) -> Options:
    """Returns the options of plans without training.

    Raises:
        ProgramError: the program has stages, or ranks pass different parts of a batch.
    """
    if options.is_pipeline:
        raise ProgramError(
            "a program with stages or microbatches cannot generate",
            why="a token would pass all stages before the next one begins",
            todo=IN_ANOTHER,
        )
    if options.batches != GLOBAL:
        raise ProgramError(
            "a program with local batches cannot generate",
            why="all ranks choose the next tokens from the logits of the whole batch",
            todo=IN_ANOTHER,
        )
    return replace(options, recompute="none", offload="none", state=None, loss_fn=None)


def plan_generation(model: nn.Module, mesh: Mesh, options: Options, sizes: Sizes) -> GenerationPlan:
    """Captures a model and returns the fastest plan of its prefill and decode.

    Raises:
        CaptureError, InfeasibleError: see `capture_generation` and `plan_serving`.
    """
    options = generating_options(options)
    prefill, decode = capture_generation(model, sizes, options)
    return plan_graphs(prefill.graph, decode.graph, mesh, options, sizes)


def plan_graphs(
    prefill: Graph, decode: Graph, mesh: Mesh, options: Options, sizes: Sizes
) -> GenerationPlan:
    """Returns the fastest plan of a prefill and a decode; see `plan_serving`."""
    (_, before), (_, after) = plan_serving(prefill, decode, mesh, options, sizes.new_tokens, {})
    return GenerationPlan(
        Plan.of(before), Plan.of(after), sizes.batch, sizes.prompt, sizes.new_tokens
    )


def plan_serving(
    prefill: Graph,
    decode: Graph,
    mesh: Mesh,
    options: Options,
    new_tokens: int,
    stored: Mapping[str, Storage],
) -> tuple[Planned, Planned]:
    """Returns the plans of a prefill and of a decode, each with its graph.

    Args:
        prefill, decode: prepared graphs with the same parameters and caches.
        mesh: the devices.
        options: options of planning, from `generating_options`.
        new_tokens: tokens that follow one prefill; a decode computes all but the first.
        stored: storage of parameters by key, if a program in training has fixed it.

    Raises:
        InfeasibleError: no plan fits into memory.
    """
    steps = max(new_tokens - 1, 1)
    pairs: list[tuple[Planned, Planned]] = []
    failed: AutoparError | None = None
    for first, second in ((decode, prefill), (prefill, decode)):
        try:
            one = _planned(first, mesh, options, stored, bool(stored))
            fixed = {**storages_of(*one), **stored}
            two = _planned(second, mesh, options, fixed, bool(stored))
        except AutoparError as error:
            failed = failed or error
            continue
        pairs.append((two, one) if first is decode else (one, two))
    if not pairs:
        assert failed is not None
        raise failed

    def seconds(pair: tuple[Planned, Planned]) -> float:
        (_, before), (_, after) = pair
        return before.predicted.step_seconds + steps * after.predicted.step_seconds

    return min(pairs, key=seconds)


def _planned(
    graph: Graph, mesh: Mesh, options: Options, stored: Mapping[str, Storage], trained: bool
) -> Planned:
    """Plans one graph; pins of a training that do not fit it are dropped."""
    graph = with_equal_blocks(graph, stored) if stored else graph
    constrained = replace(options, stored=stored)
    try:
        return graph, make_plan(graph, mesh, constrained, Trace(None))
    except PinError:
        if not trained:
            raise
        return graph, make_plan(graph, mesh, replace(constrained, pins=None), Trace(None))
