"""Random numbers: whole, drawn identically on every device, as in a run on one device.

Dropout and attention with dropout are not here: their masks are split.
"""

from __future__ import annotations

from autopar.intra_op.rule import all_whole, rule

_X, _P, _C = "f64[4, 6]", "f64[4, 6]>0", "const f64[4, 6]"
_DRAWS: dict[str, str] = {
    "rand": "(4, 6)",
    "randn": "(4, 6)",
    "randint": "9, (4, 6)",
    "randint.low": "1, 9, (4, 6)",
    "randperm": "6",
    "normal.float_float": "0.0, 1.0, (4, 6)",
    "rand_like": _X,
    "randn_like": _X,
    "randint_like": f"{_C}, 9",
    "randint_like.low_dtype": f"{_C}, 1, 9",
    "bernoulli": "f64[4, 6]<1",
    "bernoulli.p": f"{_C}, 0.5",
    "binomial": f"const {_P}, const f64[4, 6]<1",
    "multinomial": f"{_P}, 2",
    "poisson": _P,
    "normal.Tensor_float": f"{_X}, 1.0",
    "normal.float_Tensor": f"0.0, {_P}",
    "normal.Tensor_Tensor": f"{_X}, {_P}",
    # An in-place draw into an empty tensor uses the same numbers as its functional counterpart.
    "normal_functional": f"{_C}, 0.0, 1.0",
    "uniform": f"{_X}, 0.0, 1.0",
    "exponential": _X,
    "cauchy": _X,
    "geometric": f"{_X}, 0.5",
    "log_normal": _X,
    "random": _X,
    "random.from": f"{_X}, 0, 9",
    "random.to": f"{_X}, 9",
    "_standard_gamma": _P,
    "_sample_dirichlet": f"const {_P}",
    "native_dropout": f"{_X}, 0.5, True",
    "rrelu": f"{_X}, 0.125, 0.25, True",
    "feature_dropout": f"{_X}, 0.5, True",
    "alpha_dropout": f"{_X}, 0.5, True",
    "feature_alpha_dropout": f"{_X}, 0.5, True",
}
RULES = tuple(rule(f"aten.{op}", all_whole, examples=(x,)) for op, x in _DRAWS.items())
