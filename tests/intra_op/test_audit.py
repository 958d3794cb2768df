"""The rules forbid nothing without need, and the audit detects rules that do."""

from __future__ import annotations

import pytest

from autopar.intra_op.proofs.audit import KEPT, audit
from autopar.intra_op.rule import OpRule, rule
from autopar.intra_op.rules import rules

RULES = rules()


# torch's recurrent kernels do not check the sizes of what they are given: a wrong split is a crash.
UNCHECKED = ("aten.gru.input", "aten.lstm.input")


@pytest.mark.parametrize("op", sorted(set(RULES) - set(UNCHECKED)))
def test_every_whole_factor_of_every_rule_has_to_be_whole(op: str) -> None:
    for finding in audit(RULES[op]):
        assert not finding.telling, finding


@pytest.mark.parametrize(("op", "factor"), KEPT)
def test_every_reason_is_needed(op: str, factor: str) -> None:
    """On some examples; on others, such as experts with a bias, the factor has to be whole."""
    found = [f for f in audit(RULES[op]) if f.factor == factor and f.holds]
    assert found
    assert all(finding.reason for finding in found)


MM = ("f64[4, 6], f64[6, 8]",)
TOO_CAREFUL = {
    "rows of a product": (rule("aten.mm", "m! k, k n -> m! n", examples=MM), "m"),
    "a contraction": (rule("aten.mm", "m k!, k! n -> m n", examples=MM), "k"),
    "a merge": (rule("aten.reshape", "(a b)! -> a! b!", examples=("f64[24], (4, 6)",)), "a"),
    "a batch": (rule("aten.cumsum", "a! b! -> a! b!", examples=("f64[4, 6], 1",)), "a"),
}


@pytest.mark.parametrize("case", TOO_CAREFUL.values(), ids=list(TOO_CAREFUL))
def test_a_rule_that_is_too_careful_is_found(case: tuple[OpRule, str]) -> None:
    careful, factor = case
    assert {finding.factor for finding in audit(careful) if finding.holds} == {factor}


def test_a_finding_shows_the_rule_that_holds() -> None:
    careful = rule("aten.mm", "m! k, k n -> m! n", examples=MM)
    (finding,) = audit(careful)
    assert finding.spec == "m k, k n -> m n"
    assert finding.strategies == 2  # 4 rows by 2 and by 3


def test_what_nothing_can_be_learnt_from_is_left_out() -> None:
    random = rule("aten.dropout", "a! -> a!", examples=("f64[4], 0.5, True",))
    zeros = rule("aten.zeros_like", "a! -> a!", examples=("f64[4]",))
    single = rule("aten.exp", "a! -> a!", examples=("f64[1]",))
    written = rule("aten.add_.Tensor", "a!, a! -> a!", examples=("i64[4], i64[4]",))
    assert [audit(item) for item in (random, zeros, single, written)] == [()] * 4


def test_a_factor_that_no_mesh_splits_is_not_said_to_hold() -> None:
    uneven = rule("aten.reshape", "(a b)! -> a! b!", examples=("f64[10], (5, 2)",))
    found = audit(uneven)
    assert [finding.factor for finding in found] == ["a", "b"]
    assert not any(finding.strategies or finding.holds for finding in found)
