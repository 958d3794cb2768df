"""Double binary tree: two trees, each of which reduces and broadcasts one half of the data.

Sanders, Speck & Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(Parallel Computing 35(12), 2009). As in NCCL (src/graph/trees.cc), the trees connect nodes, and the
ranks of a node form a chain. Each rank of a node heads the chain of one pair of trees. With a
single level, every rank is a node.
"""

from __future__ import annotations

from autopar.cost.collectives._rounds import Rounds, Shape, Written, backwards, nodes


def all_reduce(shape: Shape) -> Written:
    """Reduces up the trees, where each rank sends after its children, and broadcasts down."""
    outer, inner = nodes(shape) if len(shape) > 1 else (*shape, 1)
    up = Rounds()
    for head in range(inner):
        for second in (False, True):
            parents = _parents(outer, inner, head, second)
            for rank, height in _heights(parents).items():
                if rank in parents:
                    up.send(height, rank, parents[rank], [2 * head + second], True)
    rounds = up.written
    down = [tuple(m._replace(adds=False) for m in messages) for messages in backwards(rounds)]
    return 2 * inner, [*rounds, *down]


def _parents(outer: int, inner: int, head: int, second: bool) -> dict[int, int]:
    """Returns the parent of every rank except for the root."""
    found: dict[int, int] = {}
    for node in range(outer):
        chain = [node * inner + (head + place) % inner for place in range(inner)]
        found.update(zip(chain[1:], chain, strict=False))
        above = _above(node, outer, second)
        if above is not None:
            found[chain[0]] = above * inner + head
    return found


def _above(node: int, count: int, second: bool) -> int | None:
    """Returns the parent of a node; the second tree is mirrored, or shifted by one node."""
    if second and count % 2:
        parent = _binary((node - 1) % count, count)
        return None if parent is None else (parent + 1) % count
    if second:
        parent = _binary(count - 1 - node, count)
        return None if parent is None else count - 1 - parent
    return _binary(node, count)


def _binary(node: int, count: int) -> int | None:
    """Returns the parent in a tree with root 0 whose leaves are the odd numbers."""
    if node == 0:
        return None
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < count else node ^ bit


def _heights(parents: dict[int, int]) -> dict[int, int]:
    """Returns the height of every rank above the leaves."""
    heights = dict.fromkeys((*parents, *parents.values()), 0)
    for rank in parents:
        steps, below = 0, rank
        while below in parents:
            below, steps = parents[below], steps + 1
            heights[below] = max(heights[below], steps)
    return heights
