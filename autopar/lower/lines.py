"""Lines of a lowered program: calls, collectives, uses of parameters, and calls of blocks.

A line reads and writes variables. A variable keeps its value alive until it is reassigned or its
function returns. A leaf of the graph is not a variable; lines read it by name, `%w`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.collective import Step
from autopar.ir.graph import Node, Source
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType

LEAF = "%"  # prefix of a leaf's name in place of a variable


@dataclass(frozen=True)
class SourceLine:
    """The user's source line for the lines that follow."""

    source: Source


@dataclass(frozen=True)
class Compute:
    """`target = node(operands)`.

    Attributes:
        node: an operator with global shapes.
        operands: variables or leaves, in the order of `node.inputs`.
        into: layouts of the operands.
        out: layouts of the results.
        target: the variable of the result; "" if the operator runs for a side effect; "a,b" if
            several results are unpacked.
        borders: variables of the values that are first fetched from neighbours, one for each such
            call.
        overlaps: whether its products overlap with a collective.
        form: name of its implementation, "" for the operator without a form.
    """

    node: Node
    operands: tuple[str, ...]
    into: tuple[Layout, ...]
    out: tuple[Layout, ...]
    target: str
    borders: tuple[str, ...] = ()
    overlaps: bool = False
    form: str = ""


@dataclass(frozen=True)
class Move:
    """`target = step(source)`, one step of resharding.

    Attributes:
        value: the node whose value is resharded.
        tensor: its global type.
        step: the collective in each direction, and the layouts before and after.
        source: the variable or leaf that is read.
        target: the variable that is written.
        overlapped: the linears whose products overlap with it.
    """

    value: str
    tensor: TensorType
    step: Step
    source: str
    target: str
    overlapped: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Use:
    """`target = parameter`: brings a stored parameter into the layout in which operators use it."""

    leaf: Node
    storage: Storage
    source: str
    target: str


@dataclass(frozen=True)
class Assign:
    """`target = source`.

    Attributes:
        source: a variable, or the leaf of an input.
        target: a variable.
        value: the node whose value it is; "" at the start of a loop.
        layout: layout of the value; None at the start of a loop.
    """

    source: str
    target: str
    value: str = ""
    layout: Layout | None = None


@dataclass(frozen=True)
class Drop:
    """Frees a variable that is no longer needed."""

    variable: str


@dataclass(frozen=True)
class Sum:
    """The place where the backward adds up the gradients of all readers of a share."""

    node: Node
    variable: str


@dataclass(frozen=True)
class Joined:
    """Operators and a collective that run as one call.

    Attributes:
        lines: the separate lines: an all_gather and the linears that overlap with it; a linear and
            the reduce_scatter that overlaps with it; or an operator that writes the message of an
            all_to_all.
    """

    lines: tuple[Compute | Move | Sum | Drop, ...]

    @property
    def move(self) -> Move:
        """The line of the collective."""
        (move,) = (line for line in self.lines if isinstance(line, Move))
        return move

    @property
    def operators(self) -> tuple[Compute, ...]:
        """The lines of the operators, in execution order."""
        return tuple(line for line in self.lines if isinstance(line, Compute))


@dataclass(frozen=True)
class Call:
    """`targets = block(targets, outside)` for every block of a run, in a loop."""

    run: int
    targets: tuple[str, ...]
    outside: tuple[str, ...]


Line = SourceLine | Compute | Move | Use | Assign | Drop | Sum | Joined | Call


@dataclass(frozen=True)
class Bound:
    """A variable or leaf with the value that it holds.

    Attributes:
        variable: its name.
        value: the node whose value it holds.
        layout: layout of the value.
    """

    variable: str
    value: str
    layout: Layout


@dataclass(frozen=True)
class Function:
    """Lines with the variables that they take and return.

    Attributes:
        name: name of the function in the program.
        arguments: variables that a caller passes.
        lines: in execution order.
        results: variables that it returns.
    """

    name: str
    arguments: tuple[Bound, ...]
    lines: tuple[Line, ...]
    results: tuple[Bound, ...]

    def __iter__(self) -> Iterator[Line]:
        """Yields the lines, including each of those that run as one call."""
        for line in self.lines:
            if isinstance(line, Joined):
                yield from line.lines
            else:
                yield line


@dataclass(frozen=True)
class Lowered:
    """The program of a plan, or of a stage of a pipeline.

    Attributes:
        forward: computes the loss, or the values that are sent to other stages.
        blocks: one function for each run of repeated blocks, written for its first block.
        aside: computes outputs that training does not need, from the variables of `forward`; None
            if there are none.
    """

    forward: Function
    blocks: tuple[Function, ...]
    aside: Function | None = None

    @property
    def trained(self) -> Iterator[tuple[Line, int | None]]:
        """The lines of a training step in execution order, without `aside`.

        Each line comes with the number of the run of blocks that it belongs to, or None outside of
        blocks; lines that run as one call are one line.
        """
        for line in self.forward.lines:
            if isinstance(line, Call):
                yield from ((inner, line.run) for inner in self.blocks[line.run].lines)
            else:
                yield line, None
