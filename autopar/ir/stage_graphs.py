"""Cuts a model's graph into the graphs of pipeline stages.

A stage's graph is an ordinary graph. Values of earlier stages are leaves,

    %add_12 = received('%add_12') : f32[4, 16, 64] grad

and values that later stages read are outputs, under the same name. They leave through an
`autopar.shard` that allows every layout without partial sums, as the leaf does, so that a gradient
has the layout of its value on both sides of the boundary. A value goes from the stage that produces
it directly to every stage that reads it. A parameter that two stages read is in both.

Cheap values that depend on no parameter and no random number, such as masks, positions and rotary
tables, are not sent: every stage that reads one computes it itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import StageError
from autopar.ir.graph import Graph, Node, Ref, Source
from autopar.ir.graph_text import format_graph
from autopar.ir.rewrite import Names, writes

# Operators that need more than one pass over their operands, by the first word of their names.
_HEAVY = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "dot", "vdot", "mv",
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "scaled_dot_product_attention", "sink_attention", "embedding",
    "cross_entropy_loss",
    "batch_norm", "layer_norm", "group_norm", "rms_norm", "sort", "topk", "unique",
)  # fmt: skip
_CHANCE = ("rand", "bernoulli", "binomial", "multinomial", "normal", "poisson", "dropout",
           "uniform", "exponential", "cauchy", "geometric", "random", "gamma", "dirichlet",
           "rrelu")  # fmt: skip


SENT = "%"  # prefix of the names of sent values; users' names never start with it


def key(value: str) -> str:
    """Returns the name under which a value is sent: "%add_12"."""
    return f"{SENT}{value}"


def is_trained(graph: Graph) -> bool:
    """Returns whether there is a backward: from a loss, or from values sent to later stages."""
    return graph.loss is not None or any(user.startswith(SENT) for user, _ in graph.outputs)


def is_sent(graph: Graph, node: Node) -> bool:
    """Returns whether later stages read the value of a node."""
    return any(user.startswith(SENT) and name == node.name for user, name in graph.outputs)


def cut(graph: Graph, ends: Sequence[str]) -> tuple[Graph, ...]:
    """Returns the graphs of the stages.

    Args:
        graph: normalised, not yet with shares and repeats (see `passes.NORMALISING`).
        ends: the last node of every stage but the last, in execution order.

    Returns:
        One graph per stage, still without shares and repeats. Together they compute the outputs of
        `graph`; an output of a middle stage is an output of that stage's graph.

    Raises:
        StageError: an end is not an operator of the graph or precedes the previous end, a stage
            computes nothing, or a written buffer is read in another stage.
    """
    stage = _stages(graph, ends)
    _refuse_shared_writes(graph, stage)
    free = free_values(graph)
    results = {name for _, name in graph.outputs} | ({graph.loss} if graph.loss else set())
    sent: dict[str, None] = {}
    parts: list[Graph] = []
    for number in reversed(range(len(ends) + 1)):
        own = [node.name for node in graph.nodes if stage.get(node.name) == number]
        wanted = {name for name in own if name in sent or name in results or writes(graph[name])}
        if number == len(ends):
            wanted |= {name for name in results if graph[name].is_leaf}
        if not wanted:
            raise StageError(
                f"stage {number} of {len(ends) + 1} computes nothing that is needed later",
                where=f"between %{ends[number - 1] if number else graph.nodes[0].name} and "
                f"%{ends[number] if number < len(ends) else graph.nodes[-1].name}",
                why="its values are recomputed where they are read, or are never read",
                todo="cut elsewhere, or into fewer stages",
            )
        kept, received = _closure(graph, stage, free, number, wanted)
        sent.update(dict.fromkeys(received))
        leaving = [name for name in own if name in sent]
        results_here = {name for name in results if stage.get(name, len(ends)) == number}
        parts.append(_part(graph, number, kept, received, leaving, results_here))
    return tuple(reversed(parts))


def _stages(graph: Graph, ends: Sequence[str]) -> dict[str, int]:
    """Returns the stage of every operator; results of one operator stay in its stage."""
    operators = [node for node in graph.nodes if not node.is_leaf]
    place = {node.name: at for at, node in enumerate(operators)}
    for name in ends:
        if name not in place:
            raise StageError(
                f"no stage can end with %{name}",
                why=f"the graph of {graph.name} has no such operator",
                todo="name an operator of the normalised graph",
            )
    places = [place[name] for name in ends]
    if places != sorted(set(places)) or (places and places[-1] == len(operators) - 1):
        raise StageError(
            f"{graph.name} cannot be cut after {', '.join(f'%{name}' for name in ends)}",
            why="a stage would have no operator",
            todo="name the ends in execution order, each once, and not the last operator",
        )
    stage: dict[str, int] = {}
    number = 0
    for at, node in enumerate(operators):
        stage[node.name] = stage[node.inputs[0]] if node.op == "getitem" else number
        number += number < len(places) and at == places[number]
    return stage


def _refuse_shared_writes(graph: Graph, stage: dict[str, int]) -> None:
    for node in graph.nodes:
        for name in writes(node):
            for user in graph.users[name]:
                if stage[user] != stage[node.name]:
                    raise StageError(
                        f"the {graph[name].op} %{name} is written in stage {stage[node.name]} and "
                        f"read in stage {stage[user]}",
                        where=str(node.source),
                        why="each stage would have its own copy",
                        todo="cut elsewhere, so that both are in one stage",
                    )


def free_values(graph: Graph) -> set[str]:
    """Returns the values that every stage that reads them computes itself."""
    written = {name for node in graph.nodes for name in writes(node)}
    free: set[str] = set()
    for node in graph.nodes:
        if node.is_leaf:
            fits = node.op in ("input", "buffer") and node.name not in written
        else:
            fits = not node.requires_grad and not writes(node) and _cheap(graph, node)
        if fits and free.issuperset(node.inputs):
            free.add(node.name)
    return free


def _cheap(graph: Graph, node: Node) -> bool:
    if node.op == "getitem":
        return True
    space, _, rest = node.op.partition(".")
    if space not in ("aten", "autopar"):
        return False
    base = rest.partition(".")[0]
    if any(word in base for word in _CHANCE):
        return False
    # An outer product takes no more work than a multiplication.
    return base not in _HEAVY or graph[node.inputs[0]].type.shape[-1:] == (1,)


def _closure(
    graph: Graph, stage: dict[str, int], free: set[str], number: int, wanted: set[str]
) -> tuple[set[str], list[str]]:
    """Returns the nodes of a stage, and the values it receives, in execution order."""
    kept: set[str] = set()
    received: set[str] = set()
    stack = list(wanted)
    while stack:
        name = stack.pop()
        if name in kept or name in received:
            continue
        if graph[name].is_leaf or stage[name] == number or name in free:
            kept.add(name)
            stack += graph[name].inputs
        else:
            received.add(name)
    return kept, [node.name for node in graph.nodes if node.name in received]


def _part(
    graph: Graph,
    number: int,
    kept: set[str],
    received: list[str],
    leaving: list[str],
    results: set[str],
) -> Graph:
    """Returns the graph of one stage."""
    # Pieces of a parameter stay together; unread parameters stay in the first stage.
    targets = {graph[name].target for name in kept if graph[name].op == "param"}
    leaves = [
        node
        for node in graph.nodes
        if node.is_leaf
        and (
            node.name in kept
            or (node.op == "param" and node.target in targets)
            or (number == 0 and node.op in ("param", "buffer") and not graph.users[node.name])
        )
    ]
    for name in received:
        node = graph[name]
        leaves.append(replace(node, op="received", args=(key(name),), kwargs=()))
    operators = [node for node in graph.nodes if node.name in kept and not node.is_leaf]
    fresh = Names(node.name for node in graph.nodes)
    sent = [_sent(graph[name], fresh) for name in leaving]
    outputs = tuple((user, name) for user, name in graph.outputs if name in results)
    outputs += tuple((key(name), node.name) for name, node in zip(leaving, sent, strict=True))
    loss = graph.loss if graph.loss in results else None
    nodes = (*leaves, *operators, *sent)
    name = f"{graph.name}, stage {number}"
    return Graph(name, nodes, outputs, loss, execution=graph.execution)


def _sent(node: Node, fresh: Names) -> Node:
    """Returns the annotation that fixes the layout of a value that leaves the stage."""
    free = ", ".join("?" * len(node.type.shape))
    return Node(
        fresh(f"{node.name}_sent"),
        "autopar.shard",
        (Ref(node.name), f"[{free}]"),
        (),
        node.types,
        node.source,
        node.requires_grad,
    )


def alike(graph: Graph) -> str:
    """Returns a text that is equal for stages that differ only in names.

    The nodes of such stages correspond by their places in `Graph.nodes`.
    """
    number = {node.name: f"n{at}" for at, node in enumerate(graph.nodes)}
    nodes = []
    for at, node in enumerate(graph.nodes):
        plain = node.map_refs(lambda name: Ref(number[name]))
        args = (f"leaf{at}", *plain.args[1:]) if node.is_leaf else plain.args
        alias = None if node.alias is None else number[node.alias]
        saved = tuple(number[name] for name in node.saved)
        nodes.append(
            replace(
                plain, name=number[node.name], args=args, alias=alias, saved=saved, source=Source()
            )
        )
    outputs = tuple((f"out{at}", number[name]) for at, (_, name) in enumerate(graph.outputs))
    repeats = tuple(
        replace(
            repeat,
            iterations=tuple(tuple(number[n] for n in block) for block in repeat.iterations),
            carried=tuple((number[a], number[b]) for a, b in repeat.carried),
        )
        for repeat in graph.repeats
    )
    loss = None if graph.loss is None else number[graph.loss]
    text = format_graph(Graph("", tuple(nodes), outputs, loss, repeats, graph.execution))
    return hashlib.sha256(text.encode()).hexdigest()
