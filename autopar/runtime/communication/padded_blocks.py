"""Blocks of a dimension that is split over the ranks of a group, and their padding."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ir.tensor import part_of


@functools.cache
def spans(
    sizes: tuple[int, ...], order: tuple[int, ...], extent: int
) -> tuple[tuple[int, int], ...]:
    """Returns (start, length) of every block, one split inside the other, by group rank."""
    blocks = []
    for place in itertools.product(*(range(sizes[i]) for i in order)):
        start, length = 0, extent
        for axis, count in enumerate(sizes):
            offset, length = part_of(length, count, place[order.index(axis)])
            start += offset
        blocks.append((start, length))
    return tuple(blocks)


def inner_counts(sizes: tuple[int, ...]) -> list[int]:
    """Returns for each axis the number of blocks inside one of its parts."""
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def rearranged(x: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """Returns the pieces of x, of these numbers of rows, in another order."""
    if list(order) == list(range(len(order))):
        return x
    pieces = x.split(list(lengths))
    return torch.cat([pieces[at] for at in order])


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """Pads x with zeros along `dim` to `length` elements."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    dim = dim % x.dim()
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)


def trimmed(x: Tensor, dim: int, length: int) -> Tensor:
    """Returns the first `length` elements of x along `dim`, contiguous."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).contiguous()
