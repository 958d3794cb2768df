"""The work of lookups, sorts and selections."""

from __future__ import annotations

from autopar.cost.model import NodeWork
from autopar.intra_op.work.local_work import Local
from autopar.ir.executed.library_kernels import base
from autopar.ir.tensor import DTYPE_BYTES

SORT = 16  # passes over keys of 64 bits by a radix sort, 8 bits at a time, reads and writes
_SELECTS = ("topk", "kthvalue", "median")  # they select by digits, and sort only the selection


def look_up(local: Local) -> NodeWork:
    """Returns a lookup's work: it reads the rows that it writes; gradients are added into zeros."""
    beside = local.read - local.operands[0].nbytes
    forward = local.work(local.flops, beside + 2 * local.written)
    if not local.node.requires_grad:
        return NodeWork((forward,))
    into = local.operands[0].nbytes
    moved = into + beside + 3 * local.written
    return NodeWork((forward,), (local.gradient(local.flops, moved),))


def sort(local: Local) -> NodeWork:
    """Returns the work of a radix sort, or of a selection by digits, of 8 bits at a time.

    A sort reads and writes keys and 64-bit places once a digit (Adinets & Merrill, "Onesweep",
    arXiv 2206.01784, section 2). A selection reads keys once a digit and once to gather (Alabi et
    al., "Fast K-Selection Algorithms for Graphics Processing Units", JEA 17, 2012, section 3.2).
    Backwards the gradients are put back into zeros.
    """
    keys = local.operands[0]
    digits = DTYPE_BYTES[keys.dtype]
    if base(local.node.op) in _SELECTS:
        moved = (digits + 1) * keys.nbytes + local.written
    else:
        moved = 2 * digits * (keys.nbytes + 8 * keys.numel)
    forward = local.work(digits * keys.numel, moved)
    if not local.node.requires_grad:
        return NodeWork((forward,))
    return NodeWork((forward,), (local.gradient(0.0, keys.nbytes + 2 * local.written),))
