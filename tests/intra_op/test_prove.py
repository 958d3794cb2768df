"""Every rule is proved on its examples and on nodes of whole models; wrong rules are detected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from autopar.capture.capture import capture
from autopar.errors import RuleError
from autopar.intra_op.proofs.case import own_randomness, read_example
from autopar.intra_op.proofs.prove import (
    aliased,
    prove,
    prove_aliased,
    prove_forms,
    prove_node,
)
from autopar.intra_op.rule import OpRule, Signature, resolve, rule
from autopar.intra_op.rules import rules
from autopar.intra_op.strategy import Strategy, form_strategies, strategies
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import TensorType
from autopar.operators.attention.sequence_forms import KINDS
from autopar.operators.forms import forms, forms_of
from autopar.operators.localise import localise
from autopar.passes.normalise import prepare
from tests.intra_op.test_defaults import UNCHECKED
from tests.support.models import MODELS, conv_net

RULES = rules()
# Rules of one string split alike: one operator of each string is proved on uneven parts and on two
# axes, too.
UNEVEN = frozenset({RULES[op].spec: op for op in sorted(RULES, reverse=True)}.values())
LINE, GRID = Mesh.parse("cpu: x=2"), Mesh.parse("cpu: y=2, x=3")


@pytest.mark.parametrize("op", sorted(RULES))
def test_every_rule_is_proved_on_its_examples(op: str) -> None:
    with own_randomness("cpu"):
        failures = [
            case.failure(strategy, mesh)
            for case in [read_example(RULES[op], text) for text in RULES[op].examples]
            for mesh in (LINE, GRID)[: 1 + (op in UNEVEN)]
            for strategy in strategies(case.signature, mesh)
        ]
    assert failures, "no strategy ran"
    assert {str(failure) for failure in failures if failure is not None} == set()


@pytest.mark.slow
def test_every_rule_is_proved_on_every_mesh() -> None:
    for op in sorted(RULES):
        report = prove(RULES[op], (2, 3))
        assert report.proved, str(report)


WITH_FORMS = list(dict.fromkeys(form.op for form in forms().values()))
ATTENTION = "aten.scaled_dot_product_attention"  # has the most forms, layouts and examples


@pytest.mark.parametrize("op", WITH_FORMS)
def test_every_form_is_proved_on_its_examples(op: str) -> None:
    report = prove_forms(RULES[op], (2,) if op in KINDS else (2, 3))
    assert report.proved, str(report)
    further = {text for form in forms_of(op) for text in form.meshes}
    ways = [
        strategy.form
        for example in (*RULES[op].examples, *(e for form in forms_of(op) for e in form.examples))
        for mesh in map(Mesh.parse, ("cpu: x=2", "cpu: y=2, x=2", *further))
        for case in [read_example(RULES[op], example)]
        for strategy, _ in form_strategies(case.node, case.types, mesh)
    ]
    assert set(ways) == {form.name for form in forms_of(op)}  # none goes without a proof


@pytest.mark.slow
def test_every_form_of_attention_is_proved_on_uneven_parts() -> None:
    report = prove_forms(RULES[ATTENTION], (2, 3))
    assert report.proved, str(report)


ALIASED = (
    "aten.linear",
    "aten.mm",
    "aten.bmm",
    "aten.outer",
    "aten.mul.Tensor",
    "aten.cat",
    "aten.where.self",
)


def check_aliases(op: str) -> None:
    """A rule is as right where one value is several operands, and does not look at their names."""
    report = prove_aliased(RULES[op])
    assert not report.failures, str(report)
    mesh = Mesh.parse("cpu: x=2")
    for case in map(partial(read_example, RULES[op]), RULES[op].examples):
        if (same := aliased(case)) is None:
            continue
        first: dict[TensorType, str] = {}
        kinds = dict(zip(same.node.inputs, same.types, strict=True))
        names = {name: first.setdefault(kind, name) for name, kind in kinds.items()}
        node = renamed(same.node, names)
        assert resolve(RULES[op], node, same.types, node.types) == same.signature
        for way in strategies(same.signature, mesh):
            given = same.types, way.operands, way.results, lambda size, axes: size // 2
            steps = (renamed(step, names) for step in localise(same.node, *given))
            assert localise(node, *given) == tuple(steps)


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    return node.map_refs(lambda name: Ref(names.get(name, name)))


@pytest.mark.parametrize("op", ALIASED)
def test_a_rule_holds_where_operands_are_one_value(op: str) -> None:
    check_aliases(op)
    assert prove_aliased(RULES[op]).strategies


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(set(RULES) - UNCHECKED))
def test_every_rule_holds_where_operands_are_one_value(op: str) -> None:
    check_aliases(op)


IN_PLACE = rule("aten.add_.Tensor", "a, a -> a", examples=("i64[4], i64[4]",))
LINEAR = "f64[4, 6], f64[8, 6], f64[8]"
WRONG = {
    "exp is not linear": rule("aten.exp", "... -> ...", linear=True, examples=("f64[4, 6]",)),
    "x + 1 adds the 1 on every rank": rule(
        "aten.add.Tensor", "... -> ...", linear=True, examples=("f64[4, 6], 1",)
    ),
    "a product is not linear in both factors together": rule(
        "aten.mul.Tensor", "..., ... -> ...", linear=((0, 1),), examples=("f64[4], f64[4]",)
    ),
    "a quotient is not linear in its divisor": rule(
        "aten.div.Tensor", "..., ... -> ...", linear=((1,),), examples=("f64[4], f64[4]>0",)
    ),
    "the bias is added on every rank": rule(
        "aten.linear", "... k, n k, n -> ... n", examples=(LINEAR,)
    ),
    "columns taken for the contraction": rule(
        "aten.linear", "... n, k n, +k -> ... n", examples=("f64[6, 6], f64[6, 6], f64[6]",)
    ),
    "a maximum is no sum": rule("aten.amax", "a b -> b", examples=("f64[4, 6], (0,)",)),
    "sums need what is before them": rule("aten.cumsum", "a b -> a b", examples=("f64[4, 6], 1",)),
    "layer_norm needs its whole row": rule(
        "aten.layer_norm", "a b -> a b", examples=("f64[4, 6], (6,)",)
    ),
    "a mean over a part": rule("aten.mean", "a b ->", examples=("f64[4, 6]",)),
    "a running sum": rule("aten.cumsum", "a b -> a b", examples=("f64[4, 6], 0",)),
    "neighbours across a cut": rule("aten.roll", "a b -> a b", examples=("f64[4, 6], (1,), (1,)",)),
    "the inner dimension of a merge": rule(
        "aten.reshape", "a b -> (b a)", examples=("f64[4, 6], (24,)",)
    ),
    "the wrong dimensions swapped": rule(
        "aten.transpose.int", "a b c -> a c b", examples=("f64[6, 6, 6], 0, 1",)
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_a_wrong_rule_is_caught_by_name(wrong: OpRule) -> None:
    report = prove(wrong)
    assert not report.proved
    assert all(failure.op == wrong.op for failure in report.failures)
    assert all(failure.difference > 1e-3 for failure in report.failures)
    assert all(failure.strategy != "whole" for failure in report.failures)
    assert wrong.examples[0] in str(report)


def test_a_layout_that_is_wrong_backwards_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling a varying operand replicated changes nothing forwards, but forgets an all_reduce."""

    def forgetful(signature: Signature, mesh: Mesh) -> tuple[Strategy, ...]:
        found = strategies(signature, mesh)
        return tuple(
            replace(s, operands=tuple(replace(layout, varying=()) for layout in s.operands))
            for s in found
        )

    monkeypatch.setattr("autopar.intra_op.proofs.prove.strategies", forgetful)
    report = prove(RULES["aten.linear"])
    assert {f.value for f in report.failures} >= {f"gradient of operand {i}" for i in range(3)}
    assert all(failure.value.startswith("gradient") for failure in report.failures)


