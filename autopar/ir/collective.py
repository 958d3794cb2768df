"""Collectives, and the cheapest sequence of them from one layout to another.

`Resharder.steps(tensor, src, dst)` is the one place where a layout change becomes communication:
the cost model prices the steps it returns and codegen prints them, so the two cannot disagree.

Each step has a forward and a backward. Along one axis a value is sharded (S), replicated with a
replicated gradient (R), replicated with a partial gradient ("varying", V), or a partial sum whose
gradient is replicated (P). The steps, with the collective of each direction:

    step               from -> to    forward         backward
    all_reduce           P -> R      all_reduce      -
    to_varying           R -> V      -               all_reduce
    from_varying         V -> R      -               - (kept on the first device)
    to_partial           R -> P      - (as before)   -
    reduce_scatter       P -> S      reduce_scatter  all_gather
    all_gather           S -> V      all_gather      reduce_scatter
    all_gather_invariant S -> R      all_gather      -
    slice_invariant      R -> S      -               all_gather
    slice_varying        V -> S      -               - (padded with zeros)
    all_to_all           S -> S'     all_to_all      all_to_all

The names and the pairing follow JAX's varying manual axes ("Efficient transposition of replication
-inducing collectives", jax docs) and Megatron-LM's f and g operators (arXiv:1909.08053, sec. 3).
A value without a gradient has no V and costs nothing backwards.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType

GATHERS = ("all_gather", "all_gather_invariant", "all_to_all")  # join parts of unequal lengths
SUMS = ("all_reduce", "reduce_scatter")
_Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective call.

    Attributes:
        kind: name of the collective.
        axes: mesh axes of the group.
        nbytes: bytes per device before the call: the shard of an all_gather, else the whole tensor.
        quantised: bytes moved by kernels that compress the payload and restore it, or 0.
        algorithm: the algorithm that runs it, "2d_torus"; "" is the library's own.
        compression: the method that compresses the payload, e.g. "int8".
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    quantised: int = 0
    algorithm: str = ""
    compression: str = ""

    @property
    def title(self) -> str:
        """Display name: "all_gather", "int8 all_gather", "all_gather by ho_ring"."""
        words = self.compression, self.kind, self.algorithm and f"by {self.algorithm}"
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Step:
    """One step from layout `src` to `dst`; `op` names the runtime function that performs it."""

    op: str
    axes: tuple[str, ...]
    dim: int | None
    to_dim: int | None
    src: Layout
    dst: Layout
    forward: Collective | None
    backward: Collective | None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of both directions."""
        return tuple(c for c in (self.forward, self.backward) if c is not None)


# Layout -> seconds to reach it, the layout before it and the step between the two.
_Tree = dict[Layout, tuple[float, Layout | None, Step | None]]


def _without(names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in axes)


