"""AdamW on any part of the parameters, and the sum of squares for clipping.

    g = scale gradient
    m = β1 m + (1 - β1) g,    v = β2 v + (1 - β2) g²
    p = (1 - lr decay) p - lr m / (1 - β1^t) / (sqrt(v / (1 - β2^t)) + eps)

(Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.) The same pass undoes the loss scale, clips,
and writes the low-precision copy that the model computes with. All values that change from step to
step are in one tensor on the device, `hyperparameters`: nothing waits for the device, and a CUDA
graph can replay the step. A scale that is not finite leaves everything unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, processors, tl
from .registry.launch import launch
from .registry.operator import Args, Operator, contiguous, sums_of, wider

HYPERPARAMETERS = 8  # lr, β1, β2, eps, decay, 1 / (1 - β1^t), 1 / sqrt(1 - β2^t), scale


@jit
def _update_kernel(
    parameter: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    gradient: tl.tensor,
    low: tl.tensor,
    hyper: tl.tensor,
    n: tl.tensor,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    rate = tl.load(hyper)
    beta1 = tl.load(hyper + 1)
    beta2 = tl.load(hyper + 2)
    eps = tl.load(hyper + 3)
    decay = tl.load(hyper + 4)
    correction1 = tl.load(hyper + 5)
    correction2 = tl.load(hyper + 6)
    scale = tl.load(hyper + 7)
    finite = tl.abs(scale) < float("inf")  # false for NaN too
    p = tl.load(parameter + at, mask=mask, other=0.0)
    old_m = tl.load(m + at, mask=mask, other=0.0)
    old_v = tl.load(v + at, mask=mask, other=0.0)
    g = tl.load(gradient + at, mask=mask, other=0.0, eviction_policy="evict_first")
    g = g.to(tl.float32) * scale
    new_m = beta1 * old_m + (1.0 - beta1) * g
    new_v = beta2 * old_v + (1.0 - beta2) * g * g
    step = rate * correction1 * new_m / (tl.sqrt(new_v) * correction2 + eps)
    new = tl.where(finite, p * (1.0 - rate * decay) - step, p)
    tl.store(parameter + at, new, mask=mask)
    tl.store(m + at, tl.where(finite, new_m, old_m), mask=mask)
    tl.store(v + at, tl.where(finite, new_v, old_v), mask=mask)
    if LOW:
        tl.store(low + at, new.to(low.dtype.element_ty), mask=mask)


@jit
def _squares_kernel(x: tl.tensor, parts: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Adds the squares of every `programs`-th block, starting at this program's."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(program, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        total += value * value
    tl.store(parts + program, tl.sum(total, axis=0))


def hyperparameters(
    step: Tensor,
    scale: Tensor,
    *,
    rate: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float | Tensor,
    decay: float | Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the inputs of one step of `adamw_`, [8], on the device of its arguments.

    Args:
        step: f32[], steps made so far; incremented if this step is made.
        scale: f32[], factor of the gradients; the step is made if it is finite.
        rate, betas, eps, decay: as torch.optim.AdamW's lr, betas, eps and weight_decay. Tensors on
            the device need no transfer.
        dtype: dtype of the result; the kernel needs f32, the reference also accepts f64.
    """
    step += scale.isfinite()
    count = step.double()  # 1 - β^t loses most of its digits for β near 1
    given = (rate, *betas, eps, decay)
    made = [torch.as_tensor(x, dtype=count.dtype, device=step.device) for x in given]
    made += [1 / (1 - betas[0] ** count), (1 - betas[1] ** count).rsqrt(), scale.double()]
    return torch.stack(made).to(dtype)


def gradient_scale(squares: Tensor, most: float | None, loss_scale: float | Tensor = 1.0) -> Tensor:
    """Returns the factor of gradients, f32[]: 1 / loss_scale, and less if the norm is clipped.

    Args:
        squares: f32[], the sum of the squares of all gradients, of every device.
        most: the largest norm after unscaling; None for no clipping.
        loss_scale: factor of the loss.

    Returns:
        A scale that is not finite if a gradient is not.
    """
    norm = squares.sqrt() / loss_scale
    clipped = torch.ones_like(norm) if most is None else (most / (norm + 1e-6)).clamp(max=1.0)
    # 0 times an infinite norm is NaN: clipping to zero must not hide an overflow.
    return clipped / loss_scale + norm * 0.0


