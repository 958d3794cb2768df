"""The roofline, the table of devices, and custom or unknown devices."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from importlib import resources
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.attention_seconds import NAMES
from autopar.cost.compute import gemm_seconds, kernel_seconds
from autopar.cost.device import DTYPES, Device, device, devices
from autopar.cost.model import AnalyticModel, Gemm, Work
from autopar.cost.work import Convolved
from autopar.errors import CostError, UnknownDeviceError
from autopar.ir.mesh import Description, Mesh
from autopar.ir.tensor import DTYPE_BYTES

H100 = AnalyticModel(Mesh.parse("H100: gpu=8"))
CPU = AnalyticModel(Mesh.parse("cpu: gpu=2"))
amount = st.floats(0, 1e18)


def matmul(n: int) -> Work:
    return Work("mm", 2.0 * n**3, 3.0 * n * n * 2, "bf16", Gemm(1, n, n, n, 0))


@pytest.mark.parametrize("n", [256, 1024, 4096, 16384])
def test_a_matmul_stays_under_the_peak(n: int) -> None:
    work = matmul(n)
    assert work.flops / H100.compute(work) < 989e12


def product(batch: int, m: int, n: int, k: int, dtype: str = "bf16") -> Work:
    """A product whose bytes cost nothing, so that only computing counts."""
    gemm = Gemm(batch, m, n, k, 0)
    return Work("aten.mm", gemm.flops, 0.0, dtype, gemm)


def waves(count: int, rows: int = 256, columns: int = 128) -> tuple[int, int]:
    """m and n of a result that is exactly `count` waves of the largest tile on an H100."""
    return count * H100.device.processors * rows, columns


def without_starts(device: Device, **given: Any) -> Device:
    """The device with the largest tile alone, full clocks and no time to start or to split."""
    table = dataclasses.replace(
        device.products, k_half=0.0, k_latency=0.0, split=0.0, throttle=0.0, tile_rows=256.0,
        tile_columns=128.0,
    )  # fmt: skip
    return dataclasses.replace(device, products=dataclasses.replace(table, **given))


def test_an_ideal_shape_reaches_the_attainable_share_at_full_clocks() -> None:
    chip, k = H100.device, 1 << 20
    work = product(1, *waves(3), k)
    rate = work.flops / gemm_seconds(chip, work.gemm or Gemm(0, 0, 0, 0, 0), "bf16")
    ramp = k / (k + chip.products.k_half)
    assert rate == pytest.approx(989e12 * chip.products.efficiency * ramp, rel=1e-9)


def test_a_long_kernel_and_a_long_step_are_slower_than_a_short_kernel() -> None:
    chip, work = H100.device, product(1, *waves(3), 1 << 20)
    full = gemm_seconds(chip, work.gemm or Gemm(0, 0, 0, 0, 0), "bf16")
    alone = H100.compute(work) - chip.launch
    assert 1 < alone / full < 1 + chip.products.throttle
    step = AnalyticModel(H100.mesh, in_step=True).compute(work) - chip.launch
    assert step == pytest.approx(full / chip.step_share(H100.mesh.size), rel=1e-9)


def test_a_long_step_slows_matrix_units_alone() -> None:
    """In f32, GPT-2 took in a step what it takes alone (benchmarks/results/steps.csv)."""
    step = AnalyticModel(H100.mesh, in_step=True)
    for dtype, slower in (("bf16", True), ("tf32", True), ("f32", False)):
        work = product(1, 8192, 8192, 8192, dtype)
        assert (step.compute(work) > 1.2 * H100.compute(work)) == slower
    assert step.compute(work) == H100.compute(work)


def test_a_row_more_than_full_waves_costs_another_tile_and_no_less() -> None:
    chip, (m, n) = H100.device, waves(4)
    full, one_more, some = (
        gemm_seconds(chip, Gemm(1, m + x, n, 8192, 0), "bf16") for x in (0, 1, 9)
    )
    rows, columns, _ = min(chip.products.tiles, key=lambda tile: tile[0] * tile[1])
    one = 2 * rows * columns * 8192 * chip.processors
    assert one_more - full >= one / 989e12
    assert one_more == some


def test_with_one_tile_shape_and_no_split_a_wave_more_is_a_wave_more() -> None:
    chip = dataclasses.replace(without_starts(H100.device, tile_rows=128.0), processors=10)
    wave = 2 * 10 * 128 * 128 * 4096 / (989e12 * chip.products.efficiency)
    for tiles, expected in ((10, 1), (20, 2), (21, 3), (30, 3)):
        seconds = gemm_seconds(chip, Gemm(1, tiles * 128, 128, 4096, 0), "bf16")
        assert seconds == pytest.approx(expected * wave, rel=1e-12), tiles


def test_a_few_tiles_are_split_along_k() -> None:
    chip = without_starts(H100.device, tile_rows=128.0)
    alone = 2 * 128 * 128 * (1 << 20) * chip.processors / (989e12 * chip.products.efficiency)
    assert gemm_seconds(chip, Gemm(1, 128, 128, 1 << 20, 0), "bf16") < alone / 16


def test_a_batch_is_as_many_tiles() -> None:
    assert H100.compute(product(12, 256, 128, 512)) == H100.compute(product(1, 3072, 128, 512))


def test_eight_bits_are_twice_as_fast_as_sixteen() -> None:
    chip = without_starts(H100.device)
    half, byte = (gemm_seconds(chip, Gemm(1, 8192, 8192, 8192, 0), d) for d in ("bf16", "f8"))
    assert half / byte == pytest.approx(1979 / 989, rel=1e-9)


size = st.integers(1, 5000)


@given(st.tuples(st.integers(1, 40), size, size, size), st.integers(0, 3), size)
def test_products_take_longer_in_each_dimension(
    shape: tuple[int, int, int, int], place: int, more: int
) -> None:
    larger = tuple(n + more * (i == place) for i, n in enumerate(shape))
    for chip in (H100, CPU):
        price = chip.compute(product(*larger))
        assert chip.compute(product(*shape)) <= price * (1 + 1e-12)
        assert price >= product(*larger).flops / chip.device.rate("bf16", True)


def attention(samples: int, length: int, width: int) -> Work:
    """A causal forward, with what it moves."""
    gemm = Gemm(samples, length, (length + 1) // 2, 2 * width, 0)
    return Work(NAMES[0], gemm.flops, 8.0 * samples * length * width, "bf16", gemm)


def test_fused_attention_is_faster_for_long_sequences_and_wide_heads() -> None:
    def rate(length: int, width: int) -> float:
        work = attention(512, length, width)
        return work.flops / H100.compute(work)

    lengths = [rate(length, 128) for length in (512, 1024, 2048, 4096, 16384)]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 2 * lengths[0]
    assert 1.2 < rate(8192, 128) / rate(8192, 64) < 1.6


def test_attention_at_its_longest_is_its_pairs_of_blocks() -> None:
    """Many heads: all pairs of blocks below the diagonal and on it, and the exponentials."""
    chip, heads, blocks = H100.device, 1 << 20, 128
    work = attention(heads, blocks * 128, 128)
    table = dataclasses.replace(chip.attention, start=0.0, call=0.0)
    pairs = heads * blocks * (blocks + 1) / 2
    computing = pairs * 4 * 128 * 128 * (128 + table.softmax) / (989e12 * table.efficiency)
    moving = work.nbytes / (3.35e12 * table.memory)
    made = kernel_seconds(
        dataclasses.replace(chip, attention=table), work.op, work.flops, work.nbytes, "bf16",
        work.gemm,
    )  # fmt: skip
    assert made == pytest.approx(computing + moving, rel=1e-6)


def test_a_copy_reaches_the_bandwidth_and_a_small_one_does_not() -> None:
    chip = H100.device
    copy = Work("copy", 0.0, 3.35e12, "bf16")
    assert H100.compute(copy) == pytest.approx(1 / chip.memory_efficiency, rel=1e-3)
    small = H100.compute(Work("copy", 0.0, chip.memory_ramp, "bf16")) - chip.launch
    least = chip.memory_ramp / (chip.memory_bandwidth * chip.memory_efficiency)
    assert small == pytest.approx(2 * least, rel=1e-9)


def test_small_kernels_cost_their_launch_and_views_nothing() -> None:
    chip = dataclasses.replace(H100.device, memory_ramp=0.0)
    assert kernel_seconds(chip, "add", 1.0, 12.0, "f32") == pytest.approx(chip.launch, rel=1e-3)
    assert H100.compute(Work("view", 0.0, 0.0, "f32")) == 0


@given(flops=amount, nbytes=amount, more=amount)
def test_prices_grow_with_flops_and_bytes(flops: float, nbytes: float, more: float) -> None:
    price = H100.compute(Work("op", flops, nbytes, "bf16"))
    assert price <= H100.compute(Work("op", flops + more, nbytes, "bf16"))
    assert price <= H100.compute(Work("op", flops, nbytes + more, "bf16"))


def test_only_matmuls_use_matrix_units() -> None:
    def rate(dtype: str, on_matrix_units: bool) -> float:
        return H100.device.rate(dtype, on_matrix_units)

    assert rate("bf16", True) == 989e12
    assert rate("tf32", True) == 494.5e12
    assert rate("bf16", False) == rate("f32", False) == rate("f32", True) == 67e12
    assert rate("f64", True) == 67e12
    assert rate("f64", False) == 33.5e12


@pytest.mark.parametrize("dtype", [*DTYPE_BYTES, *DTYPES])
@pytest.mark.parametrize("on_matrix_units", [True, False])
def test_every_dtype_has_a_price(dtype: str, on_matrix_units: bool) -> None:
    gemm = Gemm(1, 8000, 8000, 8000, 0) if on_matrix_units else None
    assert H100.compute(Work("op", 1.024e12, 1.0, dtype, gemm)) > 1e-4


@pytest.mark.parametrize(
    "work",
    [
        Work("op", -1.0, 1e9, "f32"),
        Work("op", 1.0, math.nan, "f32"),
        Work("op", math.nan, 1.0, "f32"),
        Work("op", math.inf, 1.0, "f32"),
        Work("op", 1.0, 1.0, "f3"),
    ],
)
def test_work_that_cannot_be_priced_is_refused(work: Work) -> None:
    with pytest.raises(CostError):
        H100.compute(work)


def test_every_device_has_all_keys_and_a_source() -> None:
    text = resources.files("autopar.cost").joinpath("devices.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    assert {"V100", "A100-40", "A100-80", "H100", "H100-96", "H200", "B200", "cpu"} <= set(tables)
    wanted = {field.name for field in dataclasses.fields(Device)}
    wanted -= {"name", "products", "attention", "convolutions", "links", "intra_pairs"}
    for name, table in tables.items():
        assert set(table) - {"intra_pairs"} == wanted, name
        assert set(table["peak"]) == set(DTYPES), name
        assert "data sheet" in table["source"], name


def test_figures_of_the_table_are_in_a_sensible_order() -> None:
    for entry in devices():
        peak = dict(entry.peak)
        assert peak["f64"] <= peak["f32"] <= peak["tf32"] <= peak["bf16"], entry.name
        assert peak["bf16"] <= peak["f16"] <= peak["f8"], entry.name
        assert entry.intra_latency <= entry.inter_latency, entry.name


def test_a_described_device_takes_the_given_figures() -> None:
    chip = device(Mesh.parse("mychip[400TFLOP/s 64GiB 1.6TB/s]: gpu=4 @100GB/s 5us"))
    assert chip.rate("bf16", True) == 400e12
    assert (chip.memory, chip.memory_bandwidth) == (64 * 2**30, 1.6e12)


def test_a_description_overrides_the_table() -> None:
    assert device(Mesh.parse("H100[1TFLOP/s 1GiB 1GB/s]: gpu=4")).memory == 2**30


def test_an_unknown_device_is_refused_with_near_names_and_a_way_out() -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        AnalyticModel(Mesh.parse("h100-sxm: node=2, gpu=8"))
    assert "H100" in caught.value.why
    described = caught.value.todo.split('"')[1]
    assert AnalyticModel(Mesh.parse(described)).mesh.shape == (2, 8)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("place", range(3))
def test_nonsense_in_a_description_is_refused(bad: float, place: int) -> None:
    figures = [1e12, 1e9, 1e11]
    figures[place] = bad
    with pytest.raises(CostError, match="mychip"):
        AnalyticModel(Mesh("mychip", Mesh.parse("cpu: a=2").axes, Description(*figures)))


def test_an_efficiency_above_one_is_refused() -> None:
    with pytest.raises(CostError, match="memory_efficiency"):
        dataclasses.replace(H100.device, memory_efficiency=1.01)


# Milliseconds that DeepBench published for V100 (results/train/DeepBench_NV_V100.xlsx), of rows to
# which nothing was fitted: dtype, result, whether 3 x 3 pixels one apart, product, bytes.
CONVOLVED = (
    ("f32", "forward", True, (6272, 512, 2304), 23986176, 0.716),
    ("f32", "image", True, (6272, 2304, 512), 23986176, 0.741),
    ("f32", "image", True, (200704, 576, 128), 154435584, 1.209),
    ("f32", "image", False, (5904, 6400, 512), 52723712, 3.672),
    ("f16", "forward", True, (25088, 256, 1152), 19857408, 0.169),
    ("f16", "image", True, (12544, 2304, 512), 21626880, 0.378),
    ("f16", "weight", True, (576, 128, 200704), 77217792, 0.423),
    ("f16", "weight", True, (2304, 512, 12544), 21626880, 0.33),
    # Constants that were fitted relative to other products of V100 miss these by 27 % and more.
    ("f32", "weight", False, (256, 1024, 1568), 9076736, 0.108),
    ("f16", "weight", True, (4608, 512, 3136), 11141120, 0.162),
)


@pytest.mark.parametrize(("dtype", "result", "near", "sizes", "nbytes", "published"), CONVOLVED)
def test_convolutions_take_what_was_published(
    dtype: str,
    result: Literal["forward", "image", "weight"],
    near: bool,
    sizes: tuple[int, int, int],
    nbytes: int,
    published: float,
) -> None:
    gemm = Gemm(1, *sizes, 0)
    found = kernel_seconds(
        device(Mesh.parse("V100: gpu=1")), "aten.conv2d", gemm.flops, nbytes, dtype, gemm,
        convolved=Convolved(result, near),
    )  # fmt: skip
    assert found * 1e3 == pytest.approx(published, rel=0.25)


def test_winograd_saves_products_in_f32_only() -> None:
    chip = device(Mesh.parse("H100: gpu=1"))
    for dtype, faster in (("f32", True), ("bf16", False)):
        one, other = (
            chip.convolutions.rate(Convolved("forward", winograd), dtype)
            for winograd in (True, False)
        )
        assert (one > 1.5 * other) == faster


@pytest.mark.parametrize(
    ("dtype", "rows", "at_least"), [("bf16", 1, 5), ("bf16", 2, 2), ("tf32", 1, 2)]
)
def test_rows_that_begin_anywhere_slow_matrix_units_down(
    dtype: str, rows: int, at_least: float
) -> None:
    # A vocabulary of 50257 words took 7 times as long as one of 50304 in bf16 on an H200.
    chip = device(Mesh.parse("H200: gpu=1"))
    aligned, unaligned, unknown = (
        gemm_seconds(chip, Gemm(1, 16384, 50304, 768, rows=length), dtype)
        for length in (768, rows, 0)
    )
    assert unaligned > at_least * aligned
    assert unknown == aligned
    plain = [gemm_seconds(chip, Gemm(1, 16384, 50304, 768, rows=r), "f32") for r in (1, 768)]
    assert plain[0] == plain[1]  # vector units load single numbers
