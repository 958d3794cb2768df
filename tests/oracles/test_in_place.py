"""Operators of ATen that write are right on buffers, on views and on local values, or refused.

`python -m pytest tests/oracles/test_in_place.py -m slow` tries all of them (some minutes), and
`python -m benchmarks.in_place` writes all results to a table.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.oracles import in_place

# Of every kind: a cast, indices, a mask, no reader of the old value, chance, a list, a shape.
SMOKE = (
    "add_.Tensor", "lerp_.Scalar", "index_put_.default", "masked_fill_.Scalar", "zero_.default",
    "bernoulli_.float", "_foreach_mul_.Scalar", "unsqueeze_.default", "index_add_.default",
    "logical_and_.default", "swapaxes_.default",
)  # fmt: skip
# A buffer would have another shape in the next step; torch has no derivative of a draw.
# A write that autograd does not notice leaves the gradient of what was there.
REFUSED = (
    ("unsqueeze_", "buffer"),
    ("swapaxes_", "buffer"),
    ("bernoulli_", "local"),
    ("logical_and_", "local"),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators are deprecated
        yield


@pytest.mark.parametrize("name", SMOKE)
def test_some_are_right_wherever_they_write(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    for place in in_place.PLACES:
        verdict = in_place.judge(operator, place)
        expected = "refused" if (packet, place) in REFUSED else "right"
        assert verdict.status == expected, verdict


@pytest.mark.slow
def test_all_are_right_or_refused() -> None:
    found = [in_place.judge(o, place) for o in in_place.overloads() for place in in_place.PLACES]
    assert len(found) > 600
    assert not [verdict for verdict in found if verdict.status == "wrong"]
    assert sum(verdict.status == "right" for verdict in found) > 0.8 * len(found)
