"""Tensor-parallel collectives that overlap with the linears around them.

Under sequence parallelism (arXiv:2205.05198, section 4.2.2) an all_gather of rows precedes linears
that are split by outputs, and a reduce_scatter follows one that is split by inputs. torch has an
operator for each pair, which works rank by rank: it multiplies the rows of one rank while those of
the next are in transit (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023). The backward of each is the other.

The operators read the memory of neighbouring devices, so they need axes whose devices can. Linears
in 8 bits run beside no collective, unless the execution says that another system's do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.collective import Step
from autopar.ir.graph import Graph, Node
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout

ASYNC = "async_tensor_parallel"  # its name in `fuse`
LINEAR, SHARE = "aten.linear", "autopar.share"
DTYPES = ("f64", "f32", "bf16", "f16")
# torch does not recognise gathers before products that are scaled by rows (pytorch issue 149990).
ROWS = "float8-rows"
# Operators allowed between a parameter and a linear.
_OF_PARAMETERS = (SHARE, "aten.transpose.int", "aten.t", "aten.permute")


@dataclass(frozen=True)
class Overlapped:
    """A collective that overlaps with linears.

    Attributes:
        step: an all_gather of the linears' input, or the reduce_scatter of a linear's result.
        value: the node whose value is moved, before the collective.
        linears: the linears, in execution order.
        operands: for a reduce_scatter, the layouts in which its linear reads.
    """

    step: Step
    value: Node
    linears: tuple[Node, ...]
    operands: tuple[Layout, ...] = ()


class OverlappableLinears:
    """The linears of a graph that may overlap with a collective, whatever their layouts.

    Args:
        graph: prepared.
        alone: numbers of the runs of blocks without such overlap: runs that recompute selectively,
            since torch recognises only its own matrix products.
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
        """Values that a block passes to the next one, and outputs."""
        carried = {leaves for repeat in self.graph.repeats for _, leaves in repeat.carried}
        return carried | {name for _, name in self.graph.outputs}

    def readers(self, reader: Node) -> tuple[Node, ...]:
        """Returns the linears that are the only users of the value that `reader` reads.

        Args:
            reader: a node of the folded graph: a linear, or a share that linears read.

        Returns:
            () if there are none, or if another node uses the value.
        """
        graph = self.graph
        if reader.op not in (LINEAR, SHARE) or self._home.get(reader.name) in self._alone:
            return ()
        value = graph[reader.inputs[0]]
        if reader.op == SHARE:
            carried = any(value.name == entry for r in graph.repeats for entry, _ in r.carried)
            if carried or value.is_leaf or reader.name in self._leaving:
                return ()
            users = tuple(graph[name] for name in graph.users[reader.name])
        else:
            users = (reader,) if len(graph.users[value.name]) == 1 else ()
        home = self._home.get(reader.name)
        fits = (
            self._fits(node)
            and node.part.narrow != ROWS
            and node.inputs.count(node.inputs[0]) == 1
            and graph.template[node.name] == node.name
            and self._home.get(node.name) == home
            and all(map(self._of_parameters, node.inputs[1:]))
            for node in users
        )
        return users if users and all(fits) else ()

    def reader(self, linear: Node) -> Node | None:
        """Returns the only reader of a linear's result, if it reads once and in the same block."""
        users, home = self.graph.users[linear.name], self._home.get(linear.name)
        if not self._fits(linear) or len(users) != 1 or linear.name in self._leaving:
            return None
        user = self.graph[users[0]]
        same = self._home.get(user.name) == home and home not in self._alone
        return user if same and user.inputs.count(linear.name) == 1 else None

    def _fits(self, node: Node) -> bool:
        if node.op != LINEAR or node.name in self.graph.aside or not node.requires_grad:
            return False
        if node.part.narrow and not self.graph.execution.joined:
            return False  # torch's joint operators do not exchange what scales follow from
        x, weight = (self.graph[name].type for name in node.inputs[:2])
        same = x.dtype == weight.dtype == node.type.dtype and x.dtype in DTYPES
        return same and len(x.shape) > 1 and len(weight.shape) == 2

    def _of_parameters(self, name: str) -> bool:
        """Returns whether an operand is a parameter or a transpose of one."""
        node = self.graph[name]
        while node.op in _OF_PARAMETERS:
            node = self.graph[node.inputs[0]]
        return node.op == "param"


