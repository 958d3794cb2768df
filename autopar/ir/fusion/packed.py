"""Rotary embedding that writes where an exchange of rows for heads takes from.

DeepSpeed-Ulysses (arXiv:2309.14509): before attention devices that have all heads of a part of the
rows exchange them for some heads of all rows. By itself the all_to_all copies what it sends block
by block, and again what arrives, forwards and backwards. The kernel writes those blocks, and what
arrives is what attention reads.
"""

from __future__ import annotations

from autopar.ir.collective import Resharder, Step
from autopar.ir.graph import PREFIX, Graph, Node
from autopar.ir.tensor import Layout

PACK = "rotary_pack"  # by what `fuse` switches it on and off
ROTARY = f"{PREFIX}rotary"
# Of what a device has: a copy reads and writes it, two of them forwards, one backwards are gone.
COPIES = 3


def reader(graph: Graph, node: Node) -> Node | None:
    """What reads the result of a rotary embedding, if that is one operator, and once."""
    users = graph.users[node.name] if node.op == ROTARY else ()
    if len(users) != 1 or node.name in {name for _, name in graph.outputs}:
        return None
    found = graph[users[0]]
    return found if found.inputs.count(node.name) == 1 else None


def packing(node: Node, given: Layout, wanted: Layout, resharder: Resharder) -> Step | None:
    """The exchange of rows for heads that comes right behind a rotary embedding, if one does.

    Args:
        node: the embedding, of (batch, row, head, width).
        given, wanted: the layout of its result, and that in which it is read.
        resharder: of the plan.
    """
    steps = resharder.steps(node.type, given, wanted, node.requires_grad)
    if not steps or (steps[0].op, steps[0].dim, steps[0].to_dim) != ("all_to_all", 1, 2):
        return None
    shape, mesh = node.type.shape, resharder.mesh
    even = all(layout.is_even(shape, mesh) for layout in (steps[0].src, steps[0].dst))
    return steps[0] if even else None
