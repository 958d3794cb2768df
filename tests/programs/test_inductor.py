"""Programs compiled by torch.compile, segment by segment, train like uncompiled ones.

Most tests trace and differentiate segments like inductor, but generate no code, which takes tens of
seconds.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import autopar
from autopar.errors import ProgramError
from autopar.runtime.segments import segmented
from tests.support.parity import Case, Sharded, make, unsharded
from tests.support.ranks import run_ranks

PAIR = "gpu=2"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
# Llama's angles are float32 whatever its dtype is, and inductor's sines are not torch's to the bit.
SINES = 1e-6


def compare(name: str, cases: list[Case]) -> None:
    """Compiled runs on two ranks against those of one device, which is not compiled."""
    jobs = Sharded(name, cases)
    for case, run in zip(cases, run_ranks(jobs.train, count=2)[0], strict=True):
        rounds = name == "llama" and case.backend == "inductor" and case.dtype == torch.float64
        error = run.error(unsharded(name, case.dtype, case.dropout))
        assert error <= (SINES if rounds else TOLERANCE[case.dtype]), f"{case}: off by {error:.2g}"


@pytest.mark.slow
def test_two_ranks_in_parts_of_the_sequence() -> None:
    compare("llama", [Case(PAIR, "sequence", fuse=True, backend="aot_eager")])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_plan(name: str) -> None:
    plans = ("free", "data", "zero", "tensor")
    cases = [Case(PAIR, plan, fuse=plan != "data", backend="aot_eager") for plan in plans]
    cases += [Case(PAIR, "data", dropout=0.1, backend="aot_eager")] * (name == "gpt2")
    compare(name, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_code_of_inductor(name: str) -> None:
    cases = [Case(PAIR, plan, fuse=True, backend="inductor") for plan in ("data", "sequence")]
    compare(name, [*cases, Case(PAIR, "data", torch.float32, backend="inductor")])


def stepped(backend: str, **how: Any) -> tuple[list[float], autopar.Session]:
    model, batch = make("gpt2", torch.float64, 0.0)
    program = autopar.compile(
        model, "cpu: gpu=1", example_inputs=batch, fuse=True, backend=backend, **how
    )
    return [program.step(**batch).item() for _ in range(2)], program


@cache
def eager() -> list[float]:
    """Losses without a compiler, to which no other option makes a difference."""
    return stepped("eager")[0]


def test_every_segment_is_compiled_once_and_whole() -> None:
    """Blocks share their function; a graph that breaks would be an error, and would be counted."""
    torch._dynamo.reset()
    counters.clear()
    losses, program = stepped("aot_eager")
    _, names = segmented(program.source)
    assert counters["stats"]["unique_graphs"] == len(names)
    assert not counters["graph_break"]
    assert any("_block_" in name for name in names)
    assert any(re.match(r"forward_\d", name) for name in names)
    assert losses == pytest.approx(eager(), rel=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        {"recompute": "full"},
        pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
        {"offload": "activations"},
    ],
    ids=str,
)
def test_what_is_kept_for_the_backward_may_be_elsewhere(how: dict[str, str]) -> None:
    assert stepped("aot_eager", **how)[0] == pytest.approx(eager(), rel=1e-12)


def test_microbatches_and_stages_are_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()
    how = {"microbatches": 2, "schedule": "gpipe"}
    losses, _ = stepped("aot_eager", **how)
    assert counters["stats"]["unique_graphs"] > 0
    assert losses == pytest.approx(eager(), rel=1e-12)


def test_a_backward_in_halves_is_not_compiled() -> None:
    with pytest.raises(ProgramError, match="'zb_h1' cannot be compiled"):
        stepped("aot_eager", microbatches=2, schedule="zb_h1")


def test_without_a_compiler_the_step_says_so() -> None:
    torch._dynamo.reset()
    missing = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with (
        torch._inductor.config.patch(missing),
        pytest.raises(ProgramError, match="cannot compile") as raised,
    ):
        stepped("inductor")
    assert "compiler" in str(raised.value)
    assert 'backend="eager"' in str(raised.value)


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ProgramError, match="no backend 'triton'"):
        stepped("triton")
