"""The links under the axes of a mesh: splits, custom figures, contention, speed."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.algorithms import INTER, INTRA
from autopar.cost.collective_seconds import KINDS
from autopar.cost.cube_mesh import rings
from autopar.cost.device import devices
from autopar.cost.model import AnalyticModel
from autopar.errors import CostError, MeshError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from tests.support.work import calls_of

H100, V100 = (next(d for d in devices() if d.name == name) for name in ("H100", "V100"))


def figures(text: str, *axes: str) -> list[tuple[str, int, float, float]]:
    """Returns the links, size, GB/s of a device and microseconds of each level."""
    model = AnalyticModel(Mesh.parse(text))
    return [
        (one.resource, one.size, round(one.bandwidth / 1e9, 9), round(one.latency * 1e6, 9))
        for one in model.network.levels(axes or model.mesh.names)
    ]


IN, OUT = round(H100.intra_efficiency * 450, 9), round(0.94 * 50, 9)


def test_an_axis_within_the_node_uses_the_nodes_links() -> None:
    mesh = "H100: node=4, pair=2, gpu=4"
    assert figures(mesh, "node") == [(INTER, 4, OUT, 14)]
    assert figures(mesh, "pair") == [(INTRA, 2, IN, 3.4)]
    assert figures(mesh, "gpu") == [(INTRA, 4, IN, 3.4)]
    assert figures(mesh, "node", "gpu") == [(INTER, 4, OUT, 14), (INTRA, 4, IN, 3.4)]
    # Axes that divide the same links are one level to a library.
    assert figures(mesh, "pair", "gpu") == [(INTRA, 8, IN, 3.4)]


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ("gpu=8", {"gpu": [(INTRA, 8)]}),
        ("gpu=16", {"gpu": [(INTER, 2), (INTRA, 8)]}),
        ("gpu=12", {"gpu": [(INTER, 2), (INTRA, 6)]}),
        ("gpu=13", {"gpu": [(INTER, 13)]}),
        ("node=2, gpu=16", {"node": [(INTER, 2)], "gpu": [(INTER, 2), (INTRA, 8)]}),
        ("data=4, gpu=4", {"data": [(INTER, 2), (INTRA, 2)], "gpu": [(INTRA, 4)]}),
        ("a=3, b=6", {"a": [(INTER, 3)], "b": [(INTRA, 6)]}),
        ("a=2, b=3, c=6", {"a": [(INTER, 2)], "b": [(INTER, 3)], "c": [(INTRA, 6)]}),
    ],
)
def test_an_axis_that_leaves_the_node_is_split(
    mesh: str, sizes: dict[str, list[tuple[str, int]]]
) -> None:
    for axis, expected in sizes.items():
        assert [level[:2] for level in figures(f"H100: {mesh}", axis)] == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(nodes=st.integers(1, 8), nbytes=st.integers(0, 2**34))
def test_an_axis_over_nodes_costs_what_its_two_parts_cost(
    kind: str, nodes: int, nbytes: int
) -> None:
    one = AnalyticModel(Mesh.parse(f"A100-80: gpu={8 * nodes}"))
    two = AnalyticModel(Mesh.parse(f"A100-80: node={nodes}, gpu=8"))
    three = AnalyticModel(Mesh.parse(f"A100-80: node={nodes}, pair=4, gpu=2"))
    call = Collective(kind, ("gpu",), nbytes)
    expected = one.collective(call)
    for model in (two, three):
        assert model.collective(dataclasses.replace(call, axes=model.mesh.names)) == expected


def test_figures_written_on_an_axis_win_one_by_one() -> None:
    """They are the links', as in the table, of which the device attains its share."""
    mesh = "H100: node=2 @7GB/s, gpu=8 @100GB/s 1us"
    assert figures(mesh, "node") == [(INTER, 2, round(0.94 * 7, 9), 14)]
    assert figures(mesh, "gpu") == [(INTRA, 8, round(H100.intra_efficiency * 100, 9), 1)]
    assert figures("H100: gpu=16 1us") == [(INTER, 16, OUT, 1)]
    own = "H100: node=2 @50GB/s 14us, gpu=8 @450GB/s 3.4us"
    assert figures(own) == figures("H100: node=2, gpu=8")


def test_a_lone_device_keeps_no_link_busy_and_others_theirs() -> None:
    model = AnalyticModel(Mesh.parse("H100: pod=1, data=4, gpu=4"))
    used = {
        axes: model.resources(Collective("all_reduce", axes, 8))
        for axes in (("pod",), ("gpu",), ("data",), ("data", "gpu"))
    }
    assert used == {
        ("pod",): (),
        ("gpu",): (INTRA,),
        ("data",): (INTER, INTRA),
        ("data", "gpu"): (INTER, INTRA),
    }
    with pytest.raises(MeshError, match="node"):
        model.resources(Collective("all_reduce", ("node",), 8))


