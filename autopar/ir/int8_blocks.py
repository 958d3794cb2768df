"""Collectives of int8 blocks: ZeRO++ (Wang et al., arXiv:2306.10209, sections 3.1 and 3.3).

A block is `BLOCK` numbers of one tensor in a row, as int8, with the float32 that they are to be
multiplied by; what is missing of the last block is zeros. An all_gather sends blocks in place of
numbers (qwZ). A reduce_scatter becomes an all_to_all of blocks, which are made float32 and added up
where they arrive (qgZ), so that nothing is rounded twice on one way. Parts that are too small for
blocks to be fewer bytes go as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

BLOCK = 256
BLOCK_BYTES = BLOCK + 4


def blocks(elements: int) -> int:
    """How many blocks hold so many numbers."""
    return -(-elements // BLOCK)


def in_blocks(call: Collective, elements: int, element: int, parts: int) -> Collective:
    """A collective with its payload as int8 blocks, or as it is where that is fewer bytes.

    Args:
        call: an all_gather or a reduce_scatter.
        elements: numbers of one part, that which a device brings to the former and has after the
            latter.
        element: bytes of a number.
        parts: how many there are.
    """
    plain, sent = elements * element, blocks(elements) * BLOCK_BYTES
    if sent >= plain:
        return call
    if call.kind == "all_gather":
        return replace(call, nbytes=sent, quantised=(1 + parts) * (plain + sent))
    moved = (parts + 1) * plain + 2 * parts * sent
    return Collective("all_to_all", call.axes, parts * sent, moved)


def staged(call: Collective, mesh: Mesh) -> int:
    """Bytes of blocks where there are more of them: with their scales, and apart from these."""
    if not call.quantised:
        return 0
    gathered = call.axes if call.kind == "all_gather" else ()
    return 2 * call.nbytes * math.prod(mesh.axis_size(axis) for axis in gathered)
