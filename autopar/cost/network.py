"""The levels of network links under the axes of a mesh.

Ranks are numbered in row-major order and fill one node after another, so the inner axes lie within
a node as long as their product fits into it. The first axis that does not fit is split into the
largest divisor that does and a remainder that crosses nodes: `gpu=16` on nodes of eight is two
nodes of eight, priced exactly as `node=2, gpu=8`. An axis with figures of its own in the mesh text
is not split.
"""

from __future__ import annotations

import math
from itertools import groupby

from autopar.cost.algorithms import INTER, INTRA, Level
from autopar.cost.cube_mesh import fewest_rings, groups
from autopar.cost.device import Device
from autopar.cost.protocol import library, measured
from autopar.errors import CostError
from autopar.ir.mesh import Axis, Mesh


class Network:
    """The network levels under every axis of a mesh.

    Raises:
        CostError: an axis whose bandwidth is not finite and positive, or whose latency is negative
            or not finite.
    """

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self._strides: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, tuple[Level, ...]] = {}
        self._levels: dict[tuple[str, ...], tuple[Level, ...]] = {}
        inside, intra, inter = 1, *_links(device)
        for axis in reversed(mesh.axes):
            _check(axis, mesh)
            room = device.devices_per_node // inside
            near = max((d for d in range(1, room + 1) if axis.size % d == 0), default=0)
            if axis.bandwidth is not None or axis.latency is not None:
                near = axis.size if axis.size <= room else 0
            far = axis.size // near if near else axis.size
            near = near or 1
            self._parts[axis.name] = (
                _given(axis, inter, far, device),
                _given(axis, intra, near, device),
            )
            self._strides[axis.name] = near, inside
            # Once an axis leaves the node, all outer axes lie outside it.
            inside = inside * near if far == 1 else device.devices_per_node + 1
        self._used = math.prod(near for near, _ in self._strides.values())

    def levels(self, axes: tuple[str, ...]) -> tuple[Level, ...]:
        """Returns the levels of size over 1 that a group over `axes` spans, outermost first.

        Adjacent levels with the same figures are merged: a library does not see how axes divide the
            same links.

        Raises:
            MeshError: the mesh has no such axis.
        """
        if axes not in self._levels:
            for name in axes:
                self.mesh.axis(name)
            parts = [part for name in self.mesh.names if name in axes for part in self._parts[name]]
            merged = tuple(
                figures._replace(size=math.prod(part.size for part in same))
                for figures, same in groupby(
                    (part for part in parts if part.size > 1), lambda part: part._replace(size=0)
                )
            )
            if any(level.resource != INTRA for level in merged):
                # The table of links was measured on groups inside a node.
                own = library(self.device.library, self.device.intra_link)
                merged = tuple(
                    level._replace(library=own) if level.resource == INTRA else level
                    for level in merged
                )
            self._levels[axes] = tuple(self._by_pairs(level, axes) for level in merged)
        return self._levels[axes]

    def _by_pairs(self, level: Level, axes: tuple[str, ...]) -> Level:
        """Returns a level inside a node with the bandwidth that its links between pairs give.

        Devices that no ring of them joins send over the host's links. A bandwidth in the mesh text
        is the group's, whatever its links.
        """
        device, named = self.device, [self.mesh.axis(name) for name in set(axes)]
        given = any(axis.bandwidth is not None for axis in named)
        if not device.intra_pairs or level.resource != INTRA or given:
            return level
        strides = [self._strides[axis.name] for axis in named]
        count = fewest_rings(device.intra_pairs, groups(strides, self._used))
        one = device.intra_bandwidth / sum(device.intra_pairs[0]) * device.intra_efficiency
        return level._replace(
            bandwidth=count * one or device.host_bandwidth * device.host_efficiency
        )

    def resources(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the distinct names of the links that a group over `axes` uses, outermost first.

        Two groups that share a link slow each other down while both run, whatever their axes (see
        `simulate/engine.py`).

        Raises:
            MeshError: the mesh has no such axis.
        """
        return tuple(dict.fromkeys(level.resource for level in self.levels(axes)))


def near(mesh: Mesh, device: Device) -> frozenset[str]:
    """Returns the axes whose devices can read one another's memory: NVLink within a node."""
    network = Network(mesh, device)
    levels = {name: network.levels((name,)) for name in mesh.names}
    return frozenset(
        name
        for name, links in levels.items()
        if device.intra_link == "NVLink" and [link.resource for link in links] == [INTRA]
    )


def _links(device: Device) -> tuple[Level, Level]:
    """Returns a device's links inside its node and to other nodes, as levels without a size."""
    inside = library(device.library, device.intra_link)
    if device.links is not None:
        inside = measured(device.links, device.intra_latency)
    return (
        Level(
            1,
            device.intra_bandwidth * device.intra_efficiency,
            device.intra_latency,
            switch=device.switch_reduction,
            resource=INTRA,
            library=inside,
        ),
        Level(
            1,
            device.inter_bandwidth * device.inter_efficiency,
            device.inter_latency,
            alone=device.nic_bandwidth * device.inter_efficiency,
            resource=INTER,
            library=library(device.library, device.inter_link),
        ),
    )


def _given(axis: Axis, link: Level, size: int, device: Device) -> Level:
    """Returns `link` for `size` parts, with the figures that the mesh text gives for the axis.

    A bandwidth in the mesh text is that of the link, as in devices.toml; the device's efficiency
    applies to it.
    """
    level = link._replace(size=size)
    if axis.latency is not None:
        level = level._replace(latency=axis.latency)
    if axis.bandwidth is not None:
        inside = link.resource == INTRA
        share = device.intra_efficiency if inside else device.inter_efficiency
        level = level._replace(bandwidth=axis.bandwidth * share, alone=0.0, switch=0.0)
    return level


def _check(axis: Axis, mesh: Mesh) -> None:
    bandwidth = 1.0 if axis.bandwidth is None else axis.bandwidth
    latency = 0.0 if axis.latency is None else axis.latency
    good = math.isfinite(bandwidth) and bandwidth > 0 and math.isfinite(latency) and latency >= 0
    if not good:
        raise CostError(
            f"mesh axis {axis.name!r} has bandwidth {axis.bandwidth} and latency {axis.latency}",
            where=str(mesh.device),
            why="a bandwidth is finite and positive, a latency finite and not negative",
            todo='write e.g. "gpu=8 @450GB/s 3us", or leave the figures of the device as they are',
        )
