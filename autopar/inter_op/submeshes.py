"""Sub-meshes: the parts of a cluster that pipeline stages can use, and their placement.

A sub-mesh is a subset of one host's devices, or several whole hosts (Alpa, OSDI 2022, section 5.2:
(1, 2^k) and (n, M)). Any selection with as many devices as the cluster covers it: whole hosts are
placed first, then the parts of hosts in descending order of size (Alpa, appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autopar.cost.algorithms import INTER, Level
from autopar.cost.device import device
from autopar.cost.network import Network
from autopar.errors import MeshError
from autopar.ir.mesh import Axis, Mesh

# Up to this number of hosts, any number forms a sub-mesh; beyond, only powers of two and divisors.
_FEW_HOSTS = 8


@dataclass(frozen=True)
class SubMesh:
    """A part of a cluster: `hosts` hosts with `devices` devices each.

    Attributes:
        hosts, devices: one host with some or all of its devices, or several whole hosts.
        meshes: its logical shapes, hosts x devices first, then in order of the number of axes;
            every axis is priced on the links that it uses.
        part: the number of the part of the cluster's mesh that contains it.
    """

    hosts: int
    devices: int
    meshes: tuple[Mesh, ...]
    part: int = 0

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices}"


@dataclass(frozen=True)
class Links:
    """A level of `size` equal parts joined by the same links; `axes` of the mesh use it."""

    size: int
    between_hosts: bool
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Cluster:
    """A mesh seen as hosts with devices.

    Attributes:
        mesh: the mesh as specified by the user.
        links: link levels, outermost first: those between hosts, then those within one.
    """

    mesh: Mesh
    links: tuple[Links, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> Cluster:
        """Splits `mesh` into hosts and devices, as `cost/network.py` does to price its axes.

        Raises:
            UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        """
        network = Network(mesh, device(mesh))
        parts: list[tuple[Level, Axis]] = []
        for axis in mesh.axes:
            parts += [(level, axis) for level in network.levels((axis.name,))]
        links = []
        for level, same in groupby(parts, lambda part: part[0]._replace(size=0)):
            members = list(same)
            size = math.prod(part.size for part, _ in members)
            axes = tuple(axis for _, axis in members)
            links.append(Links(size, level.resource == INTER, axes))
        return cls(mesh, tuple(links))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return math.prod(links.size for links in self.links if links.between_hosts)

    @property
    def devices(self) -> int:
        """Number of devices per host."""
        return math.prod(links.size for links in self.links if not links.between_hosts)


def submeshes(mesh: Mesh, most_axes: int = 2) -> tuple[SubMesh, ...]:
    """Returns the parts of `mesh` that a stage can use, from the smallest to the whole.

    If the mesh has unlike devices, these are the sub-meshes of its parts, one part after another.

    Parts of one host have sizes that divide each level of its links, or any power of two if there
    is only one host. Parts of several hosts have any number of them if there are few hosts, else
    powers of two and divisors.

    Args:
        mesh: the cluster.
        most_axes: maximum number of axes of a part's logical shapes.

    Raises:
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
    """
    if mesh.unlike:
        return tuple(
            replace(one, part=number)
            for number, part in enumerate(mesh.parts)
            for one in submeshes(part, most_axes)
        )
    cluster = Cluster.of(mesh)
    hosts, devices = cluster.hosts, cluster.devices
    shapes = [(1, size) for size in sorted(_within(cluster))]
    shapes += [(count, devices) for count in _counts(cluster) if count > 1]
    assert shapes[-1] == (hosts, devices)
    return tuple(
        SubMesh(count, size, tuple(_logical(cluster, count, size, most_axes)))
        for count, size in shapes
    )


def _within(cluster: Cluster) -> set[int]:
    """Returns the candidate numbers of devices within one host."""
    sizes, inner = {1}, 1
    for links in reversed(cluster.links):
        if links.between_hosts:
            break
        sizes |= {inner * part for part in _divisors(links.size)}
        if cluster.hosts == 1 and inner * links.size == cluster.devices:
            sizes |= {inner * 2**k for k in range(links.size.bit_length())}
        inner *= links.size
    return sizes


def _counts(cluster: Cluster) -> list[int]:
    """Returns the candidate numbers of hosts."""
    counts, inner = {1}, 1
    for links in reversed(cluster.links):
        if not links.between_hosts:
            continue
        outermost = links is cluster.links[0]
        parts = set(_divisors(links.size))
        if outermost:
            parts |= {2**k for k in range(links.size.bit_length())}
            if links.size <= _FEW_HOSTS:
                parts |= set(range(1, links.size + 1))
        counts |= {inner * part for part in parts}
        inner *= links.size
    return sorted(counts)


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _logical(cluster: Cluster, hosts: int, devices: int, most_axes: int) -> Iterator[Mesh]:
    """Yields the shapes of `hosts` x `devices`, the cluster's own first, priced on their own links.

    An axis covers part of one link level, or several whole levels plus part of the next if the mesh
    text gives no figures for them. Shapes that differ only in the order of axes on the same links
    count as one.
    """
    levels = _levels(cluster, hosts, devices)
    total = hosts * devices
    seen: set[tuple[object, ...]] = set()
    own = tuple(axis.size for axis in cluster.mesh.axes if axis.size > 1)
    own = own if total == cluster.mesh.size else ()
    natural = [own or tuple(size for size in (hosts, devices) if size > 1) or (1,)]
    for count in range(1, most_axes + 1):
        for sizes in (*natural, *_factorised(total, count)):
            mesh = _named(cluster, levels, sizes)
            if mesh is None or _spans(cluster, mesh) != (hosts, devices):
                continue
            network = Network(mesh, device(mesh))
            key = tuple(sorted(repr(network.levels((name,))) for name in mesh.names))
            if key not in seen:
                seen.add(key)
                yield mesh


def _levels(cluster: Cluster, hosts: int, devices: int) -> list[Links]:
    """Returns the link levels of that many hosts and devices, outermost first."""
    left = {True: hosts, False: devices}
    levels = []
    for links in reversed(cluster.links):
        size = math.gcd(links.size, left[links.between_hosts])
        outermost = links is next(
            one for one in cluster.links if one.between_hosts == links.between_hosts
        )
        size = left[links.between_hosts] if outermost else size
        left[links.between_hosts] //= size
        if size > 1:
            levels.append(replace(links, size=size))
    return levels[::-1]


def _factorised(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the products of `count` factors above 1 that equal `total`, large inner ones first."""
    if count == 1:
        yield (total,)
        return
    for inner in reversed(_divisors(total)):
        if 1 < inner < total:
            for outer in _factorised(total // inner, count - 1):
                yield (*outer, inner)


def _named(cluster: Cluster, levels: list[Links], sizes: tuple[int, ...]) -> Mesh | None:
    """Returns a mesh of `sizes`, outermost first; None if an axis would need two figures."""
    axes: list[Axis] = []
    rest = [(one.size, one) for one in levels]
    used: dict[str, int] = {}
    reach = 1
    for size in reversed(sizes):
        under: list[Links] = []
        left = size
        while left > 1:
            room, links = rest.pop()
            part = math.gcd(left, room)
            if part == 1 or (part < left and part < room):
                return None  # the axis is neither within a level nor made of whole levels
            under.append(links)
            left //= part
            if room > part:
                rest.append((room // part, links))
        given = [(axis.bandwidth, axis.latency) for links in under for axis in links.axes]
        if len(under) > 1 and any(figures != (None, None) for figures in given):
            return None
        figures = under[-1].axes[-1] if under else cluster.mesh.axes[-1]
        reach *= size
        name = _axis_at(cluster.mesh, reach)
        used[name] = used.get(name, 0) + 1
        name = name if used[name] == 1 else f"{name}_{used[name]}"
        axes.append(replace(figures, name=name, size=size))
    if len({axis.name for axis in axes}) < len(axes):
        return None
    return replace(cluster.mesh, axes=tuple(reversed(axes)))


def _axis_at(mesh: Mesh, reach: int) -> str:
    """Returns the cluster axis that names an axis whose group ends at device `reach`."""
    size = 1
    for axis in reversed(mesh.axes):
        size *= axis.size
        if reach <= size:
            return axis.name
    return mesh.axes[0].name


def _spans(cluster: Cluster, mesh: Mesh) -> tuple[int, int]:
    """Returns the numbers of hosts and devices per host that the prices of `mesh` assume."""
    levels = Network(mesh, device(cluster.mesh)).levels(mesh.names)
    outer = math.prod(level.size for level in levels if level.resource == INTER)
    return outer, mesh.size // outer


def place_stages(mesh: Mesh, stages: Sequence[SubMesh]) -> tuple[int, ...]:
    """Returns the first rank of each stage of a pipeline that uses every device of `mesh`.

    Raises:
        MeshError: the sub-meshes do not make up a part of the mesh; see `place`.
    """
    starts = [0] * len(stages)
    first = 0
    for number, part in enumerate(mesh.parts):
        held = [at for at, one in enumerate(stages) if one.part == number]
        placed = place(Cluster.of(part), [stages[at].size for at in held])
        for at, start in zip(held, placed, strict=True):
            starts[at] = first + start
        first += part.size
    return tuple(starts)


def place(cluster: Cluster, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the first rank of each part, given its number of devices; parts are contiguous.

    Keeps the given order if no part then straddles hosts; otherwise places whole hosts first and
    packs the rest into hosts, largest first.

    Raises:
        MeshError: a size is not that of a sub-mesh, or the sizes do not add up to the cluster.
    """
    devices = cluster.devices
    total = cluster.mesh.size
    good = all(size > 0 and (size <= devices or size % devices == 0) for size in sizes)
    if not good or sum(sizes) != total:
        raise MeshError(
            f"parts of {', '.join(map(str, sizes))} devices do not make up {cluster.mesh}",
            why=f"it has {cluster.hosts} hosts of {devices} devices; a part is whole hosts or "
            "some devices of one",
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    if all(_aligned(cluster, at, size) for at, size in zip(starts, sizes, strict=True)):
        return tuple(starts)
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    found = [0] * len(sizes)
    whole = [index for index in order if sizes[index] >= devices]
    at = 0
    for index in whole:
        found[index] = at
        at += sizes[index]
    small = [index for index in order if sizes[index] < devices]
    while small:
        picked = _fill([sizes[index] for index in small], devices)
        if picked is None:
            raise MeshError(
                f"parts of {', '.join(map(str, sizes))} devices do not fit into {cluster.mesh}",
                why=f"some part would lie on two hosts of {devices} devices",
            )
        for position in picked:
            found[small[position]] = at
            at += sizes[small[position]]
        small = [index for position, index in enumerate(small) if position not in picked]
    return tuple(found)


def _aligned(cluster: Cluster, at: int, size: int) -> bool:
    """Returns whether one unit of every level that is large enough contains a part at `at`."""
    unit = 1
    for links in reversed(cluster.links):
        unit *= links.size
        if size < unit and links is not cluster.links[0]:
            return at // unit == (at + size - 1) // unit
        if size >= unit and at % unit:
            return False
    return True


def _fill(sizes: Sequence[int], room: int, start: int = 0) -> tuple[int, ...] | None:
    """Returns indices of descending sizes that add up to `room`; prefers large ones."""
    if room == 0:
        return ()
    tried: set[int] = set()
    for position in range(start, len(sizes)):
        size = sizes[position]
        if size <= room and size not in tried:
            tried.add(size)
            rest = _fill(sizes, room - size, position + 1)
            if rest is not None:
                return (position, *rest)
    return None
