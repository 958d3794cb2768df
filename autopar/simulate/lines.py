"""Lines of an emitted program over variables: what is computed, resharded, used and added up."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.collective import Step
from autopar.ir.graph import Node
from autopar.ir.storage import Storage
from autopar.ir.tensor import TensorType

# A leaf that is read by name from the table of parameters; it is no variable of the function.
LEAF = "%"


@dataclass(frozen=True)
class Compute:
    """`targets = node(operands)`; `apart` if its products run beside a collective."""

    node: Node
    operands: tuple[str, ...]
    target: str
    apart: bool = False


@dataclass(frozen=True)
class Move:
    """`target = step(source)`, a value of type `tensor`; `value` is the node that made it.

    `beside` are the linears whose products run meanwhile.
    """

    value: str
    tensor: TensorType
    step: Step
    source: str
    target: str
    beside: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Use:
    """`target = parameter`, as operators use what is held of it."""

    leaf: Node
    storage: Storage
    source: str
    target: str


@dataclass(frozen=True)
class Assign:
    """`target = source`."""

    source: str
    target: str


@dataclass(frozen=True)
class Sum:
    """Where the gradients of all readers of a share meet, in the backward."""

    node: Node
    variable: str


@dataclass(frozen=True)
class Call:
    """`targets = block(targets, ...)` for every block of a run."""

    run: int
    targets: tuple[str, ...]
    outside: tuple[str, ...]


Line = Compute | Move | Use | Assign | Sum | Call


@dataclass(frozen=True)
class Function:
    """Lines, the variables that are its arguments, and those that it returns."""

    lines: tuple[Line, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """`forward` and the function of each run of blocks, which reads leaves of the first block."""

    forward: Function
    blocks: tuple[Function, ...]
