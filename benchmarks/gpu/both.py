"""Operators for the benchmark that run forward and backward in a row, as some providers do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar_kernels.registry import operators
from autopar_kernels.registry.operator import Operator


def both() -> dict[str, Operator]:
    """Cross entropy and SwiGLU with their gradients, by name; nothing is registered."""
    return {made.name: made for made in (_entropy(), _swiglu())}


def _entropy() -> Operator:
    forward, backward = (operators()[f"cross_entropy{name}"] for name in ("", "_backward"))

    def allocate(
        logits: Tensor, target: Tensor, gradient: Tensor, ignored: int, z_loss: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return *forward.allocate(logits, target, ignored, z_loss), torch.empty_like(logits)

    def launch(results: Any, logits: Tensor, target: Tensor, gradient: Tensor, *rest: Any) -> None:
        loss, lse, out = results
        forward.launch((loss, lse), logits, target, *rest)
        backward.launch(out, logits, target, lse, gradient, 0, *rest)

    def reference(
        logits: Tensor, target: Tensor, gradient: Tensor, *rest: Any, wide: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, lse = forward.reference(logits, target, *rest, wide=wide)
        out = backward.reference(logits, target, lse, gradient, 0, *rest, wide=wide)
        return loss, lse, out

    return replace(
        forward,
        name="cross_entropy_both",
        allocate=allocate,
        launch=launch,
        reference=reference,
        factors="t v, t, t -> t, t, t v",
        passes={"logits": 2},
        gradient=None,
        fits=lambda *args: "",
    )


def _swiglu() -> Operator:
    forward, again = (operators()[f"swiglu{name}"] for name in ("", "_again"))

    def allocate(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return forward.allocate(gate, up), *again.allocate(dout, gate, up)

    def launch(results: Any, gate: Tensor, up: Tensor, dout: Tensor) -> None:
        forward.launch(results[0], gate, up)
        again.launch(results[1:], dout, gate, up)

    def reference(
        gate: Tensor, up: Tensor, dout: Tensor, *, wide: torch.dtype
    ) -> tuple[Tensor, ...]:
        out = forward.reference(gate, up, wide=wide)
        return out, *again.reference(dout, gate, up, wide=wide)

    return replace(
        forward,
        name="swiglu_both",
        allocate=allocate,
        launch=launch,
        reference=reference,
        factors="..., ..., ... -> ..., ..., ..., ...",
        passes={"gate": 2, "up": 2},
        gradient=None,
        fits=lambda *args: "",
    )