class Resharder:
    """Finds the cheapest step sequences on one mesh under one price, cached by tensor type.

    Args:
        mesh: the mesh.
        price: seconds of one Collective on that mesh.
        widened: dtype -> the dtype in which sums of it are sent.
        named: gives a call the algorithm that runs it; by default the library chooses.
    """

    def __init__(
        self,
        mesh: Mesh,
        price: Callable[[Collective], float],
        widened: Mapping[str, str] | None = None,
        named: Callable[[Collective], Collective] | None = None,
    ) -> None:
        self.mesh, self.widened, self.named = mesh, dict(widened or {}), named
        self.price = price
        self._prices: dict[Collective, float] = {}
        self._moves: dict[tuple[TensorType, Layout, bool], list[tuple[float, Step]]] = {}
        self._trees: dict[tuple[TensorType, Layout, bool], _Tree] = {}
        self._nets: dict[tuple[TensorType, bool], _Net] = {}

    def cost(self, tensor: TensorType, src: Layout, dst: Layout, grad: bool = True) -> float:
        """Returns the seconds of `steps`, both directions."""
        return float(self.costs(tensor, (src,), (dst,), grad)[0, 0])

    def costs(
        self,
        tensor: TensorType,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        grad: bool = True,
    ) -> NDArray[np.float64]:
        """Returns `cost` from each of `sources` (rows) to each of `targets` (columns)."""
        starts = [self._canonical(layout, grad) for layout in sources]
        ends = [self._canonical(layout, grad) for layout in targets]
        net = self._net(tensor, starts, grad)
        seconds = net.seconds(
            [net.place[start] for start in starts], [net.place.get(end) for end in ends]
        )
        if (lost := np.argwhere(np.isinf(seconds))).size:
            raise _no_way(tensor, starts[lost[0, 0]], ends[lost[0, 1]])
        return seconds

    def steps(
        self, tensor: TensorType, src: Layout, dst: Layout, grad: bool = True
    ) -> tuple[Step, ...]:
        """Returns the cheapest steps from `src` to `dst`; of equals the fewest.

        Args:
            tensor: the global type of the value.
            src, dst: its layouts before and after.
            grad: whether a gradient flows through it.

        Raises:
            LayoutError: `dst` cannot be reached, since a device would hold nothing in it.
        """
        dst, src = self._canonical(dst, grad), self._canonical(src, grad)
        tree = self._tree(tensor, src, grad)
        if dst not in tree:
            raise _no_way(tensor, src, dst)
        path: list[Step] = []
        layout: Layout = dst
        while layout != src:
            _, previous, step = tree[layout]
            assert previous is not None
            assert step is not None
            path.append(step)
            layout = previous
        return tuple(reversed(path))

    def _net(self, tensor: TensorType, starts: Sequence[Layout], grad: bool) -> _Net:
        """Returns all reachable layouts and the steps between them."""
        net = self._nets.get((tensor, grad))
        if net is None or any(start not in net.place for start in starts):
            place = dict.fromkeys([] if net is None else net.place)
            waiting = [start for start in starts if start not in place]
            place |= dict.fromkeys(waiting)
            while waiting:
                for _, move in self._priced_moves(waiting.pop(), tensor, grad):
                    if move.dst not in place:
                        place[move.dst] = None
                        waiting.append(move.dst)
            numbers = {layout: number for number, layout in enumerate(place)}
            moves = sorted(
                (numbers[move.dst], numbers[layout], price)
                for layout in numbers
                for price, move in self._priced_moves(layout, tensor, grad)
            )
            net = self._nets[tensor, grad] = _Net(numbers, moves)
        return net

    def _canonical(self, layout: Layout, grad: bool) -> Layout:
        """Returns one spelling for equal layouts: axes in mesh order; no V without a gradient."""
        if len(layout.partial) < 2 and len(layout.varying) < 1 + grad:
            return layout
        order = self.mesh.names.index
        return Layout(
            layout.dims,
            tuple(sorted(layout.partial, key=order)),
            tuple(sorted(layout.varying, key=order)) if grad else (),
        )

    def _tree(self, tensor: TensorType, src: Layout, grad: bool) -> _Tree:
        key = (tensor, src, grad)
        if key not in self._trees:
            self._trees[key] = self._dijkstra(tensor, src, grad)
        return self._trees[key]

    def _dijkstra(self, tensor: TensorType, src: Layout, grad: bool) -> _Tree:
        done: _Tree = {}
        ticket = itertools.count()
        heap: list[tuple[float, int, int, Layout, Layout | None, Step | None]] = [
            (0.0, 0, next(ticket), src, None, None)
        ]
        while heap:
            cost, length, _, layout, previous, step = heapq.heappop(heap)
            if layout in done:
                continue
            done[layout] = (cost, previous, step)
            for price, move in self._priced_moves(layout, tensor, grad):
                if move.dst not in done:
                    entry = (cost + price, length + 1, next(ticket), move.dst, layout, move)
                    heapq.heappush(heap, entry)
        return done

    def _priced_moves(
        self, layout: Layout, tensor: TensorType, grad: bool
    ) -> list[tuple[float, Step]]:
        key = (tensor, layout, grad)
        if key not in self._moves:
            wide = self.widened.get(tensor.dtype)
            steps = moves(layout, tensor, self.mesh, grad)
            if wide is not None:
                factor = DTYPE_BYTES[wide] // DTYPE_BYTES[tensor.dtype]
                steps = (_changed(move, lambda call: _wider(call, factor)) for move in steps)
            if (named := self.named) is not None:
                steps = (_changed(move, named) for move in steps)
            self._moves[key] = [
                (sum(self._price(c) for c in move.collectives), move) for move in steps
            ]
        return self._moves[key]

    def _price(self, collective: Collective) -> float:
        if collective not in self._prices:
            self._prices[collective] = self.price(collective)
        return self._prices[collective]


