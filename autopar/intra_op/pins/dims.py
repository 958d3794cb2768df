"""Finds dimensions that are the same throughout a graph, by the factors of the rules.

An operator's rule says which dimensions of its operands and results run over one factor. Following
these through the graph ties dimensions into classes: the batch, the positions, the width of the
residual stream. Mesh-TensorFlow asks its user to name every dimension (arXiv:1811.02084, section
3); here the classes are found, and `dim_names.py` names them.

A dimension may be a product: where a reshape or a rule says that n runs over (h d), n is cut into
an outer class h and an inner class d, here and wherever else it occurs. Only the outermost class of
a dimension can be split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import OpRule, Signature, resolve
from autopar.intra_op.union_find import UnionFind
from autopar.ir.graph import Graph, Node

Atom = tuple[str, str]  # a node and a factor of its rule, or a part that was cut off one
Classes = tuple[int, ...]  # of one dimension, outermost first


@dataclass(frozen=True)
class Unsplit:
    """An operator at which a class cannot be split, and why."""

    cls: int
    node: str
    op: str
    why: str


@dataclass(frozen=True)
class Dims:
    """The classes of a graph's dimensions, by number.

    Attributes:
        graph: the graph; equal blocks are treated as one.
        signatures: signatures of all operators of the folded graph that have a rule.
        values: for every node of the folded graph, the classes of each dimension of its first
            result. Dimensions of size 1 have none.
        factors: (node, factor of its rule) -> the classes that the factor runs over.
        sizes: number of elements of each class.
    """

    graph: Graph
    signatures: dict[str, Signature]
    values: dict[str, tuple[Classes, ...]]
    factors: dict[tuple[str, str], Classes]
    sizes: tuple[int, ...]

    def of(self, value: str) -> tuple[Classes, ...]:
        """Returns the classes of each dimension of a value, in whichever block it is."""
        return self.values[self.graph.template[value]]

    def outer(self, value: str) -> tuple[int | None, ...]:
        """Returns for each dimension the class that a mesh axis would split, None for size 1."""
        return tuple(classes[0] if classes else None for classes in self.of(value))

    def place(self, value: str, cls: int) -> int | None:
        """Returns the dimension of a value that a class leads, None unless there is just one."""
        places = [dim for dim, outer in enumerate(self.outer(value)) if outer == cls]
        return places[0] if len(places) == 1 else None

    def leading(self, node: str, factor: str) -> int | None:
        """Returns the outermost class of a factor, None if it has size 1."""
        classes = self.factors.get((node, factor), ())
        return classes[0] if classes else None

    @cached_property
    def composite(self) -> frozenset[int]:
        """Classes that share a dimension with others; they split evenly or not at all."""
        dims = [classes for value in self.values.values() for classes in value]
        return frozenset(cls for classes in dims if len(classes) > 1 for cls in classes)

    def divides(self, cls: int, ways: int) -> bool:
        """Returns whether a class splits `ways` ways wherever it is outermost, sizes permitting."""
        size = self.sizes[cls]
        return size % ways == 0 or (size >= ways and cls not in self.composite)

    def cuts(self, value: str, dim: int, ways: int) -> bool:
        """Returns whether splitting a dimension `ways` ways splits its outermost class."""
        classes = self.of(value)[dim]
        size = self.sizes[classes[0]] if classes else 1
        return size % ways == 0 or (size >= ways and len(classes) == 1)

    @cached_property
    def unsplit(self) -> tuple[Unsplit, ...]:
        """Operators at which classes cannot be split, in order of execution, each once per node."""
        return tuple(dict.fromkeys(self._unsplit()))

    def _unsplit(self) -> Iterator[Unsplit]:
        for node in self.graph.folded:
            signature = self.signatures.get(node.name)
            for factor in signature.whole if signature else ():
                cls = self.leading(node.name, factor)
                if cls is not None and signature is not None:
                    inner = factor in signature.merged and _inner(factor, signature)
                    why = "inside a merged dimension" if inner else "needs it whole"
                    yield Unsplit(cls, node.name, node.op, why)
            if signature is None and not node.is_leaf:
                for cls in {c for name in node.inputs for c in self.outer(name) if c is not None}:
                    yield Unsplit(cls, node.name, node.op, "has no rule")
            classes = [cls for cls in self.outer(node.name) if cls is not None]
            for cls in dict.fromkeys(cls for cls in classes if classes.count(cls) > 1):
                yield Unsplit(cls, node.name, node.op, "stands in two dimensions")


def _inner(factor: str, signature: Signature) -> bool:
    """Returns whether a factor comes after another in some dimension."""
    for dims in (*signature.operands, *signature.results):
        for dim in dims:
            solid = [f for f in dim if signature.sizes[f] > 1]
            if factor in solid[1:]:
                return True
    return False


class _Ties:
    """Union-find over atoms, each of which may be cut into an outer and an inner part."""

    def __init__(self) -> None:
        self.forest = UnionFind[Atom]()
        self.size: dict[Atom, int] = {}
        self.parts: dict[Atom, tuple[Atom, Atom]] = {}

    def atom(self, node: str, factor: str, size: int) -> Atom:
        """Returns the atom of a node's factor."""
        self.size[node, factor] = size
        return node, factor

    def leaves(self, atoms: Iterable[Atom]) -> Iterator[Atom]:
        """Yields the atoms that remain after all cuts: one representative of each class."""
        for atom in atoms:
            root = self.forest[atom]
            if root in self.parts:
                yield from self.leaves(self.parts[root])
            else:
                yield root

    def tie(self, left: Iterable[Atom], right: Iterable[Atom]) -> None:
        """Ties two rows of atoms that run over the same elements in the same order.

        From the outermost on, equal sizes become one class, and the larger of two sizes is cut to
        the smaller; after sizes that do not divide one another nothing is tied.
        """
        a, b = deque(left), deque(right)
        while True:
            a, b = deque(self.leaves(a)), deque(self.leaves(b))
            if not a or not b:
                return
            x, y = self.size[a[0]], self.size[b[0]]
            if x == y:
                self.forest.union(a.popleft(), b.popleft())
            elif x % y == 0:
                self._cut(a[0], y)
            elif y % x == 0:
                self._cut(b[0], x)
            else:
                return

    def _cut(self, root: Atom, outer: int) -> None:
        node, factor = root
        inner = self.size[root] // outer
        self.parts[root] = (
            self.atom(node, f"{factor}<{outer}", outer),
            self.atom(node, f"{factor}>{inner}", inner),
        )


