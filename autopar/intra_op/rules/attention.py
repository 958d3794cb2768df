"""Attention: batch, heads and queries can be split; keys and the width of a head stay whole.

The width of the values could be split too, but every device would then compute all of q k^T, and
kernels for heads whose keys and values differ in width are slow or missing.
"""

from __future__ import annotations

import math

from autopar.intra_op.rule import argument, broadcast, rule
from autopar.ir.graph import Node, Ref
from autopar.ir.tensor import TensorType
from autopar.operators.attention.sequence_forms import SINKS


def _attention(node: Node, types: tuple[TensorType, ...]) -> str:
    """Returns the rule; query heads run over (g r): g key heads, each with r query heads.

    Queries stay whole under a causal mask, which depends on their position, and under dropout,
    whose random numbers depend on their row.
    """
    positional = argument(node, 5, "is_causal") is True or argument(node, 4, "dropout_p", 0.0) != 0
    s = "s!" if positional else "s"
    rank = max(len(t.shape) for t in types[:3])
    lead = [f"b{i}" for i in range(rank - 3)]
    heads, *others = (t.shape[-3] if len(t.shape) > 2 else 1 for t in types[:3])
    grouped = 1 < max(others) < heads
    query = [*lead, *(["(g r)" if grouped else "g"] if rank > 2 else []), s]
    key = [*lead, *(["g"] if rank > 2 else []), "t!"]
    masked = isinstance(argument(node, 3, "attn_mask"), Ref)
    terms = [[*query, "d!"], [*key, "d!"], [*key, "e!"], *([[*query, "t!"]] if masked else [])]
    operands = ", ".join(map(broadcast, [*terms, query[-2:-1]], types))
    return f"{operands} -> {' '.join([*query, 'e!'])}"


def _flops(node: Node, types: tuple[TensorType, ...]) -> str:
    """Returns the FLOPs of q k^T and of the weights times v; a causal mask halves both."""
    query, key, value = (tensor.shape for tensor in types[:3])
    passes = 1 if argument(node, 5, "is_causal") is True else 2
    return f"{passes * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])}"


_HEADS = "f64[2, 4, 4, 3], f64[2, 4, 6, 3], f64[2, 4, 6, 2]"
RULES = (
    rule(
        "aten.scaled_dot_product_attention",
        _attention,
        flops=_flops,
        examples=(
            _HEADS,
            f"{_HEADS}, f64[2, 1, 4, 6]",
            "f64[2, 4, 4, 3], f64[1, 1, 6, 3], f64[2, 1, 6, 2], bool[1, 6]",
            "f64[1, 6, 4, 3], f64[1, 6, 4, 3], f64[1, 6, 4, 3], None, 0.0, True",
            "f64[4, 3, 2], f64[2, 4, 6, 2], f64[2, 4, 6, 2]",
            "f64[1, 12, 4, 2], f64[1, 6, 4, 2], f64[1, 6, 4, 2], enable_gqa=True",
            "f64[1, 6, 4, 3], f64[1, 6, 4, 3], f64[1, 6, 4, 3], None, 0.5",
        ),
    ),
    rule(
        SINKS,
        _attention,
        flops=_flops,
        examples=(
            "f64[2, 4, 6, 3], f64[2, 2, 8, 3], f64[2, 2, 8, 3], bool[1, 1, 6, 8], "
            "enable_gqa=True, sinks=f64[4]",
            "f64[1, 2, 4, 3], f64[1, 2, 4, 3], f64[1, 2, 4, 2], is_causal=True, sinks=f64[2]",
        ),
    ),
)
