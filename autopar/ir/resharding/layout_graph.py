"""Layouts and the steps between them, for all tensors that have the same possible layouts.

The possible layouts of a tensor depend on its extents only through the sets of mesh axes that can
split each of them. The bytes of a step are those of the layout that it leaves (forward) or enters
(backward). Steps are therefore listed once for a class of tensors, also on meshes that differ in
sizes only, and each tensor adds its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.collective import Collective, Step, moves
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType

_NONE = Collective("", (), 0)


class LayoutGraphs:
    """The graphs of all classes of tensors, to be shared by meshes with axes of the same names."""

    def __init__(self) -> None:
        self._known: dict[Hashable, LayoutGraph] = {}

    def of(self, mesh: Mesh, tensor: TensorType, grad: bool) -> LayoutGraph:
        """Returns the graph of a tensor's layouts.

        Args:
            mesh: the devices.
            tensor: its type.
            grad: whether gradients flow.
        """
        key = mesh.names, _possible(tensor, mesh), grad
        if key not in self._known:
            self._known[key] = LayoutGraph(mesh, tensor, grad)
        return self._known[key]


class LayoutGraph:
    """The layouts of a class of tensors and the steps that leave each, listed on demand.

    Args:
        mesh: the devices, or others on which the class has the same layouts.
        tensor: one tensor of the class.
        grad: whether gradients flow.
    """

    def __init__(self, mesh: Mesh, tensor: TensorType, grad: bool) -> None:
        self._mesh, self._grad, self._tensor = mesh, grad, tensor
        self._steps: dict[Layout, tuple[Step, ...]] = {}
        self._nets: list[_Net] = []

    def steps(self, layout: Layout) -> tuple[Step, ...]:
        """Returns the steps that leave a layout; their bytes are those of another tensor."""
        if layout not in self._steps:
            self._steps[layout] = tuple(moves(layout, self._tensor, self._mesh, self._grad))
        return self._steps[layout]

    def net(self, starts: Sequence[Layout]) -> _Net:
        """Returns all layouts that can be reached from `starts`, with the steps between them."""
        net = self._nets[-1] if self._nets else None
        if net is None or any(start not in net.place for start in starts):
            place = dict.fromkeys([] if net is None else net.place)
            waiting = [start for start in starts if start not in place]
            place |= dict.fromkeys(waiting)
            while waiting:
                for step in self.steps(waiting.pop()):
                    if step.dst not in place:
                        place[step.dst] = None
                        waiting.append(step.dst)
            net = _Net(self, {layout: number for number, layout in enumerate(place)})
            self._nets.append(net)
        return net


class _Net:
    """Layouts as numbers and steps as arrays, sorted by the layout that a step enters.

    Attributes:
        place: layout -> its number.
        source, target: layouts of each step.
        ends, first: the layouts that are entered, and the first step into each.
    """

    def __init__(self, graph: LayoutGraph, place: dict[Layout, int]) -> None:
        self.place = place
        rows = sorted(
            (
                (place[step.dst], place[layout], step)
                for layout in place
                for step in graph.steps(layout)
            ),
            key=lambda row: row[:2],
        )
        self.target, self.source = (np.array([row[at] for row in rows], np.int64) for at in (0, 1))
        self.ends, self.first = np.unique(self.target, return_index=True)
        # Calls of equal kind and axes are one number; 0 is no call.
        numbers: dict[Collective, int] = {_NONE: 0}
        self._calls = np.array(
            [
                [
                    numbers.setdefault(_bare(call), len(numbers))
                    for call in (row[2].forward, row[2].backward)
                ]
                for row in rows
            ],
            np.int64,
        ).reshape(-1, 2)
        self._kinds = tuple(numbers)

    @cached_property
    def _splits(self) -> tuple[list[list[tuple[str, ...]]], NDArray[np.int64]]:
        """For each dimension the ways to split it, and the way of each layout."""
        rank = len(next(iter(self.place)).dims)
        known: list[dict[tuple[str, ...], int]] = [{} for _ in range(rank)]
        rows = [
            [
                ways.setdefault(axes, len(ways))
                for ways, axes in zip(known, layout.dims, strict=True)
            ]
            for layout in self.place
        ]
        return [list(ways) for ways in known], np.array(rows, np.int64).reshape(len(rows), rank)

    def nbytes(self, tensor: TensorType, mesh: Mesh) -> NDArray[np.int64]:
        """Returns the bytes of the largest part of a tensor in each layout."""
        ways, rows = self._splits
        total = np.full(len(self.place), DTYPE_BYTES[tensor.dtype], np.int64)
        for dim, size in enumerate(tensor.shape):
            extents = [_largest(size, axes, mesh.sizes) for axes in ways[dim]]
            total *= np.array(extents, np.int64)[rows[:, dim]]
        return total

    def prices(
        self, tensor: TensorType, mesh: Mesh, price: Callable[[Collective], float]
    ) -> NDArray[np.float64]:
        """Returns the seconds of every step, both directions, for a tensor on a mesh."""
        nbytes = self.nbytes(tensor, mesh)
        seconds = np.zeros(len(self._calls))
        for side, layouts in enumerate((self.source, self.target)):
            # One number for each pair of a kind of call and its bytes.
            pairs = nbytes[layouts] * len(self._kinds) + self._calls[:, side]
            distinct, where = np.unique(pairs, return_inverse=True)
            calls = (
                Collective(self._kinds[kind].kind, self._kinds[kind].axes, size) if kind else None
                for size, kind in (divmod(pair, len(self._kinds)) for pair in distinct.tolist())
            )
            known = [0.0 if call is None else price(call) for call in calls]
            seconds += np.array(known)[where]
        return seconds


def _possible(tensor: TensorType, mesh: Mesh) -> tuple[tuple[bool, ...], ...]:
    """Returns for each dimension whether it has an element for each device along sets of axes."""
    sizes = mesh.sizes.values()
    sets = (itertools.combinations(sizes, count) for count in range(len(mesh.axes) + 1))
    products = [math.prod(group) for groups in sets for group in groups]
    return tuple(tuple(product <= size for product in products) for size in tensor.shape)


def _bare(call: Collective | None) -> Collective:
    return _NONE if call is None else Collective(call.kind, call.axes, 0)


def _largest(size: int, axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    for axis in axes:
        size = -(-size // sizes[axis])
    return size
