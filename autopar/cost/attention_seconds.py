"""Seconds of fused attention.

A processor runs blocks of queries, each through the blocks of keys that it sees (Dao,
"FlashAttention-2", arXiv 2307.08691, section 3.2). For a pair of blocks it computes the products,
whose time grows with the width of a head, and exponentials, whose time does not, which is why
narrow heads are slow (Shah et al., "FlashAttention-3", arXiv 2407.08608, section 3.2). Under a
causal mask the pairs on the diagonal are computed whole. The time is

    call + (memory^p + computing^p)^(1/p), computing = (work^3 + chain^3)^(1/3)

where `work` shares all pairs and starts of blocks among the processors, and `chain` is the longest
row of pairs, one after another. Backwards five products take the place of two. A device's `overlap`
is p: with 1 operands are moved before they are computed with, with 3 mostly meanwhile.

A deterministic backward adds the gradients of queries in a fixed order. FlashAttention 2 then
starts only as many programs for each head as keep all processors busy, each for every so many
columns of keys (csrc/flash_attn/src/flash_bwd_launch_template.h, `params.deterministic`). A
processor runs one at a time, so that many wait if all programs do not divide into processors.
"""

from __future__ import annotations

from autopar.cost.kernel_tables import Attention
from autopar.cost.work import Gemm

NAMES = ("aten.scaled_dot_product_attention", "aten.scaled_dot_product_attention backward")
ORDERED = f"{NAMES[1]} in order"
BLOCK = 128  # queries or keys of a block
BLEND = 3.0


def attention_seconds(
    table: Attention,
    gemm: Gemm,
    rate: float,
    processors: int,
    moving: float,
    backward: bool,
    ordered: bool = False,
) -> float:
    """Returns the seconds of a call.

    Args:
        table: the device's constants.
        gemm: m queries, n keys (half of them under a causal mask), k the widths of all products.
        rate: FLOP/s of the device's matrix units.
        processors: number of blocks computed at a time.
        moving: seconds to move the operands at the whole bandwidth of memory.
        backward: whether it is the backward.
        ordered: whether it is a deterministic one.
    """
    causal = gemm.n == (gemm.m + 1) // 2 and gemm.m > 1
    rows, last = -(-gemm.m // BLOCK), min(gemm.m, BLOCK) / BLOCK
    keys = -(-(2 * gemm.n if causal else gemm.n) // BLOCK)
    pairs = rows * (keys + 1) / 2 if causal else float(rows * keys)
    # Exponentials are computed once in either direction; a forward's k is twice the width.
    width = gemm.k + 2 * table.softmax
    one = 2.0 * BLOCK * BLOCK * width * processors / (rate * table.efficiency)
    work = gemm.batch * (pairs + rows * table.start) * one * last / processors
    if ordered:
        programs = -(-processors // gemm.batch)  # of a head
        columns = -(-gemm.batch * programs // processors) * -(-keys // programs)
        work *= columns * processors / (gemm.batch * keys)
    chain = (keys + table.start) * table.block_latency * last * gemm.k / (2 * BLOCK)
    seconds = float((work**BLEND + chain**BLEND) ** (1 / BLEND))
    seconds /= table.backward if backward else 1.0
    both = seconds**table.overlap + (moving / table.memory) ** table.overlap
    return table.call + float(both ** (1 / table.overlap))
