"""Predictions of published measurements: what must be exact, and a row of each system."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autopar.cost.model import AnalyticModel
from autopar.ir.mesh import Mesh
from benchmarks import cost_accuracy
from benchmarks.cost_accuracy import Row, facts
from benchmarks.published import activations, alpa, megatron, megatron_core, torchtitan
from benchmarks.published.context import ring, unbalanced
from benchmarks.published.overlap import chunked
from benchmarks.published.pipeline import pipelined
from benchmarks.published.step import Works, chains, fuse, merged, parts


@pytest.mark.parametrize(
    "table",
    [
        cost_accuracy.activation_rows,
        cost_accuracy.paro_rows,
        cost_accuracy.communication_rows,
        pytest.param(cost_accuracy.vtrain_rows, marks=pytest.mark.slow),
    ],
)
def test_every_promise_of_a_table_is_kept(table: Callable[[], Iterator[Row]]) -> None:
    rows = list(table())
    assert rows
    assert [row for row in rows if row.within is False] == []


def test_every_published_strategy_and_volume_is_compared() -> None:
    rows = list(cost_accuracy.paro_rows())
    cases = {row.case for row in rows if row.quantity == "total"}
    assert len(cases) == 14
    assert sum(row.unit == "10^12 elements" for row in rows) == 2 * 8


def test_megatron_on_a100() -> None:
    """The paper's largest of the rows, with all three kinds of parallelism and interleaving."""
    row = facts("megatron_sc21_table1_a100_80gb")[-1]
    run = cost_accuracy.megatron_run(row)
    assert (run.tp, run.pp, run.chunks) == (8, 35, 3)
    assert megatron.tflops(run) == pytest.approx(row["tflops_per_gpu"], rel=0.1)
    # Equation 3 is right if it gives the table's own seconds from the table's own speed.
    seconds = megatron.iteration_flops(run) / run.gpus / (row["tflops_per_gpu"] * 1e12)
    assert seconds == pytest.approx(row["iter_time_s_derived"], rel=0.01)


def test_megatron_core_on_h100() -> None:
    row = facts("megatron_core_r080_h100_weak_scaling")[1]
    run = cost_accuracy.megatron_core_run(row)
    assert megatron_core.tflops(run) == pytest.approx(row["tflops_per_gpu"], rel=0.1)
    seconds = megatron_core.iteration_flops(run) / run.gpus / (row["tflops_per_gpu"] * 1e12)
    assert seconds == pytest.approx(row["iter_time_s_derived"], rel=0.01)


def test_torchtitan_in_float8_though_fitted_in_bf16() -> None:
    row = facts("torchtitan_h100")[2]
    run = cost_accuracy.torchtitan_run(row)
    assert run.float8
    assert run.compiled
    assert not run.full
    speed = torchtitan.tokens_per_second(run)
    assert speed == pytest.approx(row["tokens_per_s_per_gpu"], rel=0.1)
    assert torchtitan.memory_gib(run) == pytest.approx(row["memory_gib"], rel=0.15)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_context_parallel_attention_is_what_pairs_of_tokens_say(cp: int) -> None:
    """Count the pairs of queries and keys on every device, mirrored parts and parts in a row."""
    half = 16

    def pairs(tokens: set[int]) -> int:
        return sum(token + 1 for token in tokens)

    def part(k: int) -> set[int]:
        return set(range(k * half, (k + 1) * half))

    alone = pairs(part(0) | part(1))
    mirrored = [pairs(part(r) | part(2 * cp - 1 - r)) for r in range(cp)]
    assert len(set(mirrored)) == 1  # balanced
    assert mirrored[0] / alone == pytest.approx(cp, rel=1 / half)
    last = pairs(part(2 * cp - 2) | part(2 * cp - 1))
    assert last / alone == pytest.approx(unbalanced(cp), rel=1 / half)


