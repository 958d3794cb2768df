"""TensorType and Layout: the type of a tensor, and its distribution over a mesh, in one notation.

    bf16[8, 1024@gpu, 2048] +sum(node)

is a bf16 tensor of global shape (8, 1024, 2048) whose dimension 1 is split over the mesh axis gpu;
every device along node holds a part of a sum that is still to be computed. Along axes that are not
named, the tensor is replicated. Several axes on one dimension are written outermost first,
`64@node@gpu`. Parts differ by one element at most, and the larger ones come first: 6 elements on 4
devices are parts of 2, 2, 1 and 1.

`-sum(gpu)` is the counterpart for gradients: every device along gpu holds the whole value, and its
*gradient* will be a partial sum. An operator asks for an input in this layout if the input lacks a
factor that the operator splits (a weight under data parallelism, the input of a column-parallel
linear). JAX's shard_map calls such a value "varying"; turning a replicated value into it is free
forwards and an all_reduce backwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh

DTYPE_BYTES = {
    "bool": 1, "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "f8e4": 1, "f8e5": 1, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorType:
    """A dtype and a global shape; prints as "f32[8, 1024]"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        """Returns whether a gradient can flow through it."""
        return self.dtype[0] in "fbc" and self.dtype != "bool"

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Parses "f32[8, 1024]"; raises LayoutError for anything else."""
        match = re.fullmatch(r"\s*(\w+)\[([\d, ]*)\]\s*", text)
        if match is None or match[1] not in DTYPE_BYTES:
            raise LayoutError(f"cannot read tensor type {text!r}", todo='write e.g. "f32[8, 16]"')
        return cls(
            match[1], tuple(_size(part, text) for part in match[2].split(",") if part.strip())
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def _size(word: str, text: str) -> int:
    """Returns the length of a dimension; raises LayoutError unless a 64-bit index can count it."""
    if not re.fullmatch(r"[0-9]{1,18}", word.strip()):
        raise LayoutError(
            f"cannot read the size {word.strip()[:50]!r}",
            where=text[:200],
            todo='write e.g. "[8, 1024@gpu] +sum(node)"',
        )
    return int(word)


def part_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns (start, length) of part `index` of `size` elements, split as evenly as possible."""
    length, more = divmod(size, parts)
    return index * length + min(index, more), length + (index < more)


def blocks(sizes: tuple[int, ...], extent: int) -> list[tuple[int, int]]:
    """Returns (start, length) of every block of `extent` elements split by axes, outermost first.

    Blocks are in the order of their elements.
    """
    found = [(0, extent)]
    for size in sizes:
        parts = [
            (start, part_of(length, size, at)) for start, length in found for at in range(size)
        ]
        found = [(start + offset, length) for start, (offset, length) in parts]
    return found


