"""Patterns: spellings of an operator in models, and the kernel that replaces them.

A spelling is a Python expression in which names stand for values or numbers, and functions for
operators of the graph. Sums and products match in either order. Four functions are not operators:

    wide(x)      x, or x of 16 bits in float32
    narrow(x)    x, or x rounded to 16 bits
    mean(x)      the mean over the last dimension, which is kept with size 1
    viewed(x)    x, or x reshaped with its last dimension unchanged

`(h := x + y)` names a value inside; `...` matches the remaining arguments of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import PREFIX, Arg, Graph, Node, Ref
from autopar.ir.tensor import TensorType

__all__ = ["PREFIX", "Match", "Pattern", "Writer", "call", "computes", "is_vector", "width"]

# In float64 the kernels' references run, which are as precise.
_KERNEL_DTYPES = ("f64", "f32", "bf16", "f16")


@dataclass(frozen=True)
class Match:
    """A match of a pattern in a graph.

    Attributes:
        graph: the graph.
        found: the last node, whose value the kernel computes.
        values: the value bound to each name of the spelling.
        inside: names of the nodes that the kernel replaces, including `found`.
    """

    graph: Graph
    found: Node
    values: Mapping[str, Arg]
    inside: frozenset[str]

    def node(self, name: str) -> Node | None:
        """Returns the node bound to a name, None if it is a number or absent."""
        value = self.values.get(name)
        return self.graph[value.name] if isinstance(value, Ref) else None

    def type(self, name: str) -> TensorType:
        """Returns the type of the value bound to a name, or one that fits nothing."""
        node = self.node(name)
        return TensorType("", ()) if node is None else node.type


@dataclass
class Writer:
    """Collects the nodes that replace a match.

    Attributes:
        like: the node whose source they take.
        fresh: generator of unused names.
        known: nodes written by other matches in the same block.
        nodes: the nodes written so far.
    """

    like: Node
    fresh: Callable[[str], str]
    known: dict[tuple[str, tuple[Arg, ...]], Ref]
    nodes: list[Node] = field(default_factory=list)

    def new(self, hint: str, op: str, args: tuple[Arg, ...], kind: TensorType, grad: bool) -> Ref:
        """Adds an operator with one result, or returns an equal one that was already written."""
        if (op, args) not in self.known:
            node = Node(self.fresh(hint), op, args, (), (kind,), self.like.source, grad)
            self.nodes.append(node)
            self.known[op, args] = Ref(node.name)
        return self.known[op, args]


Write = Callable[[Match, Writer], None]


@dataclass(frozen=True)
class Pattern:
    """One kernel and its spellings.

    Attributes:
        name: name in `fuse`; patterns that are switched together share it.
        kernel: a function of `autopar.operators.kernels`.
        spellings: expressions, tried in order.
        arguments: the kernel's arguments, as names of the spellings.
        gives: names of inner values that are read elsewhere too, which the kernel returns as
            further results.
        fits: further conditions on a match.
        write: writes the replacing nodes, the last of them named like `Match.found`; by default a
            call of the kernel.
        outputs: whether a value inside may be an output of the graph, which is then recomputed only
            if it is asked for.
    """

    name: str
    kernel: str
    spellings: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    fits: Callable[[Match], bool] = lambda match: True
    write: Write | None = None
    outputs: bool = False

    def replace(self, match: Match, writer: Writer) -> None:
        """Writes the replacement of `match`."""
        if self.write is not None:
            self.write(match, writer)
            return
        call(
            match, writer, self.kernel, [match.values[name] for name in self.arguments], self.gives
        )


def call(
    match: Match, writer: Writer, kernel: str, args: Sequence[Arg], gives: Sequence[str] = ()
) -> None:
    """Writes a call of a kernel whose results are the match and the nodes named in `gives`."""
    last = match.found
    nodes = [last, *(match.node(name) or last for name in gives)]
    grad = any(node.requires_grad for node in nodes)
    op, types = PREFIX + kernel, tuple(node.type for node in nodes)
    if not gives:
        writer.nodes.append(Node(last.name, op, tuple(args), (), types, last.source, grad))
        return
    kernel_call = Node(writer.fresh(kernel), op, tuple(args), (), types, last.source, grad)
    writer.nodes.append(kernel_call)
    for index, node in enumerate(nodes):
        part = (Ref(kernel_call.name), index)
        writer.nodes.append(Node(node.name, "getitem", part, (), node.types, node.source, grad))


def computes(match: Match, *names: str) -> bool:
    """Returns whether values have one common dtype, which kernels support."""
    kinds = {match.type(name).dtype for name in names}
    return len(kinds) == 1 and kinds <= set(_KERNEL_DTYPES)


def width(match: Match, name: str) -> int:
    """Returns the size of the last dimension, 0 for a scalar."""
    shape = match.type(name).shape
    return shape[-1] if shape else 0


def is_vector(match: Match, name: str, size: int) -> bool:
    """Returns whether a value has one dimension of `size` elements, of a floating dtype."""
    kind = match.type(name)
    return kind.shape == (size,) and kind.floating
