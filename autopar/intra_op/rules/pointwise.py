"""Elementwise operators: every dimension can be split; operands broadcast."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.intra_op.rule import (
    Groups,
    Linear,
    OpRule,
    argument,
    broadcast,
    dimensions,
    letters,
    rule,
    whole_along,
)
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _both(node: Node) -> bool:
    """Sums: linear in both tensors together; x + 1 is not, since the 1 would count twice."""
    return len(node.inputs) == 2


def _each(node: Node) -> Groups:
    """Products: linear in each factor."""
    return tuple((i,) for i in range(len(node.inputs)))


def _cast(node: Node, types: tuple[TensorType, ...]) -> str:
    """Reads only the dtype of a second operand."""
    like = [", " + " ".join(f"t{i}!" for i in range(len(t.shape))) for t in types[1:]]
    return f"...{''.join(like)} -> ..."


def _glu(node: Node, types: tuple[TensorType, ...]) -> str:
    """One half of a dimension gates the other half."""
    return whole_along(node, types, dimensions(argument(node, 1, "dim", -1), len(types[0].shape)))


def _prelu(node: Node, types: tuple[TensorType, ...]) -> str:
    """One slope, or one for each channel, which is dimension 1."""
    names = letters(len(types[0].shape))
    slope = broadcast(names[1:2], types[1]) if types[1].numel > 1 else "1" * len(types[1].shape)
    return f"{' '.join(names)}, {slope} -> {' '.join(names)}"


_SPEC = "..., ..., ... -> ..."
_REAL, _POSITIVE, _FRACTION = "f64[4, 6]", "f64[4, 6]>0", "f64[4, 6]<1"
_PAIR, _POSITIVE_PAIR = "f64[4, 6], f64[6]", "f64[4, 6]>0, f64[4, 1]>0"
_WHOLE_PAIR, _TRUTHS = "i64[4, 6]<8, i64[6]<8", "bool[4, 6], bool[4, 1]"
# (operators, how they are linear, examples)
_FAMILIES: tuple[tuple[str, Linear, tuple[str, ...]], ...] = (
    (
        """abs asinh ceil celu cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardshrink
        hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf leaky_relu
        log_sigmoid logical_not mish nan_to_num relu relu6 round selu sgn sigmoid sign signbit silu
        sin sinc sinh softplus softshrink special_erfcx special_expit special_i0e special_i1
        special_i1e special_log_ndtr special_ndtr special_ndtri square tan tanh trunc""",
        False,
        (_REAL,),
    ),
    (
        """special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0""",
        False,
        (f"const {_POSITIVE}",),
    ),
    (
        """special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
        special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
        special_legendre_polynomial_p""",
        False,
        ("const f64[4, 6], i64[6]<4",),
    ),
    ("special_zeta igamma igammac", False, ("const f64[4, 6]>0, const f64[6]>0",)),
    ("polygamma", False, (f"1, {_POSITIVE}",)),
    ("round.decimals", False, (f"{_REAL}, decimals=1",)),
    (
        "digamma lgamma log log10 log1p log2 reciprocal rsqrt special_entr sqrt",
        False,
        (_POSITIVE,),
    ),
    ("acos acosh asin atan atanh erfinv logit", False, (_FRACTION,)),
    ("neg positive deg2rad rad2deg", True, (_REAL,)),
    ("alias clone contiguous autopar.detach autopar.share", True, (_REAL,)),
    ("detach", True, (_REAL,)),
    ("bitwise_not", False, ("bool[4, 6]",)),
    ("mvlgamma", False, (f"{_POSITIVE}, 1",)),
    ("threshold", False, (f"{_REAL}, 0.1, 0.2",)),
    ("fill.Scalar", False, (f"{_REAL}, 2.5",)),
    ("fill.Tensor", False, (f"{_REAL}, f64[]",)),
    ("zero", False, (_REAL,)),
    ("add.Tensor sub.Tensor rsub.Tensor", _both, (_PAIR, f"{_REAL}, f64[4, 6], alpha=2")),
    ("mul.Tensor", _each, (_PAIR, "f64[4, 6], 2", "f64[4, 6], i64[4, 1]<8")),
    (
        "div.Tensor true_divide.Tensor",
        ((0,),),
        (_POSITIVE_PAIR, "f64[4, 6], 2", "f64[4, 6], i64[]>0"),
    ),
    ("mul.Scalar div.Scalar", True, (f"{_REAL}, 2",)),
    ("add.Scalar sub.Scalar rsub.Scalar", False, (f"{_REAL}, 2",)),
    ("div.Tensor_mode", False, ("f64[4, 6], f64[6]>0, rounding_mode='floor'",)),
    ("div.Scalar_mode", False, (f"{_REAL}, 2, rounding_mode='floor'",)),
    (
        """atan2 copysign.Tensor fmax fmin hypot isclose ldexp.Tensor logaddexp logaddexp2
        max.other maximum min.other minimum nextafter""",
        False,
        (_PAIR,),
    ),
    ("copysign.Scalar", False, (f"{_REAL}, -1.0",)),
    ("pow.Tensor_Tensor float_power.Tensor_Tensor xlogy.Tensor", False, (_POSITIVE_PAIR,)),
    ("float_power.Tensor_Scalar", False, (f"{_REAL}, 2",)),
    ("special_xlog1py special_xlogy", False, (_POSITIVE_PAIR,)),
    ("special_xlog1py.other_scalar xlogy.Scalar_Other", False, (f"{_POSITIVE}, 2.0",)),
    ("pow.Tensor_Scalar", False, (f"{_REAL}, 2", f"{_POSITIVE}, 0.5")),
    ("pow.Scalar", False, (f"2, {_REAL}",)),
    ("floor_divide remainder.Tensor fmod.Tensor gcd lcm", False, ("i64[4, 6]<8, i64[6]>0",)),
    ("bitwise_left_shift.Tensor bitwise_right_shift.Tensor heaviside", False, (_WHOLE_PAIR,)),
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
    (
        """bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar
        __xor__.Scalar __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar
        bitwise_right_shift.Tensor_Scalar""",
        False,
        ("i64[4, 6]<8, 3",),
    ),
    ("clamp", False, (f"{_REAL}, -0.5, 0.5",)),
    ("clamp_min clamp_max", False, (f"{_REAL}, 0.25",)),
    ("clamp_min.Tensor clamp_max.Tensor", False, (_PAIR,)),
    ("clamp.Tensor", False, (f"{_REAL}, f64[6], None", f"{_REAL}, f64[4, 1]<1, f64[6]>0")),
    ("masked_fill.Scalar", False, (f"{_REAL}, bool[4, 6], 0.5", f"{_REAL}, bool[6], -inf")),
    ("masked_fill.Tensor", False, (f"{_REAL}, bool[4, 1], f64[]",)),
    ("where.self", ((1, 2),), ("bool[4, 1], f64[4, 6], f64[6]", "bool[4, 6], f64[], f64[4, 6]")),
    ("where.ScalarOther", False, ("bool[4, 6], f64[4, 6], 0.5",)),
    ("where.ScalarSelf", False, ("bool[4, 6], 0.5, f64[4, 6]",)),
    ("where.Scalar", False, ("bool[4, 6], 1.0, 0.0",)),
    ("lerp.Scalar", False, (f"{_PAIR}, 0.25",)),
    ("lerp.Tensor", False, (f"{_PAIR}, f64[4, 1]<1",)),
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
    rule("aten.frexp.Tensor", "... -> ..., ...", examples=(f"const {_REAL}",)),
    # A value and a condition, which is one boolean, replicated on all devices.
    rule(
        "autopar.assume",
        _SPEC,
        linear=((0,),),
        examples=(f"{_REAL}, bool[]>0, True, 'a line'",),
    ),
    rule("aten.glu", _glu, examples=("f64[4, 12]", "f64[8, 6], 0")),
    rule("aten.prelu", _prelu, examples=(f"{_REAL}, f64[6]", f"{_REAL}, f64[1]")),
)
