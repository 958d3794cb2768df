"""Prices of stages of long runs of blocks, and the search that uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from autopar.cost.device import device
from autopar.cost.kernel_tables import Host
from autopar.errors import InfeasibleError
from autopar.inter_op.layers import find_layers, layers_at
from autopar.inter_op.stage_values import Chunk, Pipeline, Stage
from autopar.inter_op.submeshes import submeshes
from autopar.intra_op.work.kernel_work import works
from autopar.ir.executed.execution import Execution
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import FINDING, NORMALISING, prepare
from autopar.planning.capturing import Call, capture_call, capture_graph
from autopar.planning.options import Options
from autopar.planning.pipelines import layered as parts
from autopar.planning.pipelines.automatic import AnySize, OnMicrobatches
from autopar.planning.pipelines.layered import Layered, runs
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.pipelines.search import INEXACT, Borders, search, simulate_pipeline
from autopar.planning.pipelines.stage_costs import StageCosts
from autopar.planning.pipelines.stages import stage_graphs, weights
from autopar.planning.pipelines.variants import InFlight
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers
from tests.support.models import gpt2, mlp, squared_error

BATCH = 16
CLUSTER = Mesh.parse("H100: node=2, gpu=2")
CLUSTER_DEVICE = device(CLUSTER)
ROOMY = 1e12


@cache
def layered(layers: int, more: int = 0) -> Callable[[int], Layered]:
    """A small model of so many blocks, with `more` that its graph does not show."""

    @cache
    def on(microbatches: int) -> Layered:
        model, batch = gpt2(layers, batch=BATCH // microbatches, n_embd=256, vocab_size=2048)
        options = Options()
        graph = capture_graph(model, (), batch, options, Trace(None), NORMALISING).graph
        whole = prepare(graph, passes=FINDING)
        seconds, _ = weights(graph, whole, CLUSTER, options)
        return Layered(graph, find_layers(whole, seconds), more)

    return on


def costs(made: Callable[[int], Layered], memory: float = ROOMY) -> StageCosts:
    return StageCosts(made, CLUSTER, Options(), memory, most=8)


def test_longer_runs_are_priced_as_if_they_were_planned_whole() -> None:
    short, long = costs(layered(5, more=3)), costs(layered(8))
    kinds = short.layered(2).kinds
    assert kinds == long.layered(2).kinds
    assert len(set(kinds)) < len(kinds) - 2
    last = len(kinds) - 1
    for part in submeshes(CLUSTER)[1::2]:
        for first, end in ((1, 5), (0, 4), (2, last)):
            scaled = short(first, end, part, 2)
            with patch.object(parts, "BLOCKS", 100):
                whole = costs(layered(8))(first, end, part, 2)
            figures = [
                [(w.seconds, w.once, w.fixed, w.per_microbatch) for w in ways]
                for ways in (scaled, whole)
            ]
            np.testing.assert_allclose(figures[0], figures[1], rtol=1e-6)


def test_frontiers_trade_time_for_memory() -> None:
    whole = submeshes(CLUSTER)[-1]
    roomy = costs(layered(5))(1, 3, whole, 8)[0]
    limit = roomy.memory(4) * 0.6
    tight = costs(layered(5), memory=limit)(1, 3, whole, 8)
    assert len(tight) > 1
    assert min(way.memory(4) for way in tight) <= limit
    assert all(way.seconds >= roomy.seconds * (1 - 1e-9) for way in tight)


def test_optimizer_state_in_host_memory_is_none_of_a_stage_but_takes_time() -> None:
    made, whole = layered(5), submeshes(CLUSTER)[-1]
    here, away = (
        StageCosts(made, CLUSTER, Options(offload=what), ROOMY, most=8)
        for what in ("none", "optimizer")
    )
    model, _ = gpt2(1, batch=1, n_embd=256, vocab_size=2048)
    state = 2 * sum(p.nbytes for p in model.transformer.h[0].parameters())
    block = made(2).kinds[2]
    with_state, without = here.alone(block, 2), away.alone(block, 2)
    assert with_state[1] - without[1] == pytest.approx(state)
    assert with_state[2] == without[2]
    fast, slow = (costs(2, 3, whole, 2)[0] for costs in (here, away))
    seconds = state / whole.size / (CLUSTER_DEVICE.host_bandwidth * CLUSTER_DEVICE.host_efficiency)
    assert slow.once >= fast.once + seconds


def test_every_way_for_many_in_flight_fits_and_blocks_compute_again_where_nothing_else_does() -> (
    None
):
    whole, made = submeshes(CLUSTER)[-1], layered(5)
    roomy = costs(made)(1, 3, whole, 8)[0]
    free = roomy.memory(8)
    found = {}
    for part in (0.5, 0.7, 0.9):
        ways = costs(made, memory=part * free)(1, 3, whole, 8)
        found[part] = [way for way in ways if way.memory(8) <= part * free]
    assert all(found.values())
    fastest = {part: min(way.seconds for way in ways) for part, ways in found.items()}
    assert fastest[0.5] >= fastest[0.7] >= fastest[0.9] >= roomy.seconds * (1 - 1e-9)
    again = StageCosts(made, CLUSTER, Options(recompute="full"), ROOMY, most=8)(1, 3, whole, 8)[0]
    assert again.recompute == "full"
    assert again.per_microbatch < roomy.per_microbatch
    assert again.forward == pytest.approx(roomy.forward, rel=0.05)
    assert 1.2 < again.seconds / roomy.seconds < 1.4  # a third of the kernels run again


def test_as_many_blocks_compute_again_as_must() -> None:
    """A way between none and all is what the whole range is priced at with so many told."""
    one, made = submeshes(CLUSTER)[0], layered(5, more=3)
    roomy = costs(made)(1, 6, one, 8)[0]
    options = Options(recompute="full")
    (frugal,) = StageCosts(made, CLUSTER, options, ROOMY, most=8)(1, 6, one, 8)
    # Of more than half of the layers 1F1B keeps two microbatches at most.
    limit = (roomy.memory(2) + frugal.memory(2)) / 2
    ways = costs(made, memory=limit)(1, 6, one, 8)
    between = [w for w in ways if w.recompute.startswith("full ") and w.memory(2) <= limit]
    assert between
    fastest = min(between, key=lambda way: way.seconds)
    assert roomy.seconds < fastest.seconds < frugal.seconds
    for way in between:
        told = Options(recompute=way.recompute)
        with patch.object(parts, "BLOCKS", 100):
            asked = StageCosts(layered(8), CLUSTER, told, ROOMY, most=8)
            (same,) = asked(1, 6, one, 8)
        assert same.seconds <= way.seconds * (1 + 1e-6)
        if way == fastest:  # at ease in memory, too, the same choice is the best
            figures = [(w.seconds, w.fixed, w.per_microbatch) for w in (way, same)]
            np.testing.assert_allclose(figures[0], figures[1], rtol=1e-6)


def test_chunks_that_share_a_device_are_priced_within_their_share() -> None:
    """Three chunks of a rank: what one may keep is a third of what is left beside their needs."""
    whole, made = submeshes(CLUSTER)[1], layered(8)
    ranks, kinds = CLUSTER.size // whole.size, len(made(8).kinds)
    length = -(-kinds // (3 * ranks))
    kept = {(ranks, 3 * ranks, 3): (4, 8)}
    roomy = costs(made)(1, length, whole, 8)[0]
    limit = 3 * (roomy.fixed + 8 * roomy.per_microbatch) * 0.7 + roomy.transient

    def fitting(asked: StageCosts) -> list[float]:
        ways = asked(1, length, whole, 8)
        return [
            way.seconds
            for way in ways
            if 3 * (way.fixed + 8 * way.per_microbatch) + way.transient <= limit
        ]

    told = StageCosts(made, CLUSTER, Options(), limit, most=8, flight=InFlight(kept=kept))
    assert fitting(told)
    assert min(fitting(told)) > roomy.seconds
    assert not fitting(costs(made, memory=limit))


def test_a_stage_of_short_kernels_takes_as_long_as_its_host_issues_them() -> None:
    """A block more takes as many kernels more as the simulator issues for it, each 75 us."""
    made, one = layered(8), submeshes(CLUSTER)[0]
    options = Options(execution=Execution.read("host=modules"))
    asked = StageCosts(made, CLUSTER, options, ROOMY, most=8)
    (short,), (long,) = (asked(1, end, one, 8) for end in (4, 5))
    graph = prepare(made(8).graph, passes=FINDING)
    plan = make_plan(graph, Mesh.parse("H100: gpu=1"), Options(), Trace(None))
    kernels = works(graph, plan, options.table)
    block = [kernels[name] for name in graph.repeats[0].iterations[0]]
    host = Host.of("modules")
    ahead, back = (sum(len(getattr(w, side)) for w in block) for side in ("forward", "backward"))
    assert long.forward - short.forward == pytest.approx(host.operator * ahead)
    assert long.backward - short.backward == pytest.approx(host.autograd * back)
    assert short.seconds > 3 * costs(made)(1, 4, one, 8)[0].seconds


@pytest.mark.slow
def test_no_pipeline_of_equal_stages_is_faster_than_the_one_that_is_found() -> None:
    made, counts = layered(8), (2, 4, 8)
    found = search(made, CLUSTER, counts, Options(), ROOMY, schedules=("1f1b", "gpipe"))
    asked, parts = costs(made), submeshes(CLUSTER)
    layers = len(asked.layered(2).kinds)
    transfer = Borders(asked.layered(2), CLUSTER, Options()).between(2)
    tried = []
    for part, count, name in product(parts, counts, ("1f1b", "gpipe")):
        stages = CLUSTER.size // part.size
        cuts = [round(at * layers / stages) for at in range(stages + 1)]
        ranges = [(a, b - 1) for a, b in pairwise(cuts)]
        ways = [min(asked(a, b, part, count), key=lambda way: way.seconds) for a, b in ranges]
        one = Pipeline(
            name,
            count,
            tuple(
                Stage(part, (Chunk(a, b, way),), way.seconds, way.once, 0.0)
                for (a, b), way in zip(ranges, ways, strict=True)
            ),
            0.0,
            0.0,
            0.0,
        )
        tried.append(simulate_pipeline(one, transfer)[0])
    assert found.closed_form.bound <= found.closed_form.best.seconds * (1 + 1e-9)
    # The best is looked for by formulas, to which simulations come as near as that.
    assert found.seconds <= min(tried) * (1 + INEXACT)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="fits"):
        search(layered(5), CLUSTER, (4,), Options(), 1e6)


def test_layers_are_the_same_on_microbatches_of_any_size() -> None:
    """The head weighs more beside blocks, and would be cut again, in small microbatches."""
    model, batch = gpt2(4, n_embd=64, vocab_size=8192)

    def graph(samples: int, layers: int | None) -> Graph:
        return capture_call(Call.of(model, batch).sized(samples), Options(), Trace(None)).graph

    sized = OnMicrobatches(AnySize(graph), 64, Mesh.parse("H100: gpu=2"), Options())
    first, second = sized(4), sized(16)
    assert first.kinds == second.kinds
    whole = prepare(second.graph, passes=FINDING)
    own = find_layers(whole, weights(second.graph, whole, CLUSTER, Options())[0])
    assert len(own) != len(second.layers)  # what its own weights would give


@pytest.mark.slow
def test_blocks_that_are_not_captured_are_layers_beside_a_head_that_weighs_more() -> None:
    def graph(samples: int, layers: int | None) -> Graph:
        model, batch = gpt2(layers or 9, seq=512, n_positions=512, n_embd=16, vocab_size=262_144)
        return capture_call(Call.of(model, batch).sized(samples), Options(), Trace(None)).graph

    sized = OnMicrobatches(AnySize(graph, 9), 8, Mesh.parse("H100: gpu=2"), Options())
    few = sized(4)
    whole = prepare(deep := sized.whole(4, "1f1b"), passes=FINDING)
    seconds = weights(deep, whole, CLUSTER, Options())[0]
    blocks = {name for block in whole.repeats[0].iterations for name in block}
    assert sum(seconds.get(name, 0.0) for name in blocks) < sum(seconds.values()) / 2
    assert max(count for _, count in runs(few.kinds)) == 9  # the embedding is a layer, too
    assert len(few.kinds) == len(find_layers(whole, seconds, by_blocks=True))


def test_layers_of_a_deep_model_end_where_those_of_its_whole_graph_do() -> None:
    """The whole graph is deepened from a folded one, and not folded again to find them."""

    def graph(samples: int, layers: int | None) -> Graph:
        model, batch = gpt2(layers or 7, n_embd=64, vocab_size=1024)
        return capture_call(Call.of(model, batch).sized(samples), Options(), Trace(None)).graph

    mesh = Mesh.parse("H100: gpu=2")
    sized = OnMicrobatches(AnySize(graph, 7), 8, mesh, Options())
    few = sized(4)
    assert few.more == 3
    whole = prepare(deep := sized.whole(4, "1f1b"), passes=FINDING)
    layers = find_layers(whole, weights(deep, whole, mesh, Options())[0], by_blocks=True)
    assert sized.ends_of_all(4) == layers.ends
    assert len(layers) == len(few.kinds)


def test_a_deep_model_of_unlike_blocks_is_captured_whole() -> None:
    asked: list[int | None] = []

    def graph(samples: int, layers: int | None) -> Graph:
        asked.append(layers)
        model, batch = mlp(tuple(8 * (11 - n) for n in range(1, 2 + (layers or 9))), batch=4)
        options = Options(loss_fn=squared_error)
        return capture_call(Call(model, (), batch).sized(samples), options, Trace(None)).graph

    sized = OnMicrobatches(AnySize(graph, 9), 8, Mesh.parse("H100: gpu=2"), Options())
    few = sized(4)
    assert asked[-1] is None
    assert len(few.kinds) == len(few.layers)
    assert len([node for node in few.graph.nodes if node.op == "aten.linear"]) == 9


class Counting(Workers):
    """Workers that count the jobs which another process gets."""

    elsewhere = 0

    def run(self, jobs: Sequence[Sequence[Callable[[], Any]]]) -> list[list[Any]]:
        self.elsewhere += sum(map(len, jobs[1:]))
        return super().run(jobs)


@pytest.mark.slow
def test_a_search_with_a_second_process_finds_the_same() -> None:
    with Counting(1) as workers:
        alone, together = (
            search(layered(5), CLUSTER, (2, 4), Options(), ROOMY, workers=one)
            for one in (None, workers)
        )
    assert workers.elsewhere
    assert together.seconds == alone.seconds
    assert together.pipeline == alone.pipeline
    assert together.closed_form.calls == alone.closed_form.calls


def test_a_block_beside_the_embedding_is_not_taken_for_one_of_the_run() -> None:
    """The first block stands in one layer with the embedding, and is folded with those behind."""

    def joined(layers: int, more: int) -> Callable[[int], Layered]:
        def on(microbatches: int) -> Layered:
            made = layered(layers, more)(microbatches)
            seconds, _ = weights(
                made.graph, prepare(made.graph, passes=FINDING), CLUSTER, Options()
            )
            ends = made.layers.ends[1:]
            return Layered(
                made.graph, layers_at(prepare(made.graph, passes=FINDING), seconds, ends), more
            )

        return on

    short, long = costs(joined(5, 3)), costs(joined(8, 0))
    part = submeshes(CLUSTER)[1]
    for last in (2, 4):
        scaled = short(0, last, part, 2)
        with patch.object(parts, "BLOCKS", 100):
            whole = long(0, last, part, 2)
        figures = [
            [(w.seconds, w.fixed, w.per_microbatch) for w in ways] for ways in (scaled, whole)
        ]
        np.testing.assert_allclose(figures[0], figures[1], rtol=1e-6)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_a_microbatch_in_flight_keeps_what_the_simulation_of_its_step_keeps(how: str) -> None:
    options, part = Options(recompute=how, whole=CLUSTER), submeshes(CLUSTER)[0]
    asked = StageCosts(layered(5), CLUSTER, options, ROOMY, most=8)
    (way,) = asked(1, 2, part, 8)
    model = asked.layered(8)
    graph = stage_graphs(model.graph, model.layers.ends[:3:2], Trace(None))[1]
    one, four = (
        make_plan(graph, part.meshes[0], replace(options, whole=CLUSTER), Trace(None), repeated)
        for repeated in (Repeated(8, 1), Repeated(8, 4))
    )
    simulated = [plan.predicted.peak_bytes for plan in (one, four)]
    assert (simulated[1] - simulated[0]) / 3 == pytest.approx(way.per_microbatch, rel=0.02)
    assert [way.memory(1), way.memory(4)] == pytest.approx(simulated, rel=0.02)


def test_every_message_pays_its_latency() -> None:
    """With twice as many microbatches a message has half the bytes and the same latency."""
    line = Mesh.parse("cpu[1GFLOP/s 64GiB 1GB/s]: gpu=2 @1GB/s 1us")
    one = next(part for part in submeshes(line) if part.size == 1)
    layers = layered(5)(4)
    transfer = Borders(layers, line, Options()).between(4)
    at = len(layers.kinds) // 2
    nbytes = BATCH // 4 * 16 * 256 * 4  # of a block's result, and of its gradient
    assert transfer(at, one, one, 4) == pytest.approx(2 * (nbytes / 1e9 + 1e-6))
    assert transfer(at, one, one, 8) == pytest.approx(2 * (nbytes / 2 / 1e9 + 1e-6))