def find_dims(graph: Graph, rules: Mapping[str, OpRule]) -> Dims:
    """Returns the classes of a graph's dimensions, numbered in order of appearance.

    Raises:
        RuleError: a rule does not fit its node.
    """
    ties = _Ties()
    signatures: dict[str, Signature] = {}
    values: dict[str, list[tuple[Atom, ...]]] = {}
    for node in graph.folded:
        rule = rules.get(node.op)
        if node.is_leaf or rule is None:
            values[node.name] = _own(ties, node)
            continue
        signature = resolve(rule, node, operand_types(graph, node), node.types)
        signatures[node.name] = signature
        for name, size in signature.sizes.items():
            ties.atom(node.name, name, size)
        for value, dims in zip(node.inputs, signature.operands, strict=True):
            for given, dim in zip(values[graph.template[value]], dims, strict=True):
                ties.tie(given, _solid(node.name, dim, signature))
        values[node.name] = [_solid(node.name, dim, signature) for dim in signature.results[0]]
    for repeat in graph.repeats:
        for entry, leaves in repeat.carried:
            pair = (values[graph.template[entry]], values[graph.template[leaves]])
            for left, right in zip(*pair, strict=True):
                ties.tie(left, right)
    return _numbered(graph, ties, signatures, values)


def without_samples(rules: Mapping[str, OpRule], graph: Graph) -> frozenset[str]:
    """Returns the values that have no dimension of samples, as far as the rules know."""
    dims = find_dims(graph, rules)
    inputs = [leaf for leaf in graph.leaves("input") if leaf.type.shape]
    samples = {cls for leaf in inputs for cls in dims.of(leaf.name)[0]}
    return frozenset(
        node.name
        for node in graph.nodes
        if samples.isdisjoint(cls for classes in dims.of(node.name) for cls in classes)
    )


def _own(ties: _Ties, node: Node) -> list[tuple[Atom, ...]]:
    """Returns untied dimensions, for a node without a rule."""
    return [
        (ties.atom(node.name, f"d{dim}", size),) if size > 1 else ()
        for dim, size in enumerate(node.type.shape)
    ]


def _solid(node: str, dim: tuple[str, ...], signature: Signature) -> tuple[Atom, ...]:
    return tuple((node, factor) for factor in dim if signature.sizes[factor] > 1)


def _numbered(
    graph: Graph,
    ties: _Ties,
    signatures: dict[str, Signature],
    values: dict[str, list[tuple[Atom, ...]]],
) -> Dims:
    numbers: dict[Atom, int] = {}

    def number(atoms: Iterable[Atom]) -> Classes:
        return tuple(numbers.setdefault(leaf, len(numbers)) for leaf in ties.leaves(atoms))

    numbered = {name: tuple(map(number, dims)) for name, dims in values.items()}
    factors = {
        (name, factor): number(_solid(name, (factor,), signature))
        for name, signature in signatures.items()
        for factor in signature.sizes
    }
    sizes = tuple(ties.size[root] for root in numbers)
    return Dims(graph, signatures, numbered, factors, sizes)
