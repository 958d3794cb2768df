"""A mixture of experts as one operator.

    %y = autopar.mixture(%gate, %up, %down, %x, %ids, %weights, "silu")

computes, for every token t, sum over j of weights[t, j] * expert[ids[t, j]](x[t]), where an expert
is down @ (act(gate @ x) * (up @ x)): Shazeer et al., "Outrageously Large Neural Networks"
(arXiv:1701.06538, section 2), with the gated experts of Mixtral (arXiv:2401.04088, section 2.1).
Experts may have no gate (None), biases (three more arguments) and other activations. Rows are
sorted by expert, so that each expert multiplies a range of rows (MegaBlocks, arXiv:2211.15841,
section 4); no row is dropped and no row is padded.

A device that holds some of the experts sums their results, which gives a partial sum. The number of
its rows depends on the router. By default, prices assume that all experts are chosen equally often,
which a router's balancing loss encourages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.tensor import Layout, TensorType

if TYPE_CHECKING:
    from torch import Tensor

# Arguments of the operator.
_ARGUMENTS = (
    "gate", "up", "down", "x", "ids", "weights", "act", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip
MIXTURE, GROUPED = "autopar.mixture", "autopar.grouped_linear"
Biases: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None]"
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Experts:
    """Weights of some experts, and their activation.

    Attributes:
        gate, up: [experts, inner, width]; `gate` is None for experts without gates.
        down: [experts, width, inner].
        act: the function between the products, see `activation.py`.
        biases: biases of gate and up, [experts, inner], and down, [experts, width]; each may be
            None.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    act: str
    biases: Biases = (None, None, None)

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.up.shape[0]

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Returns [rows, width]: the first expert of rows up to ends[0], and so on."""
        from autopar.operators.activation import activate

        gates = None if self.gate is None else self._product(rows, self.gate, 0, ends)
        inner = activate(self.act, gates, self._product(rows, self.up, 1, ends))
        return self._product(inner, self.down, 2, ends)

    def _product(self, rows: Tensor, weight: Tensor, which: int, ends: Tensor) -> Tensor:
        product, bias = _grouped(rows, weight, ends), self.biases[which]
        if bias is None:
            return product
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        return product + bias.repeat_interleave(counts, 0, output_size=rows.shape[0])


def mixture(
    experts: Experts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: int = 0,
    size: int = 0,
    kernels: bool = False,
) -> Tensor:
    """Returns the contribution of the experts first, first + 1, ... of `size` to every token.

    Args:
        experts: the experts.
        x: tokens, [..., width].
        ids: the experts of every token, [..., k], from 0 up to `size`; -1 with a weight of zero for
            none.
        weights: weights of every token's experts, [..., k].
        first, size: the first local expert and the total number; by default all are local.
        kernels: whether autopar's kernels gather, weight and sum rows, in at least float32.

    Returns:
        A tensor like x, summed in the wider dtype of x and weights.
    """
    import torch

    count, ids = experts.count, ids.flatten()
    k, partly = weights.shape[-1], 0 < count < size
    # If all experts are local, rows without one are computed by the last expert: to leave them out,
    # the host would have to read their number.
    chosen, places = (ids if partly else ids.remainder(max(count, 1))).sort(stable=True)
    ranges = torch.arange(first, first + count + 1, device=ids.device)
    bounds = torch.searchsorted(chosen, ranges)
    if partly:  # rows of experts on other devices come before and after
        start, end = bounds[:: bounds.shape[0] - 1].tolist()
        places = places[start:end]
    ends = (bounds[1:] - bounds[0]).int()
    rows, inverse = gathered(x, places, k, kernels)
    return added(experts(rows, ends), places, inverse, x, weights)


def gathered(x: Tensor, places: Tensor, k: int, kernels: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the token of each sorted row, [places, width], and the index that `added` needs."""
    flat = x.flatten(0, -2)
    if not kernels:
        return flat[places // k], None
    inverse = _inverse(places, flat.shape[0] * k)
    return _taken(flat, places, inverse), inverse


def added(
    given: Tensor, places: Tensor, inverse: Tensor | None, x: Tensor, weights: Tensor
) -> Tensor:
    """Returns a tensor like x: each token's weighted sum of the results at `places`."""
    if inverse is not None:
        return _added(given, inverse, weights.flatten(0, -2)).view(x.shape)
    given = given * weights.flatten()[places].unsqueeze(-1)
    tokens = places // weights.shape[-1]
    # Unlike index_add, this is deterministic on every device, and saves only indices for backward.
    total = given.new_zeros(x.shape).flatten(0, -2).index_put_((tokens,), given, accumulate=True)
    return total.view(x.shape).to(x.dtype)


def _taken(x: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
    """Returns [places, width]: the row of x of the token of each sorted row."""
    # Imported here because it registers torch operators, which most graphs do not need.
    from autopar.operators import kernels

    return kernels.experts_permute(x, places, inverse)


def _added(given: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """Returns [tokens, width]: the weighted sum of each token's local rows."""
    from autopar.operators import kernels

    return kernels.experts_unpermute(given, inverse, weights)


def _inverse(places: Tensor, count: int) -> Tensor:
    """Returns [count]: the index in `places` of each number, -1 if absent."""
    import torch

    inverse = places.new_full((count,), -1)
    inverse[places] = torch.arange(places.shape[0], device=places.device)
    return inverse


def by_name(node: Node, values: Sequence[_Value]) -> dict[str, _Value]:
    """Returns the values of a mixture's operands by operand name, without absent operands."""
    given = [name for name, arg in zip(_ARGUMENTS, node.args, strict=False) if isinstance(arg, Ref)]
    return dict(zip(given, values, strict=True))


_TERMS = {
    "gate": "e f d!", "up": "e f d!", "down": "e d! f", "x": "... d!", "ids": "... k!",
    "weights": "... k!", "gate_bias": "e f", "up_bias": "e f", "down_bias": "+e d!",
}  # fmt: skip


def factors(node: Node) -> str:
    """Returns the factor string of a mixture, in the notation of `intra_op/rule.py`."""
    terms = (_TERMS[name] for name in by_name(node, node.inputs))
    return f"{', '.join(terms)} -> ... d!"


def dispatch_axes(node: Node, into: Sequence[Layout]) -> tuple[str, ...]:
    """Returns the axes that split both the experts and the tokens of a mixture's operands."""
    named = by_name(node, into)
    tokens = {axis for dim in named["x"].dims for axis in dim}
    return tuple(axis for axis in named["up"].dims[0] if axis in tokens)


def rows_near(
    node: Node, types: Sequence[TensorType], into: Sequence[Layout]
) -> list[tuple[tuple[int, ...], Layout]]:
    """Returns shapes and layouts of a mixture's row tensors; () for other operators.

    Rows are split like tokens and like experts, assuming that experts are chosen equally often.
    """
    if node.op != MIXTURE:
        return []
    layouts, kinds = by_name(node, into), by_name(node, types)
    split, inner, _ = layouts["up"].dims
    axes = dict.fromkeys(axis for dim in (*layouts["x"].dims[:-1], split) for axis in dim)
    rows = kinds["ids"].numel
    wide = ((rows, kinds["x"].shape[-1]), Layout((tuple(axes), ())))
    return [wide, ((rows, kinds["up"].shape[1]), Layout((tuple(axes), inner)))]


def with_kernels(graph: Graph) -> Graph:
    """Returns `graph` with mixtures that use kernels."""
    nodes = (
        replace(node, kwargs=(*node.kwargs, ("kernels", True))) if node.op == MIXTURE else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies rows [rows, n]: rows up to ends[0] by the transpose of weight[0], and so on."""
    from autopar.operators.grouped_products import grouped_linear

    product: Tensor = grouped_linear(x, weight, ends)
    return product
