"""Annotations: layouts requested in a model's own code, after GSPMD (arXiv:2105.04663, section 3).

    x = autopar.shard(x, "[b@data, s, h]")

Outside autopar, `shard` returns `x` itself. In the graph of a captured model it is the operator
`autopar.shard`: the identity, with the given layout for both the value and its gradient. See
`shard` in `shard_call.py` for the notation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import AnnotationError, LayoutError, MeshError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout


@dataclass(frozen=True)
class Annotation:
    """An annotation, parsed for a tensor of a given shape.

    Attributes:
        layout: the fixed part.
        open: dimensions that may be split over further axes.
    """

    layout: Layout
    open: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, shape: tuple[int, ...]) -> Annotation:
        """Parses "[b@data, ?, 64] -sum(tensor)" for a tensor of `shape`.

        Raises:
            AnnotationError: the text cannot be parsed, does not match the shape, or names an axis
                twice.
        """
        match = re.fullmatch(r"\s*\[([^\]]*)\](.*)", text)
        if match is None:
            raise _unreadable(text)
        entries = [entry.strip() for entry in match[1].split(",") if entry.strip()]
        if len(entries) != len(shape):
            raise AnnotationError(
                f"the annotation {text!r} has {len(entries)} dimensions, the value {len(shape)}",
                why=f"the value's shape is {list(shape)}",
                todo="write one entry for each dimension",
            )
        parsed = [re.fullmatch(r"(\?|\w+)\s*((?:@.*)?)", entry) for entry in entries]
        sized = []
        for word, size in zip(parsed, shape, strict=True):
            if word is None:
                raise _unreadable(text)
            if word[1].isdigit() and int(word[1]) != size:
                raise AnnotationError(
                    f"the annotation {text!r} gives {word[1]} for a dimension of size {size}",
                    why=f"the value's shape is {list(shape)}",
                    todo="write a letter in its place, or another dimension",
                )
            sized.append(f"{size}{word[2]}")
        try:
            _, layout = Layout.parse(f"[{', '.join(sized)}]{match[2]}")
        except LayoutError as error:
            if "twice" in error.what:
                raise AnnotationError(
                    f"the annotation {text!r} names an axis twice",
                    why="an axis splits at most one dimension",
                    todo="leave one of them out",
                ) from None
            raise _unreadable(text) from None
        return cls(layout, tuple(i for i, word in enumerate(parsed) if word and word[1] == "?"))

    def layouts(self, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Layout]:
        """Yields every layout on a mesh that agrees with the annotation, ignoring axes of size 1.

        Raises:
            AnnotationError: the mesh has no such axis, or a dimension has too few elements.
        """
        try:
            self.layout.check(shape, mesh)
        except (LayoutError, MeshError) as error:
            raise AnnotationError(
                f"the annotation {self.layout.format(shape)} does not fit the mesh {mesh}",
                why=f"{error.what}; {error.why}",
                todo=error.todo or "name one of these axes, or give the mesh such an axis",
            ) from None
        many = {axis.name for axis in mesh.axes if axis.size > 1}
        fixed = Layout(
            tuple(tuple(axis for axis in dim if axis in many) for dim in self.layout.dims),
            tuple(axis for axis in self.layout.partial if axis in many),
            tuple(axis for axis in self.layout.varying if axis in many),
        )
        free = [name for name in mesh.names if name in many and name not in self.layout.axes]
        for places in itertools.product((None, *self.open), repeat=len(free)):
            dims = list(fixed.dims)
            for axis, dim in zip(free, places, strict=True):
                if dim is not None:
                    dims[dim] = (*dims[dim], axis)
            counts = [math.prod(mesh.axis_size(axis) for axis in dim) for dim in dims]
            if all(n <= max(size, 1) for n, size in zip(counts, shape, strict=True)):
                yield fixed.with_dims(tuple(dims))


def _unreadable(text: str) -> AnnotationError:
    return AnnotationError(
        f"cannot read the annotation {text!r}",
        todo='write e.g. "[b@data, s, h@tensor]", with "?" for an open dimension',
    )
