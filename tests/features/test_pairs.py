"""Combinations of features, against plain torch in one process.

Two cases here cover all features; `python -m pytest -m slow tests/features` runs all pairs on
both models, and `python benchmarks/features.py` writes them to a table.
"""

from __future__ import annotations

import pytest

from tests.features.feature import Case
from tests.features.sharded import assert_right, judged
from tests.features.table import FEATURES, combinations, drawn, further
from tests.features.zoo import FAMILIES, OTHERS

# Every feature once.
FEW = [
    ("tied", "stages", "dropout", "resume", "scheduler", "groups", "frozen"),
    ("zero3", "clipping", "accumulation", "ema", "recompute", "offload", "megatron", "fuse"),
]


def test_every_feature_among_seven_or_eight() -> None:
    for case, outcomes in judged([Case.of("gpt2", names, FEATURES) for names in FEW]):
        assert_right(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_all_pairs(model: str) -> None:
    for case, outcomes in judged(combinations(model, 2)):
        assert_right(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_further_features_beside_five(model: str) -> None:
    for case, outcomes in judged(further(model, 5)):
        assert_right(case, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*FAMILIES, *OTHERS])
def test_seven_at_a_time(model: str) -> None:
    """Drawn at random; of three features most come together in one of the cases."""
    for case, outcomes in judged(drawn(model, 7, 24 if model in FAMILIES else 8)):
        assert_right(case, outcomes)
