"""Closed forms against rings simulated message by message, bounds and published times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost.algorithms import INTER, INTRA
from autopar.cost.collective_seconds import KINDS, Level, algorithms, collective_seconds
from autopar.cost.model import AnalyticModel
from autopar.cost.protocol import PLAIN, library
from autopar.errors import CostError, MeshError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Axis, Mesh
from benchmarks.published import rings

NVLINK, INFINIBAND = library("NCCL", "NVLink"), library("NCCL", "InfiniBand")
level = st.tuples(st.integers(1, 16), st.floats(1e6, 1e12), st.floats(0, 1e-2)).map(
    lambda figures: Level(*figures)
)
levels = st.lists(level, min_size=1, max_size=3)
payload = st.integers(0, 2**40)
# A node and a network of nodes, both run by NCCL.
inside = level.map(lambda one: one._replace(resource=INTRA, library=NVLINK))
between = st.builds(
    lambda one, more: one._replace(
        resource=INTER, library=INFINIBAND, alone=one.bandwidth * (1 + more)
    ),
    level,
    st.floats(0, 8),
)
clusters = st.tuples(between, inside).map(list)
NAMED = [(kind, name) for kind in KINDS for name in algorithms(kind) if name != "switch"]


def price(kind: str, over: Sequence[Level], nbytes: float, algorithm: str | None = None) -> float:
    return collective_seconds(kind, over, nbytes, algorithm)


def play_ring(one: Level, chunk: float, kind: str) -> float:
    """Run a ring of messages on real chunks until every device holds what `kind` promises.

    A chunk is the set of devices whose part is in it. Each round every device sends one chunk to
    its right-hand neighbour, which adds it to its own (reduce) or keeps it (gather).
    """
    n, rounds = one.size, 0
    everyone = frozenset(range(n))
    if kind == "all_gather":
        held = [{rank: everyone} for rank in range(n)]
        start = list(range(n))
    else:
        held = [dict.fromkeys(range(n), frozenset({rank})) for rank in range(n)]
        while any(everyone not in chunks.values() for chunks in held):
            sent = [((rank - rounds) % n, held[rank][(rank - rounds) % n]) for rank in range(n)]
            for rank in range(n):
                name, part = sent[rank - 1]
                held[rank][name] |= part
            rounds += 1
        start = [next(i for i, part in chunks.items() if part == everyone) for chunks in held]
    if kind != "reduce_scatter":
        passing = list(start)
        while any(list(chunks.values()).count(everyone) < n for chunks in held):
            passing = [passing[rank - 1] for rank in range(n)]
            for rank in range(n):
                held[rank][passing[rank]] = everyone
            rounds += 1
    return rounds * (one.latency + chunk / one.bandwidth)


@settings(deadline=None)
@given(one=level, nbytes=payload)
def test_ring_forms_equal_the_ring_played_out(one: Level, nbytes: int) -> None:
    part = nbytes / one.size
    for name in (None, "ring", "channels", "torus", "h_ring", "ho_ring"):
        whole = play_ring(one, nbytes, "all_gather")
        assert price("all_gather", [one], nbytes, name) == pytest.approx(whole)
        for kind in ("reduce_scatter", "all_reduce"):
            played = play_ring(one, part, kind)
            assert price(kind, [one], nbytes, name) == pytest.approx(played)


@settings(deadline=None)
@given(over=levels, nbytes=payload)
def test_all_reduce_is_reduce_scatter_then_all_gather(over: list[Level], nbytes: int) -> None:
    shard = nbytes / math.prod(one.size for one in over)
    halves = price("reduce_scatter", over, nbytes) + price("all_gather", over, shard)
    assert price("all_reduce", over, nbytes) == pytest.approx(halves)


def test_figures_worked_by_hand() -> None:
    over = [Level(4, 100.0, 1.0)]
    assert price("all_to_all", over, 400) == pytest.approx(3 * 1.0 + 3 * 100 / 100)
    assert price("broadcast", over, 400) == pytest.approx(2 * 1.0 + 3 * 1.0 + 300 / 100 + 300 / 100)
    assert price("broadcast", over, 400, "chain") == pytest.approx(3 * 1.0 + 400 / 100)
    assert price("send", over, 400) == pytest.approx(1.0 + 4.0)
    # Of a tree of four nodes, two links up and two down, and each byte up and down.
    assert price("all_reduce", over, 400, "tree") == pytest.approx(2 * 2 * 1.0 + 2 * 400 / 100)


def test_hierarchy_sends_only_the_inner_share_over_the_outer_links() -> None:
    node, gpu = Level(2, 10.0, 0.0), Level(8, 100.0, 0.0)
    # 800 bytes: 700 in and 700 out along gpu at 100 B/s, a ring of 2 with 100 bytes at 10 B/s.
    assert price("all_reduce", [node, gpu], 800, "torus") == pytest.approx(7 + 7 + 10)
    # A shard of 10: 10 bytes from the other node, then 20 from each of seven neighbours.
    assert price("all_gather", [node, gpu], 10, "torus") == pytest.approx(1 + 1.4)
    assert price("reduce_scatter", [node, gpu], 160, "torus") == pytest.approx(1.4 + 1)
    # Rings through all sixteen leave a node at each of its eight devices, at 80 B/s together.
    assert price("all_reduce", [node, gpu], 800, "ring") == pytest.approx(2 * 15 * 50 / 80)
    assert price("all_gather", [node, gpu], 10) == pytest.approx(15 * 10 / 80)
    # Half the peers of an exchange are in the other node.
    assert price("all_to_all", [node, gpu], 160) == pytest.approx(80 / 10 + 70 / 100)


def play_ho_ring(node: Level, gpu: Level, shard: float) -> float:
    """Two rings at once, message by message: when the node's ring has passed on every arrival."""
    inside, between = (one.latency + shard / one.bandwidth for one in (gpu, node))
    arrivals = [round * between for round in range(node.size)]
    free = 0.0
    for arrived in arrivals:
        free = max(free, arrived) + (gpu.size - 1) * inside
    return free


