"""Roles of dimension classes in a model: its batch, its residual stream, its heads, ...

They follow from the graph, not from names of modules. A linear operator contracts a weight with an
activation. A residual stream is a class of dimensions that additions carry past linears that read
it and are added back to it (arXiv:1512.03385, section 3.1). The classes between such linears are
inner ones: the heads of attention or the width of a perceptron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.intra_op.pins.dims import Dims
from autopar.ir.graph import PREFIX, Graph, Node


@dataclass(frozen=True)
class Linear:
    """An operator that contracts a weight with an activation, by leading classes.

    Attributes:
        node: its name.
        weight: the operand that is computed from parameters.
        reads: contracted classes.
        gives: classes of the weight that the result has and the activation lacks.
        along: classes that all three have, such as experts with a matrix each.
    """

    node: str
    weight: str
    reads: frozenset[int]
    gives: frozenset[int]
    along: frozenset[int]


@dataclass(frozen=True)
class Roles:
    """The roles of a graph's classes; each is a tuple in order of appearance."""

    dims: Dims

    @property
    def graph(self) -> Graph:
        """The graph; only its folded nodes are used."""
        return self.dims.graph

    @cached_property
    def parametric(self) -> frozenset[str]:
        """Values computed from parameters alone: parameters, their shares, transposes and so on."""
        values: set[str] = set()
        for node in self.graph.folded:
            inputs = {self.graph.template[name] for name in node.inputs}
            if node.op == "param" or (inputs and inputs <= values):
                values.add(node.name)
        return frozenset(values)

    @cached_property
    def multiplications(self) -> tuple[Linear, ...]:
        """Operators that contract a weight with an activation, including convolutions."""
        return tuple(item for node in self.graph.folded for item in self._linear(node))

    def _linear(self, node: Node) -> Iterator[Linear]:
        signature = self.dims.signatures.get(node.name)
        if signature is None:
            return
        result = {f for dims in signature.results for dim in dims for f in dim}
        sides: dict[bool, set[str]] = {True: set(), False: set()}
        weights = []
        for name, dims, added in zip(
            node.inputs, signature.operands, signature.additive, strict=True
        ):
            if not added:
                own = self.graph.template[name] in self.parametric
                sides[own].update(f for dim in dims for f in dim)
                weights += [name] if own else []
        weight, activation = sides[True], sides[False]
        if contracted := (weight & activation) - result:
            yield Linear(
                node.name,
                weights[0],
                self._leading(node, contracted),
                self._leading(node, (weight & result) - activation),
                self._leading(node, weight & result & activation),
            )

    def _leading(self, node: Node, factors: Iterable[str]) -> frozenset[int]:
        classes = (self.dims.leading(node.name, factor) for factor in factors)
        return frozenset(cls for cls in classes if cls is not None)

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """`multiplications` without convolutions."""
        return tuple(item for item in self.multiplications if not is_conv(self.graph[item.node]))

    @cached_property
    def convolutions(self) -> tuple[Linear, ...]:
        """The convolutions among `multiplications`."""
        return tuple(item for item in self.multiplications if is_conv(self.graph[item.node]))

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The class that leads most inputs, including received values; at most one.

        Where there are tokens they alone vote: of a batch of one, which has no class, tables of
        positions would lead most inputs.
        """
        leaves = (*self.graph.leaves("input"), *self.graph.leaves("received"))
        tokens = tuple(filter(_is_tokens, leaves))
        outer = (self.dims.outer(node.name) for node in tokens or leaves)
        votes = Counter(dims[0] for dims in outer if dims)
        return tuple(cls for cls, _ in votes.most_common(1) if cls is not None)

    @cached_property
    def residuals(self) -> dict[str, tuple[int, ...]]:
        """Additions of linears of a value to that value, with the classes that each carries on."""
        carried = {node.name: tuple(self._carried_on(node)) for node in self.graph.folded}
        return {name: classes for name, classes in carried.items() if classes}

    def _carried_on(self, node: Node) -> Iterator[int]:
        terms = node.inputs[:2] if node.op.startswith(f"{PREFIX}add_") else node.inputs
        inputs = tuple(dict.fromkeys(self._value(name) for name in terms))
        if not node.op.startswith(("aten.add", f"{PREFIX}add_")) or len(inputs) != 2:
            return
        linears = {item.node: item for item in self.linears}
        for before, branch in (inputs, inputs[::-1]):
            between = [linears[name] for name in self._between(before, branch) if name in linears]
            reads = {cls for item in between for cls in item.reads}
            gives = {cls for item in between for cls in item.gives}
            yield from (
                c for c in self.dims.outer(node.name) if c is not None and c in reads & gives
            )

    def _between(self, before: str, after: str) -> set[str]:
        """Returns the nodes on paths from one value to another; empty if there is no path."""
        order = self._order
        behind: set[str] = set()
        ahead = [after]
        while ahead:
            name = ahead.pop()
            if name not in behind and order[name] > order[before]:
                behind.add(name)
                ahead += [self.graph.template[value] for value in self.graph[name].inputs]
        reached = {before}
        for name in sorted(behind, key=order.__getitem__):
            inputs = {self.graph.template[value] for value in self.graph[name].inputs}
            if inputs & reached:
                reached.add(name)
        return reached - {before} if after in reached else set()

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node.name: place for place, node in enumerate(self.graph.folded)}

    @cached_property
    def streams(self) -> tuple[int, ...]:
        """Classes of the features of residual streams."""
        return tuple(dict.fromkeys(cls for classes in self.residuals.values() for cls in classes))

    def _value(self, name: str) -> str:
        """Returns the value behind a share, or behind one of several results."""
        name = self.graph.template[name]
        while self.graph[name].op in ("autopar.share", "getitem"):
            name = self.graph.template[self.graph[name].inputs[0]]
        return name

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Classes between a linear that reads a stream and one whose result is added to it."""
        streams = set(self.streams)
        into = {cls for item in self.linears if item.reads & streams for cls in item.gives}
        out = {cls for item in self.linears if item.gives & streams for cls in item.reads}
        return tuple(sorted((into & out) - streams))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The stream's classes other than batch and features, then those of tokens."""
        values = [
            *self.residuals,
            *(n.name for n in self.graph.leaves("input") if _is_tokens(n)),
        ]
        known = {None, *self.batch, *self.streams}
        classes = dict.fromkeys(cls for name in values for cls in self.dims.outer(name))
        return tuple(cls for cls in classes if cls is not None and cls not in known)


def _is_tokens(node: Node) -> bool:
    return not node.type.floating and len(node.type.shape) == 2


def is_conv(node: Node) -> bool:
    """Returns whether an operator is a convolution."""
    return "conv" in node.op
