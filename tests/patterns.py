"""Well-known ways to train a transformer in parallel: as pins, and as what they communicate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node

Axes = tuple[str, ...]
# Steps that move nothing, neither forwards nor backwards.
FREE = ("to_partial", "from_varying", "slice_varying")


@dataclass(frozen=True)
class Family:
    """Where the blocks of a family keep what Megatron splits: patterns over names.

    `column` and `row` are parameters of linears that are split by outputs or by inputs; `outputs`
    is the dimension of their weights that counts outputs. The values of modules `inside` attention
    and perceptron are no part of the residual stream.
    """

    column: str
    row: str
    inside: str
    outputs: int = 0


FAMILIES = {
    "gpt2": Family("c_attn|c_fc", "c_proj", r"\.attn|\.mlp", outputs=1),
    "llama": Family("(q|k|v|gate|up)_proj", "(o|down)_proj", r"\.self_attn|\.mlp"),
    "bert": Family(
        r"query|key|value|intermediate\.dense", r"output\.dense", r"\.self|\.dense|intermediate"
    ),
    "vit": Family("(q|k|v)_proj|fc1", "o_proj|fc2", r"\.attention|\.mlp"),
}


def layout(shape: tuple[int, ...], split: dict[int, Axes], varying: Axes = ()) -> str:
    """The text of a layout that splits dimensions over axes."""
    sizes = ("@".join([str(size), *split.get(dim, ())]) for dim, size in enumerate(shape))
    return f"[{', '.join(sizes)}]" + (f" -sum({', '.join(varying)})" if varying else "")


def parameters(graph: Graph) -> list[Node]:
    """The parameters of the first block, which stand for those of all."""
    return [node for node in _first(graph) if node.op == "param"]


def stream(graph: Graph, family: Family) -> list[Node]:
    """The values of the first block that belong to the residual stream, but for parts of sums."""
    ((entry, _),) = graph.repeats[0].carried
    positions = graph[entry].type.shape[:2]
    return [
        node
        for node in _first(graph)
        if len(node.type.shape) == 3
        and node.type.shape[:2] == positions
        and node.op not in ("autopar.share", "aten.linear")
        and (node.op == "aten.dropout" or not re.search(family.inside, node.source.module))
    ]


def _first(graph: Graph) -> Iterator[Node]:
    (repeat,) = graph.repeats
    return (graph[name] for name in repeat.iterations[0])


def data_parallel(graph: Graph, family: Family, axes: Axes, *, stored: bool) -> dict[str, str]:
    """Every device takes its part of the batch; gradients are summed, parameters used whole.

    They are `stored` whole, or it is left open.
    """
    pins = {}
    for node in graph.leaves("param"):
        used = layout(node.type.shape, {}, axes)
        pins[node.target] = f"{layout(node.type.shape, {})} => {used}" if stored else used
    for node in stream(graph, family):
        pins[node.name] = layout(node.type.shape, {0: axes})
    return pins


def megatron(
    graph: Graph, family: Family, tensor: str, batch: Axes = (), *, sequence: bool = False
) -> dict[str, str]:
    """Megatron's tensor parallelism along one axis of all blocks; the batch along others.

    With `sequence` the residual stream is split by positions along the tensor axis. See
    arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2.
    """
    pins = {}
    for node in parameters(graph):
        shape, varying = node.type.shape, batch
        matrix = len(shape) == 2
        split: dict[int, Axes] = {}
        if re.search(family.column, node.target):
            split = {family.outputs if matrix else 0: (tensor,)}
        elif re.search(family.row, node.target):
            split = {1 - family.outputs: (tensor,)} if matrix else {}
        elif sequence:
            varying = (*batch, tensor)
        pins[node.target] = f"{layout(shape, split)} => {layout(shape, split, varying)}"
    for node in stream(graph, family):
        split = {0: batch, 1: (tensor,)} if sequence else {0: batch}
        pins[node.name] = layout(node.type.shape, split)
    return pins


def communication(source: str) -> Counter[tuple[str, Axes]]:
    """How often the repeated block of a program makes each step that is not free, by axes."""
    (block,) = re.findall(r"^def \w+_block\(.*?(?=^def )", source, re.MULTILINE | re.DOTALL)
    code = re.sub(r"#.*", "", block)
    steps = re.findall(r"mesh\.(\w+)\([^()]*axis=(\"\w+\"|\([^)]*\))", code)
    found = Counter((name, tuple(re.findall(r'"(\w+)"', axes))) for name, axes in steps)
    return Counter({step: count for step, count in found.items() if step[0] not in FREE})


def expected(
    plan: str, graph: Graph, family: Family, tensor: str, batch: Axes
) -> Counter[tuple[str, Axes]]:
    """What `communication` must be, from the papers: forwards, and the backward it stands for.

    Data parallelism: one all_reduce for each parameter's gradient, of which `to_varying` is the
    forward. Tensor parallelism: g is an all_reduce after attention and after the perceptron, f a
    `to_varying` before. Sequence parallelism: a reduce_scatter and an all_gather instead, and the
    gradients of the norms, which saw a part of the positions, are summed too.
    """
    targets = [node.target for node in parameters(graph)]
    linear = re.compile(f"{family.column}|{family.row}")
    norms = sum(1 for target in targets if not linear.search(target))
    if plan == "data":
        return Counter({("to_varying", (*batch, tensor)): len(targets)})
    steps: Counter[tuple[str, Axes]]
    if plan == "tensor":
        steps = Counter({("all_reduce", (tensor,)): 2, ("to_varying", (tensor,)): 2})
        return steps + Counter({("to_varying", batch): len(targets)} if batch else {})
    steps = Counter({("reduce_scatter", (tensor,)): 2, ("all_gather", (tensor,)): 2})
    steps["to_varying", (*batch, tensor)] = norms
    return steps + Counter({("to_varying", batch): len(targets) - norms} if batch else {})