class _Net:
    """Layouts as numbers and steps as arrays, to price many pairs at once."""

    def __init__(self, place: dict[Layout, int], moves: Sequence[tuple[int, int, float]]) -> None:
        self.place = place
        table = np.array(moves, dtype=np.float64).reshape(-1, 3)
        self._source, self._price = table[:, 1].astype(np.int64), table[:, 2]
        self._ends, self._first = np.unique(table[:, 0].astype(np.int64), return_index=True)
        self._rows: dict[int, NDArray[np.float64]] = {}

    def seconds(self, starts: Sequence[int], ends: Sequence[int | None]) -> NDArray[np.float64]:
        """Returns the seconds of the cheapest paths, shape (starts, ends), inf where there is none.

        Bellman & Ford, for all pairs at once.
        """
        fresh = [start for start in dict.fromkeys(starts) if start not in self._rows]
        seconds = np.full((len(fresh), len(self.place)), np.inf)
        seconds[np.arange(len(fresh)), fresh] = 0.0
        while len(fresh) and len(self._price):
            arrivals = np.minimum.reduceat(
                seconds[:, self._source] + self._price, self._first, axis=1
            )
            better = np.minimum(seconds[:, self._ends], arrivals)
            if (better == seconds[:, self._ends]).all():
                break
            seconds[:, self._ends] = better
        self._rows.update(zip(fresh, seconds, strict=True))
        rows = np.stack([self._rows[start] for start in starts])
        there = [end is not None for end in ends]
        return np.where(there, rows[:, [end or 0 for end in ends]], np.inf)


def _changed(step: Step, change: Callable[[Collective], Collective]) -> Step:
    """Returns the step with other calls in both directions."""
    forward, backward = (call and change(call) for call in (step.forward, step.backward))
    return replace(step, forward=forward, backward=backward)


def _wider(call: Collective, factor: int) -> Collective:
    """A sum that is sent in so many times as many bytes; other calls as they are."""
    return replace(call, nbytes=factor * call.nbytes) if call.kind in SUMS else call


def _no_way(tensor: TensorType, src: Layout, dst: Layout) -> LayoutError:
    return LayoutError(
        f"no way from {src.format(tensor.shape)} to {dst.format(tensor.shape)}",
        why="in the target a device would hold no element",
    )


def moves(layout: Layout, tensor: TensorType, mesh: Mesh, grad: bool = True) -> Iterator[Step]:
    """Yields every single step that leaves `layout` (see the table above), with its collectives."""
    # Elements of the smallest part along each dimension; a further split must leave some.
    local = tuple(
        size // math.prod(mesh.axis_size(axis) for axis in axes)
        for size, axes in zip(tensor.shape, layout.dims, strict=True)
    )
    nbytes = layout.local_bytes(tensor, mesh)
    replicated = tuple(n for n in mesh.names if n not in layout.axes)
    yield from _reductions(layout, mesh, nbytes, replicated, grad)
    for axis in mesh.names:
        yield from _scatters(layout, tensor, mesh, local, axis, grad)
    yield from _gathers(layout, tensor, mesh, local, grad)


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        yield from itertools.combinations(names, size)


