"""Annotates stages by what autograd saved in the whole model, without torch.

Torch is asked what an operator saves (`operators/interpret.py`). That follows from the operator and
its operands: their types and strides, which of them require gradients, and which share storage. So
an operator of a stage saves what an equal one saved in the model that was observed whole. A graph
does not contain strides. Equal ones are recognised by how a value is computed, operator by
operator, from values that are known to be contiguous: leaves, which include all that a stage
receives, and the results of `_FRESH` and `_EVEN` operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.executed.execution import AS_WRITTEN
from autopar.ir.executed.library_kernels import base
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.tensor import TensorType

_IDENTITIES = ("autopar.share", "autopar.shard")
_FRESH = ("linear", "embedding")  # their results are contiguous
# Their results are contiguous if all operands are.
_EVEN = (
    "add", "sub", "mul", "div", "neg", "pow", "exp", "tanh", "sigmoid", "relu", "gelu", "silu",
    "dropout", "layer_norm", "rms_norm",
)  # fmt: skip
_CONTIGUOUS, _OWN = "", -1


@dataclass(frozen=True)
class _Observation:
    """Behaviour of torch in an operator; places are of operands, or `_OWN` for its result."""

    requires_grad: bool
    alias: int | None = None
    saved: tuple[int, ...] = ()
    saved_types: tuple[TensorType, ...] = ()


@dataclass(frozen=True)
class Observations:
    """Tensors that autograd saves for operators, by the digest of each with its operands.

    Attributes:
        known: None for operators on which observations differ.
    """

    known: Mapping[str, _Observation | None] = field(default_factory=dict)

    def annotated(self, graph: Graph) -> Graph | None:
        """Returns a graph as `annotate` returns it; None if it has an operator of another kind."""
        walk, nodes = _Walk(), []
        for node in graph.nodes:
            digest = walk.digest(node)
            if not node.is_leaf:
                seen = walk.plain(node) or self.known.get(digest)
                if seen is None:
                    return None
                named = (*node.inputs, node.name)  # the last is its own
                node = replace(
                    node,
                    requires_grad=seen.requires_grad,
                    alias=None if seen.alias is None else named[seen.alias],
                    saved=tuple(dict.fromkeys(named[place] for place in seen.saved)),
                    saved_types=seen.saved_types,
                )
            walk.add(node, digest)
            nodes.append(node)
        return replace(graph, nodes=tuple(nodes))


NOTHING = Observations()


def observations(graph: Graph) -> Observations:
    """Returns the observations of an annotated graph whose kernels run as the model is written."""
    if graph.execution != AS_WRITTEN:  # tensors that kernels save replace those of operators
        return NOTHING
    known: dict[str, _Observation | None] = {}
    for digest, seen in _observed(graph):
        known[digest] = seen if known.setdefault(digest, seen) == seen else None
    return Observations(known)


def _observed(graph: Graph) -> Iterator[tuple[str, _Observation]]:
    walk = _Walk()
    for node in graph.nodes:
        digest = walk.digest(node)
        if not node.is_leaf and node.op not in _IDENTITIES:
            place = {name: node.inputs.index(name) for name in node.inputs} | {node.name: _OWN}
            alias = None if node.alias is None else place[node.alias]
            saved = tuple(place[name] for name in node.saved)
            yield digest, _Observation(node.requires_grad, alias, saved, node.saved_types)
        walk.add(node, digest)


class _Walk:
    """The values of a graph so far."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.source: dict[str, str] = {}  # the value behind shares
        self.origin: dict[str, str] = {}  # how a value is computed
        self.root: dict[str, str] = {}  # the value whose storage it uses

    def digest(self, node: Node) -> str:
        """Returns a digest of an operator and its operands."""
        plain = node.map_refs(lambda name: Ref(self.source[name]))
        roots = [self.root[name] for name in plain.inputs]
        operands = [
            (self.origin[name], one.types, one.requires_grad, roots.index(self.root[name]))
            for name in plain.inputs
            for one in [self.nodes[name]]
        ]
        text = repr((node.op, plain.form, node.types, operands))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def plain(self, node: Node) -> _Observation | None:
        """Returns the observation of an identity, or of a product with a literal."""
        grad = any(self.nodes[name].requires_grad for name in node.inputs)
        if node.op in _IDENTITIES:
            return _Observation(grad, alias=0)
        by_literal = base(node.op) == "mul" and [type(arg) for arg in node.args] == [Ref, int]
        return _Observation(grad) if by_literal else None

    def add(self, node: Node, digest: str) -> None:
        """Adds an annotated node and its digest."""
        name = node.name
        self.nodes[name] = node
        if node.op in _IDENTITIES:
            self.source[name] = self.source[node.inputs[0]]
            return
        self.source[name] = name
        self.root[name] = name if node.alias is None else self.root[self.source[node.alias]]
        self.origin[name] = _CONTIGUOUS if self._is_contiguous(node) else digest

    def _is_contiguous(self, node: Node) -> bool:
        if node.is_leaf or not any(kind.shape for kind in node.types):
            return True
        even = all(self.origin[self.source[name]] == _CONTIGUOUS for name in node.inputs)
        return base(node.op) in _FRESH or (base(node.op) in _EVEN and even)
