"""The cases that are timed: our operators, and the same in torch and in Liger."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from autopar_kernels.registry import operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator
from benchmarks.gpu.both import both

Args = tuple[Any, ...]
Function = Callable[..., Any]
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes:
        operator: by name.
        label: the size, for people.
        make: its arguments.
        target: the share of copying's bandwidth that is aimed at.
        eager: the same in torch, of the same arguments. It is compiled as well.
        peers: other providers that are installed, by name. They may overwrite their arguments.
        rival: the provider that is to be beaten, "" for none; `faster` times at least.
    """

    operator: str
    label: str
    make: Callable[[Draw], Args]
    target: float
    eager: Function | None = None
    peers: dict[str, Function] = field(default_factory=dict)
    rival: str = ""
    faster: float = 0.0

    @property
    def kernel(self) -> Operator:
        """The operator."""
        return {**operators(), **both()}[self.operator]


def liger(module: str, name: str) -> Function | None:
    """A function of Liger's, None where it is not installed."""
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name, None)
    except ImportError:
        return None


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _rms(h, weight, eps), h


def _rms_backward(
    dy: Tensor, dh: Tensor, h: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    wide, scale = h.float(), rstd.unsqueeze(-1)
    normal = wide * scale
    g = dy.float() * weight.float()
    dx = scale * (g - normal * (g * normal).mean(-1, keepdim=True)) + dh
    return dx.to(h.dtype), (dy.float() * normal).sum(0).to(weight.dtype)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_again(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    open = torch.sigmoid(gate.float())
    active = gate.float() * open
    dgate = dout * up * (open + active * (1 - open))
    return dgate.to(gate.dtype), (dout * active).to(up.dtype), (active * up).to(gate.dtype)


def _entropy(logits: Tensor, target: Tensor, ignored: int, z_loss: float) -> Tensor:
    return F.cross_entropy(logits.float(), target, ignore_index=ignored, reduction="none")


def _entropy_backward(
    logits: Tensor, target: Tensor, lse: Tensor, gradient: Tensor, start: int, *rest: Any
) -> Tensor:
    d = (logits.float() - lse.unsqueeze(1)).exp()
    d = d.scatter_add(1, target.unsqueeze(1), -torch.ones_like(lse).unsqueeze(1))
    return (d * gradient.unsqueeze(1)).to(logits.dtype)


def _entropy_both(
    logits: Tensor, target: Tensor, gradient: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    wide = logits.float()
    lse = wide.logsumexp(1)
    loss = lse - wide.gather(1, target.unsqueeze(1)).squeeze(1)
    return loss, lse, _entropy_backward(logits, target, lse, gradient, 0)


def _swiglu_both(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    return _swiglu(gate, up), *_swiglu_again(dout, gate, up)


def _pack(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * cos[:, None] + other * sin[:, None]).to(x.dtype)

    split = [
        x.permute(1, 0, 2, 3).unflatten(2, (parts, -1)).movedim(2, 0)
        for x in (turned(q), turned(k), v)
    ]
    return torch.cat(split, 3)


def _adamw(
    parameter: Tensor, m: Tensor, v: Tensor, gradient: Tensor, low: Tensor, hyper: Tensor
) -> None:
    """torch's fused AdamW, after unscaling and before the copy of low precision."""
    wide = gradient.float() * hyper[7]
    step = torch.ones((), device=parameter.device)
    adamw(
        [parameter], [wide], [m], [v], [], [step], fused=True, capturable=True,
        amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-3, weight_decay=0.1, eps=1e-8, maximize=False,
    )  # fmt: skip
    low.copy_(parameter)


def _quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    value = x.float().view(-1, group)
    scales = (value.abs().amax(1) / 127).clamp(min=1e-30)
    return (value / scales.unsqueeze(1)).round().to(torch.int8).view_as(x), scales


def _reduce(q: Tensor, scales: Tensor, group: int, scale: float, dtype: torch.dtype) -> Tensor:
    wide = q.view(q.shape[0], -1, group).float() * scales.unsqueeze(-1)
    return (wide.sum(0).view(-1) * scale).to(dtype)


def _gather(y: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    rows = y[inverse].view(*weight.shape, -1)
    return (rows * weight.unsqueeze(-1)).sum(1)


def _liger_add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    made = liger("fused_add_rms_norm", "fused_add_rms_norm_forward")
    assert made is not None
    return made(x, residual, weight, eps, 0.0, "llama")


def _liger_rms_backward(dy: Tensor, dh: Tensor, h: Tensor, weight: Tensor, rstd: Tensor) -> Any:
    made, settings = liger("fused_add_rms_norm", "fused_add_rms_norm_backward"), _settings()
    assert made is not None
    block, warps = settings(h.shape[-1])
    return made(dy, dh, h, weight, rstd, 0.0, 0, block, warps, 2, False)  # 0: as llama has it


def _settings() -> Function:
    """How Liger chooses blocks and warps."""
    found = liger("utils", "calculate_settings")
    assert found is not None
    return found


def _liger_entropy(logits: Tensor, target: Tensor, *rest: Any) -> Any:
    made = liger("vocab_parallel_cross_entropy", "LigerVocabParallelCEFunction")
    assert made is not None
    args = logits[None], target[None], None, IGNORED, 0.0, "pytorch", "global"
    return made.apply(*args)  # type: ignore[attr-defined]


def _liger_entropy_both(logits: Tensor, target: Tensor, gradient: Tensor, *rest: Any) -> Any:
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(_liger_entropy(leaf, target), leaf, gradient[None])


def _liger_swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> Any:
    made = liger("swiglu", "swiglu_backward")
    assert made is not None
    return made(gate, up, dout)


def _liger_swiglu_both(gate: Tensor, up: Tensor, dout: Tensor) -> Any:
    made = liger("swiglu", "swiglu_forward")
    assert made is not None
    return made(gate, up), _liger_swiglu_backward(dout, gate, up)


def _norm(rows: int, n: int) -> Callable[[Draw], Args]:
    return lambda draw: (draw.normal(rows, n), draw.normal(rows, n), draw.normal(n), 1e-6)


def _norm_backward(rows: int, n: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        dy, dh, h = (draw.normal(rows, n) for _ in range(3))
        return dy, dh, h, draw.normal(n), draw.positive(rows, dtype=torch.float32)

    return make


def _labels(rows: int, words: int) -> Callable[[Draw], Args]:
    return lambda draw: (draw.normal(rows, words), draw.integers(words, rows), IGNORED, 0.0)


def _labels_backward(rows: int, words: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        logits, target = draw.normal(rows, words), draw.integers(words, rows)
        lse = draw.positive(rows, dtype=torch.float32) + 10
        gradient = draw.positive(rows, dtype=torch.float32)
        return logits, target, lse, gradient, 0, IGNORED, 0.0

    return make


def _labels_both(rows: int, words: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        logits, target = draw.normal(rows, words), draw.integers(words, rows)
        return logits, target, draw.positive(rows, dtype=torch.float32), IGNORED, 0.0

    return make


def _angled(parts: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        q, k = draw.normal(2, 4096, 32, 128), draw.normal(2, 4096, 8, 128)
        angle = draw.normal(4096, 64, dtype=torch.float32).repeat(1, 2)
        return q, k, draw.normal(*k.shape), angle.cos(), angle.sin(), parts

    return make


def _updated(n: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        parameter, m, v = (draw.positive(n, dtype=torch.float32) for _ in range(3))
        numbers = [1e-3, 0.9, 0.95, 1e-8, 0.1, 10.0, 4.47, 0.7]
        hyper = torch.tensor(numbers, device=draw.device)
        return parameter, m, v, draw.normal(n), draw.normal(n), hyper

    return make


def _arrived(parts: int, n: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        scales = draw.positive(parts, n // 256, dtype=torch.float32)
        q = draw.integers(127, parts, n, dtype=torch.int8)
        return q, scales, 256, 1.0, torch.bfloat16

    return make


def _sorted(tokens: int, k: int, n: int) -> Callable[[Draw], Args]:
    def make(draw: Draw) -> Args:
        slots = draw.integers(64, tokens * k)
        slots = slots if slots.is_meta else slots.argsort(stable=True)
        inverse = slots if slots.is_meta else slots.argsort()
        return draw.normal(tokens * k, n), inverse, draw.positive(tokens, k)

    return make


def _peer(module: str, name: str, function: Function | None = None) -> dict[str, Function]:
    """Liger's function, or one that calls it, where Liger is installed."""
    found = liger(module, name)
    return {} if found is None else {"liger": function or found}


_CE, _NORM = ("vocab_parallel_cross_entropy", "LigerVocabParallelCEFunction"), "fused_add_rms_norm"
ENTROPY, ENTROPY_BOTH = (_peer(*_CE, made) for made in (_liger_entropy, _liger_entropy_both))
NORM = _peer(_NORM, f"{_NORM}_forward", _liger_add_rms)
NORM_BACKWARD = _peer(_NORM, f"{_NORM}_backward", _liger_rms_backward)
GATED_BACKWARD = _peer("swiglu", "swiglu_backward", _liger_swiglu_backward)
GATED_BOTH = _peer("swiglu", "swiglu_backward", _liger_swiglu_both)
T, F_ = 16384, 14336
CASES = (
    Case("cross_entropy", "8192 x 16032", _labels(8192, 16032), 0.85, _entropy, ENTROPY),
    Case("cross_entropy", "4096 x 128256", _labels(4096, 128256), 0.85, _entropy, ENTROPY),
    Case(
        "cross_entropy_backward", "8192 x 16032", _labels_backward(8192, 16032), 0.92,
        _entropy_backward,
    ),
    *(
        Case(
            "cross_entropy_both", f"{rows} x {words}", _labels_both(rows, words), 0.88,
            _entropy_both, ENTROPY_BOTH, "liger", 3.0,
        )
        for rows, words in ((8192, 16032), (4096, 128256))
    ),
    *(
        Case("add_rms_norm", f"{T} x {n}", _norm(T, n), 0.93, _add_rms, NORM, "liger", 1.0)
        for n in (2048, 4096, 8192)
    ),
    *(
        Case(
            "rms_norm_backward", f"{T} x {n}", _norm_backward(T, n), 0.82, _rms_backward,
            NORM_BACKWARD, "liger", 1.8,
        )
        for n in (2048, 4096, 8192)
    ),
    Case("adamw_", "2^28", _updated(1 << 28), 0.93, _adamw, {}, "eager", 1.2),
    Case("square_sum", "2^28", lambda d: (d.normal(1 << 28),), 0.90, lambda x: x.float().norm()),
    Case(
        "swiglu", f"{T} x {F_}", lambda d: (d.normal(T, F_), d.normal(T, F_)), 0.95, _swiglu,
        _peer("swiglu", "swiglu_forward"),
    ),
    Case(
        "swiglu_again", f"{T} x {F_}", lambda d: tuple(d.normal(T, F_) for _ in range(3)), 0.92,
        _swiglu_again, GATED_BACKWARD,
    ),
    Case(
        "swiglu_both", f"{T} x {F_}", lambda d: tuple(d.normal(T, F_) for _ in range(3)), 0.93,
        _swiglu_both, GATED_BOTH, "liger", 1.7,
    ),
    Case(
        "rotary_pack", "2 x 4096 x 48 x 128, 8 parts", _angled(8), 0.88, _pack, {}, "eager", 2.5
    ),
    Case(
        "quantize_int8", "2^28", lambda d: (d.normal(1 << 28), 256), 0.85, _quantize,
        {}, "compile", 1.5,
    ),
    Case("dequantize_reduce", "8 x 2^25", _arrived(8, 1 << 25), 0.88, _reduce, {}, "compile", 1.5),
    Case(
        "sum_partials", "8 x 2^25", lambda d: (d.normal(8, 1 << 25), 1.0, torch.float32), 0.92,
        lambda x, scale, dtype: x.sum(0, dtype=dtype) * scale,
    ),
    Case("experts_unpermute", "16384 x 8 x 4096", _sorted(T, 8, 4096), 0.85, _gather),
)  # fmt: skip
