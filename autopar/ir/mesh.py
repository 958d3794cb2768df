"""Mesh: the devices as a grid with named axes, written as one line of text.

    "H200: node=4 @50GB/s 10us, gpu=8 @450GB/s 3us"

Axes are listed outermost first; ranks are numbered in row-major order, as in torch's DeviceMesh.
The figures after `@` are the bandwidth per device and the latency of the links of the axis; by
default they come from the device's table in `cost/devices.toml`. A device that is not in that file
is described in brackets: "mychip[400TFLOP/s 64GiB 1.6TB/s]: gpu=4 @100GB/s 5us".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import MeshError

_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
MOST = 2**24  # most devices of a mesh
MOST_PARTS = 4  # most parts of a mesh; a search tries all their orders
# Between two parts: a plus before the head of a mesh.
_PLUS = re.compile(r"\+(?=\s*[A-Za-z_][\w.-]*\s*(?:\[[^\]]*\])?\s*:)")


def parse_quantity(text: str, unit: str) -> float:
    """Reads "50GB/s", "80GiB", "400TFLOP/s" or "3us" as a plain number (bytes, FLOP, seconds).

    Raises:
        MeshError: the text is not a positive finite number followed by a prefix and `unit`.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*", text)
    value = float("nan")
    if match and match[1].count(".") <= 1 and match[1] != ".":
        number, rest = float(match[1]), match[2]
        if unit == "s" and rest in _SECONDS:
            value = number * _SECONDS[rest]
        elif unit != "s" and rest.endswith(unit):
            prefix = rest[: len(rest) - len(unit)]
            value = number * {**_PREFIX, **_BINARY}.get(prefix, float("nan"))
    if not (math.isfinite(value) and value > 0):
        raise MeshError(
            f"cannot read the quantity {text!r}",
            why=f"a positive number with the unit {unit} is expected",
            todo={"s": 'write e.g. "3us"', "B": 'write e.g. "80GiB"'}.get(
                unit, f'write e.g. "50G{unit}"'
            ),
        )
    return value