def test_every_device_of_the_table_is_slower_between_nodes_than_in_one() -> None:
    for entry in devices():
        near, far = (
            AnalyticModel(Mesh.parse(f"{entry.name}: node=2, gpu={entry.devices_per_node}"))
            for _ in range(2)
        )
        size = 1 << 28
        inside = near.collective(Collective("send", ("gpu",), size))
        assert entry.nic_bandwidth >= entry.inter_bandwidth
        if entry.name != "cpu":
            assert inside < far.collective(Collective("send", ("node",), size))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inter_bandwidth", 0.0),
        ("nic_bandwidth", -1.0),
        ("intra_efficiency", 1.2),
        ("switch_reduction", -1.0),
        ("intra_link", "string"),
        ("library", "own"),
    ],
)
def test_nonsense_about_links_is_refused_by_name(name: str, value: float | str) -> None:
    with pytest.raises(CostError, match=name):
        dataclasses.replace(H100, **{name: value})  # type: ignore[arg-type]


def test_bus_bandwidths_are_those_that_were_measured() -> None:
    """Public figures of nccl-tests at 1 to 8 GB: issues 175 and 100 (A100), 212 and 326 (H100).

    tables/links.csv is fitted to another collection, of up to 512 MiB, on other machines.
    Both attain their full bandwidth at these sizes, so that no term in the bytes can follow one
    and then the other: a table has one bandwidth for a device. Those who have the faster machine
    measure it (`autopar calibrate`).
    """

    def bus(mesh: str, kind: str) -> float:
        model = AnalyticModel(Mesh.parse(mesh))
        n, total = model.mesh.size, 4 << 30
        brought = total // n if kind == "all_gather" else total
        sent = (2 if kind == "all_reduce" else 1) * (n - 1) / n * total
        return sent / model.collective(Collective(kind, model.mesh.names, brought)) / 1e9

    # 213 by the table: its rings attain 220 of NVLink's 300 GB/s, and copy their own shard.
    assert bus("A100-80: gpu=8", "all_reduce") == pytest.approx(232.5, rel=0.09)
    # Two nodes with four cards each, half of those of a DGX: 86 to 96 GB/s.
    assert 86 <= bus("A100-80: node=2 @12.5GB/s, gpu=8", "all_reduce") <= 96
    # 337 by the table: as much as is read, less the copy of a device's own shard (0.47 of 7.47).
    assert bus("H100: gpu=8", "all_gather") == pytest.approx(360, rel=0.07)
    # 429 by the table: its switches add 246 GB/s, the reading's 274.
    assert bus("H100: gpu=8", "all_reduce") == pytest.approx(480, rel=0.11)


@pytest.mark.parametrize(
    ("mesh", "axis", "links"),
    [
        ("gpu=2", "gpu", 1),
        ("gpu=4", "gpu", 4),
        ("gpu=8", "gpu", 6),
        ("pair=4, gpu=2", "gpu", 1),
        ("quad=2, gpu=4", "gpu", 4),
        ("quad=2, gpu=4", "quad", 1),
        ("quad=4, gpu=2", "quad", 2),
        ("node=2, gpu=8", "gpu", 6),
    ],
)
def test_v100_form_a_cube_mesh(mesh: str, axis: str, links: int) -> None:
    """Links of 25 GB/s join two neighbours, a quad, all eight, and groups that span both quads."""
    (level,) = AnalyticModel(Mesh.parse(f"V100: {mesh}")).network.levels((axis,))
    assert level.bandwidth == pytest.approx(links * 25e9 * V100.intra_efficiency)
    own = f"V100: {mesh}".replace(f"{axis}={level.size}", f"{axis}={level.size} @10GB/s")
    (written,) = AnalyticModel(Mesh.parse(own)).network.levels((axis,))
    assert written.bandwidth == pytest.approx(10e9 * V100.intra_efficiency)


@pytest.mark.parametrize(("devices", "links"), [(2, 1), (4, 4), (8, 6)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_v100_send_at_the_rate_that_nccl_assumes(devices: int, links: int, kind: str) -> None:
    """20 GB/s around every ring (NCCL's src/graph/topo.h), as nccl-tests counts what is sent."""
    nbytes = 1 << 30
    share = nbytes // devices if kind == "all_gather" else nbytes
    model = AnalyticModel(Mesh.parse(f"V100: gpu={devices}"))
    sent = (devices - 1) / devices * nbytes * (2 if kind == "all_reduce" else 1)
    rate = sent / model.collective(Collective(kind, ("gpu",), share))
    assert rate == pytest.approx(links * 20e9, rel=0.01)


def test_rings_of_a_group_share_no_link() -> None:
    """As many as every device has links into its group, or fewer; none where none leads on."""
    pairs = V100.intra_pairs
    assert rings(pairs, (0, 5)) == 0  # no link joins them
    for size in (2, 3, 4, 8):
        for group in itertools.combinations(range(8), size):
            degree = min(sum(pairs[a][b] for b in group) for a in group)
            assert rings(pairs, group) <= degree
    assert rings(pairs, tuple(range(8))) == 6


def test_pricing_takes_no_more_calls_for_more_devices_or_after_more_prices() -> None:
    """A large model has a thousand different collectives."""

    def price(nodes: int, count: int) -> None:
        model = AnalyticModel(Mesh.parse(f"H100: node={nodes}, gpu=8"))
        for step in range(count):
            for axes in (("gpu",), ("node", "gpu")):
                model.collective(Collective("all_reduce", axes, 1000 * step))

    price(2, 10)  # reads the tables
    none, few, many = (calls_of(lambda n=n: price(64, n)) for n in (0, 100, 1000))
    assert few - none < 200 * 150
    assert many - none < 2000 * 150
    assert calls_of(lambda: price(4096, 100)) < 1.1 * few
