"""Plans of further programs over parameters that a first program already stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError, PinError, StageError
from autopar.ir.graph import Graph, Node
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.lower.parameter_keys import leaf_key
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Kept:
    """The parameters and caches of one stage.

    Attributes:
        names: their names; further graphs read them in this stage.
        storages: how those that are read are stored, by key.
    """

    names: frozenset[str] = frozenset()
    storages: Mapping[str, Storage] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, plan: StagePlan) -> Kept:
        """Returns those of a prepared graph and its plan."""
        return cls(_names(graph), storages_of(graph, plan))

    def __or__(self, other: Kept) -> Kept:
        """Returns those of both, stored as in `other` where both have them."""
        return Kept(self.names | other.names, {**self.storages, **other.storages})

    def frozen(self, mesh: Mesh) -> Kept:
        """Returns them without gradients."""
        stored = {key: each.frozen(mesh.names) for key, each in self.storages.items()}
        return replace(self, storages=stored)


def graphs_of(graph: Graph, plan: Plan) -> tuple[Graph, ...]:
    """Returns the graphs of a plan's stages; raises StageError if the graph cannot be cut."""
    return stage_graphs(graph, plan.ends, Trace(None)) if plan.is_pipeline else (graph,)


def kept_by(graph: Graph, plan: Plan) -> tuple[Kept, ...]:
    """Returns the parameters and caches of every stage of a plan."""
    parts = graphs_of(graph, plan)
    return tuple(Kept.of(*pair) for pair in zip(parts, plan.stages, strict=True))


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
    return plan_with(kept_by(first, plan), plan, graph, options)


def plan_with(
    kept: Sequence[Kept], plan: Plan, graph: Graph, options: Options, stores: bool = False
) -> tuple[Graph, Plan]:
    """Plans a further call over what the stages of a plan keep; see `plan_over`.

    Args:
        kept: of each stage.
        plan, graph, options: as for `plan_over`.
        stores: whether the call's program is to store what it does not read, in the first stage.
    """
    if not plan.is_pipeline:
        graph = with_equal_blocks(graph, kept[0].storages)
        return graph, Plan.of(_planned(graph, plan.stages[0], kept[0].storages, options))
    graph = graph if stores else without_unread(graph)
    ends = plan.ends if _reads_its_own(kept, graph, plan.ends) else _ends_like(kept, graph)
    graphs = stage_graphs(graph, ends, Trace(None))
    stages = []
    for own, stage, part, end in zip(kept, plan.stages, graphs, (*ends, ""), strict=True):
        planned = _planned(part, stage, own.storages, options)
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

    Pins that do not fit this batch or the stored parameters are dropped, such as a pin that shards
    too few rows.
    """
    constrained = replace(options, stored=stored)
    try:
        return make_plan(graph, before.mesh, constrained, Trace(None))
    except (InfeasibleError, PinError):
        if not options.pins:
            raise
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


def _reads_its_own(kept: Sequence[Kept], graph: Graph, ends: Sequence[str]) -> bool:
    """Returns whether each stage of a graph, cut there, reads only what the same stage keeps.

    What no stage keeps, such as the caches of a first generation, may be read anywhere.
    """
    if not {node.name for node in graph.nodes if not node.is_leaf}.issuperset(ends):
        return False
    try:
        graphs = stage_graphs(graph, ends, Trace(None))
    except StageError:
        return False
    known = frozenset[str]().union(*(each.names for each in kept))
    return all(_names(one) & known <= own.names for one, own in zip(graphs, kept, strict=True))


def _kept(leaf: Node) -> bool:
    """Returns whether a node is a parameter or a cache."""
    return leaf.op == "param" or leaf.is_cache


def _names(graph: Graph) -> frozenset[str]:
    return frozenset(node.target for node in graph.nodes if _kept(node))


def _ends_like(kept: Sequence[Kept], graph: Graph) -> tuple[str, ...]:
    """Returns the ends of stages that read the same parameters and caches as `kept`.

    A stage ends before the first operator that depends on a parameter of later stages only; later
    stages without such parameters get one operator each.

    Raises:
        StageError: an operator after that point needs a parameter of an earlier stage.
    """
    holders: dict[str, set[int]] = {}
    for number, own in enumerate(kept):
        for target in own.names:
            holders.setdefault(target, set()).add(number)
    earliest = _earliest_stages(graph, holders)
    operators = [node for node in graph.nodes if not node.is_leaf]
    ends = []
    for number in range(len(kept) - 1):
        last = len(operators) - (len(kept) - 1 - number)
        later = (n for n, node in enumerate(operators) if earliest[node.name] > number)
        place = min(next(later, last), last)
        ends.append(operators[place - 1].name)
        for node in operators[place:]:
            for name in node.inputs:
                readers = holders.get(graph[name].target, ()) if _kept(graph[name]) else ()
                if readers and max(readers) <= number:
                    raise StageError(
                        "this call of the model does not fit the stages",
                        where=str(node.source),
                        why=f"{graph[name].target!r} of stage {max(readers)} is needed after "
                        "parameters of later stages",
                        todo="evaluate, or generate, under a plan without stages",
                    )
    return tuple(ends)


def _earliest_stages(graph: Graph, holders: Mapping[str, set[int]]) -> dict[str, int]:
    """Returns the first stage that can compute each value.

    Args:
        graph: the whole graph.
        holders: stages that store each parameter or cache; several, if it is tied.
    """
    earliest: dict[str, int] = {}
    choices: dict[str, set[int]] = {}  # of values that depend on parameters only
    for node in graph.nodes:
        if _kept(node) and node.target in holders:
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
