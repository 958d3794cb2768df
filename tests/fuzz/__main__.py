"""Tests random models: `python -m tests.fuzz 17 23` some, `python -m tests.fuzz 0-100` a range."""

from __future__ import annotations

import sys

import torch

from tests.fuzz.oracle import Job, judge
from tests.fuzz.programs import Random


def main(words: list[str]) -> int:
    seeds: list[int] = []
    for word in words:
        first, _, last = word.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    torch.set_num_threads(1)
    wrong = judge(seeds, start="fork")
    for seed, said in wrong.items():
        job = Job.of(seed)
        print(f"== {seed}: {job.how} on {job.mesh}\n{Random(seed).source}\n{said}\n")
    print(f"{len(seeds)} models, {len(wrong)} wrong: {list(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
