"""Training with fused kernels equals unsharded training without them."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.parity import Case, Run, Sharded, unsharded
from tests.support.ranks import run_ranks

FLAT, GRID = "gpu=4", "data=2, tensor=2"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
KERNELS = {
    "llama": ("rms_norm", "add_rms_norm", "swiglu", "rotary"),
    "gpt2": ("add_layer_norm", "gelu"),
}


def trained(name: str, cases: list[Case]) -> list[Run]:
    """What the first rank has of each case, once all ranks are found to agree with one device."""
    jobs = Sharded(name, cases)
    whole = {key[:2]: unsharded(name, *key[:2]) for key in jobs.captured}
    ranks = run_ranks(jobs.train)
    for number, case in enumerate(cases):
        runs, reference = [rank[number] for rank in ranks], whole[case.dtype, case.dropout]
        error = max(run.error(reference) for run in runs)
        assert error <= TOLERANCE[case.dtype], f"{case}: off by {error:.2g}"
        assert "FUSED_UPDATE = True" in runs[0].source
        for kernel in KERNELS[name]:
            assert f"kernels.{kernel}(" in runs[0].source, case
    return ranks[0]


def test_llama_in_parts_of_the_sequence_and_of_the_vocabulary() -> None:
    cases = [Case(GRID, "sequence", fuse=True), Case(GRID, "tensor", fuse=True)]
    sequence, tensor = trained("llama", cases)
    # Norms run on a part of the sequence; the loss on a part of the words.
    lines = sequence.source.splitlines()
    norms = [at for at, line in enumerate(lines) if re.search(r"kernels\.(add_)?rms_norm\(", line)]
    assert len(norms) == 3
    for at in norms:
        assert "16@tensor" in lines[at] + lines[at - 1], lines[at]
    assert "mesh.linear_cross_entropy(" in tensor.source


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_plan(name: str) -> None:
    plans = ("free", "data", "zero", "tensor", "sequence")
    cases = [Case(GRID, plan, fuse=True) for plan in plans]
    trained(name, [*cases, Case(FLAT, fuse=True), Case(GRID, dtype=torch.float32, fuse=True)])