@settings(deadline=None)
@given(node=level, gpu=level, shard=payload)
def test_ho_ring_equals_its_two_rings_played_out(node: Level, gpu: Level, shard: int) -> None:
    assert price("all_gather", [node, gpu], shard, "ho_ring") == pytest.approx(
        play_ho_ring(node, gpu, shard)
    )


def test_h_ring_by_hand() -> None:
    # Two nodes of four devices; a device alone has a card of 20 B/s instead of a share of 5.
    over = [Level(2, 5.0, 1.0, alone=20.0), Level(4, 100.0, 0.1)]
    gather, ring, broadcast = 3 * (0.1 + 10 / 100), 1.0 + 40 / 20, 3 * 0.1 + 80 / 100
    assert price("all_gather", over, 10, "h_ring") == pytest.approx(gather + ring + broadcast)
    reduce, ring = 3 * 0.1 + 80 / 100, 2 * (1.0 + 40 / 20)
    assert price("all_reduce", over, 80, "h_ring") == pytest.approx(reduce + ring + broadcast)


def test_channels_wait_once_for_every_link_on_the_way() -> None:
    over = [Level(3, 100.0, 5.0), Level(4, 50.0, 1.0)]
    # Of eleven hops two lead from node to node; the slowest level is the inner one.
    assert price("all_gather", over, 10, "channels") == pytest.approx(2 * 5 + 9 * 1 + 11 * 10 / 50)


