"""References against torch's own functions and autograd; operators as torch sees them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.operators.attention.partial_attention import _merged_by_kernel, merge_into
from autopar_kernels import adamw, co2, quantize
from autopar_kernels.linear_cross_entropy import (
    parallel_cross_entropy,
    parallel_linear_cross_entropy,
)
from autopar_kernels.registry import KernelError, KernelWarning, operators, register
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator, listed
from tests.kernels.checks import copies

register()
ALL = operators()
ours = torch.ops.autopar_kernels


@pytest.mark.parametrize("operator", ALL.values(), ids=lambda o: o.name)
def test_an_operator_is_registered_as_torch_wants_it(operator: Operator) -> None:
    dtype = torch.float32 if operator.gradient is None else torch.float64
    given = copies(next(iter(operator.samples(Draw(dtype)))))
    tests: tuple[str, ...] = ("test_schema", "test_faketensor")
    if operator.gradient is not None:
        tests += ("test_autograd_registration", "test_aot_dispatch_dynamic")
        given = tuple(
            a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in given
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about its own internals
        torch.library.opcheck(getattr(ours, operator.name).default, given, test_utils=tests)


DRAW = Draw(torch.float64)
X, R, W, B = (DRAW.normal(*shape) for shape in ((2, 5, 12), (2, 5, 12), (12,), (12,)))
TARGET = torch.tensor([3, 0, -100, 6])
ANGLE = DRAW.normal(5, 6).repeat(1, 2)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models of transformers write it; x is (batch, row, head, width)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def entropy_and_z(x: Tensor, target: Tensor) -> Tensor:
    lse = x.logsumexp(1)
    return F.cross_entropy(x, target, reduction="none") + 1e-2 * lse**2 * (target != -100)


def packed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What each of two devices gets of (batch, row, head, width), by slicing."""
    q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
    each = [torch.cat([x.chunk(2, 2)[part] for x in (q, k, v)], 2) for part in range(2)]
    return torch.stack([x.transpose(0, 1) for x in each])


SLOTS = torch.tensor([3, 0, 5, 1, 4, 2])
HEADS = DRAW.normal(2, 5, 4, 12), DRAW.normal(2, 5, 2, 12), DRAW.normal(2, 5, 2, 12)
DIFFERENTIABLE: dict[str, tuple[Sequence[Any], Callable[..., Any]]] = {
    "cross_entropy": (
        (DRAW.normal(4, 7, scale=3.0), TARGET, -100, 1e-2),
        lambda x, target, *_: entropy_and_z(x, target),
    ),
    "linear_cross_entropy": (
        (DRAW.normal(4, 5), DRAW.normal(7, 5), TARGET, -100, 1e-2, 3, True),
        lambda x, w, target, *_: entropy_and_z(x @ w.T, target).sum(),
    ),
    "rms_norm": ((X, W, 0.3), lambda x, w, eps: F.rms_norm(x, (12,), w, eps)),
    "add_rms_norm": (
        (X, R, W, 0.3),
        lambda x, r, w, eps: (F.rms_norm(x + r, (12,), w, eps), x + r),
    ),
    "layer_norm": ((X, W, B, 0.3), lambda x, w, b, eps: F.layer_norm(x, (12,), w, b, eps)),
    "add_layer_norm": (
        (X, R, W, B, 0.3),
        lambda x, r, w, b, eps: (F.layer_norm(x + r, (12,), w, b, eps), x + r),
    ),
    "swiglu": ((X, R), lambda g, u: F.silu(g) * u),
    "geglu": ((X, R), lambda g, u: F.gelu(g, approximate="tanh") * u),
    "swiglu_linear": ((X, R, DRAW.normal(3, 12)), lambda g, u, w: (F.silu(g) * u) @ w.T),
    "geglu_linear": (
        (X, R, DRAW.normal(3, 12)),
        lambda g, u, w: (F.gelu(g, approximate="tanh") * u) @ w.T,
    ),
    "rotary": ((HEADS[0], ANGLE.cos(), ANGLE.sin()), rotate_half),
    "rotary_pack": (
        (*HEADS, ANGLE.cos(), ANGLE.sin(), 2),
        lambda q, k, v, cos, sin, _: packed(q, k, v, cos, sin),
    ),
    "experts_permute": (
        (DRAW.normal(3, 5), SLOTS, SLOTS.argsort()),
        lambda x, slots, _: x.repeat_interleave(2, 0)[slots],
    ),
    "experts_unpermute": (
        (DRAW.normal(6, 5), SLOTS.argsort(), DRAW.normal(3, 2)),
        lambda y, inverse, w: torch.einsum("tk,tkn->tn", w, y[inverse].view(3, 2, 5)),
    ),
}
CONSTANT = {"rotary": (1, 2), "rotary_pack": (3, 4)}  # operands without a gradient, by position


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    args, judge = DIFFERENTIABLE[name]
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for function, out in ((getattr(ours, name), found), (judge, wanted)):
        given = [
            a.clone().requires_grad_(i not in CONSTANT.get(name, ()))
            if isinstance(a, Tensor) and a.is_floating_point()
            else a
            for i, a in enumerate(args)
        ]
        results = [r for r in listed(function(*given)) if r.requires_grad]
        leaves = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
        weights = Draw(torch.float64, seed=1)
        total = sum((r * weights.normal(*r.shape)).sum() for r in results)
        out += [*results, *torch.autograd.grad(total, leaves)]
    for ours_, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-9, atol=1e-9)


