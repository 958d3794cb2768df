"""Forms of attention copy no more than torch's own context parallelism."""

from __future__ import annotations

import torch

from benchmarks.context_parallel import HEADS, PAIRS, WIDTH, written_on_rank
from tests.support.ranks import run_ranks

COUNT, LENGTH = 2, 128


def test_no_form_writes_more_than_torch_does() -> None:
    """Apart from kernels of attention and collectives, on the rank that writes most.

    Zigzag also brings queries, keys, values and the gradient of the result into its order, and the
    result and the gradient of queries out of it; torch's users deal the batch.
    """
    ranks = run_ranks(written_on_rank, COUNT, LENGTH, torch.float32, count=COUNT)
    one = LENGTH // COUNT * HEADS * WIDTH * 4 / 2**20
    for form in PAIRS:
        here, there = (max(rank[form, by] for rank in ranks) for by in ("here", "torch"))
        assert 0 < here <= there + (6 * one if form == "zigzag" else 0), form
