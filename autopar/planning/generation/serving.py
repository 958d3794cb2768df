"""Plans of a model that generates: a prefill and a decode over the same stored parameters.

The plan that is made first chooses the layouts of parameters and caches, and the other plan uses
them. Both orders are planned; the pair with the shortest generation is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import AutoparError, ProgramError
from autopar.generation_plan import GenerationPlan
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.generation.graphs import Sizes
from autopar.planning.generation.passes_of_stages import one_at_a_time, passed, plan_in_stages
from autopar.planning.options import GLOBAL, Options
from autopar.planning.planner import make_plan
from autopar.planning.stored import Kept, kept_by, plan_with
from autopar.planning.trace import Trace

Planned = tuple[Graph, Plan]
IN_ANOTHER = (
    "program.save_checkpoint(folder), then other = autopar.compile(model, mesh, "
    "example_inputs=batch), other.load_checkpoint(folder) and other.generate(...)"
)


def generating_options(options: Options, first: Plan | None = None) -> Options:
    """Returns the options of plans without training.

    Args:
        options: of the program.
        first: a plan whose stages the plans have; None for those that the options ask for.

    Raises:
        ProgramError: ranks pass different parts of a batch, or the stages have copies.
    """
    if options.batches != GLOBAL:
        raise ProgramError(
            "a program with local batches cannot generate",
            why="all ranks choose the next tokens from the logits of the whole batch",
            todo=IN_ANOTHER,
        )
    free = replace(options, recompute="none", offload="none", state=None, loss_fn=None)
    return one_at_a_time(free, first)


def plan_graphs(
    prefill: Graph, decode: Graph, mesh: Mesh, options: Options, sizes: Sizes
) -> GenerationPlan:
    """Returns the fastest plan of a prefill and a decode; see `plan_serving`."""
    (_, before), (_, after) = plan_serving(prefill, decode, mesh, options, sizes.new_tokens)
    return GenerationPlan(before, after, sizes.batch, sizes.prompt, sizes.new_tokens)


def plan_serving(
    prefill: Graph,
    decode: Graph,
    mesh: Mesh,
    options: Options,
    new_tokens: int,
    trained: Planned | None = None,
) -> tuple[Planned, Planned]:
    """Returns the plans of a prefill and of a decode, each with its graph.

    Args:
        prefill, decode: graphs with the same parameters and caches; prepared, or only normalised
            if the options ask for stages.
        mesh: the devices.
        options: options of planning, from `generating_options`.
        new_tokens: tokens that follow one prefill; a decode computes all but the first.
        trained: the graph and the plan of a program that stores the parameters.

    Raises:
        InfeasibleError: no plan fits into memory.
        StageError: no cut gives each stage the parameters and caches that it stores.
    """
    steps = max(new_tokens - 1, 1)
    kept: Sequence[Kept] = ()
    if trained is not None:
        kept = [
            each.frozen(stage.mesh)
            for each, stage in zip(kept_by(*trained), trained[1].stages, strict=True)
        ]
    pairs: list[tuple[Planned, Planned]] = []
    failed: AutoparError | None = None
    for first, second in ((decode, prefill), (prefill, decode)):
        try:
            if trained is None:
                one = _planned(first, mesh, options)
            else:
                one = _over(kept, trained[1], first, options, stores=False)
            own = kept_by(*one)
            both = [a | b for a, b in zip(own, kept or own, strict=True)]
            two = _over(both, one[1], second, options, stores=trained is None)
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


def _planned(graph: Graph, mesh: Mesh, options: Options) -> Planned:
    """Plans the graph that chooses where parameters and caches lie."""
    if options.is_pipeline:
        return graph, passed(graph, plan_in_stages(graph, mesh, options), options)
    return graph, Plan.of(make_plan(graph, mesh, options, Trace(None)))


def _over(
    kept: Sequence[Kept], plan: Plan, graph: Graph, options: Options, stores: bool
) -> Planned:
    """Plans a graph over parameters and caches that lie where another plan has them."""
    if plan.is_pipeline:
        plan = replace(plan, microbatches=1, schedule=options.schedule)
    graph, over = plan_with(kept, plan, graph, options, stores)
    return graph, passed(graph, over, options)
