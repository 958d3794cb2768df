"""Every operator with samples in torch is captured correctly, and is right under every strategy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from autopar.ir.graph import Graph

# Why an operator runs whole in samples of it, without a rule. None of them trains a network.
MEMORY, INDICES, BY_VALUES = "a layout in memory", "reaches anywhere", "size by values"
WITHOUT_RULE = {
    "aten._pdist_forward": INDICES,
    "aten.as_strided_scatter": INDICES,
    "aten.empty_permuted": MEMORY,
    "aten.empty_strided": MEMORY,
    "aten.histogram.bin_ct": "bounds of the data",
    "aten.linalg_ldl_solve": "a factorisation's own pivots",
    "aten.linalg_lu_solve": "a factorisation's own pivots",
    "aten.linspace.Tensor_Scalar": "a row of numbers",
    "aten.linspace.Tensor_Tensor": "a row of numbers",
    "aten.lu_unpack": "a factorisation's own pivots",
    "aten.multilabel_margin_loss_forward": "torch's definition of it is wrong",
    "aten.native_batch_norm": "its batch_norm has a rule",
    "aten.native_group_norm": "its group_norm has a rule",
    "aten.new_empty_strided": MEMORY,
    "aten.nonzero": BY_VALUES,
    "aten.nonzero_static": INDICES,
    "aten.put": INDICES,
    "aten.repeat_interleave.Tensor": BY_VALUES,
    "aten.resize": MEMORY,
    "aten.resize_as": MEMORY,
    "aten.searchsorted.Scalar": "one number",
    "aten.segment_reduce": INDICES,
    "torch_nn._linear_cross_entropy_batch_chunked": "not an operator of ATen",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": "not an operator of ATen",
}
PARTS = 16
# Numbers in the place of tensors, NaN, look-ups, a tuple of operands, what is taken apart.
SMOKE = ("gather", "nansum", "cat", "softmax", "nn_functional_dropout", "kron")


@pytest.fixture
def opinfo() -> Iterator[ModuleType]:
    """The oracle, imported late: torch takes seconds to list its samples."""
    from tests.oracles import opinfo

    with warnings.catch_warnings():  # samples try what is deprecated, too
        warnings.simplefilter("ignore")
        yield opinfo


def test_some_operators_pass(opinfo: ModuleType) -> None:
    verdicts = [opinfo.judge(opinfo.operators()[name], 4) for name in SMOKE]
    assert [v.status for v in verdicts] == ["splits"] * len(SMOKE), verdicts
    assert verdicts[0] == opinfo.judge(opinfo.operators()[SMOKE[0]], 4)


def first_leaf(graph: Graph, known: object) -> Graph:
    """A graph that gives back what it is given."""
    return replace(graph, outputs=((graph.outputs[0][0], graph.nodes[0].name),))


def test_a_wrong_rule_and_a_wrong_graph_are_found(
    opinfo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = opinfo.operators()["nn_functional_softmin"]
    right = opinfo.RULES["aten.softmax.int"]
    monkeypatch.setitem(opinfo.RULES, right.op, replace(right, linear=True))
    assert any("aten.softmax.int" in text for text in opinfo.judge(op, 2).failures)
    monkeypatch.setitem(opinfo.RULES, right.op, right)
    monkeypatch.setattr(opinfo, "prepare", lambda graph: graph)
    monkeypatch.setattr(opinfo, "decompose_unknown", first_leaf)
    assert any("the graph gives another" in text for text in opinfo.judge(op, 2).failures)


def test_operators_that_got_a_rule_are_not_excused(opinfo: ModuleType) -> None:
    assert not WITHOUT_RULE.keys() & opinfo.RULES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_sample_of_any_operator_fails(opinfo: ModuleType, part: int) -> None:
    """Every operator left out has a known reason; the benchmark `operators` tabulates all."""
    known = {reason for _, reason in opinfo.REASONS}
    for name in sorted(opinfo.operators())[part::PARTS]:
        verdict = opinfo.judge(opinfo.operators()[name])
        assert not verdict.failures, f"{name}: " + "\n".join(verdict.failures)
        assert set(verdict.refused) <= known, name
        assert verdict.unknown <= WITHOUT_RULE.keys(), name
