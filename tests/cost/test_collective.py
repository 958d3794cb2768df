"""Closed forms against a ring that is played message by message, and which links an axis uses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import collective as forms
from autopar.cost.collective import Level
from autopar.cost.device import Link, link
from autopar.cost.model import AnalyticModel
from autopar.errors import CostError, MeshError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Axis, Mesh

KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
level = st.builds(Level, st.integers(1, 16), st.floats(1e6, 1e12), st.floats(0, 1e-2))
levels = st.lists(level, min_size=1, max_size=3)
payload = st.integers(0, 2**40)


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


@given(one=level, nbytes=payload)
def test_ring_forms_equal_the_ring_played_out(one: Level, nbytes: int) -> None:
    part = nbytes / one.size
    assert forms.all_gather([one], nbytes) == pytest.approx(play_ring(one, nbytes, "all_gather"))
    for kind in ("reduce_scatter", "all_reduce"):
        played = play_ring(one, part, kind)
        assert forms.collective_seconds(kind, [one], nbytes) == pytest.approx(played)


@given(over=levels, nbytes=payload)
def test_all_reduce_is_reduce_scatter_then_all_gather(over: list[Level], nbytes: int) -> None:
    shard = nbytes / math.prod(one.size for one in over)
    halves = forms.reduce_scatter(over, nbytes) + forms.all_gather(over, shard)
    assert forms.all_reduce(over, nbytes) == pytest.approx(halves)


def test_figures_worked_by_hand() -> None:
    over = [Level(4, 100.0, 1.0)]
    assert forms.all_to_all(over, 400) == pytest.approx(3 * 1.0 + 3 * 100 / 100)
    assert forms.broadcast(over, 400) == pytest.approx(2 * 1.0 + 3 * 1.0 + 300 / 100 + 300 / 100)
    assert forms.send(over, 400) == pytest.approx(1.0 + 4.0)


def test_hierarchy_sends_only_the_inner_share_over_the_outer_links() -> None:
    node, gpu = Level(2, 10.0, 0.0), Level(8, 100.0, 0.0)
    # 800 bytes: 700 in and 700 out along gpu at 100 B/s, a ring of 2 with 100 bytes at 10 B/s.
    assert forms.all_reduce([node, gpu], 800) == pytest.approx(7 + 7 + 10)
    # A shard of 10: 10 bytes from the other node, then 20 from each of seven neighbours.
    assert forms.all_gather([node, gpu], 10) == pytest.approx(1 + 1.4)
    assert forms.reduce_scatter([node, gpu], 160) == pytest.approx(1.4 + 1)


@pytest.mark.parametrize("kind", KINDS)
@given(over=levels, nbytes=payload, more=payload, wait=st.floats(0, 1e-2))
def test_prices_grow_with_bytes_and_latency(
    kind: str, over: list[Level], nbytes: int, more: int, wait: float
) -> None:
    price = forms.collective_seconds(kind, over, nbytes)
    assert 0 <= price <= forms.collective_seconds(kind, over, nbytes + more) * (1 + 1e-12)
    slower = [one._replace(latency=one.latency + wait) for one in over]
    assert price <= forms.collective_seconds(kind, slower, nbytes) * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_free_and_of_two_is_not(kind: str) -> None:
    model = AnalyticModel(Mesh.parse("H100: node=1, gpu=2"))
    assert model.collective(Collective(kind, ("node",), 1 << 20)) == 0
    alone = model.collective(Collective(kind, ("gpu",), 1 << 20))
    assert alone > 0
    assert model.collective(Collective(kind, ("gpu", "node"), 1 << 20)) == alone


def test_an_axis_within_the_node_uses_the_nodes_links() -> None:
    mesh = Mesh.parse("H100: node=4, pair=2, gpu=4")
    inside, outside = Link(450e9, 3e-6), Link(50e9, 10e-6)
    assert [link(mesh, axis) for axis in mesh.names] == [outside, inside, inside]
    wide = Mesh.parse("H100: node=2, gpu=16")
    assert [link(wide, axis) for axis in wide.names] == [outside, outside]


def test_figures_written_on_an_axis_win_one_by_one() -> None:
    mesh = Mesh.parse("H100: node=2 @7GB/s, gpu=8 @100GB/s 1us")
    assert link(mesh, "node") == Link(7e9, 10e-6)
    assert link(mesh, "gpu") == Link(100e9, 1e-6)


def test_the_order_in_which_axes_are_named_does_not_matter() -> None:
    model = AnalyticModel(Mesh.parse("H100: node=2, gpu=8"))
    there = model.collective(Collective("all_gather", ("node", "gpu"), 1 << 24))
    assert there == model.collective(Collective("all_gather", ("gpu", "node"), 1 << 24))


def test_what_cannot_be_priced_is_refused() -> None:
    model = AnalyticModel(Mesh.parse("H100: gpu=8"))
    with pytest.raises(CostError, match="gossip"):
        model.collective(Collective("gossip", ("gpu",), 8))
    with pytest.raises(CostError, match="price"):
        model.collective(Collective("all_reduce", ("gpu",), -8))
    with pytest.raises(MeshError, match="node"):
        model.collective(Collective("all_reduce", ("node",), 8))
    for bandwidth, latency in [(0.0, 1e-6), (math.nan, 1e-6), (math.inf, 1e-6), (1e9, -1.0)]:
        with pytest.raises(CostError, match="'gpu'"):
            AnalyticModel(Mesh("H100", (Axis("gpu", 8, bandwidth, latency),)))
    crawl = AnalyticModel(Mesh("H100", (Axis("gpu", 8, 1e-308, 0.0),)))
    with pytest.raises(CostError, match="inf"):
        crawl.collective(Collective("all_reduce", ("gpu",), 1 << 40))