def format_quantity(value: float, unit: str) -> str:
    """Inverts `parse_quantity` exactly: `repr` of the number with the best decimal prefix."""
    table = _SECONDS if unit == "s" else {p + unit: f for p, f in _PREFIX.items()}
    for suffix, factor in sorted(table.items(), key=lambda item: -item[1]):
        if value >= factor:
            scaled = f"{value / factor:.12g}"
            if parse_quantity(scaled + suffix, unit) == value:
                return scaled + suffix
    return f"{value!r}{unit}"


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh; bandwidth in bytes/s per device, latency in seconds, None = default."""

    name: str
    size: int
    bandwidth: float | None = None
    latency: float | None = None

    def __str__(self) -> str:
        text = f"{self.name}={self.size}"
        if self.bandwidth is not None:
            text += f" @{format_quantity(self.bandwidth, 'B/s')}"
        if self.latency is not None:
            text += f" {format_quantity(self.latency, 's')}"
        return text


@dataclass(frozen=True)
class Description:
    """A device described in the mesh text: peak FLOP/s, memory in bytes, memory bytes/s."""

    flops: float
    memory: float
    bandwidth: float

    def __str__(self) -> str:
        return (
            f"[{format_quantity(self.flops, 'FLOP/s')} {format_quantity(self.memory, 'B')} "
            f"{format_quantity(self.bandwidth, 'B/s')}]"
        )


@dataclass(frozen=True)
class Mesh:
    """A device kind and its grid; `str(mesh)` parses back to an equal mesh.

    Attributes:
        device: name of the device; of a mesh with several parts, the names joined by " + ".
        axes: outermost first; a mesh with several parts has none of its own.
        description: description of a device that is not in devices.toml.
        unlike: the parts of a mesh with unlike devices, each with one kind of device.
    """

    device: str
    axes: tuple[Axis, ...]
    description: Description | None = None
    unlike: tuple[Mesh, ...] = ()

    def __post_init__(self) -> None:
        if self.unlike:
            return self._check_parts()
        names = [axis.name for axis in self.axes]
        bad = [n for n in names if not _NAME.match(n)]
        if not self.axes or bad or len(set(names)) != len(names):
            raise MeshError(
                f"mesh axes {names} are not usable",
                why="a mesh needs at least one axis, and axis names are distinct",
                todo='write e.g. "H100: node=2, gpu=8"',
            )
        for axis in self.axes:
            if axis.size < 1:
                raise MeshError(f"mesh axis {axis.name!r} has size {axis.size}", todo="use >= 1")
        if self.size > MOST:
            raise MeshError(
                f"the mesh has {self.size} devices", why=f"at most {MOST} are supported"
            )

    def _check_parts(self) -> None:
        """Raises MeshError unless the parts are meshes of one kind of device each."""
        many, nested = len(self.unlike), any(part.unlike for part in self.unlike)
        if not 2 <= many <= MOST_PARTS or nested or self.axes or self.description is not None:
            raise MeshError(
                f"a mesh of {many} parts with the axes {list(self.names)} of its own",
                why=f"unlike devices form 2 to {MOST_PARTS} parts, each a mesh with its own axes",
                todo='write e.g. "H100: node=2, gpu=8 + A100-80: node=4, gpu=8"',
            )
        if self.size > MOST:
            raise MeshError(
                f"the mesh has {self.size} devices", why=f"at most {MOST} are supported"
            )

    @classmethod
    def of_parts(cls, parts: tuple[Mesh, ...]) -> Mesh:
        """Returns the mesh of several parts; of one part, that part.

        Raises:
            MeshError: there are too many parts, or a part has parts.
        """
        if len(parts) == 1:
            return parts[0]
        return cls(" + ".join(part.device for part in parts), (), None, parts)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads a mesh text.

        Raises:
            MeshError: the text cannot be read; names the offending part.
        """
        if len(text) > 10_000:
            raise MeshError(f"a mesh text of {len(text)} characters", todo="write at most 10000")
        return cls.of_parts(tuple(map(cls._parse_part, _PLUS.split(text))))

    @classmethod
    def _parse_part(cls, text: str) -> Mesh:
        head, colon, tail = text.partition(":")
        match = re.fullmatch(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[([^\]]*)\])?\s*", head)
        if not colon or match is None:
            raise MeshError(
                f"cannot read mesh {text!r}",
                why="a mesh is a device name, a colon and its axes",
                todo='write e.g. "H100: node=2, gpu=8" or "cpu: data=2, tensor=2"',
            )
        try:
            axes = tuple(_parse_axis(part, text) for part in tail.split(","))
            return cls(match[1], axes, _parse_description(match[2], text))
        except MeshError as error:
            error.where = error.where or text
            raise

    @property
    def size(self) -> int:
        """Number of devices."""
        if self.unlike:
            return sum(part.size for part in self.unlike)
        return math.prod(axis.size for axis in self.axes)

    @property
    def parts(self) -> tuple[Mesh, ...]:
        """Meshes with one kind of device each, in the order of ranks; itself if it is one."""
        return self.unlike or (self,)

    @property
    def kind(self) -> str:
        """The device with its description, as the mesh text has it."""
        return self.device + ("" if self.description is None else str(self.description))

    def part_of(self, rank: int) -> tuple[int, int]:
        """Returns the number of the part that holds `rank`, and the first rank of that part."""
        start = 0
        for number, part in enumerate(self.parts):
            if rank < start + part.size:
                return number, start
            start += part.size
        raise MeshError(f"mesh {str(self)!r} has no rank {rank}", why=f"it has {self.size} devices")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name -> number of devices along it."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    def spans_parts(self, start: int, size: int) -> bool:
        """Returns whether `size` ranks from `start` on belong to more than one part."""
        return self.part_of(start) != self.part_of(start + size - 1)

    def axis(self, name: str) -> Axis:
        """Returns the axis called `name`; raises MeshError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        why = f"its axes are {', '.join(self.names)}"
        if self.unlike:
            why = f"axes belong to a part, and {self} has {len(self.unlike)} parts"
        raise MeshError(f"mesh has no axis {name!r}", why=why)

    def axis_size(self, name: str) -> int:
        """Returns the number of devices along `name`; raises MeshError if there is no such axis."""
        return self.sizes[name] if name in self.sizes else self.axis(name).size

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the position of `rank` (row-major) along every axis.

        Raises:
            MeshError: the mesh has several parts, which share no axes.
        """
        if self.unlike:
            self.axis("of all parts")
        coordinates: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return {name: coordinates[name] for name in self.names}

    def groups(self, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns every group of ranks that differ only along `names`, each in row-major order."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            position = self.coordinate(rank)
            key = tuple(position[n] for n in self.names if n not in names)
            members.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in members.values())

    def __str__(self) -> str:
        if self.unlike:
            return " + ".join(map(str, self.unlike))
        return f"{self.kind}: " + ", ".join(str(axis) for axis in self.axes)


def _parse_axis(part: str, text: str) -> Axis:
    match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,12})\s*(?:@\s*(\S+))?\s*(\S+)?\s*", part)
    if match is None or not _NAME.match(match[1]):
        raise MeshError(
            f"cannot read mesh axis {part.strip()!r}",
            where=text,
            why="an axis is name=size, optionally followed by @bandwidth and latency",
            todo='write e.g. "gpu=8" or "node=4 @50GB/s 10us"',
        )
    bandwidth = parse_quantity(match[3], "B/s") if match[3] else None
    latency = parse_quantity(match[4], "s") if match[4] else None
    return Axis(match[1], int(match[2]), bandwidth, latency)


def _parse_description(words: str | None, text: str) -> Description | None:
    if words is None:
        return None
    parts = words.split()
    if len(parts) != 3:
        raise MeshError(
            f"cannot read the device description [{words}]",
            where=text,
            why="three figures are expected: peak compute, memory, memory bandwidth",
            todo='write e.g. "mychip[400TFLOP/s 64GiB 1.6TB/s]: gpu=4 @100GB/s 5us"',
        )
    return Description(
        parse_quantity(parts[0], "FLOP/s"),
        parse_quantity(parts[1], "B"),
        parse_quantity(parts[2], "B/s"),
    )
