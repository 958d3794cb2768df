"""Sub-meshes: the parts of a cluster that pipeline stages may get, and where they lie in it.

A part is some devices of one host, or whole hosts (Alpa, OSDI 2022, section 5.2: (1, 2^k) and
(n, M)). Any selection of such parts that has as many devices as the cluster covers it: hosts first,
then what shares one, the largest first (Alpa, appendix A).
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

# Up to so many hosts every number of them is a sub-mesh; beyond only powers of two and divisors.
_FEW_HOSTS = 8


@dataclass(frozen=True)
class SubMesh:
    """Part of a cluster: `hosts` times `devices` on each.

    Attributes:
        hosts, devices: one host with some or all of its devices, or several whole hosts.
        meshes: how they may be seen, as hosts with devices first, then the fewest axes first; every
            axis is priced on the links that lie under it.
    """

    hosts: int
    devices: int
    meshes: tuple[Mesh, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices}"


@dataclass(frozen=True)
class Links:
    """`size` equal parts joined by the same links; `axes` of the cluster's mesh lie on them."""

    size: int
    between_hosts: bool
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Cluster:
    """A mesh as hosts with devices.

    Attributes:
        mesh: as the user wrote it.
        links: levels, outermost first: those between hosts, then those inside one.
    """

    mesh: Mesh
    links: tuple[Links, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> Cluster:
        """Hosts and devices of `mesh`, by the same division that prices its axes (cost/network.py).

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
        """Number of devices of each host."""
        return math.prod(links.size for links in self.links if not links.between_hosts)


def submeshes(mesh: Mesh, most_axes: int = 2) -> tuple[SubMesh, ...]:
    """The parts of `mesh` that a stage may get, the smallest first, the whole last.

    Of one host: so many devices as divide each level of its links, and any power of two where there
    is one host only. Of several: any number where there are few, else powers of two and divisors.

    Args:
        mesh: the cluster.
        most_axes: how many axes a part's logical shapes may have.

    Raises:
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
    """
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
    """Numbers of devices of one host."""
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
    """Numbers of hosts."""
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
    """The shapes of `hosts` x `devices`, the cluster's own first, each priced on its own links.

    An axis holds part of one level of links, or some whole levels with part of the next where the
    mesh text gives no figures for them. Shapes that differ in the order of axes on the same links
    only are one.
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
    """The links of so many hosts and devices, outermost first."""
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
    """All ways to write `total` as a product of `count` factors above 1, inner ones large first."""
    if count == 1:
        yield (total,)
        return
    for inner in reversed(_divisors(total)):
        if 1 < inner < total:
            for outer in _factorised(total // inner, count - 1):
                yield (*outer, inner)


def _named(cluster: Cluster, levels: list[Links], sizes: tuple[int, ...]) -> Mesh | None:
    """A mesh of `sizes`, outermost first; None where an axis would need two figures."""
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
                return None  # neither inside a level nor made of whole ones
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
    """The axis of the cluster that an axis is named after which ends with device `reach`."""
    size = 1
    for axis in reversed(mesh.axes):
        size *= axis.size
        if reach <= size:
            return axis.name
    return mesh.axes[0].name


def _spans(cluster: Cluster, mesh: Mesh) -> tuple[int, int]:
    """Over how many hosts and devices of each the prices of `mesh` believe that it spreads."""
    levels = Network(mesh, device(cluster.mesh)).levels(mesh.names)
    outer = math.prod(level.size for level in levels if level.resource == INTER)
    return outer, mesh.size // outer


def place(cluster: Cluster, sizes: Sequence[int]) -> tuple[int, ...]:
    """The first rank of each part, given the numbers of devices; ranks of a part are contiguous.

    Parts lie one behind the other in the given order if none straddles hosts so, else whole hosts
    come first and the rest is packed into hosts, the largest first.

    Raises:
        MeshError: the sizes are not those of the cluster's parts or do not add up to it.
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
    """Whether a part may begin at `at`: it lies in one unit of every level that could hold it."""
    unit = 1
    for links in reversed(cluster.links):
        unit *= links.size
        if size < unit and links is not cluster.links[0]:
            return at // unit == (at + size - 1) // unit
        if size >= unit and at % unit:
            return False
    return True


def _fill(sizes: Sequence[int], room: int, start: int = 0) -> tuple[int, ...] | None:
    """Positions of sizes, in descending order, that add up to `room`; large ones are preferred."""
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
