"""Builds an explanation from the moves, costs and storages of a graph under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from autopar.cost.device import device
from autopar.cost.uncertainty import error_seconds
from autopar.explain.explanation import (
    CACHES,
    Cache,
    Cost,
    Explanation,
    Line,
    Operator,
    Parameter,
    Section,
)
from autopar.explain.layer_names import layers
from autopar.explain.moves import Move, moves
from autopar.explain.node_names import block_modules, common, parameter_name
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Node, Source
from autopar.ir.recompute import repetitions
from autopar.ir.update import nbytes_in, shared_states
from autopar.lower.planned_layouts import entry_of
from autopar.plan_entries import NodePlan
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class StepFigures:
    """Figures of a whole step.

    Attributes:
        limit: memory of one device in bytes.
        hidden: seconds in which collectives and copies overlap with kernels.
        peak: bytes per device at the simulated peak of the step; None if it was not simulated.
        offloaded: bytes of activations in host memory.
        offload_seconds: seconds of copying them to host memory and back.
        state_byte_seconds: seconds per byte of copying optimizer state from host memory and back.
        added: seconds of adding gradients to those of earlier microbatches.
    """

    limit: float
    hidden: float = 0.0
    peak: float | None = None
    offloaded: float = 0.0
    offload_seconds: float = 0.0
    state_byte_seconds: float = 0.0
    added: float = 0.0


def explain(
    graph: Graph,
    plan: StagePlan,
    price: Callable[[Collective], float],
    costs: Mapping[str, Cost],
    figures: StepFigures,
    whole: Iterable[str] = (),
) -> Explanation:
    """Explains the time and memory of a step under a plan.

    Args:
        graph: the prepared graph of the plan.
        plan: a layout for every node of the folded graph.
        price: predicts the seconds of one collective.
        costs: compute and memory of nodes other than parameters; missing nodes are free.
        figures: figures of the whole step.
        whole: operators without a rule, which run whole on every device.

    Returns:
        The explanation: seconds and bytes by cause, operator and parameter.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    moved = moves(graph, plan, price)
    table = parameters(graph, plan, moved)
    shared = nbytes_in(shared_states(plan.precision), "device")
    memory: dict[str, float] = {
        "parameters": sum(parameter.nbytes for parameter in table),
        "gathered parameters": sum(parameter.gathered for parameter in table),
        "gradients": sum(parameter.gradient for parameter in table),
        "optimizer": sum((parameter.optimizer for parameter in table), shared),
        "activations": sum(cost.saved for cost in costs.values()),
    }
    caches = tuple(_caches(graph, plan))
    if caches:
        memory[CACHES] = float(sum(cache.nbytes for cache in caches))
    sections = tuple(_sections(graph, plan, moved, costs))
    states = sum(parameter.host for parameter in table)
    copies = figures.offload_seconds + states * figures.state_byte_seconds / plan.microbatches
    found = Explanation(
        plan.graph, str(plan.mesh), plan.predicted.figures(), sections, table, memory,
        figures.limit, tuple(whole), figures.hidden, figures.peak, copies,
        states + figures.offloaded, plan.precision.caution, added=figures.added, caches=caches,
    )  # fmt: skip
    if plan.calibration:
        return found
    seconds = found.seconds
    sent = seconds["activations"] + seconds["parameters"]
    return replace(found, error=error_seconds(device(plan.mesh), seconds["compute"], sent))


def _caches(graph: Graph, plan: StagePlan) -> Iterator[Cache]:
    layer = layers(graph)
    for leaf in graph.folded:
        if leaf.is_cache:
            layout = plan.nodes[leaf.name].results[0][1]
            readers = graph.users[leaf.name]
            nbytes = graph.multiplicity[leaf.name] * layout.local_bytes(leaf.type, plan.mesh)
            yield Cache(layer[readers[0] if readers else leaf.name], layout.sharded_axes, nbytes)


