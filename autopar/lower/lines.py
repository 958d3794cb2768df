"""Lines of a lowered program: calls, exchanges, uses of parameters, and calls of blocks.

A line reads and writes variables. A variable keeps its value alive until it is given another one or
its function returns. A leaf of the graph is read by name, `%w`, and is no variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.collective import Step
from autopar.ir.graph import Node, Source
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType

LEAF = "%"  # before the name of a leaf, where a variable could stand


@dataclass(frozen=True)
class Cite:
    """The user's source line that the next lines come from."""

    source: Source


@dataclass(frozen=True)
class Compute:
    """`target = node(operands)`.

    Attributes:
        node: an operator with global shapes.
        operands: variables or leaves, in the order of `node.inputs`.
        into: the layouts in which they are read.
        out: the layouts of the results.
        target: the variable of the result, "" for an operator that runs for what it writes; of
            several results that are unpacked at once "a,b".
        borders: variables of what is fetched from neighbours first, one for each such call.
        apart: whether its products run beside a collective.
        form: name of its implementation, "" for the operator as it is.
    """

    node: Node
    operands: tuple[str, ...]
    into: tuple[Layout, ...]
    out: tuple[Layout, ...]
    target: str
    borders: tuple[str, ...] = ()
    apart: bool = False
    form: str = ""


@dataclass(frozen=True)
class Move:
    """`target = step(source)`, one step of a change of layout.

    Attributes:
        value: the node whose value is moved.
        tensor: its global type.
        step: the collective in each direction, and the layouts before and after.
        source: the variable or leaf that is read.
        target: the variable that is written.
        beside: the linears whose products run meanwhile.
    """

    value: str
    tensor: TensorType
    step: Step
    source: str
    target: str
    beside: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Use:
    """`target = parameter`, as operators use it where it is stored otherwise."""

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
        value: the node whose value it is, with its layout; "" where a loop begins.
    """

    source: str
    target: str
    value: str = ""
    layout: Layout | None = None


@dataclass(frozen=True)
class Drop:
    """The variable is no longer needed."""

    variable: str


@dataclass(frozen=True)
class Sum:
    """The gradients of all readers of a share meet here, in the backward."""

    node: Node
    variable: str


@dataclass(frozen=True)
class Joined:
    """Operators and a collective that are one call of the program.

    Attributes:
        lines: by themselves: an all_gather and the linears that run beside it; a linear and the
            reduce_scatter that runs beside it; or an operator that writes what an all_to_all sends.
    """

    lines: tuple[Compute | Move | Sum | Drop, ...]

    @property
    def move(self) -> Move:
        """The collective."""
        (move,) = (line for line in self.lines if isinstance(line, Move))
        return move

    @property
    def operators(self) -> tuple[Compute, ...]:
        """The operators, in execution order."""
        return tuple(line for line in self.lines if isinstance(line, Compute))


@dataclass(frozen=True)
class Call:
    """`targets = block(targets, outside)` for every block of a run, in a loop."""

    run: int
    targets: tuple[str, ...]
    outside: tuple[str, ...]


Line = Cite | Compute | Move | Use | Assign | Drop | Sum | Joined | Call


@dataclass(frozen=True)
class Bound:
    """A variable, or a leaf, with the value that it holds."""

    variable: str
    value: str
    layout: Layout


@dataclass(frozen=True)
class Function:
    """Lines with the variables that they begin with and those that they return.

    Attributes:
        name: of the function in the program.
        arguments: what a caller passes.
        lines: in execution order.
        results: what it returns.
    """

    name: str
    arguments: tuple[Bound, ...]
    lines: tuple[Line, ...]
    results: tuple[Bound, ...]

    def __iter__(self) -> Iterator[Line]:
        """The lines, those that run as one call one by one."""
        for line in self.lines:
            if isinstance(line, Joined):
                yield from line.lines
            else:
                yield line


@dataclass(frozen=True)
class Lowered:
    """The program of a plan, or of a stage of a pipeline.

    Attributes:
        forward: computes what training needs, the loss or what is sent to other stages.
        blocks: one function for each run of repeated blocks, written for its first block.
        aside: goes on behind `forward` for outputs that training does without; None if there are
            none. It reads forward's variables.
    """

    forward: Function
    blocks: tuple[Function, ...]
    aside: Function | None = None

    @property
    def trained(self) -> Iterator[tuple[Line, int | None]]:
        """What a step of training runs, in execution order, without `aside`.

        Each line stands beside the number of the run of blocks that it is in, None outside of
        blocks; lines that run as one call are one.
        """
        for line in self.forward.lines:
            if isinstance(line, Call):
                yield from ((inner, line.run) for inner in self.blocks[line.run].lines)
            else:
                yield line, None
