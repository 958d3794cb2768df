"""The deterministic backward of attention, against the programs that FlashAttention 2 starts."""

from __future__ import annotations

import math

import pytest

from autopar.cost.attention_seconds import BLOCK, NAMES, ORDERED, attention_seconds
from autopar.cost.compute import kernel_seconds
from autopar.cost.device import devices
from autopar.cost.kernel_tables import Attention
from autopar.cost.work import Gemm


@pytest.mark.parametrize("heads", [1, 8, 27, 32, 54, 108, 109, 500])
def test_programs_are_dealt_to_processors_in_turns(heads: int) -> None:
    """Each of 108 processors takes the next program; each program has every n-th column of keys."""
    processors, columns = 108, 64
    programs = math.ceil(processors / heads)
    busy = [0] * processors
    for program in range(heads * programs):
        own = len(range(program // heads, columns, programs))
        place = min(range(processors), key=busy.__getitem__)
        busy[place] += own
    table = Attention(call=0.0)
    gemm = Gemm(heads, columns * BLOCK, columns * BLOCK, 640, rows=0)
    free, ordered = (
        attention_seconds(table, gemm, 1e14, processors, 0.0, backward=True, ordered=ordered)
        for ordered in (False, True)
    )
    found = ordered / free * columns * heads / processors
    assert max(busy) <= found <= max(busy) + math.ceil(heads * programs / processors)


def test_32_heads_on_an_a100_take_two_rounds() -> None:
    """128 programs of a quarter of the columns each: 2 x 16 of them, instead of 64 x 32 / 108."""
    chip = next(chip for chip in devices() if chip.name == "A100-80")
    gemm = Gemm(32, 8192, 4096, 640, rows=0)
    free, ordered = (
        kernel_seconds(chip, op, gemm.flops, 0.0, "bf16", gemm) for op in (NAMES[1], ORDERED)
    )
    assert ordered / free == pytest.approx(32 * 108 / (64 * 32), rel=0.02)
