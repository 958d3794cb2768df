"""`autopar.mixture`, which a model calls to compute a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.operators.activation import activate
from autopar.operators.mixture import Biases, Experts
from autopar.operators.mixture import mixture as computed


def mixture(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate: Tensor | None = None,
    activation: str = "silu",
    biases: Biases = (None, None, None),
) -> Tensor:
    """Returns the weighted sum of each token's expert results; for use inside a model's forward.

    Expert e computes `down[e] @ (act(gate[e] @ x) * (up[e] @ x))`, or `down[e] @ act(up[e] @ x)`
    without a gate. Outside autopar, this function computes the same, each expert on its own rows,
    and autograd differentiates it. In the graph of a captured model it is one operator. Its tokens,
    experts and inner features can be split, and its rows can be sent to their experts.

    Args:
        x: tokens, [..., width].
        ids: expert numbers of every token, integers [..., k] from 0 up to the number of experts.
        weights: routing weights, [..., k]; the router's gradient flows through them.
        up: [experts, inner, width].
        down: [experts, width, inner].
        gate: like `up`; None for experts without gates.
        activation: "silu", "relu", "gelu" or "gelu_tanh", or a function of `gate` and `up` as text,
            such as "mul(sigmoid(gate), clamp(up, -7.0, 7.0))" (see operators/activation.py).
        biases: biases of the products with gate and up, [experts, inner], and down, [experts,
            width].

    Returns:
        A tensor like `x`.

    Raises:
        CaptureError: shapes do not match.
        GraphError: the activation cannot be parsed.
    """
    _check(x, ids, weights, up, down, gate, biases)
    activate(activation, None if gate is None else up.new_zeros(1), up.new_zeros(1))
    if not torch.compiler.is_exporting():
        return computed(Experts(gate, up, down, activation, biases), x, ids, weights)
    result: Tensor = torch.ops.autopar.mixture(gate, up, down, x, ids, weights, activation, *biases)
    return result


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None,
    biases: Biases,
) -> None:
    fits = up.dim() == 3 and x.dim() >= 2 and ids.shape == weights.shape
    fits = fits and ids.shape[:-1] == x.shape[:-1] and not ids.is_floating_point()
    if fits:
        experts, inner, width = up.shape
        wanted = [(x.shape[-1:], (width,)), (down.shape, (experts, width, inner))]
        wanted += [(gate.shape, up.shape)] if gate is not None else []
        sizes = ((experts, inner), (experts, inner), (experts, width))
        wanted += [(b.shape, s) for b, s in zip(biases, sizes, strict=True) if b is not None]
        fits = all(tuple(a) == tuple(b) for a, b in wanted)
    if not fits:
        shapes = [tuple(t.shape) for t in (x, ids, weights, up, down)]
        raise CaptureError(
            f"autopar.mixture of x, ids, weights, up and down of the shapes {shapes}",
            why="they do not fit one another",
            todo="pass x [..., width], ids and weights [..., k], up (and gate) [experts, inner, "
            "width], down [experts, width, inner], biases [experts, inner] and [experts, width]",
        )


# Represents the mixture in a trace; a graph runs `mixture.py`, which is differentiable.
torch.library.define(
    "autopar::mixture",
    "(Tensor? gate, Tensor up, Tensor down, Tensor x, Tensor ids, Tensor weights, str act, "
    "Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None) -> Tensor",
)


@torch.library.impl("autopar::mixture", "default")
def _run(gate: Tensor | None, up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    x, ids, weights, act, *biases = rest
    experts = Experts(gate, up, down, act, (*biases, None, None, None)[:3])
    return computed(experts, x, ids, weights).clone()


def _like(gate: Tensor | None, up: Tensor, down: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


torch.library.register_fake("autopar::mixture", _like)
