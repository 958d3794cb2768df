"""The function between an expert's products, as text: "mul(silu(gate), up)".

`gate` and `up` are the first products of an expert's rows, each [rows, inner]. The text is an
elementwise function of them, in a few functions of torch. A single name such as "silu" means the
gated form, silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import GraphError

# By the operator's argument.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "neg": torch.neg,
    "exp": torch.exp,
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "clamp": torch.clamp,
}
_LONGEST = 1000  # characters


def activate(text: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """Returns the value of the text, [rows, inner]; `gate` is None for experts without one.

    Raises:
        GraphError: the text cannot be parsed.
    """
    if text in ACTIVATIONS:
        value = ACTIVATIONS[text](up if gate is None else gate)
        return value if gate is None else value * up
    result: Tensor = _parsed(text)({"gate": gate, "up": up})
    return result


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Callable[[dict[str, Any]], Any]:
    try:
        if len(text) <= _LONGEST:
            return _compiled(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        pass
    raise GraphError(
        f"cannot read the activation {text[:50]!r} of a mixture of experts",
        todo=f"write one of {', '.join(ACTIVATIONS)}, or calls such as 'mul(silu(gate), up)' of "
        + ", ".join(FUNCTIONS),
    )


def _compiled(tree: ast.expr) -> Callable[[dict[str, Any]], Any]:
    """Returns the text as a function of `gate` and `up`; raises ValueError for other text."""
    match tree:
        case ast.Name(id="gate" | "up" as name):
            return lambda values: values[name]
        case ast.Constant(value=None | int() | float() as number):
            return lambda values: number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda values: -number
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            function, operands = FUNCTIONS[name], [_compiled(arg) for arg in args]
            return lambda values: function(*(operand(values) for operand in operands))
    raise ValueError
