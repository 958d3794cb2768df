"""Collectives of int8 blocks, as in ZeRO++ (Wang et al., arXiv:2306.10209, sections 3.1 and 3.3).

A block is `BLOCK` consecutive numbers of one tensor as int8, with their common float32 scale; the
last block is padded with zeros. An all_gather sends blocks in place of numbers (qwZ); gradients are
sent so by `compression/int8.py` (qgZ). Parts too small to gain by blocks are sent unchanged.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

BLOCK = 256
BLOCK_BYTES = BLOCK + 4


def blocks(elements: int) -> int:
    """Returns the number of blocks for `elements` numbers."""
    return -(-elements // BLOCK)


def in_blocks(call: Collective, elements: int, element: int, parts: int) -> Collective:
    """Returns an all_gather with its payload as int8 blocks, or unchanged if that is fewer bytes.

    Args:
        call: the all_gather.
        elements: numbers in the part that a device contributes.
        element: bytes of a number.
        parts: number of parts.
    """
    plain, sent = elements * element, blocks(elements) * BLOCK_BYTES
    if sent >= plain:
        return call
    return replace(call, nbytes=sent, quantised=(1 + parts) * (plain + sent), compression="int8")


def staged(call: Collective, mesh: Mesh) -> int:
    """Returns the bytes of messages, packed and unpacked, on the side with more of them."""
    if not call.quantised:
        return 0
    gathered = call.axes if call.kind == "all_gather" else ()
    return 2 * call.nbytes * math.prod(mesh.axis_size(axis) for axis in gathered)
