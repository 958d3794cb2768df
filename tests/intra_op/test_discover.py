"""Rules discovered by running operators on halves equal the rules that people wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.intra_op.proofs.case import read_example
from autopar.intra_op.proofs.discover import discover, source
from autopar.intra_op.proofs.prove import prove
from autopar.intra_op.rule import OpRule, Signature, resolve, rule
from autopar.intra_op.rules import rules
from autopar.intra_op.strategy import strategies
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.exchange import local_steps

RULES = rules()
TWO = Mesh.parse("cpu: x=2")
HEADS = "f64[2, 4, 4, 3], f64[2, 4, 6, 3], f64[2, 4, 6, 2]"
EXAMPLES = {
    "aten.linear": ("f64[4, 6, 8], f64[12, 8], f64[12]", "f64[4, 6], f64[8, 6]"),
    "aten.mm": ("f64[4, 6], f64[6, 8]",),
    "aten.bmm": ("f64[4, 4, 6], f64[4, 6, 2]",),
    "aten.add.Tensor": ("f64[4, 6], f64[6]", "f64[4, 6], f64[4, 1]"),
    "aten.mul.Tensor": ("f64[4, 6], f64[6]",),
    "aten.where.self": ("bool[4, 1], f64[4, 6], f64[6]",),
    "aten.softmax.int": ("f64[4, 6, 8], 1",),
    "aten.layer_norm": ("f64[4, 6, 8], (8,), f64[8], f64[8]",),
    "aten.embedding": ("f64[8, 6], i64[4, 6]<8", "f64[8, 6], i64[4]<8"),
    "aten.sum.dim_IntList": ("f64[4, 6, 8], (1,)",),
    "aten.max.dim": ("f64[4, 6, 8], 1",),
    "aten.transpose.int": ("f64[4, 6, 8], 1, 2",),
    "aten.reshape": ("f64[4, 6, 8], (4, 48)",),
    "aten.expand": ("f64[4, 1], (6, 4, 8)",),
    "aten.zeros": ("(4, 6)",),
    "aten.view_as_real": ("c128[4, 6]",),
    "aten.scaled_dot_product_attention": (HEADS,),
    "aten.conv2d": ("f64[2, 4, 4, 3], f64[6, 4, 2, 2], f64[6], (2, 1), (1, 0)",),
}
# What discovery finds beside the rule; test_audit.py says why it is not in the rule.
BESIDE = {"aten.scaled_dot_product_attention": ["f64[2@x, 4, 6, 2]"]}


@torch.library.custom_op("discovery::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """A gated linear layer: (x * tanh(gate)) weight^T."""
    return (x * gate.tanh()) @ weight.T


@torch.library.custom_op("discovery::forwards", mutates_args=())
def forwards(x: Tensor) -> Tensor:
    """An operator without a backward."""
    return x.sin()


def gated_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, gate, weight = ctx.saved_tensors
    rows = gradient @ weight
    weights = torch.einsum("...n,...k->nk", gradient, x * gate.tanh())
    return rows * gate.tanh(), rows * x * (1 - gate.tanh() ** 2), weights


gated.register_autograd(
    gated_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def signature(item: OpRule, example: str) -> Signature:
    case = read_example(item, example)
    return resolve(item, case.node, case.types, case.node.types)


def splits(item: OpRule, example: str) -> set[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    """The layouts of every strategy on two devices that splits a factor, or nothing.

    Discovery runs operators on parts as they are; what they could ask other parts for, it cannot
    know.
    """
    case = read_example(item, example)
    found = strategies(signature(item, example), TWO)
    return {
        (s.operands, s.results)
        for s in found
        if not str(s).startswith(("+", "-")) and not local_steps(case.node, case.types, s.operands)
    }


@pytest.mark.parametrize("op", EXAMPLES)
def test_the_written_rule_is_found(op: str) -> None:
    found = discover(op, EXAMPLES[op])
    assert prove(found, (2,)).proved
    for example in EXAMPLES[op]:
        extra = splits(found, example) - splits(RULES[op], example)
        assert splits(RULES[op], example) <= splits(found, example)
        assert len(extra) == len(BESIDE.get(op, ()))
        linear = set(signature(RULES[op], example).linear)
        assert linear <= set(signature(found, example).linear)


def test_the_string_is_the_one_that_a_person_would_write() -> None:
    found = discover("aten.linear", EXAMPLES["aten.linear"])
    assert found.spec == "... a, b a, +b -> ... b"
    assert discover("aten.embedding", EXAMPLES["aten.embedding"]).spec == "a! b, ... -> ... b"
    assert discover("aten.reshape", ("f64[4, 6], (24,)",)).spec == "a b! -> (a c)"


def test_a_bias_is_added_and_linear_in_pairs() -> None:
    found = discover("aten.linear", EXAMPLES["aten.linear"][:1])
    assert found.linear == ((0, 2), (1, 2))


@pytest.mark.parametrize("op", ["aten.exp", "aten.add.Tensor", "aten.mm", "aten.logaddexp"])
def test_operands_are_found_too(op: str) -> None:
    found = discover(op)
    assert found.examples
    assert found.spec == ("... a, a b -> ... b" if op == "aten.mm" else RULES_LIKE[op])


RULES_LIKE = {
    "aten.exp": "... -> ...",
    "aten.add.Tensor": "..., ... -> ...",
    "aten.logaddexp": "..., ... -> ...",
}


def test_an_own_operator_is_found() -> None:
    found = discover("discovery::gated", ["f64[4, 6, 8], f64[4, 6, 8], f64[10, 8]"])
    assert found.op == "discovery.gated"
    assert found.spec == "... a, ... a, b a -> ... b"
    assert found.linear == ((0,), (2,))


def test_what_is_printed_can_be_pasted() -> None:
    found = discover("discovery::gated", ["f64[4, 6, 8], f64[4, 6, 8], f64[10, 8]"])
    text = source(found)
    assert text.startswith('autopar.rule(\n    "discovery::gated",\n')
    assert eval(text.removeprefix("autopar."), {"rule": rule}) == found


def test_an_operator_without_a_backward_is_found_where_it_takes_no_gradient() -> None:
    assert discover("discovery::forwards", ["const f64[4, 6]"]).spec == "... -> ..."
    with pytest.raises(RuleError, match="backwards") as raised:
        discover("discovery::forwards", ["f64[4, 6]"])
    assert "const" in str(raised.value)


def test_sizes_need_not_be_even() -> None:
    assert discover("aten.mm", ["f64[3, 5], f64[5, 7]"]).spec == "... a, a b -> ... b"


def test_what_an_operator_writes_into_is_not_split() -> None:
    assert discover("aten.add_.Tensor", ["i64[4], i64[]"]).spec == "a!,  -> b!"


@pytest.mark.parametrize(
    ("op", "examples", "says"),
    [
        ("aten.dropout", ["f64[4], 0.5, True"], "random"),
        ("aten.softmax.int", ["f64[4, 6], 0", "f64[4, 6], 1"], "no one factor string"),
        ("aten.layer_norm", [], "--example"),
        ("aten.mm", ["f64[4, 6], f64[4, 6]"], "cannot run"),
        ("aten.no_such_operator", ["f64[4]"], "cannot run"),
        ("aten.cat", [f"({', '.join(['f64[4, 6]'] * 12)})"], "too many operands"),
    ],
)
def test_what_cannot_be_told_is_refused(op: str, examples: list[str], says: str) -> None:
    with pytest.raises(RuleError) as raised:
        discover(op, examples)
    assert says in str(raised.value)
