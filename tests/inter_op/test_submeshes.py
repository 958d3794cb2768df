"""Sub-meshes: their enumeration, the links that price their axes, and their placement."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.algorithms import INTER, INTRA
from autopar.cost.device import device
from autopar.cost.network import Network
from autopar.errors import MeshError
from autopar.inter_op.submeshes import Cluster, place, submeshes
from autopar.ir.mesh import Mesh

CLUSTERS = [
    "H100: node=4, gpu=8",
    "H100: node=2 @50GB/s 10us, gpu=8 @450GB/s 3us",
    "H100: node=3, gpu=6",
    "H100: node=5, gpu=8",
    "V100: gpu=16",
    "H100: gpu=7",
    "cpu: data=2, tensor=2",
    "H100: pod=4 @10GB/s, node=4, gpu=8",
    "chip[400TFLOP/s 64GiB 1.6TB/s]: gpu=12",
]


def shapes(text: str) -> list[str]:
    return [str(part) for part in submeshes(Mesh.parse(text))]


def test_parts_of_hosts_and_whole_hosts() -> None:
    assert shapes("A100-80: node=4, gpu=8") == ["1x1", "1x2", "1x4", "1x8", "2x8", "3x8", "4x8"]
    assert shapes("H100: node=3, gpu=6") == ["1x1", "1x2", "1x3", "1x6", "2x6", "3x6"]
    assert shapes("H100: gpu=7") == ["1x1", "1x2", "1x4", "1x7"]
    many = [part.hosts for part in submeshes(Mesh.parse("H100: node=96, gpu=8"))]
    assert {16, 24, 32, 48, 64, 96} <= set(many)
    assert len(many) < 24


@pytest.mark.parametrize("text", CLUSTERS)
def test_every_axis_lies_on_the_links_of_its_part(text: str) -> None:
    """What a part's mesh says of hosts and links is what the cluster says of those devices."""
    mesh = Mesh.parse(text)
    whole = {(level.resource, level.bandwidth, level.latency)
             for level in Network(mesh, device(mesh)).levels(mesh.names)}  # fmt: skip
    for part in submeshes(mesh, most_axes=3):
        assert part.meshes
        assert len(set(part.meshes)) == len(part.meshes)
        for shape in part.meshes:
            assert shape.size == part.size
            assert (shape.device, shape.description) == (mesh.device, mesh.description)
            levels = Network(shape, device(shape)).levels(shape.names)
            outer = math.prod(level.size for level in levels if level.resource == INTER)
            assert (outer, shape.size // outer) == (part.hosts, part.devices)
            found = {(level.resource, level.bandwidth, level.latency) for level in levels}
            if device(mesh).intra_pairs:  # a part has the rings that its own devices form
                found = {item for item in found if item[0] != INTRA}
            assert found <= whole


def test_logical_shapes_are_the_physical_one_first_then_every_split() -> None:
    parts = {str(part): part.meshes for part in submeshes(Mesh.parse("A100-80: node=4, gpu=8"))}
    assert [mesh.shape for mesh in parts["1x8"]] == [(8,), (2, 4)]
    assert [mesh.shape for mesh in parts["2x8"]] == [(2, 8), (16,), (4, 4), (8, 2)]
    assert parts["4x8"][0] == Mesh.parse("A100-80: node=4, gpu=8")
    given_names = submeshes(Mesh.parse("cpu: data=2, tensor=2"))[-1].meshes
    assert given_names[0] == Mesh.parse("cpu: data=2, tensor=2")


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 12, 16])
def test_parts_of_any_sizes_that_add_up_tile_two_hosts(devices: int) -> None:
    cluster = Cluster.of(
        Mesh.parse(f"chip[1TFLOP/s 1GiB 1TB/s]: node=2 @1GB/s, gpu={devices} @2GB/s")
    )
    if cluster.devices != devices:  # small hosts are one host to the network
        cluster = Cluster.of(Mesh.parse(f"cpu: gpu={2 * devices}"))
    sizes = [part.size for part in submeshes(cluster.mesh)]
    for multiset in _sums(sorted(sizes, reverse=True), 2 * devices):
        _assert_placed(cluster, multiset)


def _sums(sizes: list[int], total: int) -> list[tuple[int, ...]]:
    """All multisets of sizes with that sum."""
    if total == 0:
        return [()]
    found = []
    for at, size in enumerate(sizes):
        if size <= total:
            found += [(size, *rest) for rest in _sums(sizes[at:], total - size)]
    return found


def _assert_placed(cluster: Cluster, sizes: tuple[int, ...]) -> None:
    starts = place(cluster, sizes)
    ranks = [rank for at, size in zip(starts, sizes, strict=True) for rank in range(at, at + size)]
    assert sorted(ranks) == list(range(cluster.mesh.size))
    for at, size in zip(starts, sizes, strict=True):
        if size < cluster.devices:
            assert at // cluster.devices == (at + size - 1) // cluster.devices
        else:
            assert at % cluster.devices == 0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_placed_in_any_order(data: st.DataObject) -> None:
    mesh = Mesh.parse(data.draw(st.sampled_from([t for t in CLUSTERS if "pod" not in t])))
    cluster = Cluster.of(mesh)
    sizes = [part.size for part in submeshes(mesh)]
    chosen: list[int] = []
    while left := mesh.size - sum(chosen):
        chosen.append(data.draw(st.sampled_from([size for size in sizes if size <= left])))
    _assert_placed(cluster, tuple(chosen))


def test_stages_lie_in_their_order_where_that_is_possible() -> None:
    cluster = Cluster.of(Mesh.parse("H100: node=2, gpu=8"))
    assert place(cluster, (2, 2, 4, 8)) == (0, 2, 4, 8)
    assert place(cluster, (1, 8, 4, 2, 1)) == (14, 0, 8, 12, 15)


def test_what_cannot_be_placed_is_refused() -> None:
    cluster = Cluster.of(Mesh.parse("H100: node=2, gpu=8"))
    with pytest.raises(MeshError, match="do not make up"):
        place(cluster, (8, 4))
    with pytest.raises(MeshError, match="do not make up"):
        place(cluster, (12, 4))
    with pytest.raises(MeshError, match="do not fit"):
        place(Cluster.of(Mesh.parse("H100: node=2, gpu=6")), (4, 4, 4))


def test_mirrored_shapes_on_the_same_links_are_one() -> None:
    for part in submeshes(Mesh.parse("H100: node=2, gpu=8"), most_axes=3):
        for one, other in itertools.combinations(part.meshes, 2):
            network = [Network(mesh, device(mesh)) for mesh in (one, other)]
            keys = [sorted(repr(net.levels((name,))) for name in net.mesh.names) for net in network]
            assert keys[0] != keys[1]
