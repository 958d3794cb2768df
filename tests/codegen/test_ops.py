"""The text of an operator computes what the operator computes, on all examples of rules."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.codegen.ops import expression
from autopar.intra_op.rules import rules
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import TensorType
from autopar.operators import kernels
from autopar.operators.interpret import TORCH_DTYPES, execute, tensor_type
from autopar.runtime.runtime import Runtime

CPU = torch.device("cpu")
# In the examples of rules, the operands: "f64[4, 8]", "const f64[8]>" (positive), "i64[4]<8".
OPERAND = re.compile(r"(?:const )?((?:bool|[cfiu]\d+)\[[\d, ]*\])(?:([<>])(\d+))?")
UNWRITTEN = ("aten.empty", "aten.new_empty")  # memory as it is


def values_of(example: str) -> tuple[str, list[Tensor]]:
    """An example with its operands replaced by %x0, %x1, ..., and values for these."""
    generator = torch.Generator().manual_seed(0)
    values: list[Tensor] = []

    def operand(match: re.Match[str]) -> str:
        kind, relation, bound = TensorType.parse(match[1]), match[2], int(match[3] or 0)
        dtype = TORCH_DTYPES[kind.dtype]
        if kind.floating:
            value = torch.randn(kind.shape, dtype=dtype, generator=generator)
            if relation is not None:
                value = value.abs().clamp(0.1, 0.9) * (bound or 1)
        else:
            value = torch.randint(
                int(relation == ">"), max(bound, 2), kind.shape, generator=generator
            )
        values.append(value.to(dtype))
        return f"%x{len(values) - 1}"

    return OPERAND.sub(operand, example), values


# What a person may leave out, and forms that no rule needs an example of.
FURTHER = {
    "aten.add.Tensor": ("f64[4], 1", "f64[4], 1.5, alpha=2", "i64[4], i64[4]"),
    "aten.sub.Tensor": ("f64[4], 1", "i64[4], i64[4]"),
    "aten.mul.Tensor": ("f64[4], inf", "f64[4], -inf"),
    "aten.pow.Tensor_Scalar": ("f64[4]>0, -1", "f64[4]>0, -0.5", "i64[4], 2"),
    "aten.logical_and": ("f64[4], i64[4]",),
    "aten.logical_or": ("f64[4], i64[4]",),
    "aten.matmul": ("f64[4], f64[4, 2]",),
    "aten.gelu": ("f64[4], approximate='tanh'", "f64[4], approximate='none'"),
    "aten.leaky_relu": ("f64[4], 0.2",),
    "aten.linear": ("f64[4, 6], f64[8, 6], None",),
    "aten.layer_norm": (
        "f64[4, 6, 8], (8,), f64[8]",
        "f64[4, 6, 8], (8,), None, None, 0.001",
        "f64[4, 6, 8], (8,), f64[8], f64[8], 0.001, False",
    ),
    "aten.rms_norm": ("f64[4, 8], (8,)", "f64[4, 8], (8,), f64[8], 0.001", "f64[4, 8], (8,), None"),
    "aten.embedding": (
        "f64[8, 6], i64[4]<8, -1, True",
        "f64[8, 6], i64[4]<8, 3, False, False",
        "f64[8, 6], i64[4]<8, -1, False, True",
    ),
    "aten.scaled_dot_product_attention": (
        "f64[2, 4, 4, 3], f64[2, 4, 6, 3], f64[2, 4, 6, 2], None, 0.0, False, scale=0.25",
        "f64[2, 4, 4, 3], f64[2, 4, 4, 3], f64[2, 4, 4, 3], None, 0.0, True, scale=None",
        "f64[2, 4, 4, 3], f64[2, 2, 4, 3], f64[2, 2, 4, 3], None, 0.0, True, enable_gqa=True",
        "f64[2, 4, 4, 3], f64[2, 4, 6, 3], f64[2, 4, 6, 2], f64[4, 6], 0.0, False, scale=0.25",
        "f64[2, 4, 4, 3], f64[2, 4, 6, 3], f64[2, 4, 6, 2], attn_mask=f64[4, 6], is_causal=False",
    ),
    "aten.cross_entropy_loss": (
        "f64[4, 6], i64[4]<6, None, 1, 2, 0.1",
        "f64[4, 6], i64[4]<6, f64[6]>0, 1, -100, 0.0",
        "f64[4, 6], i64[4]<6, None, 2, -100, 0.25",
        "f64[4, 6], f64[4, 6]<1",
        "f64[4, 6], i64[4]<6, reduction=2, ignore_index=3",
    ),
    "aten.slice.Tensor": (
        "f64[4, 6, 8]",
        "f64[4, 6, 8], 0",
        "f64[4, 6, 8], -1, None, -2",
        "f64[4, 6, 8], 2, -3, 9223372036854775807, 2",
        "f64[4, 6, 8], -2, 1, None",
    ),
    "aten.select.int": ("f64[4, 6, 8], -1, 2", "f64[4, 6, 8], 0, -2", "f64[4], 0, 1"),
    "aten.index.Tensor": ("f64[8, 6], (bool[8],)",),
    "aten.squeeze.dim": ("f64[4, 1], -1",),
    "aten.expand": ("f64[4, 1], (-1, 3)", "f64[4, 1], (4, 3), implicit=False"),
    "aten.permute": ("f64[4, 6], (-1, 0)",),
    "aten.view": ("f64[4, 6], (-1,)", "f64[4, 6], (24,)"),
    "aten.reshape": ("f64[1], ()",),
    "aten.to.dtype": ("f64[4], f32, False, True", "i64[4], bool", "bool[4], f64"),
    "aten.arange": ("6, dtype=f64", "4, dtype=i32, device='cpu', pin_memory=False"),
    "aten.arange.start": ("1, 7, dtype=i64, layout=None",),
    "aten.full": ("(2, 3), -inf, dtype=f64", "(), 1, dtype=i64", "(4,), nan, dtype=f64"),
    "aten.ones": ("(2,), dtype=f64, pin_memory=False",),
    "aten.masked_fill.Scalar": ("f64[4], bool[4], inf", "f64[4], bool[4], -1e+30"),
    "aten.clamp": ("f64[4], None, 0.5", "f64[4], min=0.0"),
    "aten.eq.Scalar": ("bool[4], True",),
    "aten.ne.Scalar": ("f64[4], nan",),
    "aten.dropout": ("f64[4], 0.0, True",),
    "aten.cat": ("(f64[4],)",),
}


def cases() -> list[tuple[str, str]]:
    """All operators that are expressions; a share is but a variable, a write a statement."""
    others = ("autopar.share", "autopar.write")
    table = {op: rule.examples for op, rule in rules().items() if op not in others}
    written = [(op, example) for op, examples in table.items() for example in examples]
    return written + [(op, example) for op, texts in FURTHER.items() for example in texts]


def run(code: str, names: dict[str, Any]) -> Any:
    mesh = Runtime(Mesh.parse("cpu: x=1"), CPU)
    bound = {"torch": torch, "F": F, "aten": torch.ops.aten, "mesh": mesh, "kernels": kernels}
    torch.manual_seed(0)
    return eval(code, bound, names)


def assert_same(found: Any, expected: Any) -> None:
    if not isinstance(expected, Tensor):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(("op", "example"), cases())
def test_what_is_written_computes_the_same(op: str, example: str) -> None:
    arguments, values = values_of(example)
    node = parse_graph(f"graph 'example'\n%y = {op}({arguments}) : ()").nodes[0]
    given: dict[str, Any] = {f"x{i}": value for i, value in enumerate(values)}
    if op == "getitem":
        given = {name: (value,) for name, value in given.items()}
    torch.manual_seed(0)
    expected = execute(node, copy.deepcopy(given), CPU)
    types = (expected,) if isinstance(expected, Tensor) else tuple(expected)
    node = replace(node, types=tuple(map(tensor_type, types)))
    mine = copy.deepcopy(given)
    code = expression(node, list(node.inputs))
    found = run(code, mine)
    if op.startswith(UNWRITTEN):
        found, expected = torch.zeros_like(found), torch.zeros_like(expected)
    assert_same(found, expected)
