"""Random settings of a training give the losses and weights of a plain loop, or are refused.

`python -m tests.fuzz.training SEED SEED+1` tests the settings of a seed again.
"""

from __future__ import annotations

import pytest

from tests.fuzz.settings import Settings
from tests.fuzz.training import REFUSED, judge

QUICK, ALL, TOGETHER = 1, 602, 50
WORDS = {"blocks": 2, "attention": False, "norm": "rms", "dropout": 0.0, "tied": True, "frozen": "",
         "loss": "mean"}  # fmt: skip
# What once was wrong.
FOUND = [
    # A rank of the second session holds no parameter of a group whose rate has changed.
    Settings(
        -1, "cpu: x=2", WORDS, (12,) * 4, "sgd", grouped=True, scheduled=True, saved=2,
        again={"stages": 2, "microbatches": 2},
    ),
    # The third stage has the tied head, and an odd batch runs as one microbatch.
    Settings(-2, "cpu: x=4", WORDS, (12, 13), "sgd", {"stages": 4, "microbatches": 2, "shapes": 2}),
    # Both halves of a split backward recompute the blocks of their stage.
    Settings(
        -3, "cpu: x=2", {**WORDS, "blocks": 4}, (12,) * 2, "sgd",
        {"stages": 2, "microbatches": 3, "schedule": "zb_h1", "recompute": "selective"},
    ),
]  # fmt: skip


def check(jobs: list[Settings]) -> None:
    said = judge(jobs)
    wrong = {seed: text for seed, text in said.items() if text and not text.startswith(REFUSED)}
    lines = (f"python -m tests.fuzz.training {s} {s + 1}: {text}" for s, text in wrong.items())
    assert not wrong, "\n".join(lines)
    refused = [text for text in said.values() if text.startswith(REFUSED)]
    assert len(refused) < len(jobs) / 3, refused


def test_what_once_was_wrong_is_right() -> None:
    said = judge(FOUND)
    assert not any(said.values()), said


@pytest.mark.parametrize("kind", ["of", "apart", "stale"])
def test_random_settings_train_like_one_process(kind: str) -> None:
    make = getattr(Settings, kind)
    check([make(seed) for seed in range(QUICK)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["of", "apart", "stale"])
@pytest.mark.parametrize("first", range(QUICK, ALL, TOGETHER))
def test_hundreds_of_random_settings_train_like_one_process(first: int, kind: str) -> None:
    make = getattr(Settings, kind)
    check([make(seed) for seed in range(first, min(first + TOGETHER, ALL))])
