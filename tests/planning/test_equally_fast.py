"""The simplest of several pipelines is chosen that are equally fast within the error of prices."""

from __future__ import annotations

import pytest

from autopar.cost.device import devices
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.stage_values import Candidate, Chunk, Pipeline, Stage
from autopar.inter_op.submeshes import SubMesh
from autopar.planning.pipelines.equally_fast import simplest_first

A100 = next(entry for entry in devices() if entry.name == "A100-80")
COUNT = 10


def played(stages: int, seconds: float, sent: float) -> tuple[float, Timeline, Pipeline]:
    """A pipeline of so many stages whose collectives take `sent` seconds a step."""
    part = SubMesh(1, 1, ())
    candidate = Candidate(seconds / COUNT, sent=sent / COUNT)
    stage = Stage(part, (Chunk(0, 0, candidate),), seconds / COUNT, 0.0, 0.0)
    pipeline = Pipeline("1f1b", COUNT, (stage,) * stages, seconds, 0.0, seconds)
    return seconds, Timeline((), (), (), (), ()), pipeline


@pytest.mark.parametrize(
    ("sent", "stages"),
    [
        (1.0, 8),  # the same collectives: 0.05 s of kernels are off by 7 % of 0.05 s
        (2.0, 4),  # 0.95 s of kernels against 1 s of collectives: off by 0.07 and 0.04 s
    ],
)
def test_the_difference_decides_and_not_the_whole(sent: float, stages: int) -> None:
    found = simplest_first([played(4, 10.05, sent), played(8, 10.0, 1.0)], A100)
    assert len(found[0][2].stages) == stages
    assert sorted(row[0] for row in found) == [10.0, 10.05]
