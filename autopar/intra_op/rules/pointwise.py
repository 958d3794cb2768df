"""Elementwise operators: every dimension splits, operands broadcast."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.intra_op.rule import Groups, Linear, OpRule, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _both(node: Node) -> bool:
    """Sums: linear in both tensors together; x + 1 is not, the 1 would count twice."""
    return len(node.inputs) == 2


def _each(node: Node) -> Groups:
    """Products: linear in each factor."""
    return tuple((i,) for i in range(len(node.inputs)))


def _cast(node: Node, types: tuple[TensorType, ...]) -> str:
    """Of a second operand only the dtype is read."""
    like = [", " + " ".join(f"t{i}!" for i in range(len(t.shape))) for t in types[1:]]
    return f"...{''.join(like)} -> ..."


_SPEC = "..., ..., ... -> ..."
_REAL, _POSITIVE, _FRACTION = "f64[4, 6]", "f64[4, 6]>0", "f64[4, 6]<1"
_PAIR, _POSITIVE_PAIR = "f64[4, 6], f64[6]", "f64[4, 6]>0, f64[4, 1]>0"
_WHOLE_PAIR, _TRUTHS = "i64[4, 6]<8, i64[6]<8", "bool[4, 6], bool[4, 1]"
# (operators, how they are linear, examples)
_FAMILIES: tuple[tuple[str, Linear, tuple[str, ...]], ...] = (
    (
        """abs ceil cos cosh elu erf exp expm1 floor frac gelu hardshrink hardsigmoid hardswish
        hardtanh isfinite isinf isnan leaky_relu log_sigmoid logical_not mish nan_to_num relu relu6
        round selu sigmoid sign silu sin sinh softplus softshrink square tan tanh trunc""",
        False,
        (_REAL,),
    ),
    ("lgamma log log10 log1p log2 reciprocal rsqrt sqrt", False, (_POSITIVE,)),
    ("acos asin atan atanh erfinv logit", False, (_FRACTION,)),
    ("neg alias clone contiguous autopar.detach autopar.share", True, (_REAL,)),
    ("detach", True, (_REAL,)),
    ("bitwise_not", False, ("bool[4, 6]",)),
    ("add.Tensor sub.Tensor rsub.Tensor", _both, (_PAIR, f"{_REAL}, f64[4, 6], alpha=2")),
    ("mul.Tensor", _each, (_PAIR, "f64[4, 6], 2", "f64[4, 6], i64[4, 1]<8")),
    ("div.Tensor", ((0,),), (_POSITIVE_PAIR, "f64[4, 6], 2", "f64[4, 6], i64[]>0")),
    ("mul.Scalar div.Scalar", True, (f"{_REAL}, 2",)),
    ("add.Scalar sub.Scalar rsub.Scalar", False, (f"{_REAL}, 2",)),
    ("div.Tensor_mode", False, ("f64[4, 6], f64[6]>0, rounding_mode='floor'",)),
    ("atan2 maximum minimum max.other min.other", False, (_PAIR,)),
    ("pow.Tensor_Tensor", False, (_POSITIVE_PAIR,)),
    ("pow.Tensor_Scalar", False, (f"{_REAL}, 2", f"{_POSITIVE}, 0.5")),
    ("pow.Scalar", False, (f"2, {_REAL}",)),
    ("floor_divide remainder.Tensor fmod.Tensor", False, ("i64[4, 6]<8, i64[6]>0",)),
    ("remainder.Scalar fmod.Scalar", False, (f"{_REAL}, 2",)),
    ("eq.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor ne.Tensor", False, (_WHOLE_PAIR,)),
    ("eq.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar ne.Scalar", False, ("i64[4, 6]<8, 3",)),
    ("logical_and logical_or logical_xor", False, (_TRUTHS,)),
    (
        """bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor
        __xor__.Tensor""",
        False,
        (_TRUTHS, _WHOLE_PAIR),
    ),
    ("bitwise_and.Scalar bitwise_or.Scalar __and__.Scalar", False, ("i64[4, 6]<8, 3",)),
    ("clamp", False, (f"{_REAL}, -0.5, 0.5",)),
    ("clamp_min clamp_max", False, (f"{_REAL}, 0.25",)),
    ("clamp.Tensor", False, (f"{_REAL}, f64[6], None", f"{_REAL}, f64[4, 1]<1, f64[6]>0")),
    ("masked_fill.Scalar", False, (f"{_REAL}, bool[4, 6], 0.5", f"{_REAL}, bool[6], -inf")),
    ("masked_fill.Tensor", False, (f"{_REAL}, bool[4, 1], f64[]",)),
    ("where.self", False, ("bool[4, 1], f64[4, 6], f64[6]", "bool[4, 6], f64[], f64[4, 6]")),
    ("where.ScalarOther", False, ("bool[4, 6], f64[4, 6], 0.5",)),
    ("where.ScalarSelf", False, ("bool[4, 6], 0.5, f64[4, 6]",)),
    ("lerp.Scalar", False, (f"{_PAIR}, 0.25",)),
    ("addcmul addcdiv", False, (f"{_REAL}, f64[6], f64[4, 6]>0",)),
    ("dropout", False, (f"{_REAL}, 0.5, True", f"{_REAL}, 0.5, False")),
)
_CASTS = {
    "to.dtype": f"{_REAL}, f32",
    "to.dtype_layout": f"{_REAL}, dtype=f32",
    "to.device": f"{_REAL}, 'cpu', f32",
    "to.other": f"{_REAL}, f32[2]",
    "_to_copy": f"{_REAL}, dtype=i64",
    "type_as": f"{_REAL}, i64[2, 3]",
}


def _families() -> Iterator[OpRule]:
    for names, linear, examples in _FAMILIES:
        for name in names.split():
            op = name if name.startswith("autopar.") else f"aten.{name}"
            yield rule(op, _SPEC, linear=linear, examples=examples)


RULES = (
    *_families(),
    *(rule(f"aten.{op}", _cast, examples=(example,)) for op, example in _CASTS.items()),
)
