"""Elementwise operators: every dimension splits, operands broadcast."""

from __future__ import annotations

from autopar.intra_op.rule import rule

_ELEMENTWISE = """
add.Tensor sub.Tensor
abs.default acos.default asin.default atan.default bitwise_and.Tensor bitwise_not.default
bitwise_or.Tensor bitwise_xor.Tensor ceil.default clamp.default clamp_min.default
clamp_max.default cos.default elu.default eq.Scalar eq.Tensor erf.default exp.default
floor.default ge.Scalar ge.Tensor gelu.default gt.Scalar gt.Tensor hardswish.default
hardtanh.default isinf.default isnan.default le.Scalar le.Tensor leaky_relu.default log.default
log1p.default logical_and.default logical_not.default logical_or.default lt.Scalar lt.Tensor
masked_fill.Scalar maximum.default minimum.default mish.default mul.Tensor div.Tensor
ne.Scalar ne.Tensor pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default relu.default
relu6.default round.default rsqrt.default sigmoid.default sign.default silu.default sin.default
softplus.default sqrt.default square.default tanh.default where.self __and__.Tensor
__or__.Tensor
"""
# Linear in their only operand: owed sums pass through. (x + 1 is not: the 1 would count twice.)
_LINEAR = ("neg.default", "autopar.detach", "autopar.share")


def _name(op: str) -> str:
    op = op.removesuffix(".default")
    return op if op.startswith("autopar.") else f"aten.{op}"


_SPEC = "..., ..., ... -> ..."
RULES = (
    *(rule(_name(op), _SPEC) for op in _ELEMENTWISE.split()),
    *(rule(_name(op), _SPEC, linear=True) for op in _LINEAR),
)
