"""The communication of well-known ways to train a transformer in parallel, by their papers.

This is the oracle of the plans in `autopar.pins`: it identifies families by the names of their
parameters, and knows nothing of how those plans find what they split.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node

Axes = tuple[str, ...]
# Steps that move nothing, neither forwards nor backwards.
FREE = ("to_partial", "from_varying", "slice_varying")


@dataclass(frozen=True)
class Family:
    """Where the blocks of a family keep what Megatron splits: patterns over names.

    `column` and `row` are parameters of linears that are split by outputs or by inputs; `outputs`
    is the dimension of their weights that counts outputs.
    """

    column: str
    row: str
    outputs: int = 0


FAMILIES = {
    "gpt2": Family("c_attn|c_fc", "c_proj", outputs=1),
    "llama": Family("(q|k|v|gate|up)_proj", "(o|down)_proj"),
    "bert": Family(r"query|key|value|intermediate\.dense", r"output\.dense"),
    "vit": Family("(q|k|v)_proj|fc1", "o_proj|fc2"),
}


def parameters(graph: Graph) -> list[Node]:
    """Returns the parameters of the first block, which represent those of all blocks."""
    (repeat,) = graph.repeats
    return [graph[name] for name in repeat.iterations[0] if graph[name].op == "param"]


def split_dim(family: Family, node: Node) -> int | None:
    """The dimension of a block's parameter that Megatron splits, None if it is whole.

    Linears that are split by inputs have a whole bias, which is added once.
    """
    matrix = len(node.type.shape) == 2
    if re.search(family.column, node.target):
        return family.outputs if matrix else 0
    return 1 - family.outputs if matrix and re.search(family.row, node.target) else None


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
    forward. ZeRO-3: each parameter is gathered, its gradient scattered. Tensor parallelism: g is an
    all_reduce after attention and after the perceptron, f a `to_varying` before. Sequence
    parallelism: a reduce_scatter and an all_gather instead, and the gradients of the norms, which
    saw a part of the positions, are summed too.
    """
    targets = [node.target for node in parameters(graph)]
    linear = re.compile(f"{family.column}|{family.row}")
    norms = sum(1 for target in targets if not linear.search(target))
    if plan == "zero":
        return Counter({("all_gather", (*batch, tensor)): len(targets)})
    if plan == "data":
        return Counter({("to_varying", (*batch, tensor)): len(targets)})
    steps: Counter[tuple[str, Axes]]
    if plan == "tensor":
        steps = Counter({("all_reduce", (tensor,)): 2, ("to_varying", (tensor,)): 2})
        return steps + Counter({("to_varying", batch): len(targets)} if batch else {})
    steps = Counter({("reduce_scatter", (tensor,)): 2, ("all_gather", (tensor,)): 2})
    steps["to_varying", (*batch, tensor)] = norms
    return steps + Counter({("to_varying", batch): len(targets) - norms} if batch else {})
