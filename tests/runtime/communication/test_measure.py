"""Calibration on a machine whose other load disturbs the measurements."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.calibration import Calibration, Exchange, Point, Product, Timing
from autopar.cost.work import Gemm
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.clocks import Bench
from autopar.runtime.communication.measure import Settings, calibrate, in_order

MESH = Mesh.parse("cpu: gpu=2")
SIDES, PAYLOADS = (8, 32), (256, 1024, 4096, 16384)


def points(seconds: list[float]) -> list[Point]:
    taken = iter(seconds)
    made: list[Point] = [
        Product("f32", Gemm(1, m, n, k, 0), Timing(next(taken), 0.0))
        for m, n, k in itertools.product(SIDES, repeat=3)
    ]
    for size in PAYLOADS:
        made.append(Exchange("all_reduce", ("gpu",), float(size), Timing(next(taken), 0.0)))
    return made


def at_least_as_large(small: Point, large: Point) -> bool:
    if isinstance(small, Product) and isinstance(large, Product):
        a, b = small.gemm, large.gemm
        return a.m <= b.m and a.n <= b.n and a.k <= b.k
    if isinstance(small, Exchange) and isinstance(large, Exchange):
        return small.nbytes <= large.nbytes
    return False


@given(st.lists(st.floats(1e-6, 1e-2), min_size=12, max_size=12))
def test_points_in_order_make_a_calibration(seconds: list[float]) -> None:
    """Each point keeps its time, or gets that of a larger one, which was shorter."""
    measured = points(seconds)
    ordered = in_order(measured)
    assert [
        replace(new, time=old.time) for old, new in zip(measured, ordered, strict=True)
    ] == measured
    for old, new in zip(measured, ordered, strict=True):
        larger = {other.time for other in measured if at_least_as_large(old, other)}
        assert new.time in larger
        assert new.time.seconds <= old.time.seconds
    products = tuple(point for point in ordered if isinstance(point, Product))
    calls = tuple(point for point in ordered if isinstance(point, Exchange))
    Calibration(MESH, torch.__version__, "2026-01-31", products, exchanges=calls)


def test_points_that_rise_remain() -> None:
    rising = points([1e-6 * i for i in range(1, 13)])
    assert in_order(rising) == rising


def test_a_machine_under_erratic_load_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the clock, a thousandth of a second passes, or a thousand times that."""
    now, dice = [0.0], random.Random(3)

    def clock(_: Bench) -> float:
        now[0] += 1e-3 * 10 ** dice.uniform(0, 3)
        return now[0]

    monkeypatch.setattr(Bench, "clock", clock)
    few = Settings(("f32",), SIDES, (256, 4096), (8,), (), 2, 1, 0.0)
    with pytest.warns(RuntimeWarning, match="took longer than larger problems"):
        made = calibrate(
            Mesh.parse("cpu: gpu=1"), torch.device("cpu"), few, "2026-01-31", lambda *_: None
        )
    assert len(made.products) == 8
