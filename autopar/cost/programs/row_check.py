"""Refuses rows of chosen algorithms that could not run, before any rank makes the call."""

from __future__ import annotations

from autopar.cost.collectives import check_name, written
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm, ChosenAlgorithms
from autopar.ir.mesh import Mesh


def checked(chosen: ChosenAlgorithms, mesh: Mesh) -> ChosenAlgorithms:
    """Returns the rows, each of which can run on the mesh.

    Raises:
        MeshError: an axis that the mesh does not have.
        CollectiveError: an algorithm that does not run this collective, is written for another
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