def test_unpacking_undoes_packing_and_so_do_its_gradients() -> None:
    cos, sin = ANGLE.cos(), ANGLE.sin()
    made = ours.rotary_pack(*HEADS, cos, sin, 2).requires_grad_()
    back = ours.rotary_unpack(made, cos, sin, 4, 2)
    for found, wanted in zip(back, HEADS, strict=True):
        torch.testing.assert_close(found, wanted)
    grads = [DRAW.normal(*x.shape) for x in HEADS]
    (found,) = torch.autograd.grad(back, made, grads)
    torch.testing.assert_close(found, ours.rotary_pack(*grads, cos, sin, 2))


def test_one_tensor_is_packed_as_it_is_among_three() -> None:
    cos, sin = ANGLE.cos(), ANGLE.sin()
    q = HEADS[0].clone().requires_grad_()
    alone = ours.rotary_pack(q, None, None, cos, sin, 2)
    among = ours.rotary_pack(*HEADS, cos, sin, 2)
    assert torch.equal(alone, among[:, :, :, :2])
    (found,) = torch.autograd.grad(alone, q, alone.detach())
    torch.testing.assert_close(found, HEADS[0])  # a rotation's gradient is the way back
    back = ours.rotary_unpack(alone.detach().requires_grad_(), cos, sin, 4, 0)
    torch.testing.assert_close(back[0], HEADS[0])


def test_a_gated_product_is_computed_again_as_it_was() -> None:
    gate, up, dout = (t.bfloat16() for t in (X, R, DRAW.normal(2, 5, 12)))
    for name in ("swiglu", "geglu"):
        dgate, dup, again = getattr(ours, f"{name}_again")(dout, gate, up)
        assert torch.equal(again, getattr(ours, name)(gate, up))
        for a, b in zip(
            getattr(ours, f"{name}_backward")(dout, gate, up), (dgate, dup), strict=True
        ):
            assert torch.equal(a, b)


def test_what_backward_would_need_is_not_kept() -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    gate, up, weight = X.clone().requires_grad_(), R.clone(), DRAW.normal(3, 12)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ours.swiglu_linear(gate, up, weight)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_a_vocabulary_put_together(parts: int) -> None:
    x, weight = DRAW.normal(4, 5), DRAW.normal(7, 5)
    words = weight.tensor_split(parts)
    starts = [sum(len(w) for w in words[:i]) for i in range(parts)]
    stats = torch.stack(
        [
            ours.cross_entropy_stats(x @ w.T, TARGET, start)
            for w, start in zip(words, starts, strict=True)
        ]
    )
    whole = [t.clone().requires_grad_() for t in (x, weight)]
    losses = entropy_and_z(whole[0] @ whole[1].T, TARGET)
    dx, dweight = torch.autograd.grad(losses.sum(), whole)
    found_dx, found_dw = [], []
    for own, start in zip(words, starts, strict=True):
        logits = (x @ own.T).requires_grad_()
        rest: dict[str, Any] = {"start": start, "vocabulary": 7, "z_loss": 1e-2}
        alone = parallel_cross_entropy(logits, TARGET, gather=lambda _: stats, **rest)
        torch.testing.assert_close(alone, losses)
        leaves = [t.clone().requires_grad_() for t in (x, own)]
        rows = iter(stats.split(3, 1))
        total = parallel_linear_cross_entropy(
            *leaves, TARGET, gather=lambda _, rows=rows: next(rows), chunk=3, **rest
        )
        torch.testing.assert_close(total, losses.sum())
        (dlogits,) = torch.autograd.grad(alone.sum(), logits)
        own_dx, own_dw = torch.autograd.grad(total, leaves)
        torch.testing.assert_close(dlogits @ own, own_dx)
        found_dx.append(own_dx)
        found_dw.append(own_dw)
    torch.testing.assert_close(sum(found_dx), dx)
    torch.testing.assert_close(torch.cat(found_dw), dweight)


