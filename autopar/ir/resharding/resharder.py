"""Shortest paths between layouts: the cheapest sequence of steps from one to another."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import LayoutError
from autopar.ir.collective import SUMS, Collective, Step
from autopar.ir.mesh import Mesh
from autopar.ir.resharding.layout_graph import LayoutGraph, LayoutGraphs
from autopar.ir.resharding.step_arrays import PricedSteps
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType

_Key = tuple[TensorType, Layout, bool]


class Resharder:
    """Finds the cheapest step sequences on one mesh under one price, cached by tensor type.

    Args:
        mesh: the mesh.
        price: seconds of one Collective on that mesh.
        widened: dtype -> the dtype in which sums of it are sent.
        named: gives a call the algorithm that runs it; by default the library chooses.
        graphs: layouts and steps to share with resharders on other meshes.
    """

    def __init__(
        self,
        mesh: Mesh,
        price: Callable[[Collective], float],
        widened: Mapping[str, str] | None = None,
        named: Callable[[Collective], Collective] | None = None,
        graphs: LayoutGraphs | None = None,
    ) -> None:
        self.mesh, self.widened, self.named = mesh, dict(widened or {}), named
        self.price, self._shared = price, graphs or LayoutGraphs()
        self._prices: dict[Collective, float] = {}
        self._moves: dict[_Key, list[tuple[float, Step]]] = {}
        self._trees: dict[_Key, _Tree] = {}
        self._graphs: dict[tuple[TensorType, bool], LayoutGraph] = {}
        self._pairs: dict[tuple[TensorType, bool], _Pairs] = {}

    def cost(self, tensor: TensorType, src: Layout, dst: Layout, grad: bool = True) -> float:
        """Returns the seconds of `steps`, both directions."""
        seconds = 0.0  # rounded after each step, as in `costs`
        for step in self.steps(tensor, src, dst, grad):
            seconds += sum(map(self._price, step.collectives))
        return seconds

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
        seconds = self._between(tensor, grad).seconds(starts, ends)
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
        if dst == src:
            return ()
        key = (tensor, src, grad)
        if key not in self._trees:
            self._trees[key] = _Tree(src, lambda layout: self._priced_moves(layout, tensor, grad))
        path = self._trees[key].path(dst)
        if path is None:
            raise _no_way(tensor, src, dst)
        return path

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

    def _graph(self, tensor: TensorType, grad: bool) -> LayoutGraph:
        key = tensor, grad
        if key not in self._graphs:
            self._graphs[key] = self._shared.of(self.mesh, tensor, grad)
        return self._graphs[key]

    def _between(self, tensor: TensorType, grad: bool) -> _Pairs:
        """Returns the seconds between all layouts of a tensor."""
        key = tensor, grad
        if key not in self._pairs:
            arrays = self._shared.arrays(self.mesh, tensor, grad)
            steps = arrays.priced(
                tensor, self.mesh, lambda call: self._price(self._sent(call, tensor))
            )
            self._pairs[key] = _Pairs(arrays.place, steps)
        return self._pairs[key]

    def _priced_moves(
        self, layout: Layout, tensor: TensorType, grad: bool
    ) -> list[tuple[float, Step]]:
        key = (tensor, layout, grad)
        if key not in self._moves:
            steps = [self._sized(s, tensor) for s in self._graph(tensor, grad).steps(layout)]
            self._moves[key] = [
                (sum(self._price(c) for c in step.collectives), step) for step in steps
            ]
        return self._moves[key]

    def _sized(self, step: Step, tensor: TensorType) -> Step:
        """Returns a step with the bytes of this tensor's messages."""
        calls = (
            call and self._sent(replace(call, nbytes=at.local_bytes(tensor, self.mesh)), tensor)
            for call, at in ((step.forward, step.src), (step.backward, step.dst))
        )
        return Step(step.op, step.axes, step.dim, step.to_dim, step.src, step.dst, *calls)

    def _sent(self, call: Collective, tensor: TensorType) -> Collective:
        """Returns a call with the dtype in which it sums, and with its chosen algorithm."""
        wide = self.widened.get(tensor.dtype)
        if wide is not None and call.kind in SUMS:
            factor = DTYPE_BYTES[wide] // DTYPE_BYTES[tensor.dtype]
            call = replace(call, nbytes=factor * call.nbytes)
        return call if self.named is None else self.named(call)

    def _price(self, collective: Collective) -> float:
        if collective not in self._prices:
            self._prices[collective] = self.price(collective)
        return self._prices[collective]


class _Tree:
    """The shortest paths from one layout, by Dijkstra's algorithm, computed on demand.

    Args:
        src: the layout.
        leaving: returns the steps that leave a layout, with their seconds.
    """

    def __init__(self, src: Layout, leaving: Callable[[Layout], list[tuple[float, Step]]]) -> None:
        self._src, self._leaving = src, leaving
        self._done: dict[Layout, Step | None] = {}
        self._ticket = itertools.count()
        self._heap: list[tuple[float, int, int, Layout, Step | None]] = [
            (0.0, 0, next(self._ticket), src, None)
        ]

    def path(self, dst: Layout) -> tuple[Step, ...] | None:
        """Returns the steps to a layout, None if it cannot be reached."""
        while dst not in self._done and self._heap:
            self._settle()
        return tuple(reversed([*self._back(dst)])) if dst in self._done else None

    def _back(self, dst: Layout) -> Iterator[Step]:
        while (step := self._done[dst]) is not None:
            yield step
            dst = step.src

    def _settle(self) -> None:
        cost, length, _, layout, step = heapq.heappop(self._heap)
        if layout in self._done:
            return
        self._done[layout] = step
        for price, move in self._leaving(layout):
            if move.dst not in self._done:
                entry = (cost + price, length + 1, next(self._ticket), move.dst, move)
                heapq.heappush(self._heap, entry)


class _Pairs:
    """The seconds between layouts of one tensor, for many pairs at once.

    Args:
        place: layout -> its number.
        steps: between them.
    """

    def __init__(self, place: Mapping[Layout, int], steps: PricedSteps) -> None:
        self._place, self._steps = place, steps
        self._rows: dict[int, NDArray[np.float64]] = {}

    def seconds(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> NDArray[np.float64]:
        """Returns the seconds of the cheapest paths, a row for each source, inf without a path."""
        starts = [self._place[layout] for layout in sources]
        ends = [self._place[layout] for layout in targets]
        fresh = [start for start in dict.fromkeys(starts) if start not in self._rows]
        if fresh:
            # Numba loads slowly, and programs that only look at plans ask for no prices of pairs.
            from autopar.ir.resharding.shortest import shorten

            seconds = np.full((len(self._place), len(fresh)), np.inf)
            seconds[fresh, np.arange(len(fresh))] = 0.0
            shorten(seconds, *self._steps)
            self._rows.update(zip(fresh, np.ascontiguousarray(seconds.T), strict=True))
        return np.stack([self._rows[start][ends] for start in starts])


def _no_way(tensor: TensorType, src: Layout, dst: Layout) -> LayoutError:
    return LayoutError(
        f"no way from {src.format(tensor.shape)} to {dst.format(tensor.shape)}",
        why="in the target a device would hold no element",
    )
