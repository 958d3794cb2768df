"""What a pattern says: how people write an operator, and the kernel that computes it at once.

A spelling is an expression of Python, in which names stand for values or numbers and functions for
operators of the graph. Sums and products match in either order. Four functions are no operators:

    wide(x)      x, or x of 16 bits in float32
    narrow(x)    x, or x rounded to 16 bits
    mean(x)      the mean over the last dimension, which stays with one element
    viewed(x)    x, or x reshaped with its last dimension as it is

`(h := x + y)` names a value inside, `...` stands for the remaining arguments of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import PREFIX, Arg, Graph, Node, Ref
from autopar.ir.tensor import TensorType

__all__ = ["PREFIX", "Match", "Pattern", "Writer", "call", "computes", "is_vector", "width"]

# In float64 there are no kernels but their references, which are as precise.
_KERNEL_DTYPES = ("f64", "f32", "bf16", "f16")


@dataclass(frozen=True)
class Match:
    """Where a pattern was found.

    Attributes:
        graph: in which.
        found: the last node, whose value the kernel gives.
        values: what each name of the spelling stands for.
        inside: names of the nodes that the kernel replaces, `found` among them.
    """

    graph: Graph
    found: Node
    values: Mapping[str, Arg]
    inside: frozenset[str]

    def node(self, name: str) -> Node | None:
        """The node that a name stands for, None if it is a number or not there."""
        value = self.values.get(name)
        return self.graph[value.name] if isinstance(value, Ref) else None

    def type(self, name: str) -> TensorType:
        """The type of the value that a name stands for; of no value, one that fits nothing."""
        node = self.node(name)
        return TensorType("", ()) if node is None else node.type


@dataclass
class Writer:
    """Takes the nodes that stand in a match's place.

    Attributes:
        like: whose source they have.
        fresh: gives out names.
        known: what other matches in the same block have written.
        nodes: what has been written.
    """

    like: Node
    fresh: Callable[[str], str]
    known: dict[tuple[str, tuple[Arg, ...]], Ref]
    nodes: list[Node] = field(default_factory=list)

    def new(self, hint: str, op: str, args: tuple[Arg, ...], kind: TensorType, grad: bool) -> Ref:
        """An operator with one result; the same as before, if it has been written before."""
        if (op, args) not in self.known:
            node = Node(self.fresh(hint), op, args, (), (kind,), self.like.source, grad)
            self.nodes.append(node)
            self.known[op, args] = Ref(node.name)
        return self.known[op, args]


Write = Callable[[Match, Writer], None]


@dataclass(frozen=True)
class Pattern:
    """One kernel and how it is written out.

    Attributes:
        name: as `fuse` names it; patterns that are switched together share it.
        kernel: a function of `autopar.operators.kernels`.
        spellings: expressions, tried in order.
        arguments: of the kernel, by the names in the spellings.
        gives: names inside that are read elsewhere too, which the kernel gives as further results.
        fits: what more must hold of a match.
        write: the nodes in its place, the last of them called as `Match.found`; by default a call
            of the kernel.
        outputs: whether a value inside may be an output of the graph, and is then computed for
            itself where somebody asks for it.
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
        """Write what stands in the place of `match`."""
        if self.write is not None:
            self.write(match, writer)
            return
        call(
            match, writer, self.kernel, [match.values[name] for name in self.arguments], self.gives
        )


def call(
    match: Match, writer: Writer, kernel: str, args: Sequence[Arg], gives: Sequence[str] = ()
) -> None:
    """A call of a kernel whose first result is the match's, the others those named in `gives`."""
    found = match.found
    nodes = [found, *(match.node(name) or found for name in gives)]
    grad = any(node.requires_grad for node in nodes)
    op, types = PREFIX + kernel, tuple(node.type for node in nodes)
    if not gives:
        writer.nodes.append(Node(found.name, op, tuple(args), (), types, found.source, grad))
        return
    made = Node(writer.fresh(kernel), op, tuple(args), (), types, found.source, grad)
    writer.nodes.append(made)
    for index, node in enumerate(nodes):
        part = (Ref(made.name), index)
        writer.nodes.append(Node(node.name, "getitem", part, (), node.types, node.source, grad))


def computes(match: Match, *names: str) -> bool:
    """Whether values are of dtypes that kernels compute with, and of one."""
    kinds = {match.type(name).dtype for name in names}
    return len(kinds) == 1 and kinds <= set(_KERNEL_DTYPES)


def width(match: Match, name: str) -> int:
    """Elements of the last dimension, 0 of a scalar."""
    shape = match.type(name).shape
    return shape[-1] if shape else 0


def is_vector(match: Match, name: str, size: int) -> bool:
    """Whether a value has one dimension of `size` elements, of a floating dtype."""
    kind = match.type(name)
    return kind.shape == (size,) and kind.floating
