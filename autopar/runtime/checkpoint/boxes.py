"""Boxes: the part of a whole tensor on a device, as offsets and sizes along its dimensions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.runtime.parameters.pieces import Piece


@dataclass(frozen=True)
class Box:
    """The elements [offset, offset + size) along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Returns the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Returns the elements that two boxes of one tensor share, None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """Returns the same elements with offsets from the beginning of a box around them."""
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return replace(self, offsets=offsets)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a tensor of `shape` contains the box."""
        return len(shape) == len(self.offsets) == len(self.sizes) and all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def shifted(self, dim: int, by: int) -> Box:
        """Returns the same box moved along `dim`."""
        offsets = list(self.offsets)
        offsets[dim] += by
        return replace(self, offsets=tuple(offsets))


_CUTS = 8  # most dimensions that are split; a mesh has fewer axes


def tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Returns whether boxes tile a tensor: all inside it, without gaps or overlaps.

    That is the case if the indicator functions of the boxes sum to the tensor's. Differences along
    all dimensions are invertible, so these are compared: they are ±1 at corners and 0 elsewhere.
    """
    whole = Box.whole(shape)
    if not whole.volume:
        return list(boxes) == [whole]
    if not all(box.inside(shape) and box.volume for box in boxes):
        return False
    cut = [d for d, extent in enumerate(shape) if any(box.sizes[d] != extent for box in boxes)]
    if len(cut) > _CUTS or sum(box.volume for box in boxes) != whole.volume:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in ((whole, -1), *((box, 1) for box in boxes)):
        ends = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in cut]
        for corner in itertools.product(*ends):
            place, signs = tuple(end for end, _ in corner), (sign for _, sign in corner)
            corners[place] += weight * math.prod(signs)
    return not any(corners.values())


def box_of(
    layout: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    coordinate: Mapping[str, int],
    piece: Piece | None = None,
) -> Box:
    """Returns the box of the device at `coordinate` in the tensor of the state_dict.

    Args:
        layout: layout of the tensor, or of the piece if it is one.
        shape: its shape.
        mesh: the devices.
        coordinate: the device's position along every axis.
        piece: the part of a fused tensor that has this layout.
    """
    bounds = layout.bounds(shape, mesh, coordinate)
    box = Box(tuple(start for start, _ in bounds), tuple(length for _, length in bounds))
    return box if piece is None else box.shifted(piece.dim, piece.start)