def overlapped_step(
    op: str, value: Node, steps: Sequence[Step], near: Collection[str], resharder: Resharder
) -> Step | None:
    """Returns the only step of a layout change, if linears can overlap with it.

    Args:
        op: "all_gather" or "reduce_scatter".
        value: the moved value.
        steps: the resharder's steps.
        near: axes whose devices can read one another's memory.
        resharder: the plan's resharder.
    """
    if len(steps) != 1 or steps[0].op != op or not set(steps[0].axes) <= set(near):
        return None
    (step,), shape, mesh = steps, value.type.shape, resharder.mesh
    even = step.src.is_even(shape, mesh) and step.dst.is_even(shape, mesh)
    # Products of parts of the last dimension would have to be summed.
    rows = step.dim is not None and step.dim < len(shape) - 1
    exact = value.type.dtype not in resharder.widened
    return step if even and rows and exact and mesh.axis_size(step.axes[0]) > 1 else None


class Overlaps:
    """The collectives of a plan that overlap with linears.

    Args:
        linears: the linears that may overlap.
        resharder: the plan's resharder.
        near: axes whose devices can read one another's memory; none if it is switched off.
        operands: node -> the layouts in which it reads.
        result: node -> the layout of its result.
        formed: node -> whether it runs in a form; torch's operators compute plain linears only.
    """

    def __init__(
        self,
        linears: OverlappableLinears,
        resharder: Resharder,
        near: Collection[str],
        operands: Callable[[str], Sequence[Layout]],
        result: Callable[[str], Layout],
        formed: Callable[[str], bool],
    ) -> None:
        self.linears, self.resharder, self.near = linears, resharder, frozenset(near)
        self.operands, self.result, self.formed = operands, result, formed

    def gather(self, reader: Node, held: Layout) -> Overlapped | None:
        """Returns the all_gather of a value in layout `held` before `reader`, a linear or share."""
        linears = self.linears.readers(reader)
        if not linears or any(self.formed(linear.name) for linear in linears):
            return None
        graph, whole = self.linears.graph, self.operands(reader.name)[0]
        value = graph[reader.inputs[0]]
        step = self._step("all_gather", value, held, whole)
        given = whole if reader.op == LINEAR else self.result(reader.name)
        wanted = [given, *(self.operands(linear.name)[0] for linear in linears)]
        if step is None or any(self._steps(value, whole, layout) for layout in wanted):
            return None
        return Overlapped(step, value, linears)

    def parameters(self, found: Overlapped) -> list[tuple[str, Layout]]:
        """Returns weights and biases of the linears, with the layouts in which they are read."""
        return [
            read
            for linear in found.linears
            for read in list(zip(linear.inputs, self.operands(linear.name), strict=True))[1:]
        ]

    def scatter(self, linear: Node) -> Overlapped | None:
        """Returns the reduce_scatter after a linear.

        Its bias is added after the reduce_scatter, by every device to its own rows. Without overlap
        the linear needs a bias that is zero on all devices but the first, made from one that all
        have.
        """
        reader = self.linears.reader(linear)
        if reader is None or self.formed(linear.name):
            return None
        wanted = self.operands(reader.name)[reader.inputs.index(linear.name)]
        step = self._step("reduce_scatter", linear, self.result(linear.name), wanted)
        if step is None:
            return None
        operands = list(self.operands(linear.name))
        for place, name in list(enumerate(linear.inputs))[2:]:
            bias = self.linears.graph[name]
            asked = self._steps(bias, self.result(name), operands[place])
            if [(one.op, one.axes) for one in asked[-1:]] != [("to_partial", step.axes)]:
                return None
            operands[place] = asked[-1].src
        return Overlapped(step, linear, (linear,), tuple(operands))

    def _steps(self, value: Node, src: Layout, dst: Layout) -> tuple[Step, ...]:
        return self.resharder.steps(value.type, src, dst, value.requires_grad)

    def _step(self, op: str, value: Node, src: Layout, dst: Layout) -> Step | None:
        return overlapped_step(op, value, self._steps(value, src, dst), self.near, self.resharder)
