"""Bytes of activations of a layer: "Reducing Activation Recomputation" (arXiv 2205.05198).

autopar captures and plans the layer; the saved activations are read off the graph and counted by
the paper's conventions (section 4): values have two bytes, dropout masks one; the statistics of
layer norms and other small values, and parameters, do not count. With sequence parallelism, inputs
of products are saved before they are gathered, since they are gathered again in the backward
(section 4.2.2). Selective recomputation drops the activations between the products of queries and
keys and of weights and values, full recomputation all but the layer's input. The formulas are
equations 1, 2, 4 and 6 and the table of section 5. Everything is counted, nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from autopar import pins
from autopar.ir.executed.library_kernels import base
from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import DTYPE_BYTES
from benchmarks.published.models import GPT, Sizes
from benchmarks.published.step import Captured, captured

# Bytes a layer as functions of s, b, h, a, t, by what is parallel and what is recomputed.
FORMULAS: dict[str, Callable[[int, int, int, int, int], float]] = {
    "none": lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h),
    "tensor": lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    "tensor, sequence": lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h),
    "tensor, selective": lambda s, b, h, a, t: s * b * h * (10 + 24 / t),
    "tensor, sequence, selective": lambda s, b, h, a, t: 34 * s * b * h / t,
    "full": lambda s, b, h, a, t: 2 * s * b * h,
}


@cache
def layer(hidden: int, heads: int, seq: int, batch: int, tensor: int, sequence: bool) -> Captured:
    """A model of two layers under the plan of that parallelism."""
    with torch.device("meta"):
        model = GPT(Sizes(hidden, heads, 2, 64 * tensor, seq)).half()
        tokens = torch.zeros(batch, seq, dtype=torch.long)
    words = pins.megatron_sp("tp") if sequence else pins.megatron("tp")
    batch_of = {"tokens": tokens, "labels": tokens}
    return captured(model, batch_of, f"A100-80: tp={tensor}", words)


def kept(of: Captured, recomputed: str = "") -> float:
    """Bytes on one device that a layer keeps; `recomputed` is "", "selective" or "full"."""
    graph = of.graph
    nodes = {node.name: node for node in of.block if not node.is_leaf}
    carried = {_source(graph, graph[before]).name: own for before, own in graph.repeats[0].carried}
    if recomputed == "full":
        return sum(map(of.nbytes, carried.values()))
    core = _core(of) if recomputed else set()
    values: dict[str, float] = {}
    masks = 0.0
    for node in nodes.values():
        names = [name for name in node.inputs if name not in core] if node.name in core else []
        for tensor in () if node.name in core else node.saved_types:
            if base(node.op) == "dropout":
                masks += of.nbytes(node.name) / DTYPE_BYTES[node.type.dtype]
            else:  # a copy of an operand in another shape counts as the operand
                alike = [n for n in node.inputs if graph[n].type.numel == tensor.numel]
                names += [n for n in alike if n not in names][:1]
        for name in (*names, *(() if node.name in core else node.saved)):
            source = _source(graph, graph[name])
            if not source.is_leaf:
                # What enters the first block stands for what one block hands to the next.
                own = carried.get(source.name, source.name)
                values[own] = of.nbytes(own)
    return sum(values.values()) + masks


def _core(of: Captured) -> set[str]:
    """Nodes from the product of queries and keys to the one of weights and values."""
    names = [node.name for node in of.block]
    products = [k for k, node in enumerate(of.block) if base(node.op) == "matmul"]
    return set(names[products[0] : products[1] + 1])


def _source(graph: Graph, node: Node) -> Node:
    """The node that owns a value's storage."""
    while node.alias is not None:
        node = graph[node.alias]
    return node


def compared(
    hidden: int, heads: int, seq: int, batch: int, tensor: int
) -> list[tuple[str, float, float]]:
    """(name, bytes by the paper's formula, bytes counted) for every formula."""
    rows = []
    for name, formula in FORMULAS.items():
        parallel = tensor if "tensor" in name else 1
        of = layer(hidden, heads, seq, batch, parallel, "sequence" in name)
        again = next((word for word in ("selective", "full") if word in name), "")
        rows.append((name, formula(seq, batch, hidden, heads, parallel), kept(of, again)))
    return rows
