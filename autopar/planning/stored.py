"""Plans of further programs over parameters that a first program already stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import PinError, StageError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.storage import Storage
from autopar.lower.parameter_keys import leaf_key
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan


def plan_over(first: Graph, plan: Plan, graph: Graph, options: Options) -> tuple[Graph, Plan]:
    """Plans a further call of a model; its parameters stay where the first plan stores them.

    Args:
        first: the graph of the first plan.
        plan: the first plan.
        graph: the further call, with the same parameters, in another mode or on another batch;
            prepared, or only normalised if the plan is a pipeline.
        options: options of the first plan.

    Returns:
        The graph of the new plan, and the plan. Stages and their devices do not change.

    Raises:
        InfeasibleError: no plan fits into memory.
        StageError: no cut gives each stage exactly the parameters that it stores.
    """
    if not plan.is_pipeline:
        stored = storages_of(first, plan.stages[0])
        graph = with_equal_blocks(graph, stored)
        return graph, Plan.of(_planned(graph, plan.stages[0], stored, options))
    parts = stage_graphs(first, plan.ends, Trace(None))
    graph = without_unread(graph)
    ends = plan.ends if _reads_its_own(parts, graph, plan.ends) else _ends_like(parts, graph)
    graphs = stage_graphs(graph, ends, Trace(None))
    stages = []
    for before, stage, after, end in zip(parts, plan.stages, graphs, (*ends, ""), strict=True):
        planned = _planned(after, stage, storages_of(before, stage), options)
        stages.append(replace(planned, end=end, starts=stage.starts))
    return graph, replace(plan, graph=fingerprint(graph), stages=tuple(stages))


def storages_of(graph: Graph, plan: StagePlan) -> dict[str, Storage]:
    """Returns the storage of every parameter, and of every cache, by its key in the program.

    Args:
        graph: a prepared graph.
        plan: the plan of the graph.
    """
    caches = {
        leaf_key(leaf): Storage.as_is(plan.nodes[graph.template[leaf.name]].results[0][1])
        for leaf in graph.leaves("buffer")
        if leaf.is_cache
    }
    return caches | {
        leaf_key(leaf): plan.storage(
            graph.template[leaf.name], graph.template[graph.users[leaf.name][0]]
        )
        for leaf in graph.leaves("param")
        if graph.users[leaf.name]
    }


def _planned(
    graph: Graph, before: StagePlan, stored: Mapping[str, Storage], options: Options
) -> StagePlan:
    """Plans a graph that is not cut into stages.

    Pins that do not fit this batch are dropped, such as a pin that shards too few rows.
    """
    constrained = replace(options, stored=stored)
    try:
        return make_plan(graph, before.mesh, constrained, Trace(None))
    except PinError:
        return make_plan(graph, before.mesh, replace(constrained, pins=None), Trace(None))


def with_equal_blocks(graph: Graph, stored: Mapping[str, Storage]) -> Graph:
    """Returns the graph without repeats whose blocks store their parameters differently.

    Blocks that differ only in training, such as in a dropout rate, may be stored differently.
    """
    kept = (*graph.leaves("param"), *(leaf for leaf in graph.leaves("buffer") if leaf.is_cache))
    leaves = {leaf.name: stored.get(leaf_key(leaf)) for leaf in kept}
    equal = tuple(
        repeat
        for repeat in graph.repeats
        if len({tuple(leaves.get(name) for name in block) for block in repeat.iterations}) == 1
    )
    return graph if equal == graph.repeats else replace(graph, repeats=equal)


def without_unread(graph: Graph) -> Graph:
    """Returns the graph without parameters and buffers that nothing reads.

    An evaluation does not read all tensors of the training, such as a batch norm's counter. No
    operator determines the stage that stores such a tensor.
    """
    results = {name for _, name in graph.outputs} | {graph.loss}
    nodes = tuple(
        node
        for node in graph.nodes
        if node.op not in ("param", "buffer") or graph.users[node.name] or node.name in results
    )
    return replace(graph, nodes=nodes)


def _reads_its_own(parts: Sequence[Graph], graph: Graph, ends: Sequence[str]) -> bool:
    """Returns whether each stage of a graph, cut at `ends`, reads only parameters of its part."""
    if not {node.name for node in graph.nodes if not node.is_leaf}.issuperset(ends):
        return False
    try:
        graphs = stage_graphs(graph, ends, Trace(None))
    except StageError:
        return False
    return all(
        _parameters(one) <= _parameters(part) for one, part in zip(graphs, parts, strict=True)
    )


def _parameters(graph: Graph) -> set[str]:
    return {leaf.target for leaf in graph.leaves("param")}


def _ends_like(parts: Sequence[Graph], graph: Graph) -> tuple[str, ...]:
    """Returns the ends of stages that read the same parameters as `parts`.

    A stage ends before the first operator that depends on a parameter of later stages only; later
    stages without such parameters get one operator each.

    Raises:
        StageError: an operator after that point needs a parameter of an earlier stage.
    """
    holders: dict[str, set[int]] = {}
    for number, part in enumerate(parts):
        for leaf in part.leaves("param"):
            holders.setdefault(leaf.target, set()).add(number)
    earliest = _earliest_stages(graph, holders)
    operators = [node for node in graph.nodes if not node.is_leaf]
    ends = []
    for number in range(len(parts) - 1):
        last = len(operators) - (len(parts) - 1 - number)
        later = (n for n, node in enumerate(operators) if earliest[node.name] > number)
        place = min(next(later, last), last)
        ends.append(operators[place - 1].name)
        for node in operators[place:]:
            for name in node.inputs:
                readers = holders.get(graph[name].target, ()) if graph[name].op == "param" else ()
                if readers and max(readers) <= number:
                    raise StageError(
                        "the stages cannot evaluate the model",
                        where=str(node.source),
                        why=f"the parameter {graph[name].target!r} of stage {max(readers)} is "
                        "needed after parameters of later stages",
                        todo="evaluate under a plan without stages",
                    )
    return tuple(ends)


def _earliest_stages(graph: Graph, holders: Mapping[str, set[int]]) -> dict[str, int]:
    """Returns the first stage that can compute each value.

    Args:
        graph: the whole graph.
        holders: stages that store each parameter; several, if it is tied.
    """
    earliest: dict[str, int] = {}
    choices: dict[str, set[int]] = {}  # of values that depend on parameters only
    for node in graph.nodes:
        if node.op == "param" and node.target in holders:
            choices[node.name] = holders[node.target]
            earliest[node.name] = min(choices[node.name])
            continue
        read = [choices[name] for name in node.inputs if name in choices]
        shared = set.intersection(*read) if read else set()
        if shared and len(read) == len(node.inputs):
            choices[node.name] = shared
        stage = max((earliest[name] for name in node.inputs if name not in choices), default=0)
        if read:
            shared = shared or {max(min(stages) for stages in read)}
            stage = min((one for one in shared if one >= stage), default=max(shared))
        earliest[node.name] = stage
    return earliest
