"""Checks before any call that the algorithms which a plan chooses can run on its mesh."""

from __future__ import annotations

from autopar.cost.collectives import check_name, written
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm, ChosenAlgorithms
from autopar.ir.mesh import Mesh


def checked(chosen: ChosenAlgorithms, mesh: Mesh) -> ChosenAlgorithms:
    """Returns the chosen algorithms after checking that each can run on the mesh.

    Raises:
        MeshError: the mesh lacks an axis.
        CollectiveError: an algorithm does not implement its collective, is written for another
            number of ranks, or sends more messages than a program may.
    """
    chosen.check(mesh)
    for row in chosen.rows:
        if row.by == LIBRARY:
            continue
        by = Algorithm.parse(row.by)
        check_name(row.kind, by.name)
        sizes = [mesh.axis_size(name) for name in mesh.names if name in row.axes]
        written(row.kind, by.name, by.over(sizes), by.pieces)
    return chosen