def test_no_gradients_are_made_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = DRAW.normal(7, 5).requires_grad_()
    rest: dict[str, Any] = {"start": 0, "vocabulary": 7, "gather": lambda s: s.unsqueeze(0)}
    monkeypatch.setattr(torch, "mm", None)  # what makes the gradient of x
    with torch.no_grad():
        loss = parallel_linear_cross_entropy(DRAW.normal(4, 5), weight, TARGET, **rest)
    assert loss.isfinite()
    with pytest.raises(TypeError):
        parallel_linear_cross_entropy(DRAW.normal(4, 5), weight, TARGET, **rest)


def test_a_label_beyond_the_vocabulary_makes_the_loss_nan() -> None:
    loss, _ = ours.cross_entropy(DRAW.normal(3, 7), torch.tensor([7, -1, 2]), -100, 0.0)
    assert loss.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("most", [None, 0.5])
def test_adamw_is_torchs_and_skips_steps_that_are_not_finite(most: float | None) -> None:
    ours_p, theirs = DRAW.normal(6, 5), torch.nn.Parameter(DRAW.normal(6, 5))
    ours_p.copy_(theirs.detach())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1)
    m, v, low = torch.zeros_like(ours_p), torch.zeros_like(ours_p), ours_p.bfloat16()
    step = torch.zeros((), dtype=torch.float64)
    for number in range(4):
        gradient = DRAW.normal(6, 5)
        scaled = gradient * 8
        if number == 2:
            scaled[0, 0] = torch.inf
        squares = ours.square_sum(scaled)
        scale = adamw.gradient_scale(squares, most, 8.0)
        hyper = adamw.hyperparameters(
            step, scale, rate=1e-2, betas=(0.9, 0.99), eps=1e-3, decay=0.1
        )
        ours.adamw_(ours_p, m, v, scaled, low, hyper)
        if number != 2:
            theirs.grad = gradient.clone()
            if most is not None:
                torch.nn.utils.clip_grad_norm_([theirs], most)
            optimizer.step()
        torch.testing.assert_close(ours_p, theirs.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(low, ours_p.bfloat16())
    assert step == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_of_int8_are_rounded_as_the_kernels_division_rounds_them(dtype: torch.dtype) -> None:
    """Half of a group's largest number is 63.5 steps, and one rounding decides between two."""
    top = Draw(dtype).positive(2048)
    x = torch.stack([top, top / 2, -top / 2, top / 127 * 0.5], 1)
    q, _ = ours.quantize_int8(x, 4)
    inverse = x.numpy().dtype.type(127) / top.numpy()
    steps = np.floor(x.numpy() * inverse[:, None] + x.numpy().dtype.type(0.5))
    np.testing.assert_array_equal(q.numpy(), steps)


@pytest.mark.parametrize("name", ["quantize_int8", "quantize_f8"])
def test_quantised_values_are_near(name: str) -> None:
    x = Draw(torch.float32).normal(5, 60, scale=3.0)
    q, scales = getattr(ours, name)(x, 32)
    back = ours.dequantize_reduce(q.reshape(1, -1), scales.unsqueeze(0), 32, 1.0, torch.float32)
    tops = F.pad(x.view(-1), (0, 20)).view(-1, 32).abs().amax(1).repeat_interleave(32)[:300]
    off = (back - x.view(-1)).abs() / tops
    assert off.max() <= (0.5001 / 127 if name == "quantize_int8" else 2**-4)
    assert off.max() > 1e-3


def test_an_overflow_is_not_lost_in_quantising() -> None:
    x = torch.ones(64)
    x[3] = torch.inf
    q, scales = quantize.reference(x, 32, dtype=torch.int8)
    back = quantize.reduce_reference(q.unsqueeze(0), scales.unsqueeze(0), 32, 1.0, torch.float32)
    assert not back[:32].isfinite().any()
    assert back[32:].isfinite().all()


def test_attentions_to_parts_of_the_keys_merge_into_that_to_all() -> None:
    q, k, v = (DRAW.normal(2, 3, 6, 4) for _ in range(3))  # (batch, head, row, width)
    causal = torch.ones(6, 6).tril().bool()

    def attention(keys: slice) -> tuple[Tensor, Tensor]:
        scores = (q @ k[:, :, keys].mT / 2).masked_fill(~causal[:, keys], -torch.inf)
        weights = scores.softmax(-1).nan_to_num()  # rows that see no key of these
        return (weights @ v[:, :, keys]).transpose(1, 2).contiguous(), scores.logsumexp(-1)

    out, lse = torch.zeros(2, 6, 3, 4, dtype=q.dtype), torch.full((2, 3, 6), -torch.inf).double()
    for keys in (slice(2, 6), slice(0, 2)):
        ours.attention_merge_(out, lse, *attention(keys))
    whole, total = attention(slice(0, 6))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, total)