@dataclass(frozen=True)
class Layout:
    """Distribution of a tensor over a mesh.

    Attributes:
        dims: for each tensor dimension, the mesh axes that split it, outermost first.
        partial: axes along which the value is a partial sum.
        varying: axes along which the value is whole and its gradient will be a partial sum.

    An axis appears at most once; along every other axis the tensor is replicated.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    @classmethod
    def replicated(cls, rank: int) -> Layout:
        """Returns the layout in which a tensor of `rank` dimensions is whole everywhere."""
        return cls(((),) * rank)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the layout names."""
        return (*(a for dim in self.dims for a in dim), *self.partial, *self.varying)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes that split a dimension."""
        return tuple(axis for dim in self.dims for axis in dim)

    def local_shape(
        self, shape: tuple[int, ...], mesh: Mesh, coordinate: Mapping[str, int] | None = None
    ) -> tuple[int, ...]:
        """Returns the shape of the part at `coordinate`; without one, of the largest part."""
        if coordinate is not None:
            return tuple(length for _, length in self.bounds(shape, mesh, coordinate))
        largest, sizes = [], mesh.sizes
        for size, axes in zip(shape, self.dims, strict=True):
            for axis in axes:
                size = -(-size // sizes[axis])
            largest.append(size)
        return tuple(largest)

    def bounds(
        self, shape: tuple[int, ...], mesh: Mesh, coordinate: Mapping[str, int]
    ) -> tuple[tuple[int, int], ...]:
        """Returns (start, length) of the device's part, for each dimension."""
        bounds = []
        for size, axes in zip(shape, self.dims, strict=True):
            start = 0
            for axis in axes:
                offset, size = part_of(size, mesh.axis_size(axis), coordinate[axis])
                start += offset
            bounds.append((start, size))
        return tuple(bounds)

    def is_even(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Returns whether all parts are equal in size."""
        return all(
            size % math.prod(mesh.axis_size(axis) for axis in axes) == 0
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def local_bytes(self, tensor: TensorType, mesh: Mesh) -> int:
        """Returns the bytes of the largest part."""
        return math.prod(self.local_shape(tensor.shape, mesh)) * DTYPE_BYTES[tensor.dtype]

    def check(self, shape: tuple[int, ...], mesh: Mesh) -> None:
        """Raises LayoutError unless it fits `shape` on `mesh` and every part has an element."""
        text = self.format(shape)
        if len(self.dims) != len(shape):
            raise LayoutError(f"layout {text} has {len(self.dims)} dimensions, not {len(shape)}")
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"layout {text} names an axis twice")
        for axis in self.axes:
            mesh.axis(axis)
        for size, axes in zip(shape, self.dims, strict=True):
            if axes and math.prod(mesh.axis_size(axis) for axis in axes) > size:
                raise LayoutError(
                    f"layout {text} splits {size} elements over {', '.join(axes)}",
                    why="a device would hold none of them",
                    todo="split another dimension, or over fewer devices",
                )

    def with_dims(self, dims: tuple[tuple[str, ...], ...]) -> Layout:
        """Returns the same layout with other dimension splits."""
        return Layout(dims, self.partial, self.varying)

    def format(self, shape: tuple[int, ...]) -> str:
        """Returns the notation with sizes filled in: "[8, 1024@gpu] +sum(node)"."""
        sizes = [str(s) for s in shape] + ["?"] * (len(self.dims) - len(shape))
        inner = ", ".join(
            "@".join((size, *axes)) for size, axes in zip(sizes, self.dims, strict=False)
        )
        text = f"[{inner}]"
        if self.partial:
            text += f" +sum({', '.join(self.partial)})"
        if self.varying:
            text += f" -sum({', '.join(self.varying)})"
        return text

    @classmethod
    def parse(cls, text: str) -> tuple[tuple[int, ...], Layout]:
        """Parses "[8, 1024@gpu] +sum(node)"; returns the global shape and the layout.

        Raises:
            LayoutError: the text is not a layout.
        """
        match = re.fullmatch(
            r"\s*\[([^\]]*)\]\s*(?:\+sum\(([\w, ]*)\))?\s*(?:-sum\(([\w, ]*)\))?\s*", text
        )
        if match is None:
            raise LayoutError(
                f"cannot read layout {text!r}", todo='write e.g. "[8, 1024@gpu] +sum(node)"'
            )
        shape, dims = [], []
        for part in match[1].split(","):
            if part.strip():
                size, *axes = (word.strip() for word in part.split("@"))
                if not all(axes):
                    raise LayoutError(
                        f"cannot read {part.strip()!r} in layout {text!r}",
                        todo='write e.g. "[8, 1024@gpu] +sum(node)"',
                    )
                shape.append(_size(size, text))
                dims.append(tuple(axes))
        partial, varying = (
            tuple(word.strip() for word in (match[i] or "").split(",") if word.strip())
            for i in (2, 3)
        )
        layout = cls(tuple(dims), partial, varying)
        if len(set(layout.axes)) != len(layout.axes):
            raise LayoutError(
                f"layout {text!r} names an axis twice", why="an axis may appear only once"
            )
        return tuple(shape), layout