@pytest.mark.parametrize("cluster", [levels, clusters])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), nbytes=payload, more=payload, wait=st.floats(0, 1e-2), gain=st.floats(1, 9))
def test_prices_grow_with_bytes_and_latency_and_shrink_with_bandwidth(
    cluster: st.SearchStrategy[list[Level]],
    kind: str,
    data: st.DataObject,
    nbytes: int,
    more: int,
    wait: float,
    gain: float,
) -> None:
    over = data.draw(cluster)
    for name in (None, *algorithms(kind)):
        now = price(kind, over, nbytes, name)
        assert 0 <= now <= price(kind, over, nbytes + more, name) * (1 + 1e-12)
        slower = [one._replace(latency=one.latency + wait) for one in over]
        assert now <= price(kind, slower, nbytes, name) * (1 + 1e-12)
        for place, one in enumerate(over):
            faster = list(over)
            faster[place] = one._replace(bandwidth=one.bandwidth * gain, alone=one.alone * gain)
            assert price(kind, faster, nbytes, name) <= now * (1 + 1e-12)


@pytest.mark.parametrize(("kind", "name"), NAMED)
@settings(max_examples=30, deadline=None)
@given(over=clusters, nbytes=payload)
def test_no_algorithm_beats_the_bytes_that_must_leave_a_node_and_a_device(
    kind: str, name: str, over: list[Level], nbytes: int
) -> None:
    """What all devices of a node, or one device, must receive at least, at all they can."""
    node, gpu = over
    n = node.size * gpu.size
    assume(n > 1)
    shards = {"all_gather": n, "all_reduce": 2, "send": 0, "broadcast": 0}.get(kind, 1)
    if kind == "all_to_all":
        cross = gpu.size * nbytes * (node.size - 1) / node.size
    else:
        cross = shards * nbytes * (node.size - 1) / node.size
    way_out = (
        max(gpu.size * node.bandwidth, node.alone)
        if name == "h_ring"
        else (gpu.size * node.bandwidth)
    )
    seconds = price(kind, over, nbytes, name)
    assert seconds >= cross / way_out * (1 - 1e-12)
    # A device alone may use a card as well as its links to its neighbours.
    ports = max(node.bandwidth, node.alone) * (node.size > 1) + gpu.bandwidth * (gpu.size > 1)
    assert seconds >= shards * nbytes * (n - 1) / n / ports * (1 - 1e-12)


@settings(deadline=None)
@given(over=clusters, nbytes=payload)
def test_nothing_that_runs_unasked_is_slower_than_simple_rings(
    over: list[Level], nbytes: int
) -> None:
    """The library chooses: no dearer than its ring with the protocol Simple, 8.4 us at first."""
    plain = [one._replace(library=PLAIN) for one in over]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        ring = price(kind, plain, nbytes, "channels")
        assert price(kind, over, nbytes) <= (8.4e-6 + ring) * (1 + 1e-12)


def test_the_protocol_changes_with_the_size() -> None:
    """LL for small messages, LL128 between, Simple at full bandwidth: NCCL's figures for NVLink."""
    over = [Level(8, 240e9, 3.4e-6, resource=INTRA, library=NVLINK)]
    assert price("all_gather", over, 8) == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-3)
    middle, large = 1 << 20, 1 << 30
    ll128 = 14e-6 + 7 * (1.9e-6 + middle / (0.92 * 240e9))
    assert price("all_gather", over, middle) == pytest.approx(ll128)
    simple = 8.4e-6 + 7 * (3.4e-6 + large / 240e9)
    assert price("all_gather", over, large) == pytest.approx(simple)


def test_trees_win_where_latencies_count_and_switches_where_bytes_do() -> None:
    nodes = [Level(64, 25e9, 14e-6, resource=INTER, library=INFINIBAND)]
    small = price("all_reduce", nodes, 1024)
    assert small < price("all_reduce", nodes, 1024, "channels") / 5
    # Six links up and six down, 5 us each with LL.
    assert small == pytest.approx(6.8e-6 + 12 * 5e-6, rel=0.01)
    large = price("all_reduce", nodes, 1 << 32)
    assert large == price("all_reduce", nodes, 1 << 32, "channels")
    node = [Level(8, 360e9, 3.4e-6, switch=274e9, resource=INTRA, library=NVLINK)]
    assert price("all_reduce", node, 1 << 30) == pytest.approx((1 << 30) / 274e9, rel=0.01)
    assert price("all_reduce", node, 1 << 10) < price("all_reduce", node, 1 << 10, "switch")
    assert math.isinf(price("all_reduce", nodes, 1024, "switch"))