def reference(
    parameter: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    low: Tensor | None,
    hyper: Tensor,
    *,
    wide: torch.dtype = torch.float32,
) -> None:
    """Implements the kernel in torch."""
    rate, beta1, beta2, eps, decay, correction1, correction2, scale = wider(hyper, wide)
    finite = scale.isfinite()
    g = wider(gradient, wide) * scale
    new_m = beta1 * wider(m, wide) + (1 - beta1) * g
    new_v = beta2 * wider(v, wide) + (1 - beta2) * g * g
    step = rate * correction1 * new_m / (new_v.sqrt() * correction2 + eps)
    new = wider(parameter, wide) * (1 - rate * decay) - step
    parameter.copy_(torch.where(finite, new.to(parameter.dtype), parameter))
    m.copy_(torch.where(finite, new_m.to(m.dtype), m))
    v.copy_(torch.where(finite, new_v.to(v.dtype), v))
    if low is not None:
        low.copy_(parameter)


def squares_reference(x: Tensor, *, wide: torch.dtype = torch.float32) -> Tensor:
    """Returns the sum of the squares of all elements, at least in f32."""
    return wider(x, wide).square().sum().to(sums_of(x))


def _allocate(
    parameter: Tensor, m: Tensor, v: Tensor, gradient: Tensor, low: Tensor | None, hyper: Tensor
) -> None:
    return None


def _launch(
    results: None,
    parameter: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    low: Tensor | None,
    hyper: Tensor,
) -> None:
    n = parameter.numel()
    row = launch("adamw_", n)
    _update_kernel[(blocks(n, row.block),)](
        *(parameter, m, v, gradient, parameter if low is None else low, hyper, n),
        LOW=low is not None,
        BLOCK=row.block,
        **row.options,
    )


def _allocate_squares(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=sums_of(x))


def _launch_squares(result: Tensor, x: Tensor) -> None:
    row = launch("square_sum", x.numel())
    programs = min(blocks(x.numel(), row.block), row.programs * processors(x))
    parts = x.new_empty(programs, dtype=torch.float32)
    _squares_kernel[(programs,)](x, parts, x.numel(), BLOCK=row.block, **row.options)
    torch.sum(parts, 0, out=result)


def _wrong(*args: Tensor | None) -> str:
    hyper = args[-1]
    if hyper is not None and hyper.shape == (HYPERPARAMETERS,):
        return ""
    return f"hyper must have {HYPERPARAMETERS} numbers, as returned by `hyperparameters`"


def _fits(
    parameter: Tensor, m: Tensor, v: Tensor, gradient: Tensor, low: Tensor | None, hyper: Tensor
) -> str:
    for name, tensor in (("parameter", parameter), ("m", m), ("v", v), ("hyper", hyper)):
        if tensor.dtype != torch.float32:
            return f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}"
    return contiguous(parameter=parameter, m=m, v=v, gradient=gradient, low=low, hyper=hyper)


def _samples(draw: Draw) -> Iterable[Args]:
    for scale in (0.5, float("nan"), float("inf")):
        numbers = [1e-2, 0.9, 0.95, 1e-2, 0.1, 2.0, 1.5, scale]
        hyper = torch.tensor(numbers, device=draw.device)
        parameter, m = (draw.normal(7, 43, dtype=torch.float32) for _ in range(2))
        v = draw.positive(7, 43, dtype=torch.float32)
        low = None if scale == float("inf") else draw.normal(7, 43, dtype=torch.bfloat16)
        yield parameter, m, v, draw.normal(7, 43), low, hyper


def _typical(draw: Draw, n: int) -> Args:
    n = n or 1 << 26
    parameter, m, v = (draw.positive(n, dtype=torch.float32) for _ in range(3))
    hyper = draw.positive(HYPERPARAMETERS, dtype=torch.float32)
    return parameter, m, v, draw.normal(n), draw.normal(n, dtype=torch.bfloat16), hyper


def _square_samples(draw: Draw) -> Iterable[Args]:
    yield (draw.normal(3, 67),)
    yield (draw.normal(5),)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        name="adamw_",
        allocate=_allocate,
        launch=_launch,
        reference=reference,
        factors="..., ..., ..., ..., ..., h! ->",
        flops="15 ...",
        writes=("parameter", "m", "v", "low"),
        passes={"low": 1},
        samples=_samples,
        typical=_typical,
        table="adamw_",
        wrong=_wrong,
        fits=_fits,
    ),
    Operator(
        name="square_sum",
        allocate=_allocate_squares,
        launch=_launch_squares,
        reference=squares_reference,
        factors="... ->",
        flops="2 ...",
        samples=_square_samples,
        typical=lambda draw, n: (draw.normal(n or 1 << 26),),
        table="square_sum",
        fits=lambda x: contiguous(x=x),
        examples=("const f64[4, 6]",),
    ),
)
