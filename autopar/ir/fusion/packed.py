"""Rotary embedding fused with the packing of a following exchange of rows for heads.

In DeepSpeed-Ulysses (arXiv:2309.14509), devices that hold all heads of some rows exchange them
before attention for some heads of all rows. The plain all_to_all copies the blocks that it sends
and those that it receives, forwards and backwards. The fused kernel writes the blocks directly, and
attention reads the blocks that arrive.
"""

from __future__ import annotations

from autopar.ir.collective import Step
from autopar.ir.graph import PREFIX, Graph, Node
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout

PACK = "rotary_pack"  # its name in `fuse`
ROTARY = f"{PREFIX}rotary"
# Copies of a device's tensor that are saved (each reads and writes it): two forwards, one
# backwards.
COPIES = 3


def reader(graph: Graph, node: Node) -> Node | None:
    """Returns the reader of a rotary embedding's result, if there is just one and it reads once."""
    users = graph.users[node.name] if node.op == ROTARY else ()
    if len(users) != 1 or node.name in {name for _, name in graph.outputs}:
        return None
    user = graph[users[0]]
    return user if user.inputs.count(node.name) == 1 else None


def packing(node: Node, given: Layout, wanted: Layout, resharder: Resharder) -> Step | None:
    """Returns the exchange of rows for heads directly after a rotary embedding, None if absent.

    Args:
        node: the embedding, of (batch, row, head, width).
        given, wanted: the layout of its result, and that in which it is read.
        resharder: the plan's resharder.
    """
    steps = resharder.steps(node.type, given, wanted, node.requires_grad)
    if not steps or (steps[0].op, steps[0].dim, steps[0].to_dim) != ("all_to_all", 1, 2):
        return None
    shape, mesh = node.type.shape, resharder.mesh
    even = all(layout.is_even(shape, mesh) for layout in (steps[0].src, steps[0].dst))
    return steps[0] if even else None
