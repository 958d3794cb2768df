"""Fewer choices on meshes of many axes.

The strategies of an operator, and the storages of a parameter, grow as a power of the number of
mesh axes; the pairs of layouts that an edge prices grow as its square. From `SEVERAL` axes on, a
strategy of an operator, and the use of a parameter, therefore divide the axes, in mesh order, into
at most `RUNS` runs of neighbours, and use all axes of a run alike. Neighbouring axes that are used
alike are as one axis of their product, so every plan of a mesh of two axes remains, for every way
to merge the axes into two. An operator may have one run more if the first two split its rows, as
data and context parallelism do beside tensor parallelism. The number of choices then grows as the
square of the number of axes at most. From `MANY` axes on, the same holds for forms of operators,
such as products on a cube of devices, and for the states of parameters between steps. Where no plan
fits into memory on `SEVERAL` axes, all choices are searched.

All prices are those of the whole mesh. A node with a pin keeps all its
choices, and so does a parameter that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout

SEVERAL, MANY = 3, 4
RUNS = 2


def most_runs(mesh: Mesh) -> int | None:
    """Returns the number of runs into which a choice may divide the axes; None for any number."""
    return RUNS if len(_names(mesh)) >= SEVERAL else None


def can_be_complete(mesh: Mesh) -> bool:
    """Returns whether all choices are few enough to be searched if nothing fits without them."""
    return len(_names(mesh)) == SEVERAL


def on_many(most: int | None, mesh: Mesh) -> int | None:
    """Returns a number of runs as it holds for forms and stored states; None for any number."""
    return most if len(_names(mesh)) >= MANY else None


def within_runs(uses: Iterable[object], most: int | None, rows: Sequence[object] = ()) -> bool:
    """Returns whether the uses of the axes form few enough runs.

    Args:
        uses: of the axes, in mesh order.
        most: number of runs; None for any number.
        rows: the uses that split rows, ordered. Runs of two of them may have one run more behind.
    """
    if most is None:
        return True
    runs = [use for use, _ in groupby(uses)]
    if len(runs) <= most:
        return True
    places = [rows.index(use) for use in runs[:2] if use in rows]
    return len(runs) == most + 1 and len(places) == 2 and places[0] < places[1]


def storage_within(storage: Storage, mesh: Mesh, most: int | None) -> bool:
    """Returns whether the layouts of a storage use many axes in at most `most` runs."""
    most = on_many(most, mesh)
    if most is None:
        return True
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
