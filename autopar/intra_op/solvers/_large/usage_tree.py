"""A segment tree of the bytes in use: a change of one node's memory and the peak in O(log times).

Entry k of `lift` is the number of bytes that tree node k adds to all times under it. Entry k of
`top` is the peak of these times, without the bytes added by ancestors. Both have 2 n entries, the
root is entry 1, and the leaves begin at n, a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.intra_op.reduce.flat import Floats, Ints
from autopar.intra_op.reduce.numba_compile import entry, inner
from autopar.intra_op.solvers._moves import Local


class Usage(NamedTuple):
    """Bytes in use at every time, as a tree of maxima."""

    top: Floats
    lift: Floats


@entry
def usage(s: Local, choice: Ints) -> Usage:
    """Returns the tree of a choice's bytes; its peak is `top[1]`."""
    leaves = 1
    while leaves < len(s.base):
        leaves *= 2
    top, lift = np.full(2 * leaves, -np.inf), np.zeros(2 * leaves)
    top[leaves : leaves + len(s.base)] = held(s, choice)
    for k in range(leaves - 1, 0, -1):
        top[k] = max(top[2 * k], top[2 * k + 1])
    return Usage(top, lift)


@entry
def held(s: Local, choice: Ints) -> Floats:
    """Returns the bytes in use at every time."""
    change = np.zeros(len(s.base) + 1)
    for v in range(len(choice)):
        for p in range(s.first[v], s.first[v + 1]):
            nbytes = s.nbytes[s.begin[p] + choice[v]]
            change[s.low[p]] += nbytes
            change[s.high[p]] -= nbytes
    bytes_now = np.empty(len(s.base))
    now = 0.0
    for t in range(len(s.base)):
        now += change[t]
        bytes_now[t] = now + s.base[t]
    return bytes_now


@inner
def _add(u: Usage, low: int, high: int, nbytes: float) -> None:
    """Adds bytes at the times from `low` to `high`, exclusive."""
    leaves = len(u.top) >> 1
    left, right = low + leaves, high + leaves
    while left < right:
        if left & 1:
            u.top[left] += nbytes
            u.lift[left] += nbytes
            left += 1
        if right & 1:
            right -= 1
            u.top[right] += nbytes
            u.lift[right] += nbytes
        left >>= 1
        right >>= 1
    one, two = (low + leaves) >> 1, (high - 1 + leaves) >> 1
    while one != two:
        u.top[one] = max(u.top[2 * one], u.top[2 * one + 1]) + u.lift[one]
        u.top[two] = max(u.top[2 * two], u.top[2 * two + 1]) + u.lift[two]
        one >>= 1
        two >>= 1
    while one:
        u.top[one] = max(u.top[2 * one], u.top[2 * one + 1]) + u.lift[one]
        one >>= 1


@inner
def swap(s: Local, u: Usage, v: int, old: int, new: int) -> None:
    """Replaces the bytes of node v's old choice by those of its new one."""
    for p in range(s.first[v], s.first[v + 1]):
        more = s.nbytes[s.begin[p] + new] - s.nbytes[s.begin[p] + old]
        if more != 0:
            _add(u, s.low[p], s.high[p], more)
