"""All steps between all layouts of tensors with a number of dimensions, as arrays.

A layout arranges some mesh axes on the dimensions of a tensor, and has one state, R, V or P, along
every other axis. A step changes some of these states, or the place of one axis. If the axis goes to
a dimension, every part of the dimension must have an element; nothing else depends on the tensor.
The steps are therefore listed once for a number of dimensions, as `collective.py` lists them for a
single layout. A tensor on a mesh adds which of them it has, and how many bytes they send.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.collective import Collective, put, subsets
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType

Ints = NDArray[np.int64]
_Names = tuple[str, ...]
_Dims = tuple[_Names, ...]
_Call = tuple[str, _Names]  # kind and axes
_State = tuple[frozenset[str], frozenset[str]]  # partial and varying axes
_Change = tuple[_State, _State, _Call, _Call]  # before and after; calls forward and backward
_NONE: _Call = "", ()


class PricedSteps(NamedTuple):
    """The steps of a tensor, sorted by the layout that they leave.

    Attributes:
        first: for each layout, the first step that leaves it; at the end, the number of steps.
        target: the layout that each step enters.
        seconds: of both directions of each step.
    """

    first: Ints
    target: Ints
    seconds: NDArray[np.float64]


class StepArrays:
    """The layouts of tensors as numbers, and the steps between them as arrays.

    Args:
        names: of the mesh axes.
        rank: number of dimensions.
        grad: whether gradients flow.

    Attributes:
        place: layout -> its number.
    """

    def __init__(self, names: _Names, rank: int, grad: bool) -> None:
        free = {dims: _free(names, dims) for dims in _arrangements(names, rank)}
        states = {axes: _states(axes, grad) for axes in set(free.values())}
        counts = [len(states[axes]) for axes in free.values()]
        starts = dict(zip(free, itertools.accumulate(counts, initial=0), strict=False))
        layouts = (
            Layout(dims, *(tuple(axis for axis in axes if axis in part) for part in state))
            for dims, axes in free.items()
            for state in states[axes]
        )
        self.place = {layout: number for number, layout in enumerate(layouts)}
        # The arrangement of each layout, and the axes on each dimension of an arrangement.
        self._arrangement = np.repeat(np.arange(len(counts)), counts)
        self._ways = {axes: number for number, axes in enumerate(_ordered(names))}
        self._split = np.array([[self._ways[axes] for axes in dims] for dims in free], np.int64)
        calls: dict[_Call, int] = {_NONE: 0}

        def number(call: _Call) -> int:
            return calls.setdefault(call, len(calls))

        # Pairs of arrangements between which the states change in the same ways.
        alike: dict[tuple[str, str, _Names, _Names], list[tuple[int, ...]]] = {}
        for op, axis, src, dst, dim in _pairs(free):
            way = 0 if dim is None else self._ways[dst[dim]]
            row = starts[src], starts[dst], rank if dim is None else dim, way
            alike.setdefault((op, axis, free[src], free[dst]), []).append(row)
        rows: list[Ints] = []
        for (op, axis, before, after), pairs in alike.items():
            changes = [
                (states[before][one], states[after][two], number(first), number(second))
                for one, two, first, second in _changes(op, axis, before, states[before], grad)
            ]
            rows.append(_outer(pairs, changes))
        steps = np.concatenate(rows)
        # Source, target, calls forward and backward, the further split dimension and its axes.
        self._steps = steps[np.argsort(steps[:, 0], kind="stable")].T.copy()
        self._calls = tuple(calls)

    def priced(
        self, tensor: TensorType, mesh: Mesh, price: Callable[[Collective], float]
    ) -> PricedSteps:
        """Returns the steps that a tensor has on a mesh, with their seconds."""
        sizes = [[mesh.axis_size(axis) for axis in axes] for axes in self._ways]
        # The last row is for steps that split no dimension further.
        possible = np.ones((len(tensor.shape) + 1, len(sizes)), np.bool_)
        nbytes = np.full(len(self._split), DTYPE_BYTES[tensor.dtype], np.int64)
        for dim, size in enumerate(tensor.shape):
            possible[dim] = [math.prod(counts) <= size for counts in sizes]
            largest = np.array([_largest(size, counts) for counts in sizes], np.int64)
            nbytes *= largest[self._split[:, dim]]
        kept = possible[self._steps[4], self._steps[5]]
        source, target, *calls = self._steps[:4, kept]
        seconds = np.zeros(len(source))
        for called, layouts in zip(calls, (source, target), strict=True):
            # One number for each pair of a call and its bytes.
            pairs = nbytes[self._arrangement[layouts]] * len(self._calls) + called
            distinct, where = np.unique(np.where(called, pairs, 0), return_inverse=True)
            known = []
            for size, number in (divmod(pair, len(self._calls)) for pair in distinct.tolist()):
                kind, axes = self._calls[number]
                known.append(price(Collective(kind, axes, size)) if number else 0.0)
            seconds += np.array(known)[where]
        first = np.searchsorted(source, np.arange(len(self.place) + 1))
        return PricedSteps(first, target, seconds)


def _ordered(names: _Names) -> Iterator[_Names]:
    """Yields every selection of axes in every order, the empty one first."""
    for count in range(len(names) + 1):
        yield from itertools.permutations(names, count)


def _arrangements(names: _Names, rank: int) -> Iterator[_Dims]:
    """Yields every way to split `rank` dimensions over some of the axes."""
    if not rank:
        yield ()
        return
    for order in _ordered(names):
        for cuts in itertools.combinations_with_replacement(range(len(order) + 1), rank - 1):
            ends = 0, *cuts, len(order)
            yield tuple(order[a:b] for a, b in itertools.pairwise(ends))


def _free(names: _Names, dims: _Dims) -> _Names:
    """Returns the axes that split no dimension."""
    return tuple(name for name in names if not any(name in axes for axes in dims))


def _states(axes: _Names, grad: bool) -> dict[_State, int]:
    """Returns the possible states along axes that split no dimension, numbered."""
    states: dict[_State, int] = {}
    for kinds in itertools.product("RPV" if grad else "RP", repeat=len(axes)):
        partial, varying = (
            frozenset(axis for axis, kind in zip(axes, kinds, strict=True) if kind == one)
            for one in "PV"
        )
        states[partial, varying] = len(states)
    return states


def _pairs(
    arrangements: Iterable[_Dims],
) -> Iterator[tuple[str, str, _Dims, _Dims, int | None]]:
    """Yields the moves of single axes between arrangements, and "stay", which moves none.

    Each is its kind, the axis, both arrangements, and the dimension to which the axis goes.
    """
    for dims in arrangements:
        yield "stay", "", dims, dims, None
        for dim, axes in enumerate(dims):
            if not axes:
                continue
            # Only a dimension's innermost axis can leave it.
            whole, axis = put(dims, dim, axes[:-1]), axes[-1]
            yield "split", axis, whole, dims, dim
            yield "gather", axis, dims, whole, None
            for other in range(len(dims)):
                if other != dim:
                    yield "move", axis, dims, put(whole, other, (*whole[other], axis)), other


def _changes(
    op: str, axis: str, axes: _Names, states: Iterable[_State], grad: bool
) -> Iterator[_Change]:
    """Yields the steps of one kind, as changes of the states of axes that split no dimension.

    Args:
        op, axis: the kind and the axis, as in `_pairs`.
        axes: those that split no dimension before.
        states: the possible states along them.
        grad: whether gradients flow.
    """
    gather, scatter, exchange = (
        (kind, (axis,)) for kind in ("all_gather", "reduce_scatter", "all_to_all")
    )
    for state in states:
        partial, varying = state
        if op == "stay":
            yield from _reductions(partial, varying, axes, grad)
        elif op == "move":
            yield state, state, exchange, exchange if grad else _NONE
        elif op == "gather":
            yield state, state, gather, _NONE
            if grad:
                yield state, (partial, varying | {axis}), gather, scatter
        else:
            forward = scatter if axis in partial else _NONE
            backward = gather if grad and axis not in varying else _NONE
            yield state, (partial - {axis}, varying - {axis}), forward, backward


def _reductions(
    partial: frozenset[str], varying: frozenset[str], axes: _Names, grad: bool
) -> Iterator[_Change]:
    """Yields the steps that leave every axis where it is: between R and P, and between R and V."""
    state = partial, varying
    whole = [axis for axis in axes if axis not in partial and axis not in varying]
    for some in subsets(tuple(axis for axis in axes if axis in partial)):
        yield state, (partial.difference(some), varying), ("all_reduce", some), _NONE
    if grad:
        for some in subsets(tuple(whole)):
            yield state, (partial, varying.union(some)), _NONE, ("all_reduce", some)
    for axis in varying:
        yield state, (partial, varying - {axis}), _NONE, _NONE
    for axis in whole:
        yield state, (partial | {axis}, varying), _NONE, _NONE


def _outer(pairs: Sequence[tuple[int, ...]], changes: Sequence[tuple[int, ...]]) -> Ints:
    """Returns a row for every change between every pair of arrangements."""
    ends, states = np.array(pairs, np.int64), np.array(changes, np.int64).reshape(-1, 4)
    rows = np.empty((len(ends), len(states), 6), np.int64)
    rows[:, :, :2] = ends[:, None, :2] + states[:, :2]
    rows[:, :, 2:4] = states[:, 2:]
    rows[:, :, 4:] = ends[:, None, 2:]
    return rows.reshape(-1, 6)


def _largest(size: int, counts: Iterable[int]) -> int:
    """Returns the length of the longest part of a dimension that is split again and again."""
    for count in counts:
        size = -(-size // count)
    return size