def test_what_is_written_into_must_be_whole() -> None:
    """Every device holds the whole of a buffer, and would write into a slice that is dropped."""
    report = prove(IN_PLACE)
    assert {failure.strategy for failure in report.failures} >= {"a@x"}
    assert all("written into" in failure.value for failure in report.failures)
    assert prove(replace(IN_PLACE, spec="a!, a! -> a!")).proved


def test_random_operators_are_compared_by_shape() -> None:
    """Two dropouts never agree, yet their parts have shapes that can be wrong."""
    report = prove(RULES["aten.dropout"])
    assert report.proved
    merged = rule("aten.dropout", "a b -> b a", examples=("f64[6, 6], 0.5, True",))
    assert {failure.difference for failure in prove(merged).failures} == {math.inf}


@pytest.mark.parametrize("example", ["f64[4", "f64[4, 6], f64[5, 5]", "f64[4, 6], f64[6, 4, 2]"])
def test_an_example_that_cannot_be_run_is_named(example: str) -> None:
    with pytest.raises(RuleError, match=r"aten\.mm"):
        prove(replace(RULES["aten.mm"], examples=(example,)))


def prepared(name: str, training: bool = True) -> Graph:
    """A small model's graph as the planner reads it."""
    sizes = {"batch": 4, "seq": 4, "layers": 1} if name in MODELS else {"batch": 4}
    model, batch = ({**MODELS, "conv_net": conv_net})[name](**sizes)
    return prepare(capture(model.train(training), kwargs=batch).graph)


# Every operator is proved on its examples; whole models show that their nodes are like these.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("llama", "conv_net")))
        for name in (*MODELS, "conv_net")
    ],
)
def test_every_node_of_a_model_is_proved(name: str) -> None:
    graph = prepared(name)
    seen = set()
    for node in graph.folded:
        key = (node.op, node.types, str(node.map_refs(lambda name: str(graph[name].type)).args))
        if not node.is_leaf and key not in seen:
            seen.add(key)
            report = prove_node(RULES[node.op], graph, node)
            assert report.proved, str(report)


@pytest.mark.parametrize("name", [*MODELS, "conv_net"])
def test_every_operator_of_a_model_in_evaluation_has_a_rule(name: str) -> None:
    operators = {node.op for node in prepared(name, training=False).nodes if not node.is_leaf}
    assert operators <= set(RULES)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_every_operator_of_a_model_with_dropout_has_a_rule(name: str) -> None:
    model, batch = MODELS[name](layers=1, dropout=0.1)
    operators = {n.op for n in prepare(capture(model, kwargs=batch).graph).nodes if not n.is_leaf}
    assert "aten.dropout" in operators
    assert operators <= set(RULES)
