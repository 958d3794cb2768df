"""TensorType and Layout: what a tensor is, and how a mesh splits it. One notation everywhere.

    bf16[8, 1024@gpu, 2048] +sum(node)

reads: a bf16 tensor of global shape (8, 1024, 2048); dimension 1 is split over the mesh axis gpu;
every device along node holds a part of a sum that is still owed. An axis that is not named holds
the whole tensor on every device. Several axes on one dimension are written outermost first,
`64@node@gpu`. Parts differ by one element at most, the first ones are the larger: 6 elements on 4
devices are parts of 2, 2, 1 and 1.

`-sum(gpu)` is the mirror image for gradients: every device along gpu holds the whole value, and the
*gradient* of that value will be owed a sum. It is what an operator asks of an input which lacks a
factor that the operator splits (a weight under data parallelism, the input of a column-parallel
linear). The value is "varying" in the words of JAX's shard_map; turning a plain replicated value
into it is free forwards and an all_reduce backwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
        """Whether a gradient can flow through it."""
        return self.dtype[0] in "fbc" and self.dtype != "bool"

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Read "f32[8, 1024]"; LayoutError if it is anything else."""
        match = re.fullmatch(r"\s*(\w+)\[([\d, ]*)\]\s*", text)
        if match is None or match[1] not in DTYPE_BYTES:
            raise LayoutError(f"cannot read tensor type {text!r}", todo='write e.g. "f32[8, 16]"')
        return cls(
            match[1], tuple(_size(part, text) for part in match[2].split(",") if part.strip())
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def _size(word: str, text: str) -> int:
    """The length of a dimension; LayoutError unless it is one that an index of 64 bits counts."""
    if not re.fullmatch(r"[0-9]{1,18}", word.strip()):
        raise LayoutError(
            f"cannot read the size {word.strip()[:50]!r}",
            where=text[:200],
            todo='write e.g. "[8, 1024@gpu] +sum(node)"',
        )
    return int(word)


def part_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` of `size` elements in a row, as equal as they can be."""
    length, more = divmod(size, parts)
    return index * length + min(index, more), length + (index < more)


@dataclass(frozen=True)
class Layout:
    """How a mesh holds a tensor.

    Attributes:
        dims: for each tensor dimension, the mesh axes that split it, outermost first.
        partial: axes along which a sum of the value is still owed.
        varying: axes along which the value is whole and a sum of its gradient will be owed.

    An axis stands in at most one place; along every other axis the tensor is replicated.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    @classmethod
    def replicated(cls, rank: int) -> Layout:
        """The layout that holds a tensor of `rank` dimensions whole everywhere."""
        return cls(((),) * rank)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis the layout names."""
        return (*(a for dim in self.dims for a in dim), *self.partial, *self.varying)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """Axes that split a dimension."""
        return tuple(axis for dim in self.dims for axis in dim)

    def local_shape(
        self, shape: tuple[int, ...], mesh: Mesh, coordinate: Mapping[str, int] | None = None
    ) -> tuple[int, ...]:
        """Shape of the part that the device at `coordinate` holds; without one, of the largest."""
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
        """(start, length) of the device's part, for each dimension."""
        found = []
        for size, axes in zip(shape, self.dims, strict=True):
            start = 0
            for axis in axes:
                offset, size = part_of(size, mesh.axis_size(axis), coordinate[axis])
                start += offset
            found.append((start, size))
        return tuple(found)

    def is_even(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether all parts are equal."""
        return all(
            size % math.prod(mesh.axis_size(axis) for axis in axes) == 0
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def local_bytes(self, tensor: TensorType, mesh: Mesh) -> int:
        """Bytes of the largest part a device holds."""
        return math.prod(self.local_shape(tensor.shape, mesh)) * DTYPE_BYTES[tensor.dtype]

    def check(self, shape: tuple[int, ...], mesh: Mesh) -> None:
        """LayoutError unless rank and axes fit `shape` on `mesh` and every part has an element."""
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
        """The same layout with other dimension splits."""
        return replace(self, dims=dims)

    def format(self, shape: tuple[int, ...]) -> str:
        """The notation with sizes filled in: "[8, 1024@gpu] +sum(node)"."""
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
        """Read "[8, 1024@gpu] +sum(node)"; returns the global shape and the layout.

        Raises:
            LayoutError: naming the text that is not a layout.
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
                f"layout {text!r} names an axis twice", why="an axis stands in one place at most"
            )
        return tuple(shape), layout
