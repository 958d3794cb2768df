"""Attention: batch, heads and queries split; keys and the width of a head stay whole."""

from __future__ import annotations

from autopar.intra_op.rule import argument, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _attention(node: Node, types: tuple[TensorType, ...]) -> str:
    """Query heads run over (g r): g groups, one for each key head, of r query heads.

    Which keys a query sees depends on its position under a causal mask, and the random numbers of
    dropout on its row, so there the queries stay whole.
    """
    positional = argument(node, 5, "is_causal") is True or argument(node, 4, "dropout_p", 0.0) != 0
    s = "s!" if positional else "s"
    rank = len(types[0].shape)
    heads = ["(g r)"] if rank > 2 else []
    lead = [f"b{i}" for i in range(rank - 3)]
    query = [*lead, *heads, s]
    key = [*lead, *(["g"] if heads else []), "t!"]
    terms = [[*query, "d!"], [*key, "d!"], [*key, "e!"]]
    if len(types) > 3:
        full = [*query, "t!"]
        mask = types[3].shape
        terms.append(
            [n if size > 1 else "1" for n, size in zip(full[-len(mask) :], mask, strict=True)]
        )
    return f"{', '.join(map(' '.join, terms))} -> {' '.join([*query, 'e!'])}"


def _flops(node: Node, types: tuple[TensorType, ...]) -> str:
    """Two products, q k^T and its weights times v; a causal mask leaves out half of each."""
    weights = f"{types[0].numel // types[0].shape[-1]} t"
    factor = 1 if argument(node, 5, "is_causal") is True else 2
    return f"{factor} {weights} d + {factor} {weights} e"


_HEADS = "f64[2, 4, 4, 3], f64[2, 4, 6, 3], f64[2, 4, 6, 2]"
RULES = (
    rule(
        "aten.scaled_dot_product_attention",
        _attention,
        flops=_flops,
        examples=(
            _HEADS,
            f"{_HEADS}, f64[2, 1, 4, 6]",
            "f64[1, 6, 4, 3], f64[1, 6, 4, 3], f64[1, 6, 4, 3], None, 0.0, True",
            "f64[1, 12, 4, 2], f64[1, 6, 4, 2], f64[1, 6, 4, 2], enable_gqa=True",
            "f64[1, 6, 4, 3], f64[1, 6, 4, 3], f64[1, 6, 4, 3], None, 0.5",
        ),
    ),
)
