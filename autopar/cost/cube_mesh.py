"""Rings over links between pairs of devices, where no switch joins them all.

The eight V100 of a DGX-1 or a p3.16xlarge form a hybrid cube mesh of one or two NVLinks between
neighbours. A collective library runs as many rings at a time as it finds cycles through all
devices of a group, each on links of its own; every link carries one ring each way (NVIDIA, "DGX-1
With Tesla V100 System Architecture", white paper, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

Matrix = tuple[tuple[int, ...], ...]


def groups(strides: Sequence[tuple[int, int]], used: int) -> Iterator[tuple[int, ...]]:
    """Yields the devices of every group that axes form inside a node.

    Args:
        strides: (size inside the node, distance of neighbours) of each axis of the group.
        used: number of devices of the node in the mesh.
    """
    offsets = [0]
    for size, stride in strides:
        offsets = [place + stride * step for place in offsets for step in range(size)]
    for base in range(used):
        if all(base // stride % size == 0 for size, stride in strides):
            yield tuple(sorted(base + offset for offset in offsets))


def fewest_rings(links: Matrix, many: Iterable[tuple[int, ...]]) -> int:
    """Returns the number of rings of the group that has the fewest."""
    return min(rings(links, group) for group in many)


@cache
def rings(links: Matrix, group: tuple[int, ...]) -> int:
    """Returns how many rings through all devices of a group run at a time.

    Repeatedly takes the ring whose scarcest link has the most copies left, until none is left.

    Args:
        links: number of links between each pair of devices.
        group: two or more devices.
    """
    left = {(a, b): links[a][b] for a in group for b in group if a != b}
    count = 0
    while (cycle := _widest(left, group)) is not None:
        count += 1
        for pair in cycle:
            left[pair] -= 1
    return count


def _widest(
    left: dict[tuple[int, int], int], group: tuple[int, ...]
) -> tuple[tuple[int, int], ...] | None:
    """Returns the cycle through a group whose least link, and sum of links, is largest."""
    best: tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
    stack: list[tuple[int, ...]] = [(group[0],)]
    while stack:
        path = stack.pop()
        if len(path) == len(group):
            pairs = tuple(zip(path, (*path[1:], path[0]), strict=True))
            free = [left[pair] for pair in pairs]
            if min(free) > 0 and (best is None or (min(free), sum(free)) > best[0]):
                best = (min(free), sum(free)), pairs
            continue
        rest = (n for n in group if n not in path and left[path[-1], n] > 0)
        stack += [(*path, n) for n in rest]
    return None if best is None else best[1]
