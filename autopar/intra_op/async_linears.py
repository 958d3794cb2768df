"""Time saved on edges of a problem where linears overlap with their resharding.

The all_gather of a linear's input, or the reduce_scatter of its output, overlaps with the linear's
kernels; both ends of an edge determine them. Where several linears read a share, each counts as its
fastest choice that reads the share's layout, so that the saving is never overestimated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.overlap import hidden, products
from autopar.intra_op.node_choices import Option, operand_types
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Edge, Matrix
from autopar.intra_op.rule import OpRule, resolve
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.collective import Step, moves
from autopar.ir.fusion.async_tensor_parallel import LINEAR, OverlappableLinears, overlapped_step
from autopar.ir.graph import Node
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout

Seconds = tuple[float, float]  # forwards and backwards
_NOTHING = (0.0, 0.0)


class Hidden:
    """Seconds saved on the edges of one problem.

    Args:
        linears: the linears that may overlap with collectives.
        near: axes whose devices can read one another's memory.
        prices: prices of kernels and collectives.
        resharder: the problem's resharder.
        table: rules by operator.
        slowdown: slowdown of kernels and collectives that run side by side.
        options: maps a node to its choices.

    Attributes:
        found: edge number -> seconds saved by each pair of choices, shape (choices of the source,
            choices of the reader); only edges that save something.
    """

    def __init__(
        self,
        linears: OverlappableLinears,
        near: Collection[str],
        prices: Prices,
        resharder: Resharder,
        table: dict[str, OpRule],
        slowdown: float,
        options: Callable[[str], tuple[Option, ...]],
    ) -> None:
        self.linears, self.near, self.prices = linears, near, prices
        self.resharder, self.table, self.slowdown = resharder, table, slowdown
        self.options = options
        self._known: dict[tuple[str, Option], Seconds] = {}
        self.found: dict[int, Matrix] = {}

    def less(
        self,
        number: int,
        edge: Edge,
        source: Node,
        reader: Node,
        index: int,
        times: Sequence[int],
    ) -> Edge:
        """Returns the edge with its saving subtracted from its costs, and records the saving.

        Args:
            number: number of the edge.
            edge: the edge with the cost of resharding alone.
            source, reader: nodes of the folded graph.
            index: index of the operand.
            times: number of runs in a step, forwards and backwards.
        """
        linears = self.linears.readers(reader) if self.near and index == 0 else ()
        op = "all_gather" if linears else "reduce_scatter"
        if self.near and source.op == LINEAR and self.linears.reader(source) is reader:
            linears = linears or (source,)
        saving = self._less(op, source, reader, index, times, linears) if linears else None
        if saving is None:
            return edge
        self.found[number] = saving
        return replace(
            edge, cost=np.where(saving > 0, np.maximum(edge.cost - saving, 0), edge.cost)
        )

    def _less(
        self,
        op: str,
        source: Node,
        reader: Node,
        index: int,
        times: Sequence[int],
        linears: tuple[Node, ...],
    ) -> Matrix | None:
        rows, columns = self.options(source.name), self.options(reader.name)
        saved = np.zeros((len(rows), len(columns)))
        for step in self._steps(op, source, [option.results[0] for option in rows]):
            parts = self.prices.mesh.axis_size(step.axes[0])
            calls = (step.forward, step.backward)
            sent = [0.0 if call is None else self.prices.model.collective(call) for call in calls]
            for b, column in enumerate(columns):
                if not self._same(column.operands[index], step.dst):
                    continue
                for a, row in enumerate(rows):
                    if not self._same(row.results[0], step.src):
                        continue
                    if (row if op == "reduce_scatter" else column).form:
                        continue  # see `Overlaps`
                    if op == "reduce_scatter":
                        taken = self._products(source, row)
                    elif reader.op == LINEAR:
                        taken = self._products(reader, column)
                    else:
                        taken = self._least(linears, step.dst)
                    saved[a, b] = sum(
                        count * hidden(kernels, seconds, parts, self.slowdown)
                        for count, kernels, seconds in zip(times, taken, sent, strict=True)
                    )
        return saved if saved.any() else None

    def _steps(self, op: str, value: Node, sources: list[Layout]) -> Iterator[Step]:
        """Yields the cheapest steps from these layouts that linears can overlap with."""
        tensor, grad = value.type, value.requires_grad
        for layout in dict.fromkeys(sources):
            for step in moves(layout, tensor, self.prices.mesh, grad):
                if step.op == op and step.axes[0] in self.near:
                    way = self.resharder.steps(tensor, layout, step.dst, grad)
                    overlapping = overlapped_step(op, value, way, self.near, self.resharder)
                    if overlapping is not None:
                        yield overlapping

    @staticmethod
    def _same(one: Layout, other: Layout) -> bool:
        """Returns whether two layouts are equal but for the order of axes."""
        alike = one.dims == other.dims and set(one.partial) == set(other.partial)
        return alike and set(one.varying) == set(other.varying)

    def _least(self, linears: tuple[Node, ...], layout: Layout) -> Seconds:
        """Returns the kernel seconds of linears that read a layout, each at its fastest."""
        total = _NOTHING
        for linear in linears:
            fitting = [
                self._products(linear, option)
                for option in self.options(linear.name)
                if not option.form and self._same(option.operands[0], layout)
            ]
            if not fitting:
                return _NOTHING
            least = tuple(map(min, zip(*fitting, strict=True)))
            total = (total[0] + least[0], total[1] + least[1])
        return total

    def _products(self, linear: Node, option: Option) -> Seconds:
        """Returns the forward and backward seconds of kernels that overlap with a collective."""
        key = linear.name, option
        if key not in self._known:
            graph, mesh = self.linears.graph, self.prices.mesh
            types = operand_types(graph, linear)
            signature = resolve(self.table[linear.op], linear, types, linear.types)
            layouts = option.operands, option.results
            work = node_work(graph, linear, *layouts, signature, mesh, option.form)
            trained = graph[linear.inputs[0]].requires_grad
            ahead, back, _ = products(work, trained)
            compute = self.prices.model.compute
            self._known[key] = sum(map(compute, ahead)), sum(map(compute, back))
        return self._known[key]