def _reductions(
    layout: Layout, mesh: Mesh, nbytes: int, replicated: tuple[str, ...], grad: bool
) -> Iterator[Step]:
    """Yields P -> R and R -> V, over any set of axes at once."""
    for axes in _subsets(layout.partial):
        dst = replace(layout, partial=_without(layout.partial, axes))
        call = Collective("all_reduce", axes, nbytes)
        yield Step("all_reduce", axes, None, None, layout, dst, call, None)
    if grad:
        for axes in _subsets(replicated):
            dst = replace(layout, varying=_merge(mesh, layout.varying, axes))
            call = Collective("all_reduce", axes, nbytes)
            yield Step("to_varying", axes, None, None, layout, dst, None, call)
    for axis in layout.varying:
        dst = replace(layout, varying=_without(layout.varying, (axis,)))
        yield Step("from_varying", (axis,), None, None, layout, dst, None, None)
    for axis in replicated:
        dst = replace(layout, partial=_merge(mesh, layout.partial, (axis,)))
        yield Step("to_partial", (axis,), None, None, layout, dst, None, None)


def _merge(mesh: Mesh, names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the union in mesh order, so that equal layouts are equal values."""
    return tuple(name for name in mesh.names if name in names or name in more)


def _scatters(
    layout: Layout, tensor: TensorType, mesh: Mesh, local: tuple[int, ...], axis: str, grad: bool
) -> Iterator[Step]:
    """Yields R, V or P -> S: `axis` becomes the innermost split of a dimension."""
    if axis in layout.sharded_axes:
        return
    size = mesh.axis_size(axis)
    for dim, extent in enumerate(local):
        if extent < size:
            continue
        dims = _put(layout.dims, dim, (*layout.dims[dim], axis))
        dst = Layout(dims, _without(layout.partial, (axis,)), _without(layout.varying, (axis,)))
        forward: Collective | None = None
        backward: Collective | None = None
        if axis in layout.partial:
            nbytes = layout.local_bytes(tensor, mesh)
            op, forward = "reduce_scatter", Collective("reduce_scatter", (axis,), nbytes)
        elif axis in layout.varying:
            op = "slice_varying"
        else:
            op = "slice_invariant"
        if op != "slice_varying" and grad:
            backward = Collective("all_gather", (axis,), dst.local_bytes(tensor, mesh))
        yield Step(op, (axis,), dim, None, layout, dst, forward, backward)


def _gathers(
    layout: Layout, tensor: TensorType, mesh: Mesh, local: tuple[int, ...], grad: bool
) -> Iterator[Step]:
    """Yields S -> V, R or another S: only a dimension's innermost axis can leave it."""
    nbytes = layout.local_bytes(tensor, mesh)
    for dim, axes in enumerate(layout.dims):
        if not axes:
            continue
        axis, size = axes[-1], mesh.axis_size(axes[-1])
        dims = _put(layout.dims, dim, axes[:-1])
        forward = Collective("all_gather", (axis,), nbytes)
        whole = replace(layout, dims=dims)
        yield Step("all_gather_invariant", (axis,), dim, None, layout, whole, forward, None)
        if grad:
            dst = replace(whole, varying=_merge(mesh, layout.varying, (axis,)))
            backward = Collective("reduce_scatter", (axis,), whole.local_bytes(tensor, mesh))
            yield Step("all_gather", (axis,), dim, None, layout, dst, forward, backward)
        for other, extent in enumerate(local):
            if other != dim and extent >= size:
                dst = replace(layout, dims=_put(dims, other, (*dims[other], axis)))
                call = Collective("all_to_all", (axis,), nbytes)
                back = replace(call, nbytes=dst.local_bytes(tensor, mesh)) if grad else None
                yield Step("all_to_all", (axis,), dim, other, layout, dst, call, back)


def _put(dims: _Dims, dim: int, axes: tuple[str, ...]) -> _Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])
