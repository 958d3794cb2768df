"""Calibration files, their refusals, and prices interpolated from measurements."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.calibration import Calibration, Exchange, Kernel, Product, Timing
from autopar.cost.measured import Curve, MeasuredModel, pooled
from autopar.cost.model import AnalyticModel
from autopar.cost.work import Gemm, Work
from autopar.errors import CalibrationError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

MESH = Mesh.parse("cpu: data=2, tensor=2")
SIDE = (16, 64, 256)
ATTENTION = "aten.scaled_dot_product_attention"


def took(m: int, n: int, k: int) -> float:
    """Seconds of some machine, not a power law."""
    return 3e-6 + 2e-11 * m * n * k + 1e-9 * (m * n + n * k)


def calibration() -> Calibration:
    products = tuple(
        Product("f32", Gemm(1, m, n, k, 0), Timing(took(m, n, k), 0.05))
        for m, n, k in itertools.product(SIDE, repeat=3)
    )
    kernels = [
        Kernel("aten.gelu", "f32", 0.0, float(n), Timing(5e-6 + 4e-9 * n, 0.1))
        for n in (1024, 65536, 1 << 20)
    ]
    kernels += [
        Kernel("aten.add.Tensor", "f32", 0.0, float(n), Timing(2e-6 + 1e-10 * n, 0.1))
        for n in (1024, 1 << 20)
    ]
    kernels += [
        Kernel(ATTENTION, "f32", float(n), n / 8, Timing(1e-5 + 1e-10 * n, 0.2), "flops")
        for n in (1 << 20, 1 << 26)
    ]
    calls = tuple(
        Exchange(kind, axes, float(n), Timing(3e-4 * len(axes) + n / 4e8, 0.3))
        for kind in ("all_reduce", "all_gather")
        for axes in (("data",), ("tensor",), ("data", "tensor"))
        for n in (1 << 10, 1 << 16, 1 << 22)
    )
    return Calibration(MESH, "2.13.0", "2026-01-31", products, tuple(kernels), calls)


MADE = calibration()
MODEL = MeasuredModel(MESH, MADE)


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "f32") -> Work:
    gemm = Gemm(batch, m, n, k, 0)
    return Work("aten.linear", gemm.flops, 0.0, dtype, gemm)


def test_a_calibration_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "calibration.toml"
    file.write_text(MADE.to_toml(), encoding="utf-8")
    assert Calibration.load(file) == MADE


def test_every_measured_point_has_its_measured_price() -> None:
    for item in MADE.products:
        g = item.gemm
        price = MODEL.compute(product(g.m, g.n, g.k))
        assert price == pytest.approx(item.time.seconds, rel=1e-12)
    for kernel in MADE.kernels:
        work = Work(kernel.op, kernel.flops, kernel.nbytes, kernel.dtype)
        assert MODEL.compute(work) == pytest.approx(kernel.time.seconds, rel=1e-12)
    for call in MADE.exchanges:
        price = MODEL.collective(Collective(call.kind, call.axes, int(call.nbytes)))
        assert price == pytest.approx(call.time.seconds, rel=1e-12)


length = st.integers(1, 3000)


@given(st.tuples(length, length, length), st.integers(0, 2), length)
def test_prices_of_products_rise_along_each_side(
    shape: tuple[int, int, int], place: int, more: int
) -> None:
    m, n, k = (size + more * (i == place) for i, size in enumerate(shape))
    assert MODEL.compute(product(*shape)) <= MODEL.compute(product(m, n, k)) * (1 + 1e-12)


@given(st.floats(0, 1e10), st.floats(0, 1e10))
def test_prices_of_kernels_and_collectives_rise_with_bytes(nbytes: float, more: float) -> None:
    for op in ("aten.gelu", "aten.tanh", "aten.tanh backward"):
        less = MODEL.compute(Work(op, 1.0, nbytes, "f32"))
        assert less <= MODEL.compute(Work(op, 1.0, nbytes + more, "f32")) * (1 + 1e-12)
    for kind in ("all_reduce", "all_to_all"):
        small = MODEL.collective(Collective(kind, ("data",), int(nbytes)))
        large = MODEL.collective(Collective(kind, ("data",), int(nbytes + more)))
        assert small <= large * (1 + 1e-12)


def test_between_two_points_a_price_is_on_the_line_in_logarithms() -> None:
    curve = Curve([(100.0, 1e-5), (10000.0, 1e-3)])
    assert curve(1000.0) == pytest.approx(1e-4)
    assert curve(1.0) == pytest.approx(1e-5)
    assert curve(20000.0) == pytest.approx(2e-3)


def test_a_batch_of_products_is_as_many_rows() -> None:
    assert MODEL.compute(product(16, 64, 64, batch=4)) == MODEL.compute(product(64, 64, 64))


def test_beyond_the_grid_prices_are_proportional() -> None:
    inside, beyond = MODEL.compute(product(256, 256, 64)), MODEL.compute(product(1024, 512, 64))
    assert beyond == pytest.approx(8 * inside)


def test_what_was_not_measured_is_the_closed_form_to_scale() -> None:
    model = AnalyticModel(MESH)
    half = product(64, 64, 64, dtype="bf16")
    other = product(256, 64, 16, dtype="bf16")
    scale = MODEL.compute(half) / model.compute(half)
    assert scale == pytest.approx(MODEL.compute(other) / model.compute(other))
    assert scale != pytest.approx(1.0)
    call = Collective("all_to_all", ("data",), 1 << 20)
    assert MODEL.collective(call) != model.collective(call)
    assert MODEL.compute(Work("aten.tanh", 1.0, 1024.0, "f32")) == pytest.approx(
        next(k.time.seconds for k in MADE.kernels if k.op == "aten.add.Tensor")
    )


def test_it_is_told_what_is_measured() -> None:
    assert MODEL.measured(product(3, 4, 5))
    assert MODEL.measured(Work("aten.gelu", 1.0, 64.0, "f32"))
    assert MODEL.measured(Collective("all_reduce", ("tensor", "data"), 64))
    assert not MODEL.measured(product(3, 4, 5, dtype="bf16"))
    assert not MODEL.measured(Work("aten.tanh", 1.0, 64.0, "f32"))
    assert not MODEL.measured(Collective("all_to_all", ("data",), 64))


def test_views_and_groups_of_one_are_free() -> None:
    assert MODEL.compute(Work("aten.gelu", 0.0, 0.0, "f32")) == 0
    alone = Mesh.parse("cpu: data=1")
    made = Calibration(alone, "2.13.0", "2026-01-31")
    assert MeasuredModel(alone, made).collective(Collective("all_reduce", ("data",), 64)) == 0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_pooling_is_the_nearest_rising_sequence(values: list[float]) -> None:
    """The conditions of Karush, Kuhn and Tucker decide, because the problem is convex."""
    found = pooled(values)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
    for value in set(found):
        run = [v for v, f in zip(values, found, strict=True) if f == value]
        assert math.fsum(run) / len(run) == pytest.approx(value, abs=1e-9)
        for i in range(1, len(run)):  # no cut of a run would keep the order and come nearer
            assert math.fsum(run[:i]) / i >= value - 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1e-6])
@pytest.mark.parametrize("field", ["products", "kernels", "exchanges"])
def test_times_that_are_none_are_refused(field: str, bad: float) -> None:
    first, *rest = getattr(MADE, field)
    wrong = dataclasses.replace(first, time=Timing(bad, 0.1))
    with pytest.raises(CalibrationError, match="a time of"):
        dataclasses.replace(MADE, **{field: (wrong, *rest)})


@pytest.mark.parametrize("field", ["products", "kernels", "exchanges"])
def test_a_small_problem_that_is_far_slower_is_refused_and_noise_is_not(field: str) -> None:
    first, *rest = getattr(MADE, field)
    slow = dataclasses.replace(first, time=Timing(10.0, 0.1))
    with pytest.raises(CalibrationError, match="larger of two problems is faster"):
        dataclasses.replace(MADE, **{field: (slow, *rest)})
    noisy = dataclasses.replace(first, time=Timing(rest[0].time.seconds * 1.2, 0.1))
    MeasuredModel(MESH, dataclasses.replace(MADE, **{field: (noisy, *rest)}))


def test_a_grid_with_a_hole_is_refused() -> None:
    with pytest.raises(CalibrationError, match="do not form a complete grid"):
        dataclasses.replace(MADE, products=MADE.products[1:])


def test_a_point_that_is_there_twice_is_refused() -> None:
    with pytest.raises(CalibrationError, match="twice"):
        dataclasses.replace(MADE, kernels=(*MADE.kernels, MADE.kernels[0]))


def test_axes_that_the_mesh_does_not_have_are_refused() -> None:
    wrong = Exchange("all_reduce", ("gpu",), 64.0, Timing(1e-4, 0.0))
    with pytest.raises(CalibrationError, match="gpu"):
        dataclasses.replace(MADE, exchanges=(wrong,))


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("H100: data=2, tensor=2", "of the device 'cpu'"),
        ("cpu: data=4", "another mesh"),
        ("cpu: tensor=2, data=2", "another mesh"),
        ("cpu: data=4, tensor=2", "another mesh"),
    ],
)
def test_a_calibration_of_another_machine_is_refused(mesh: str, words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        MeasuredModel(Mesh.parse(mesh), MADE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version = ", "not readable"),
        ("version = 7", "version 7"),
        ("version = 1", "damaged"),
        ('version = 1\nmesh = "cpu"\ntorch = ""\ndate = ""', "damaged"),
        (MADE.to_toml().replace("16 x 16 x 16", "16 x 16"), "damaged"),
        (MADE.to_toml().replace("16 x 16 x 16", "16 x 16 x 0"), "positive m, n and k"),
        (MADE.to_toml().replace('by = "flops"', ""), "damaged"),
        (
            MADE.to_toml().replace("[matmul.f32]", "[matmul.f37]"),
            "unknown dtype or collective 'f37'",
        ),
        (MADE.to_toml().replace("[collective.all_reduce]", "[collective.sum]"), "collective 'sum'"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "calibration.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CalibrationError, match=words) as caught:
        Calibration.load(file)
    assert str(file) in caught.value.where


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot read") as caught:
        Calibration.load(tmp_path / "none.toml")
    assert "autopar calibrate" in caught.value.todo