# PaRO's cluster: two figures of its network are fitted to the three times together.
PARO = rings.levels()
PUBLISHED_MS = {"ring": 288, "h_ring": 183, "ho_ring": 162}


@pytest.mark.parametrize("name", PUBLISHED_MS)
def test_published_times_of_rings_over_two_levels(name: str) -> None:
    """An all_gather of 1 GB in all, from 128 devices."""
    assert rings.all_gather_ms(name) == pytest.approx(PUBLISHED_MS[name], rel=0.1)


@pytest.mark.parametrize("total", [1e5, 1e7, 1e8, 1e10, 1e11])
def test_their_order_holds_for_other_sizes(total: float) -> None:
    for kind, nbytes in (("all_gather", total / 128), ("reduce_scatter", total)):
        ho_ring, h_ring, ring = (
            price(kind, PARO, nbytes, name) for name in ("ho_ring", "h_ring", "ring")
        )
        assert ho_ring < h_ring < ring
    overlapped = price("all_reduce", PARO, total, "ho_ring")
    assert overlapped <= price("all_reduce", PARO, total, "torus")
    assert overlapped < price("all_reduce", PARO, total, "h_ring")


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_free_and_of_two_is_not(kind: str) -> None:
    model = AnalyticModel(Mesh.parse("H100: node=1, gpu=2"))
    assert model.collective(Collective(kind, ("node",), 1 << 20)) == 0
    for name in (None, *algorithms(kind)):
        assert price(kind, [Level(1, 1.0, 1.0)], 1 << 20, name) == 0
    alone = model.collective(Collective(kind, ("gpu",), 1 << 20))
    assert alone > 0
    assert model.collective(Collective(kind, ("gpu", "node"), 1 << 20)) == alone


def test_the_order_in_which_axes_are_named_does_not_matter() -> None:
    model = AnalyticModel(Mesh.parse("H100: node=2, gpu=8"))
    there = model.collective(Collective("all_gather", ("node", "gpu"), 1 << 24))
    assert there == model.collective(Collective("all_gather", ("gpu", "node"), 1 << 24))


def test_what_cannot_be_priced_is_refused() -> None:
    model = AnalyticModel(Mesh.parse("H100: gpu=8"))
    with pytest.raises(CostError, match="gossip"):
        model.collective(Collective("gossip", ("gpu",), 8))
    with pytest.raises(CostError, match="'tree'") as caught:
        collective_seconds("all_gather", [Level(8, 1.0, 1.0)], 8, "tree")
    assert "ho_ring" in caught.value.why
    for nodes in ("gpu=8", "gpu=1"):
        with pytest.raises(CostError, match="price"):
            AnalyticModel(Mesh.parse(f"H100: {nodes}")).collective(
                Collective("all_reduce", ("gpu",), -8)
            )
    with pytest.raises(MeshError, match="node"):
        model.collective(Collective("all_reduce", ("node",), 8))
    for bandwidth, latency in [(0.0, 1e-6), (math.nan, 1e-6), (math.inf, 1e-6), (1e9, -1.0)]:
        with pytest.raises(CostError, match="'gpu'"):
            AnalyticModel(Mesh("H100", (Axis("gpu", 8, bandwidth, latency),)))
    crawl = AnalyticModel(Mesh("H100", (Axis("gpu", 8, 1e-308, 0.0),)))
    with pytest.raises(CostError, match="inf"):
        crawl.collective(Collective("all_reduce", ("gpu",), 1 << 40))
