"""A mixture of experts as one operator: tokens go through their experts and back.

    y = mixture(gate, up, down, x, ids, weights, "silu")

computes, for every token t, sum over j of weights[t, j] * expert[ids[t, j]](x[t]), where an expert
is down @ (act(gate @ x) * (up @ x)): Shazeer et al., "Outrageously Large Neural Networks"
(arXiv:1701.06538, section 2), with the gated experts of Mixtral (arXiv:2401.04088, section 2.1).
Rows are sorted by expert, so that each expert multiplies its own (MegaBlocks, arXiv:2211.15841,
section 4); no row is dropped and none is padded.

A device with some of the experts sums their results, which gives a partial sum. The number of its
rows depends on the router; prices assume that all experts are chosen equally often, which a
router's balancing loss encourages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import Layout, TensorType

MIXTURE, GROUPED = "autopar.mixture", "autopar.grouped_linear"
# By the operator's argument.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_ALIGNMENT = 16  # bytes, required by torch's own grouped product


def mixture(
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    act: str,
    first: int = 0,
    size: int = 0,
    kernels: bool = False,
) -> Tensor:
    """Returns the contribution of the experts first, first + 1, ... of `size` to every token.

    Args:
        gate, up: weights of these experts, [experts, inner, width].
        down: [experts, width, inner].
        x: tokens, [..., width].
        ids: the experts of every token, [..., k], from 0 up to `size`.
        weights: weights of every token's experts, [..., k].
        act: one of `ACTIVATIONS`.
        first, size: the first local expert and the total number; by default all are local.
        kernels: whether kernels gather, weight and sum rows, in at least float32.

    Returns:
        A tensor like x, summed in the wider dtype of x and weights.
    """
    experts = gate.shape[0]
    chosen, places = ids.flatten().sort(stable=True)
    ranges = torch.arange(first, first + experts + 1, device=ids.device)
    bounds = torch.searchsorted(chosen, ranges)
    if 0 < experts < size:  # rows of other experts come before and after
        start, end = bounds[:: bounds.shape[0] - 1].tolist()
        places = places[start:end]
    ends = (bounds[1:] - bounds[0]).int()
    tokens = places // ids.shape[-1]
    flat = x.flatten(0, -2)
    inverse = _inverse(places, ids.numel()) if kernels else None
    rows = flat[tokens] if inverse is None else _taken(flat, places, inverse)
    given = through_experts(gate, up, down, rows, ends, act)
    if inverse is not None:
        return _added(given, inverse, weights.flatten(0, -2)).view(x.shape)
    return added(given, places, x, weights)


def through_experts(
    gate: Tensor, up: Tensor, down: Tensor, rows: Tensor, ends: Tensor, act: str
) -> Tensor:
    """Returns [rows, width]: rows up to ends[0] through the first expert, and so on."""
    inner = ACTIVATIONS[act](_grouped(rows, gate, ends)) * _grouped(rows, up, ends)
    return _grouped(inner, down, ends)


def added(given: Tensor, places: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Returns a tensor like x: each token's weighted sum of the results at `places`."""
    given = given * weights.flatten()[places].unsqueeze(-1)
    tokens = places // weights.shape[-1]
    # Unlike index_add, this is deterministic on every device, and its backward saves indices only.
    total = given.new_zeros(x.shape).flatten(0, -2).index_put_((tokens,), given, accumulate=True)
    return total.view(x.shape).to(x.dtype)


def _taken(x: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
    """Returns [places, width]: the token row of x for each of these places."""
    # Imported here because it registers torch operators, which most graphs do not need.
    from autopar.operators import kernels

    return kernels.experts_permute(x, places, inverse)


def _added(given: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """Returns [tokens, width]: the weighted sum of each token's local rows."""
    from autopar.operators import kernels

    return kernels.experts_unpermute(given, inverse, weights)


def _inverse(places: Tensor, count: int) -> Tensor:
    """Returns [count]: the index in `places` of each number, -1 if absent."""
    inverse = places.new_full((count,), -1)
    inverse[places] = torch.arange(places.shape[0], device=places.device)
    return inverse


def dispatch_axes(into: Sequence[Layout]) -> tuple[str, ...]:
    """Returns the axes that split both the experts and the tokens of a mixture's operands."""
    tokens = {axis for dim in into[3].dims for axis in dim}
    return tuple(axis for axis in into[0].dims[0] if axis in tokens)


def rows_near(
    node: Node, types: Sequence[TensorType], into: Sequence[Layout]
) -> list[tuple[tuple[int, ...], Layout]]:
    """Returns shapes and layouts of a mixture's row tensors, none for other operators.

    Rows are split like tokens and like experts, assuming that experts are chosen equally often.
    """
    if node.op != MIXTURE:
        return []
    tokens, inner = into[3].dims[:-1], into[0].dims[1]
    axes = dict.fromkeys(axis for dim in (*tokens, into[0].dims[0]) for axis in dim)
    rows = types[4].numel
    wide = ((rows, types[3].shape[-1]), Layout((tuple(axes), ())))
    return [wide, ((rows, types[0].shape[1]), Layout((tuple(axes), inner)))]


def with_kernels(graph: Graph) -> Graph:
    """Returns `graph` with mixtures that use kernels."""
    nodes = (
        replace(node, kwargs=(("kernels", True),)) if node.op == MIXTURE else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies rows [rows, n]: those up to ends[0] by the transpose of weight[0], and so on."""
    product: Tensor = grouped_linear(x, weight, ends)
    return product


# Separate operators, because torch's grouped product supports neither float64 nor, for shapes
# alone, float32; and because the number of an expert's rows cannot be traced.
@torch.library.custom_op("autopar::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each expert's rows: x [rows, k], weight [experts, n, k], ends int32 [experts]."""
    if _fits(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends)):
        out[start:end] = x[start:end] @ weight[expert].T
    return out


@torch.library.custom_op("autopar::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Returns x.T @ y over each expert's rows: [experts, columns of x, columns of y]."""
    if _fits(x, y):
        return F.grouped_mm(x.T, y, offs=ends)
    out = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends)):
        out[expert] = x[start:end].T @ y[start:end]
    return out


def _fits(*operands: Tensor) -> bool:
    """Returns whether torch's grouped product accepts the operands."""
    return all(
        x.dtype == torch.bfloat16
        and x.numel()
        and all(size * x.element_size() % _ALIGNMENT == 0 for size in x.shape[1:])
        for x in operands
    )


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    given = given.contiguous()
    into, own, _ = ctx.needs_input_grad
    return (
        grouped_linear(given, weight.transpose(1, 2), ends) if into else None,
        grouped_outer(given, x, ends) if own else None,
        None,
    )


grouped_linear.register_autograd(_gradients, setup_context=_keep)
