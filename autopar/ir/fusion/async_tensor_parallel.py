"""Collectives of tensor parallelism that run beside the linears around them.

Under sequence parallelism (arXiv:2205.05198, section 4.2.2) an all_gather of rows stands before the
linears that are split by outputs, and a reduce_scatter behind one that is split by inputs. torch
has an operator for each pair, which works rank by rank: the rows of one rank are multiplied while
those of the next are on their way (Wang et al., "Overlap Communication with Dependent Computation
via Decomposition in Large Deep Learning Models", ASPLOS 2023). Backwards one is the other.

Neighbours read one another's memory there, so that it is for axes whose devices can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.collective import Resharder, Step
from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import Layout

ASYNC = "async_tensor_parallel"  # by what `fuse` switches it on
LINEAR, SHARE = "aten.linear", "autopar.share"
DTYPES = ("f64", "f32", "bf16", "f16")
# What may stand between a parameter and a linear.
_OF_PARAMETERS = (SHARE, "aten.transpose.int", "aten.t", "aten.permute")


@dataclass(frozen=True)
class Overlapped:
    """A collective that runs beside linears.

    Attributes:
        step: an all_gather of what the linears read, or the reduce_scatter of what one gives.
        value: the node whose value is moved, as it is before the collective.
        linears: in execution order.
        operands: of a reduce_scatter the layouts in which its linear reads.
    """

    step: Step
    value: Node
    linears: tuple[Node, ...]
    operands: tuple[Layout, ...] = ()


class Beside:
    """Which linears of a graph may run beside a collective; layouts come later.

    Args:
        graph: prepared.
        alone: runs of blocks, by number, in which nothing does: those that keep products while all
            else is computed again, since torch knows its own products only.
    """

    def __init__(self, graph: Graph, alone: Collection[int] = ()) -> None:
        self.graph = graph
        self._alone = frozenset(alone)

    @cached_property
    def _home(self) -> dict[str, int]:
        """Node of the first block of a run -> the run."""
        repeats = enumerate(self.graph.repeats)
        return {name: run for run, repeat in repeats for name in repeat.iterations[0]}

    @cached_property
    def _leaving(self) -> set[str]:
        """Values that a block hands to the next one, and outputs."""
        carried = {leaves for repeat in self.graph.repeats for _, leaves in repeat.carried}
        return carried | {name for _, name in self.graph.outputs}

    def readers(self, reader: Node) -> tuple[Node, ...]:
        """The linears that alone use what `reader` reads: itself, or those behind a share.

        Args:
            reader: of the folded graph.

        Returns:
            () where there are none, or anything else reads it.
        """
        graph = self.graph
        if reader.op not in (LINEAR, SHARE) or self._home.get(reader.name) in self._alone:
            return ()
        value = graph[reader.inputs[0]]
        if reader.op == SHARE:
            carried = any(value.name == entry for r in graph.repeats for entry, _ in r.carried)
            if carried or value.is_leaf or reader.name in self._leaving:
                return ()
            found = tuple(graph[name] for name in graph.users[reader.name])
        else:
            found = (reader,) if len(graph.users[value.name]) == 1 else ()
        home = self._home.get(reader.name)
        fits = (
            self._fits(node)
            and node.inputs.count(node.inputs[0]) == 1
            and graph.template[node.name] == node.name
            and self._home.get(node.name) == home
            and all(map(self._of_parameters, node.inputs[1:]))
            for node in found
        )
        return found if found and all(fits) else ()

    def reader(self, linear: Node) -> Node | None:
        """What alone reads the result of a linear, once and in the same block."""
        users, home = self.graph.users[linear.name], self._home.get(linear.name)
        if not self._fits(linear) or len(users) != 1 or linear.name in self._leaving:
            return None
        found = self.graph[users[0]]
        same = self._home.get(found.name) == home and home not in self._alone
        return found if same and found.inputs.count(linear.name) == 1 else None

    def _fits(self, node: Node) -> bool:
        if node.op != LINEAR or node.name in self.graph.aside or not node.requires_grad:
            return False
        x, weight = (self.graph[name].type for name in node.inputs[:2])
        same = x.dtype == weight.dtype == node.type.dtype and x.dtype in DTYPES
        return same and len(x.shape) > 1 and len(weight.shape) == 2

    def _of_parameters(self, name: str) -> bool:
        """Whether an operand is there before any other: a parameter, or a transpose of one."""
        node = self.graph[name]
        while node.op in _OF_PARAMETERS:
            node = self.graph[node.inputs[0]]
        return node.op == "param"


def runs_beside(
    op: str, value: Node, steps: Sequence[Step], near: Collection[str], resharder: Resharder
) -> Step | None:
    """The one step of a layout change, if that is what linears run beside.

    Args:
        op: "all_gather" or "reduce_scatter".
        value: what is moved.
        steps: of the resharder.
        near: axes whose devices read one another's memory.
        resharder: of the plan.
    """
    if len(steps) != 1 or steps[0].op != op or not set(steps[0].axes) <= set(near):
        return None
    (step,), shape, mesh = steps, value.type.shape, resharder.mesh
    even = step.src.is_even(shape, mesh) and step.dst.is_even(shape, mesh)
    # Products of parts of the last dimension would have to be added up.
    rows = step.dim is not None and step.dim < len(shape) - 1
    exact = value.type.dtype not in resharder.widened
    return step if even and rows and exact and mesh.axis_size(step.axes[0]) > 1 else None


class Overlaps:
    """Which collectives of a plan run beside linears.

    Args:
        beside: which may.
        resharder: of the plan.
        near: axes whose devices read one another's memory; none where it is switched off.
        operands: node -> the layouts in which it reads.
        result: node -> the layout of what it gives.
    """

    def __init__(
        self,
        beside: Beside,
        resharder: Resharder,
        near: Collection[str],
        operands: Callable[[str], Sequence[Layout]],
        result: Callable[[str], Layout],
    ) -> None:
        self.beside, self.resharder, self.near = beside, resharder, frozenset(near)
        self.operands, self.result = operands, result

    def gather(self, reader: Node, held: Layout) -> Overlapped | None:
        """The all_gather before `reader`, a linear or a share, of what is held in a layout."""
        linears = self.beside.readers(reader)
        if not linears:
            return None
        graph, whole = self.beside.graph, self.operands(reader.name)[0]
        value = graph[reader.inputs[0]]
        step = self._step("all_gather", value, held, whole)
        given = whole if reader.op == LINEAR else self.result(reader.name)
        wanted = [given, *(self.operands(linear.name)[0] for linear in linears)]
        if step is None or any(self._steps(value, whole, layout) for layout in wanted):
            return None
        return Overlapped(step, value, linears)

    def parameters(self, found: Overlapped) -> list[tuple[str, Layout]]:
        """Weights and biases of the linears, with the layouts in which these read them."""
        return [
            read
            for linear in found.linears
            for read in list(zip(linear.inputs, self.operands(linear.name), strict=True))[1:]
        ]

    def scatter(self, linear: Node) -> Overlapped | None:
        """The reduce_scatter behind a linear.

        A bias is added behind it, by every device to its own rows. The linear by itself asks for
        one that is zero but on the first device, which is made of one that all have.
        """
        reader = self.beside.reader(linear)
        if reader is None:
            return None
        wanted = self.operands(reader.name)[reader.inputs.index(linear.name)]
        step = self._step("reduce_scatter", linear, self.result(linear.name), wanted)
        if step is None:
            return None
        operands = list(self.operands(linear.name))
        for place, name in list(enumerate(linear.inputs))[2:]:
            bias = self.beside.graph[name]
            asked = self._steps(bias, self.result(name), operands[place])
            if [(one.op, one.axes) for one in asked] != [("to_partial", step.axes)]:
                return None
            operands[place] = asked[0].src
        return Overlapped(step, linear, (linear,), tuple(operands))

    def _steps(self, value: Node, src: Layout, dst: Layout) -> tuple[Step, ...]:
        return self.resharder.steps(value.type, src, dst, value.requires_grad)

    def _step(self, op: str, value: Node, src: Layout, dst: Layout) -> Step | None:
        return runs_beside(op, value, self._steps(value, src, dst), self.near, self.resharder)