def parameters(graph: Graph, plan: StagePlan, moved: Iterable[Move]) -> tuple[Parameter, ...]:
    """Returns the parameters that the folded graph reads.

    Args:
        graph: the prepared graph.
        plan: its plan.
        moved: the moves of the whole program.

    Returns:
        Parameters in the order of the graph, with layouts, moves and bytes.
    """
    rows, layer = [], layers(graph)
    operators, _ = repetitions(graph, plan.recompute)
    by_parameter: dict[str, list[Move]] = {}
    for move in moved:
        by_parameter.setdefault(move.parameter, []).append(move)
    for node in graph.folded:
        if node.op != "param" or not graph.users[node.name]:
            continue
        entry_of(plan, graph, node.name), entry_of(plan, graph, graph.users[node.name][0])
        storage = plan.storage(node.name, graph.template[graph.users[node.name][0]])
        stored, used, kept = storage.held, storage.used, storage.kept
        times, nbytes = graph.multiplicity[node.name], stored.local_bytes(node.type, plan.mesh)
        copied = kept.local_bytes(node.type, plan.mesh) if kept.dims != stored.dims else 0
        own = plan.precision.updated(node.type, node.requires_grad)
        updated = times * storage.updated.local_bytes(own, plan.mesh)
        updated = updated if node.requires_grad else 0
        grads = times * storage.grads.local_bytes(own, plan.mesh)
        gradient = max(updated, grads if updated and plan.microbatches > 1 else 0)
        states = plan.states(node, storage)
        rows.append(
            Parameter(
                parameter_name(graph, node),
                times,
                layer[node.name],
                f"{node.type.dtype}{storage.describe(node.type.shape)}",
                f"{node.type.dtype}{used.format(node.type.shape)}",
                stored.sharded_axes,
                storage.updated.sharded_axes,
                used.sharded_axes,
                tuple(by_parameter.get(node.name, ())),
                times * nbytes,
                (times - operators.get(graph.users[node.name][0], 0)) * copied,
                gradient,
                times * nbytes_in(states, "device"),
                times * nbytes_in(states, "host"),
            )
        )
    return tuple(rows)


def _sections(
    graph: Graph, plan: StagePlan, moved: Iterable[Move], costs: Mapping[str, Cost]
) -> Iterator[Section]:
    """Yields the operators in order of execution, by block and by line of the user's code."""
    before: dict[str, list[Move]] = {}
    after: dict[str, list[Move]] = {}
    for move in moved:
        if move.parameter:
            continue
        # A share is not an operator; its moves belong to the value that is shared.
        if move.reader and graph[move.reader].op != "autopar.share":
            before.setdefault(move.reader, []).append(move)
        else:
            after.setdefault(_producer(graph, move.value), []).append(move)
    run = {n: k for k, repeat in enumerate(graph.repeats) for n in repeat.iterations[0]}
    # A share is listed only if it computes: it adds up the gradients of its readers.
    free = {n.name for n in graph.folded if n.is_leaf or n.op == "autopar.share"}
    free -= {*after, *(name for name, cost in costs.items() if cost != Cost(0.0, 0.0))}
    listed = [n for n in graph.folded if n.op != "param" and n.name not in free]
    layer = layers(graph)
    for number, nodes in groupby(listed, lambda node: run.get(node.name)):
        modules = {} if number is None else block_modules(graph, number)
        lines = [
            Line(
                modules.get(group[0].name, source.module),
                f"{source.file}:{source.line}" if source.file else "",
                source.text,
                tuple(
                    Operator(
                        node.name,
                        node.op,
                        layer[node.name],
                        _axes(plan, entry_of(plan, graph, node.name)),
                        str(entry_of(plan, graph, node.name)),
                        costs.get(node.name, Cost(0.0, 0.0)),
                        tuple(before.get(node.name, ())),
                        tuple(after.get(node.name, ())),
                    )
                    for node in group
                ),
            )
            for source, group in _by_line(nodes)
        ]
        if number is None:
            yield Section("", 1, tuple(lines))
        else:
            title = common(modules.values())
            yield Section(title, graph.repeats[number].count, tuple(lines))


def _axes(plan: StagePlan, entry: NodePlan) -> tuple[str, ...]:
    """Returns the mesh axes that split an operand or result or along which it is a partial sum."""
    layouts = [layout for _, layout in (*entry.operands, *entry.results)]
    used = {axis for layout in layouts for axis in (*layout.sharded_axes, *layout.partial)}
    return tuple(name for name in plan.mesh.names if name in used)


def _producer(graph: Graph, value: str) -> str:
    """Returns the operator or leaf behind a chain of shares."""
    while graph[value].op == "autopar.share":
        value = graph.template[graph[value].inputs[0]]
    return value


def _by_line(nodes: Iterable[Node]) -> Iterator[tuple[Source, list[Node]]]:
    for source, group in groupby(nodes, lambda node: node.source):
        yield source, list(group)