def test_a_ring_of_one_device_adds_nothing_and_a_longer_one_more() -> None:
    prices = AnalyticModel(Mesh.parse("H100-96: dp=1, cp=8"))
    assert ring(prices, "cp", 1, 2**20).layer(0.25, 2) == 0.25
    short = ring(AnalyticModel(Mesh.parse("H100-96: dp=4, cp=2")), "cp", 2, 2**27)
    long = ring(prices, "cp", 8, 2**27)
    # The f32 results of seven parts, each read and written with one of bf16 read, at full speed.
    assert long.forward > 7 * 10 * 2**27 / 2.4e12
    assert long.forward == pytest.approx(7 * short.forward)
    assert long.backward == pytest.approx(4 * short.backward)
    assert 0.25 < short.layer(0.25, 2) < long.layer(0.25, 2)
    # Keys and values of seven others arrive thrice over a link of 450 GB/s, and nothing hides it.
    assert long.layer(0.25, 2) > 0.25 + 3 * 7 * 4 * 2**27 / 450e9 + 2 * long.forward + long.backward


def test_alpa_runs_out_of_memory_where_it_did() -> None:
    rows = facts("alpa_gpt_intra_op_ablation_p3_16xlarge")
    runs = [cost_accuracy.alpa_run(row) for row in rows]
    found = [alpa.memory_bytes(run) > alpa.MEMORY for run in runs]
    assert found == [row["oom"] for row in rows]
    assert any(found)
    assert not all(found)


def test_rank_correlation_of_known_orders() -> None:
    assert alpa.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert alpa.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # One swap among four: 1 - 6 * 2 / (4 * 15).
    assert alpa.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert alpa.ranks([5, 5, 1]) == [1.5, 1.5, 0]


def test_a_row_tells_relative_errors_and_points() -> None:
    relative = Row("t", "c", "q", "s", "predicted", 2.0, 2.1, 0.1)
    assert relative.error == pytest.approx(0.05)
    assert relative.within
    points = Row("t", "c", "q", "points", "predicted", 90.0, 95.0, 4.0)
    assert points.error == pytest.approx(5.0)
    assert points.within is False
    assert Row("t", "c", "q", "s", "fitted", 2.0, 9.0, None).within is None


def test_fusion_keeps_the_work_and_moves_the_ends_only() -> None:
    h, heads, s, b = 256, 4, 128, 2
    of = activations.layer(h, heads, s, b, 1, sequence=False)
    layer = {node.name for node in of.block}

    def products(kernels: Works) -> float:
        made = (work for name in layer for work in kernels[name].forward)
        return sum(work.flops for work in made if work.gemm is not None)

    # Eight h x h matrices of two FLOPs a token and weight in four linears, and two of attention.
    closed = 24 * b * s * h**2 + 4 * b * s**2 * h
    joined = merged(of, of.works)
    assert products(of.works) == products(joined) == closed
    gemms = [work.gemm for name in layer for work in joined[name].forward if work.gemm]
    assert sorted((g.m, g.n, g.k) for g in gemms if g.batch == 1) == sorted(
        [(b * s, 3 * h, h), (b * s, h, h), (b * s, 4 * h, h), (b * s, h, 4 * h)]
    )
    found = [group for group in chains(of, megatron.FUSED) if group[0].name in layer]
    assert [len(group) for group in found] == [2, 2, 2]  # of attention, twice of the stream
    fused = fuse(of, joined, found)
    (work,) = fused[found[-1][-1].name].forward
    # Two values read, their sum and a mask as wide as a value written.
    assert work.nbytes == 4 * 2 * b * s * h
    assert sum(part.seconds for part in parts(of, fused)) < sum(
        part.seconds for part in parts(of, joined)
    )


def test_pipelines_and_overlap_by_their_closed_forms() -> None:
    # m t + (p - 1) t / v (Narayanan et al. 2021, section 2.2).
    assert pipelined([3.0] * 4, 8, 2) == pytest.approx(8 * 3 + 3 * 3 / 2)
    assert pipelined([1.0, 2.0], 1, 1) == pytest.approx(3.0)
    # In one chunk nothing overlaps; in many all but the slowdown does.
    assert chunked(5.0, 2.0, 1) == pytest.approx(7.0)
    assert 5.0 < chunked(5.0, 2.0, 1000) < 5.5
