"""Fewer choices on meshes of many axes.

The strategies of an operator, and the storages of a parameter, grow as a power of the number of
mesh axes; the pairs of layouts that an edge prices grow as its square. On `MANY` axes and more, a
choice therefore divides the axes, in mesh order, into at most `RUNS` runs of neighbours, and uses
all axes of a run alike. Neighbouring axes that are used alike are as one axis of their product, so
every plan of a mesh of two axes remains, for every way to merge the axes into two. The number of
choices then grows linearly with the axes.

All prices are those of the whole mesh. A node with a pin keeps all its choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout

MANY = 4
RUNS = 2


def most_runs(mesh: Mesh) -> int | None:
    """Returns the number of runs into which a choice may divide the axes; None for any number."""
    return RUNS if len(_names(mesh)) >= MANY else None


def within_runs(uses: Iterable[object], most: int | None) -> bool:
    """Returns whether the uses of the axes, in mesh order, form at most `most` runs."""
    return most is None or sum(1 for _ in groupby(uses)) <= most


def storage_within(storage: Storage, mesh: Mesh, most: int | None) -> bool:
    """Returns whether every layout of a storage uses the axes in at most `most` runs."""
    layouts = {storage.used, storage.held, storage.grads, storage.updated, storage.kept}
    names = _names(mesh)
    return all(within_runs(_uses(layout, names), most) for layout in layouts)


def _names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis.name for axis in mesh.axes if axis.size > 1)


def _uses(layout: Layout, names: Sequence[str]) -> list[object]:
    """Returns the dimension that each axis splits, or the kind of a replica along it."""
    split: dict[str, object] = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    split |= dict.fromkeys(layout.partial, "partial") | dict.fromkeys(layout.varying, "varying")
    return [split.get(axis) for axis in names]
