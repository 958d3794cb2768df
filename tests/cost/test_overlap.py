"""Overlap and sequence parallelism against published figures."""

from __future__ import annotations

import math

import pytest

from autopar.cost.model import AnalyticModel
from autopar.cost.overlap import overlap_ratio
from autopar.errors import CostError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from benchmarks.published import ulysses

# CO2 (arXiv:2401.16265): TransNormer-LLM 7B on 128 A100 over TCP, a step of 0.109 s and an
# all_reduce of 1.566 s; local steps and percent overlapped.
CO2 = {48: 100.0, 24: 100.0, 12: 83.28, 6: 41.81, 3: 20.39, 1: 6.52}
# DeepSpeed-Ulysses, dense 7B: devices, batch, sequence, SP, speed-up over 256 devices without SP.
ULYSSES = [
    (256, 256, 8192, 1, 1.0),
    (512, 256, 8192, 2, 1.83),
    (512, 128, 16384, 4, 1.79),
    (512, 64, 32768, 8, 1.75),
    (512, 64, 65536, 8, 1.81),
]


@pytest.mark.parametrize(("steps", "percent"), CO2.items())
def test_published_overlap_ratios(steps: int, percent: float) -> None:
    assert 100 * overlap_ratio(steps, 0.109, 1.566) == pytest.approx(percent, abs=4)


@pytest.mark.parametrize(
    ("steps", "step", "call"), [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, 0.0), (1, math.nan, 1.0)]
)
def test_times_that_make_no_sense_are_refused(steps: int, step: float, call: float) -> None:
    with pytest.raises(CostError, match="overlap"):
        overlap_ratio(steps, step, call)


@pytest.mark.parametrize(("gpus", "bsz", "seq", "sp", "published"), ULYSSES)
def test_published_speedups_of_sequence_parallelism(
    gpus: int, bsz: int, seq: int, sp: int, published: float
) -> None:
    assert ulysses.speedup(gpus, bsz, seq, sp) == pytest.approx(published, rel=0.1)


def test_exchanges_cost_much_more_across_nodes() -> None:
    """The published advice: no more sequence parallelism than a node has devices."""

    def seconds(sp: int) -> float:
        prices = AnalyticModel(Mesh.parse(f"A100-80: data=8, sequence={sp}"))
        return prices.collective(Collective("all_to_all", ("sequence",), 1 << 25))

    assert seconds(8) < 1.3 * seconds(4)
    assert seconds(16) > 4 * seconds(8)