def test_a_ring_merges_parts_alike_with_and_without_the_kernel() -> None:
    rows = [DRAW.normal(2, 6, 3, 16, dtype=torch.float32).transpose(1, 2) for _ in range(2)]
    sums = [DRAW.normal(2, 3, 6, 1, dtype=torch.float32) for _ in range(2)]
    sums[0][0, 0, :2] = sums[1][0, 0, 1:3] = -torch.inf
    for part, lse in zip(rows, sums, strict=True):
        part.masked_fill_(lse == -torch.inf, 0)  # queries without a key
    out, lse = rows[0].clone(), sums[0].clone()
    merge_into(out, lse, rows[1], sums[1])
    assert _merged_by_kernel(rows[0], sums[0], rows[1], sums[1])
    torch.testing.assert_close(rows[0], out)
    torch.testing.assert_close(sums[0], lse)
    assert not _merged_by_kernel(rows[0].contiguous(), sums[0], rows[1], sums[1])


def test_the_outer_step_of_co2_clips() -> None:
    anchor, momentum = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0])
    hyper = co2.hyperparameters(beta=0.5, penalty=2.0, rate=0.1, clip=1.0, devices=4)
    low = torch.empty(2, dtype=torch.bfloat16)
    ours.co2_outer_(torch.tensor([2.0, 40.0]), anchor, momentum, low, hyper)
    # 0.5 · 0.5 + (1 - 2/4) / 2 = 0.5; (1 - 40/4) / 2 = -4.5, clipped to -1
    torch.testing.assert_close(momentum, torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(anchor, torch.tensor([0.95, 1.1]))
    assert torch.equal(low, anchor.bfloat16())


def test_wrong_shapes_are_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"rms_norm: weight is \(7\), .* in x .* 8 elements"):
        ours.rms_norm(torch.ones(3, 8), torch.ones(7), 1e-6)
    with pytest.raises(KernelError, match="rms_norm: weight"):
        ours.rms_norm(torch.ones(3, 8, device="meta"), torch.ones(7, device="meta"), 1e-6)
    with pytest.raises(KernelError, match="6 heads"):
        ours.rotary_pack(*(torch.ones(1, 2, 6, 4) for _ in range(3)), *torch.ones(2, 2, 2), 4)


def test_what_a_kernel_does_not_take_is_named() -> None:
    draw = Draw(torch.float32)
    norm, merge = ALL["rms_norm"], ALL["attention_merge_"]
    strided = draw.normal(8, 6).T
    assert norm.unfit((strided, draw.normal(8), 1e-6)) == "x with strides (1, 6)"
    assert "float64" in norm.unfit((draw.normal(6, 8).double(), draw.normal(8), 1e-6))
    assert "70000 elements" in norm.unfit((draw.normal(1, 70000), draw.normal(70000), 1e-6))
    assert "several devices" in norm.unfit((draw.normal(6, 8), draw.normal(8).to("meta"), 1e-6))
    out, lse = draw.normal(1, 2, 3, 4), draw.normal(1, 3, 2)
    assert merge.unfit((out, lse.half(), out, lse)) == "lse of dtype float16"
    assert issubclass(KernelWarning, RuntimeWarning)


def test_they_are_registered_once_in_one_way() -> None:
    assert register() is register(strict=False)
    with pytest.raises(KernelError, match="registered with strict=False"):
        register(strict=True)


def test_two_operators_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(co2, "OPERATORS", (ALL["rms_norm"],))
    with pytest.raises(KernelError, match="two operators are called rms_norm"):
        operators()


@pytest.mark.parametrize("operator", ALL.values(), ids=lambda o: o.name)
def test_bytes_are_those_of_what_is_read_and_written(operator: Operator) -> None:
    args = operator.typical(Draw(torch.bfloat16, "meta"), 0)
    tensors = list(operator.operands(args).values())
    results = listed(operator.allocate(*args))
    moved = operator.nbytes(tensors, results)
    held = [t.nbytes for t in (*tensors, *results) if t is not None]
    assert max(held) <= moved <= 2 * sum(held)


def test_bytes_of_a_step_of_adamw() -> None:
    n = 1 << 20
    args = ALL["adamw_"].typical(Draw(torch.bfloat16, "meta"), n)
    assert ALL["adamw_"].nbytes(list(args), ()) == 28 * n + 32
