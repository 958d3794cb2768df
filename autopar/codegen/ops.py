"""Prints one operator as idiomatic PyTorch, such as `x + y`, where such a spelling exists.

`expression(node, operands)` is ordinary PyTorch: `a + b`, `x.transpose(1, 2)`, `F.linear(x, w)`.
Operators without an entry here are written as the torch function of the same name if that is a
plain binding of the operator, else as `aten.name.overload(...)`. Sizes in the graph are global:
shape arguments have been made local before (see operators/localise.py).
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch

from autopar.ir.graph import PREFIX, Arg, Name, Node, Ref
from autopar.lower.literals import quoted
from autopar.operators.attention.document_lengths import PRICED
from autopar.operators.attention.sequence_forms import SINKS
from autopar.operators.branches import ASSUME
from autopar.operators.expert_load import PRICED as PRICED_MIXTURES
from autopar.operators.interpret import TORCH_DTYPES
from autopar.operators.mixture import MIXTURE
from autopar.operators.own_functions import called

_INFIX = {
    "add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/",
    "__and__.Tensor": "&", "__or__.Tensor": "|", "pow.Tensor_Scalar": "**", "matmul": "@",
    "bitwise_and.Tensor": "&", "bitwise_or.Tensor": "|",
    "eq.Tensor": "==", "ne.Tensor": "!=", "lt.Tensor": "<", "le.Tensor": "<=", "gt.Tensor": ">",
    "ge.Tensor": ">=", "eq.Scalar": "==", "ne.Scalar": "!=", "lt.Scalar": "<", "le.Scalar": "<=",
    "gt.Scalar": ">", "ge.Scalar": ">=",
}  # fmt: skip
# Methods of the first operand; shapes and orders of dimensions are written without brackets.
_METHODS = {
    "reshape": "reshape", "view": "reshape", "expand": "expand", "permute": "permute",
    "transpose.int": "transpose", "unsqueeze": "unsqueeze", "squeeze.dim": "squeeze",
    "to.dtype": "to", "square": "square", "masked_fill.Scalar": "masked_fill",
}  # fmt: skip
# Operators whose Python binding refuses valid arguments (dimensions without an index).
_UNBOUND = ("aten.index_put",)
_REDUCTIONS = ('"none"', '"mean"', '"sum"')
_END = 2**63 - 1

Keywords = dict[str, str]


def expression(node: Node, operands: Sequence[str]) -> str:
    """Returns Python text that computes `node`.

    Args:
        node: an operator, localised.
        operands: variables of the values that it reads, in the order of `node.inputs`. The names
            `torch`, `F`, `aten`, `kernels`, `functions` (the user's own) and `mesh` (with this
            device's coordinates) must also be bound.
    """
    if draws_random_numbers(node) and not node.op.split(".")[1].endswith("_"):
        # Random numbers follow the order of memory, which a collective may have changed.
        operands = [f"{name}.contiguous()" for name in operands]
    names = iter(operands)
    args = [_text(arg, names) for arg in node.args]
    keywords = {key: _text(value, names) for key, value in node.kwargs}
    if node.op.startswith(("mesh.", PREFIX)):
        return f"{node.op}({_call(args, keywords)})"
    base = node.op.removeprefix("aten.")
    if node.op == "getitem":
        return f"{args[0]}[{args[1]}]"
    if node.op == "autopar.detach":
        return f"{args[0]}.detach()"
    if (function := called(node)) is not None:
        name, first = function
        return f"functions[{quoted(name)}].apply({_call(args[first:], {})})"
    if node.op == ASSUME:
        return f"mesh.assume({_call(args, keywords)})"
    if node.op == MIXTURE:
        for name in PRICED_MIXTURES:
            keywords.pop(name, None)
        return f"mesh.mixture({_call(args, keywords)})"
    for name in PRICED:
        keywords.pop(name, None)
    if node.op == SINKS:
        return f"mesh.sink_attention({_call(args, keywords)})"
    if base in _INFIX and len(args) == 2 and not keywords and isinstance(node.args[0], Ref):
        return f"{args[0]} {_INFIX[base]} {args[1]}"
    writer = _WRITERS.get(base)
    if writer is not None:
        return writer(node, args, keywords)
    if base in _METHODS:
        rest = [item for arg in args[1:] for item in _unpacked(arg)]
        return f"{args[0]}.{_METHODS[base]}({_call(rest, keywords)})"
    if not node.inputs and _takes_device(node.op):
        keywords["device"] = "mesh.device"
    return f"{_function(node.op)}({_call(args, keywords)})"


def _text(arg: Arg, names: Iterator[str]) -> str:
    if isinstance(arg, Ref):
        return next(names)
    if isinstance(arg, Name):
        if arg.text.startswith("mesh."):
            return arg.text  # a size that differs between devices
        return str(TORCH_DTYPES.get(arg.text, f"torch.{arg.text}"))
    if isinstance(arg, str):
        return quoted(arg)
    if isinstance(arg, tuple):
        items = [_text(item, names) for item in arg]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    return repr(arg)


def _unpacked(text: str) -> list[str]:
    """Returns the items of a printed tuple, or the text itself if it is not one."""
    if text.startswith("(") and text != "()":
        return [item for item in text[1:-1].rstrip(",").split(", ") if item]
    return [text]


def _call(args: Sequence[str], keywords: Keywords) -> str:
    return ", ".join([*args, *(f"{key}={value}" for key, value in keywords.items())])


def _function(op: str) -> str:
    """Returns `torch.name` if that is a plain binding, else `aten.name.overload`."""
    if not op.startswith("aten."):
        return f"torch.ops.{op}"
    name, *overload = op.split(".")[1:]
    if isinstance(getattr(torch, name, None), BuiltinFunctionType) and op not in _UNBOUND:
        return f"torch.{name}"
    if any(map(keyword.iskeyword, overload)):
        return f'getattr(aten.{name}, "{overload[0]}")'
    return op


def _overload(op: str) -> Any:
    operator: Any = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part)
    return operator if hasattr(operator, "_schema") else operator.default


def _takes_device(op: str) -> bool:
    return any(argument.name == "device" for argument in _overload(op)._schema.arguments)


def draws_random_numbers(node: Node) -> bool:
    """Returns whether an operator's result depends on a generator's state."""
    if node.is_leaf or not node.op.startswith("aten."):
        return False
    if node.op == "aten.scaled_dot_product_attention":
        return bool(dict(enumerate(node.args)).get(4))
    return torch.Tag.nondeterministic_seeded in _overload(node.op).tags


def _linear(node: Node, args: list[str], keywords: Keywords) -> str:
    return f"F.linear({_call(_trim(args, 'None'), keywords)})"


def _trim(args: list[str], *idle: str) -> list[str]:
    """Returns `args` without default values at the end."""
    while args and args[-1] in idle:
        args = args[:-1]
    return args


def _layer_norm(node: Node, args: list[str], keywords: Keywords) -> str:
    return f"F.layer_norm({_call(args[:5], keywords)})"


def _rms_norm(node: Node, args: list[str], keywords: Keywords) -> str:
    return f"F.rms_norm({_call(args, keywords)})"


def _activation(node: Node, args: list[str], keywords: Keywords) -> str:
    name = node.op.split(".")[1]
    return f"F.{name}({_call(args, keywords)})"


def _embedding(node: Node, args: list[str], keywords: Keywords) -> str:
    """Writes aten.embedding(weight, indices, padding_idx=-1, scale_grad_by_freq, sparse)."""
    padding = args[2:3] if len(args) > 2 and args[2] != "-1" else []
    more = {"padding_idx": padding[0]} if padding else {}
    for at, key in ((3, "scale_grad_by_freq"), (4, "sparse")):
        if len(args) > at and args[at] != "False":
            more[key] = args[at]
    return f"F.embedding({_call([args[1], args[0]], {**more, **keywords})})"


def _attention(node: Node, args: list[str], keywords: Keywords) -> str:
    names = ("attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args[3:], strict=False))
    idle = {"attn_mask": "None", "dropout_p": "0.0", "is_causal": "False"}
    kept = {key: value for key, value in given.items() if value != idle[key]}
    rest = {k: v for k, v in keywords.items() if v not in ("None", "False")}
    return f"F.scaled_dot_product_attention({_call(args[:3], {**kept, **rest})})"


def _cross_entropy(node: Node, args: list[str], keywords: Keywords) -> str:
    """Writes aten.cross_entropy_loss(input, target, weight, reduction=1, ignore_index, ...)."""
    more = dict(
        zip(("weight", "reduction", "ignore_index", "label_smoothing"), args[2:], strict=False)
    )
    more |= keywords
    more["reduction"] = _REDUCTIONS[int(more.get("reduction", "1"))]
    idle = {
        "weight": "None",
        "reduction": '"mean"',
        "ignore_index": "-100",
        "label_smoothing": "0.0",
    }
    kept = {key: value for key, value in more.items() if value != idle[key]}
    return f"F.cross_entropy({_call(args[:2], kept)})"


def _slice(node: Node, args: list[str], keywords: Keywords) -> str:
    """Writes aten.slice.Tensor(x, dim=0, start, end, step=1) as an index."""
    dim = int(args[1]) if len(args) > 1 else 0
    start = "" if len(args) < 3 or args[2] in ("None", "0") else args[2]
    end = "" if len(args) < 4 or args[3] in ("None", str(_END)) else args[3]
    step = f":{args[4]}" if len(args) > 4 and args[4] != "1" else ""
    return f"{args[0]}[{_at(dim, len(node.type.shape), f'{start}:{end}{step}')}]"


def _select(node: Node, args: list[str], keywords: Keywords) -> str:
    return f"{args[0]}[{_at(int(args[1]), len(node.type.shape) + 1, args[2])}]"


def _at(dim: int, rank: int, index: str) -> str:
    return ", ".join([*[":"] * (dim % rank), index])


_WRITERS: dict[str, Callable[[Node, list[str], Keywords], str]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _activation,
    "silu": _activation,
    "relu": _activation,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "cross_entropy_loss": _cross_entropy,
    "slice.Tensor": _slice,
    "select.int": _select,
}
