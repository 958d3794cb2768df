"""The outer step of CO2, between rounds of local steps whose average arrives a round late.

    m = clip(β m + (anchor - average) / penalty),    anchor = anchor - rate m

(Sun et al., arXiv:2401.16265, algorithm 1, with its staleness penalty and its outer momentum
clipping.) `total` is the all_reduced sum of the devices' parameters; the next round begins with a
copy of the anchor in the parameters' own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .registry.draw import Draw
from .registry.language import blocks, jit, tl
from .registry.launch import launch
from .registry.operator import Args, Operator, contiguous, wider

HYPERPARAMETERS = 5  # β, 1 / penalty, rate, the largest |m|, 1 / devices


@jit
def _kernel(
    total: tl.tensor,
    anchor: tl.tensor,
    momentum: tl.tensor,
    parameter: tl.tensor,
    hyper: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    beta = tl.load(hyper)
    share = tl.load(hyper + 1)
    rate = tl.load(hyper + 2)
    most = tl.load(hyper + 3)
    average = tl.load(total + at, mask=mask, other=0.0).to(tl.float32) * tl.load(hyper + 4)
    old = tl.load(anchor + at, mask=mask, other=0.0)
    m = beta * tl.load(momentum + at, mask=mask, other=0.0) + (old - average) * share
    m = tl.where(m > most, most, tl.where(m < -most, -most, m))  # NaN stays NaN
    new = old - rate * m
    tl.store(momentum + at, m, mask=mask)
    tl.store(anchor + at, new, mask=mask)
    tl.store(parameter + at, new.to(parameter.dtype.element_ty), mask=mask)


def hyperparameters(
    *, beta: float, penalty: float, rate: float, clip: float, devices: int
) -> Tensor:
    """Returns the inputs of `co2_outer_`, f32[5], on the CPU."""
    return torch.tensor([beta, 1 / penalty, rate, clip, 1 / devices])


def reference(
    total: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    parameter: Tensor,
    hyper: Tensor,
    *,
    wide: torch.dtype = torch.float32,
) -> None:
    """Implements the kernel in torch."""
    beta, share, rate, most, part = wider(hyper, wide)
    old = wider(anchor, wide)
    m = beta * wider(momentum, wide) + (old - wider(total, wide) * part) * share
    m = m.clamp(-most, most)
    momentum.copy_(m)
    anchor.copy_(old - rate * m)
    parameter.copy_(anchor)


def _allocate(
    total: Tensor, anchor: Tensor, momentum: Tensor, parameter: Tensor, hyper: Tensor
) -> None:
    return None


def _launch(
    results: None,
    total: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    parameter: Tensor,
    hyper: Tensor,
) -> None:
    n = anchor.numel()
    row = launch("co2_outer_", n)
    _kernel[(blocks(n, row.block),)](
        *(total, anchor, momentum, parameter, hyper, n), BLOCK=row.block, **row.options
    )


def _wrong(*args: Tensor | None) -> str:
    hyper = args[-1]
    if hyper is not None and hyper.shape == (HYPERPARAMETERS,):
        return ""
    return f"hyper must have {HYPERPARAMETERS} numbers, as returned by `hyperparameters`"


def _fits(total: Tensor, anchor: Tensor, momentum: Tensor, parameter: Tensor, hyper: Tensor) -> str:
    for name, tensor in (("anchor", anchor), ("momentum", momentum), ("hyper", hyper)):
        if tensor.dtype != torch.float32:
            return f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}"
    return contiguous(
        total=total, anchor=anchor, momentum=momentum, parameter=parameter, hyper=hyper
    )


def _samples(draw: Draw) -> Iterable[Args]:
    hyper = hyperparameters(beta=0.5, penalty=2.0, rate=0.8, clip=1.0, devices=4)
    anchor, momentum = (draw.normal(5, 61, dtype=torch.float32) for _ in range(2))
    total = draw.normal(5, 61, scale=4.0)
    total[0, 0] = float("nan")
    yield total, anchor, momentum, draw.normal(5, 61), hyper.to(draw.device)


def _typical(draw: Draw, n: int) -> Args:
    total, anchor, momentum = (draw.normal(n or 1 << 26, dtype=torch.float32) for _ in range(3))
    hyper = draw.positive(HYPERPARAMETERS, dtype=torch.float32)
    return total, anchor, momentum, draw.normal(n or 1 << 26), hyper


OPERATORS = (
    Operator(
        name="co2_outer_",
        allocate=_allocate,
        launch=_launch,
        reference=reference,
        factors="..., ..., ..., ..., h! ->",
        flops="8 ...",
        writes=("anchor", "momentum", "parameter"),
        passes={"parameter": 1},
        samples=_samples,
        typical=_typical,
        table="co2_outer_",
        wrong=_wrong,
        fits=_fits,
    ),
)
