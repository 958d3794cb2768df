"""Lowers a graph and a plan: `forward`, and a function for each run of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Repeat
from autopar.ir.recompute import common_module
from autopar.ir.tensor import Layout
from autopar.lower.function import Writer
from autopar.lower.lines import LEAF, Assign, Bound, Call, Function, Lowered
from autopar.lower.planned_layouts import Placed
from autopar.lower.variables import identifier
from autopar.stage_plan import StagePlan


def lower(graph: Graph, plan: StagePlan, price: Callable[[Collective], float]) -> Lowered:
    """Lowers a graph and its plan to a program.

    Args:
        graph: the prepared graph with its repeats.
        plan: a layout for every node of the folded graph.
        price: predicts the seconds of one collective, to choose the steps of resharding.

    Returns:
        The program, line by line.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    placed = Placed(graph, plan, price)
    blocks: list[Function] = []
    for repeat in graph.repeats:
        blocks.append(_block(placed, repeat, [block.name for block in blocks]))
    return _forward(placed, blocks)


def _carried(placed: Placed, repeat: Repeat) -> list[Layout]:
    """Returns the layout of each carried value at the start of a block."""
    first, users = set(repeat.iterations[0]), placed.graph.users
    shares = (next(name for name in users[e] if name in first) for e, _ in repeat.carried)
    return [placed.planned(share).operands[0][1] for share in shares]


def _outside(graph: Graph, repeat: Repeat) -> list[str]:
    """Returns the values from outside that a block reads, except parameters and buffers."""
    inside = set(repeat.iterations[0]) | {entry for entry, _ in repeat.carried}
    nodes = (graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf)
    reads = dict.fromkeys(name for node in nodes for name in node.inputs)
    named = ("param", "buffer")
    return [name for name in reads if name not in inside and graph[name].op not in named]


def _block(placed: Placed, repeat: Repeat, others: Sequence[str]) -> Function:
    """Lowers one run of blocks to a function, whose name is not one of `others`.

    It takes the carried values, and returns them for the next block.
    """
    graph = placed.graph
    nodes = [graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf]
    module = common_module(graph, repeat)
    wish = identifier(f"{module[-1] if module else 'repeated'}_block")
    numbered = itertools.chain([wish], (f"{wish}_{number}" for number in itertools.count(2)))
    name = next(name for name in numbered if name not in others)
    leaving = [leaves for _, leaves in repeat.carried]
    writer, layouts = Writer(placed, nodes, leaving), _carried(placed, repeat)
    arguments = [
        writer.hold(entry, writer.names.fresh("hidden"), layout)
        for (entry, _), layout in zip(repeat.carried, layouts, strict=True)
    ]
    for outside in _outside(graph, repeat):
        variable = writer.names.fresh(writer.names.wish(graph[outside]))
        arguments.append(writer.hold(outside, variable, placed.result(outside)))
    for node in nodes:
        writer.add(node)
    results = _results(writer, zip(leaving, layouts, strict=True))
    return Function(name, tuple(arguments), tuple(writer.lines), results)


def _results(writer: Writer, reads: Iterable[tuple[str, Layout]]) -> tuple[Bound, ...]:
    """Returns values in the layouts in which a function returns them."""
    reads = list(reads)
    variables = writer.operands(reads)
    return tuple(
        Bound(variable, value, layout)
        for variable, (value, layout) in zip(variables, reads, strict=True)
    )


def _forward(placed: Placed, blocks: Sequence[Function]) -> Lowered:
    """Lowers everything outside of blocks, and the calls of blocks."""
    graph = placed.graph
    home = {
        n: run for run, repeat in enumerate(graph.repeats) for it in repeat.iterations for n in it
    }
    nodes = [node for node in graph.nodes if node.name not in home and not node.is_leaf]
    outside = [_outside(graph, repeat) for repeat in graph.repeats]
    used = [name for names in outside for name in names]
    used += [entry for repeat in graph.repeats for entry, _ in repeat.carried]
    used += [node for _, node in graph.outputs]
    writer = Writer(placed, nodes, used)
    for block in blocks:
        writer.names.take(block.name)  # no variable may shadow it
    _inputs(writer, {name for node in nodes for name in node.inputs} | set(used))
    called: set[int] = set()
    for node in graph.nodes:
        run = home.get(node.name)
        if node.is_leaf or run in called or node.name in graph.aside:
            continue
        if run is None:
            writer.add(node)
        else:
            called.add(run)
            _call(writer, run, outside[run])
    first = _outputs(writer, aside=False)
    forward = Function("forward", (), tuple(writer.lines), first)
    if not graph.aside:
        return Lowered(forward, tuple(blocks))
    writer.keep(result.variable for result in first)
    writer.lines = []
    for node in graph.nodes:
        if node.name in graph.aside:
            writer.add(node)
    rest = _outputs(writer, aside=True)
    aside = Function("aside", (), tuple(writer.lines), rest)
    return Lowered(forward, tuple(blocks), aside)


def _inputs(writer: Writer, wanted: set[str]) -> None:
    """Assigns a variable to each input that is read."""
    graph = writer.graph
    for leaf in (*graph.leaves("input"), *graph.leaves("received")):
        if leaf.name in wanted:
            received = leaf.op == "received"
            wish = writer.names.wish(leaf) if received else leaf.target.replace(".", "_")
            variable, layout = writer.names.fresh(wish), writer.placed.result(leaf.name)
            writer.hold(leaf.name, variable, layout)
            writer.lines.append(Assign(LEAF + leaf.name, variable, leaf.name, layout))


def _outputs(writer: Writer, aside: bool) -> tuple[Bound, ...]:
    """Returns the outputs of training, or with `aside` the others, in their final layouts."""
    graph = writer.graph
    nodes = [node for _, node in graph.outputs if (node in graph.aside) == aside]
    return _results(writer, ((node, output_layout(writer.placed, node)) for node in nodes))


def _call(writer: Writer, run: int, outside: Sequence[str]) -> None:
    """Writes the loop over the blocks of a run."""
    placed, repeat = writer.placed, writer.graph.repeats[run]
    layouts = _carried(placed, repeat)
    entries = (entry for entry, _ in repeat.carried)
    variables = writer.operands(zip(entries, layouts, strict=True))
    targets = [writer.names.fresh("hidden") for _ in variables]
    for target, variable in zip(targets, variables, strict=True):
        writer.lines.append(Assign(variable, target))
    read = writer.operands((name, placed.result(name)) for name in outside)
    writer.lines.append(Call(run, tuple(targets), read))
    last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
    for (_, leaves), target, layout in zip(repeat.carried, targets, layouts, strict=True):
        writer.hold(last[leaves], target, layout)


def output_layout(placed: Placed, node: str) -> Layout:
    """Returns the layout of an output: the loss is replicated, other outputs keep their layouts.

    A loss that the plan adds up later keeps its layout, too.
    """
    graph = placed.graph
    if node == graph.loss and not placed.plan.late_loss:
        return Layout.replicated(len(graph[node].type.shape))
    for repeat in graph.repeats:
        last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
        for (_, leaves), layout in zip(repeat.carried, _carried(placed, repeat), strict=True):
            if last[leaves] == node:
                return layout
    return placed.result(node)
