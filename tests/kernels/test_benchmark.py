"""The benchmark's cases without a GPU: all providers of a case compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import listed
from benchmarks.gpu import model
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.measure import arithmetic

EAGER = [case for case in CASES if case.eager is not None and case.operator != "adamw_"]
# What torch's counterpart returns besides, or leaves out.
RETURNED = {
    "cross_entropy": (0,),
    "add_rms_norm": (0, 1),
    "square_sum": (0,),
}


@pytest.mark.parametrize("case", EAGER, ids=lambda c: f"{c.operator}-{c.label}")
def test_a_rival_returns_what_the_kernel_does(case: Case) -> None:
    operator = case.kernel
    args = case.make(Draw(torch.bfloat16, "meta"))
    assert case.eager is not None
    ours, theirs = listed(operator.allocate(*args)), listed(case.eager(*args))
    ours = tuple(ours[i] for i in RETURNED.get(case.operator, range(len(ours))))
    assert [t.shape for t in ours] == [t.shape for t in theirs]


def test_rivals_compute_what_the_kernels_do() -> None:
    draw = Draw(torch.float32)
    rivals = {case.operator: case.eager for case in EAGER}
    for name in ("rms_norm_backward", "swiglu_again", "swiglu", "cross_entropy_backward"):
        operator, rival = operators()[name], rivals[name]
        assert rival is not None
        args = next(iter(operator.samples(draw)))
        if name == "cross_entropy_backward":  # the rival ignores no rows
            target: Tensor = args[1].clamp(min=0)
            args = (args[0], target, *args[2:])
        results = zip(listed(rival(*args)), listed(operator.reference(*args)), strict=True)
        for found, wanted in results:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_forward_and_backward_in_a_row_are_both() -> None:
    draw = Draw(torch.float64)
    gate, up, dout = (draw.normal(3, 8).requires_grad_() for _ in range(3))
    out = torch.nn.functional.silu(gate) * up
    wanted = (out, *torch.autograd.grad(out, (gate, up), dout), out)
    logits, target = draw.normal(4, 9).requires_grad_(), draw.integers(9, 4)
    gradient = draw.positive(4)
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    lse, slope = logits.logsumexp(1), torch.autograd.grad(loss, logits, gradient)[0]
    for name, args, right in (
        ("swiglu_both", (gate, up, dout), wanted),
        ("cross_entropy_both", (logits, target, gradient, -100, 0.0), (loss, lse, slope)),
    ):
        case = next(case for case in CASES if case.operator == name)
        given = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        made = listed(case.kernel.reference(*given, wide=torch.float64))
        assert case.eager is not None
        for results in (made, case.eager(*given)):
            for found, judged in zip(results, right, strict=False):
                torch.testing.assert_close(found.double(), judged.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_case_compiles_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does; unset, it warns
    from tests.kernels.compiled import compiling

    for case in CASES:
        args = case.make(Draw(torch.bfloat16, "meta"))
        assert not case.kernel.unfit(args), case
        with compiling(90) as made:
            case.kernel.launch(case.kernel.allocate(*args), *args)
        assert made, case
        assert not any(kernel.spilled for kernel in made), case


def test_a_row_without_a_gpu_has_bytes_and_no_times() -> None:
    row = arithmetic(CASES[0])
    assert float(str(row["megabytes"])) > 8192 * 16032 * 2 / 1e6
    assert row["ms"] == row["copy_TBps"] == row["error"] == ""


@pytest.mark.parametrize(
    "providers",
    [
        ("eager", "autopar fused"),
        pytest.param(model.PROVIDERS, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_a_small_model_takes_the_way_of_the_large_one(providers: tuple[str, ...]) -> None:
    rows, curve = model.rows(model.SMALL, providers)
    assert [row["provider"] for row in rows] == list(providers)
    assert len(curve) == model.CURVE
    for row in rows:
        assert row["step_ms"] == row["peak_GiB"] == row["of_eager"] == ""  # not of a GPU
        graph = row["provider"] == "autopar fused masters graph"
        assert ("has no CUDA graphs" in str(row["failed"])) == graph
        if row["provider"] in model.CURVED:
            assert float(str(row["curve_off"])) < 0.02  # of bf16
    assert curve[-1]["eager"] < curve[0]["eager"]
