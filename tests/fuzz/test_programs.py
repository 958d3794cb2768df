"""Random models under random plans train as in one process.

`python -m tests.fuzz SEED` shows the model of a seed and tests it again.
"""

from __future__ import annotations

import pytest

from tests.fuzz.oracle import judge

QUICK, ALL, TOGETHER = 3, 1000, 99


def check(seeds: range) -> None:
    wrong = judge(seeds)
    lines = (f"python -m tests.fuzz {seed}: {said}" for seed, said in wrong.items())
    assert not wrong, "\n".join(lines)


def test_random_programs_train_like_one_process() -> None:
    check(range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, TOGETHER))
def test_a_thousand_random_programs_train_like_one_process(first: int) -> None:
    check(range(first, min(first + TOGETHER, ALL)))
