"""Determines where a value can be nonzero: only for tokens that chose an expert.

A comparison of the ids with a number, `one_hot` of them, and weights scattered to them are zero
elsewhere; so are products with such values, views, and sums over the choices of a token. The
indices of `topk` and `argmax` are the ids: a token chooses an expert at most once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import argument, dimension

TOKEN, SLOT, EXPERT = "token", "slot", "expert"
Dims = tuple[str, ...]  # a name for each dimension, "" for others, which have one element


@dataclass(frozen=True)
class Ids:
    """The experts that tokens chose.

    Attributes:
        source: the value that holds them.
        dims: names of the dimensions of the value that was asked for.
        experts: number of experts.
        pairs: whether every choice of a token is treated as a separate token.
    """

    source: str
    dims: Dims
    experts: int
    pairs: bool = False


@dataclass(frozen=True)
class Support:
    """Places at which a value can be nonzero.

    Attributes:
        ids: the choices.
        dims: names of the value's dimensions.
        expert: the expert, if the value has no dimension of experts.
        exact: whether it is one or true just there.
    """

    ids: Ids
    dims: Dims
    expert: int | None = None
    exact: bool = True


@dataclass
class ChosenElements:
    """Supports of the values of a graph."""

    graph: Graph
    _known: dict[str, Support | None] = field(default_factory=dict)

    def of(self, name: str) -> Support | None:
        """Returns where a value can be nonzero, None if anywhere."""
        if name not in self._known:
            node = self.graph[name]
            rule = _RULES.get(node.op)
            self._known[name] = None if rule is None else rule(self, node)
        return self._known[name]

    def at(self, arg: Arg) -> Support | None:
        """Returns where an argument can be nonzero."""
        return self.of(arg.name) if isinstance(arg, Ref) else None

    def ids(self, arg: Arg) -> Ids | None:
        """Returns the choices that a value holds, None if it holds none."""
        node = self.graph[arg.name] if isinstance(arg, Ref) else None
        if node is None or node.type.floating:
            return None
        if node.op == "aten.reshape":
            return _viewed_ids(self.ids(node.args[0]), self.graph, node)
        if node.op in ("aten.to.dtype", "autopar.detach"):
            return self.ids(node.args[0])
        if node.op == "aten.unsqueeze":
            ids, at = self.ids(node.args[0]), dimension(node.args[1], len(node.type.shape))
            return ids and replace(ids, dims=(*ids.dims[:at], "", *ids.dims[at:]))
        if node.op in ("aten.select.int", "aten.slice.Tensor"):
            return self._part_of_slots(node)
        return self._routed(node)

    def _part_of_slots(self, node: Node) -> Ids | None:
        ids = self.ids(node.args[0])
        dim = dimension(node.args[1], len(self.graph[node.inputs[0]].type.shape))
        if ids is None or ids.dims[dim] != SLOT:
            return None
        gone = node.op == "aten.select.int"
        dims = (*ids.dims[:dim], *ids.dims[dim + gone :])
        return replace(ids, source=self._first[node.op, node.args], dims=dims)

    @cached_property
    def _first(self) -> dict[object, str]:
        """The first of several nodes that compute the same value."""
        nodes: dict[object, str] = {}
        for node in self.graph.nodes:
            if node.op in ("aten.select.int", "aten.slice.Tensor"):
                nodes.setdefault((node.op, node.args), node.name)
        return nodes

    def _routed(self, node: Node) -> Ids | None:
        """Returns the choices if a value is the indices of the largest elements."""
        maker = self.graph[node.inputs[0]] if node.op == "getitem" else node
        if maker.op not in _DIMS:
            return None
        if node.op == "getitem" and node.args[1] != 1:
            return None
        scores = self.graph[maker.inputs[0]].type.shape
        last = len(scores) - 1
        at, default = _DIMS[maker.op]
        dim = argument(maker, at, "dim", default)
        if not scores or not isinstance(dim, int) or dim % len(scores) != last:
            return None
        kept = len(node.type.shape) == len(scores)
        return Ids(node.name, (TOKEN,) * last + (SLOT,) * kept, scores[last])


_DIMS: dict[str, tuple[int, int | None]] = {  # the place of the dimension, and its default
    "aten.topk": (2, -1), "aten.sort": (1, -1), "aten.max.dim": (1, None), "aten.argmax": (1, None),
}  # fmt: skip


def viewed(dims: Dims, old: tuple[int, ...], new: tuple[int, ...]) -> Dims | None:
    """Returns names after a reshape that folds tokens only, None for another."""
    named = [(dim, size) for dim, size in zip(dims, old, strict=True) if size != 1]
    lead = next((at for at, (dim, _) in enumerate(named) if dim != TOKEN), len(named))
    rest, sizes = named[lead:], [size for size in new if size != 1]
    head = len(sizes) - len(rest)
    if head < 0 or [size for _, size in rest] != sizes[head:]:
        return None
    if math.prod(size for _, size in named[:lead]) != math.prod(sizes[:head]):
        return None
    names = iter([*[TOKEN] * head, *(dim for dim, _ in rest)])
    return tuple("" if size == 1 else next(names) for size in new)


def _viewed_ids(ids: Ids | None, graph: Graph, node: Node) -> Ids | None:
    old, new = graph[node.inputs[0]].type.shape, node.type.shape
    dims = None if ids is None else viewed(ids.dims, old, new)
    if ids is None or dims is not None:
        return ids and replace(ids, dims=dims or ())
    flat = ids.dims[-1:] == (SLOT,) and SLOT not in ids.dims[:-1] and len(new) == 1
    return replace(ids, dims=(TOKEN,), pairs=True) if flat else None


def _equal(of: ChosenElements, node: Node) -> Support | None:
    ids, number = of.ids(node.args[0]), node.args[1]
    if ids is None or not isinstance(number, int) or isinstance(number, bool):
        return None
    return Support(ids, ids.dims, number)


def _one_hot(of: ChosenElements, node: Node) -> Support | None:
    ids = of.ids(node.args[0])
    return None if ids is None else Support(ids, (*ids.dims, EXPERT))


def _scattered(of: ChosenElements, node: Node) -> Support | None:
    """Values that replace zeros, or minus infinity, which a softmax makes zero."""
    base, dim, index, value = node.args[:4]
    ids, last = of.ids(index), len(node.type.shape) - 1
    if ids is None or node.kwargs or dimension(dim, last + 1) != last or not isinstance(base, Ref):
        return None
    zero = is_zero(of.graph[base.name])
    if ids.dims[-1] not in (SLOT, "") or ids.pairs or not zero:
        return None
    return Support(ids, (*ids.dims[:-1], EXPERT), exact=value in (1, 1.0, True))


def _softmax(of: ChosenElements, node: Node) -> Support | None:
    """A softmax or a sigmoid, which make minus infinity zero."""
    made = of.graph[node.inputs[0]]
    last = len(node.type.shape) - 1
    if made.op not in ("aten.scatter.src", "aten.scatter.value") or made.kwargs:
        return None
    base, dim, index = made.args[:3]
    ids = of.ids(index)
    empty = of.graph[base.name] if isinstance(base, Ref) else made
    never = empty.op == "aten.full" and empty.args[1] == -math.inf
    along = dimension(dim, last + 1) == last
    along = along and (node.op == "aten.sigmoid" or dimension(node.args[1], last + 1) == last)
    if ids is None or not (never and along) or ids.dims[-1] not in (SLOT, "") or ids.pairs:
        return None
    return Support(ids, (*ids.dims[:-1], EXPERT), exact=False)


def _reshaped(of: ChosenElements, node: Node) -> Support | None:
    found = of.at(node.args[0])
    old, new = of.graph[node.inputs[0]].type.shape, node.type.shape
    dims = None if found is None else viewed(found.dims, old, new)
    if found is None or dims is not None:
        return found and replace(found, dims=dims or ())
    if found.dims[-1:] == (SLOT,) and len(new) == 1 and set(found.dims[:-1]) <= {TOKEN, ""}:
        return replace(found, dims=(TOKEN,), ids=replace(found.ids, pairs=True))
    return None


def _permuted(of: ChosenElements, node: Node) -> Support | None:
    found, order = of.at(node.args[0]), node.args[1]
    if found is None or not isinstance(order, tuple):
        return None
    return _reordered(found, [at for at in order if isinstance(at, int)])


def _reordered(found: Support, order: list[int]) -> Support | None:
    """Returns the support with dimensions in another order, None if that is one of tokens, too."""
    tokens = [at for at in order if found.dims[at] == TOKEN]
    dims = tuple(found.dims[at] for at in order)
    return replace(found, dims=dims) if tokens == sorted(tokens) else None


def _transposed(of: ChosenElements, node: Node) -> Support | None:
    found = of.at(node.args[0])
    if found is None:
        return None
    order = list(range(len(found.dims)))
    first, second = (dimension(at, len(order)) for at in node.args[1:3])
    order[first], order[second] = second, first
    return _reordered(found, order)


def _taken(of: ChosenElements, node: Node) -> Support | None:
    """One expert by its number; a slot leaves fewer nonzero elements."""
    found = of.at(node.args[0])
    if found is None:
        return None
    shape = of.graph[node.inputs[0]].type.shape
    dim = dimension(node.args[1], len(shape))
    at, gone = node.args[2], node.op == "aten.select.int"
    one = gone or (len(node.args) > 3 and node.type.shape[dim] == 1)
    if not isinstance(at, int) or not one or found.dims[dim] == TOKEN:
        return None
    dims = (*found.dims[:dim], *[""] * (not gone), *found.dims[dim + 1 :])
    if found.dims[dim] == EXPERT:
        return replace(found, dims=dims, expert=at % shape[dim])
    return replace(found, dims=dims, exact=found.exact and found.dims[dim] == "")


def _reduced(of: ChosenElements, node: Node) -> Support | None:
    """Returns the meaning of a sum over slots, of which at most one is nonzero."""
    found, dims = of.at(node.args[0]), argument(node, 1, "dim")
    if found is None or not isinstance(dims, (int, tuple)):
        return None
    rank = len(found.dims)
    at = {dimension(dim, rank) for dim in (dims if isinstance(dims, tuple) else (dims,))}
    if any(found.dims[n] not in (SLOT, "") for n in at):
        return None
    if len(node.type.shape) == rank:
        return replace(found, dims=tuple("" if n in at else d for n, d in enumerate(found.dims)))
    return replace(found, dims=tuple(d for n, d in enumerate(found.dims) if n not in at))


def _unsqueezed(of: ChosenElements, node: Node) -> Support | None:
    found = of.at(node.args[0])
    at = dimension(node.args[1], len(node.type.shape))
    return found and replace(found, dims=(*found.dims[:at], "", *found.dims[at:]))


def _same(of: ChosenElements, node: Node) -> Support | None:
    return of.at(node.args[0])


def _positive(of: ChosenElements, node: Node) -> Support | None:
    return of.at(node.args[0]) if node.args[1] == 0 else None


def _product(of: ChosenElements, node: Node) -> Support | None:
    """A product is nonzero where both operands are."""
    for arg in node.args[:2] if "mul" in node.op or "and" in node.op else node.args[:1]:
        found = of.at(arg)
        if found is not None and isinstance(arg, Ref):
            rank, dims = len(node.type.shape), found.dims
            shape = of.graph[arg.name].type.shape
            padded = (*[1] * (rank - len(shape)), *shape)
            if padded == node.type.shape:
                return replace(found, dims=(*[""] * (rank - len(dims)), *dims), exact=False)
    return None


def _selected(of: ChosenElements, node: Node) -> Support | None:
    condition, _, other = node.args
    found = of.at(condition)
    zero = isinstance(other, Ref) and is_zero(of.graph[other.name])
    if not zero or found is None or not isinstance(condition, Ref):
        return None
    if of.graph[condition.name].type.shape != node.type.shape:
        return None
    return replace(found, exact=False)


def is_zero(node: Node) -> bool:
    """Returns whether a value is zero."""
    return node.op == "aten.zeros" or (node.op == "aten.full" and node.args[1] == 0)


_RULES: dict[str, Callable[[ChosenElements, Node], Support | None]] = {
    "aten.eq.Scalar": _equal,
    "aten.one_hot": _one_hot,
    "aten.scatter.src": _scattered,
    "aten.scatter.value": _scattered,
    "aten.softmax.int": _softmax,
    "aten.sigmoid": _softmax,
    "aten.reshape": _reshaped,
    "aten.permute": _permuted,
    "aten.transpose.int": _transposed,
    "aten.select.int": _taken,
    "aten.slice.Tensor": _taken,
    "aten.unsqueeze": _unsqueezed,
    "aten.where.self": _selected,
    **dict.fromkeys(
        ("aten.sum.dim_IntList", "aten.any.dim", "aten.any.dims", "aten.amax"), _reduced
    ),
    **dict.fromkeys(("aten.to.dtype", "autopar.detach"), _same),
    **dict.fromkeys(("aten.gt.Scalar", "aten.ne.Scalar"), _positive),
    **dict.fromkeys(
        (
            "aten.mul.Tensor",
            "aten.div.Tensor",
            "aten.logical_and",
            "aten.bitwise_and.Tensor",
            "aten.__and__.Tensor",
        ),
        _product,
    ),
}
