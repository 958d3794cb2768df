"""Matches spellings of a pattern against nodes of a graph."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.fusion.pattern import Match, Pattern
from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import writes

HALF = ("bf16", "f16")
INFIX: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
}  # fmt: skip
_COMMUTE = ("add", "mul")


@dataclass(frozen=True)
class _State:
    """Bindings of names so far, and the nodes visited."""

    values: Mapping[str, Arg] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()

    def bind(self, name: str, value: Arg) -> Iterator[_State]:
        """Yields the state with `name` bound to `value`, unless it is bound to another value."""
        if name == "_":
            yield self
        elif name not in self.values:
            yield _State({**self.values, name: value}, self.inside)
        elif _same(self.values[name], value):
            yield self

    def through(self, node: Node) -> _State:
        """Returns the state with `node` among those visited."""
        return _State(self.values, self.inside | {node.name})


def find(pattern: Pattern, graph: Graph, node: Node) -> Match | None:
    """Returns the first match of a spelling of `pattern` that ends in `node` and fits.

    A value inside the match that an outside node reads cannot be replaced, unless the kernel
    returns it or the pattern recomputes outputs.
    """
    if node.is_leaf or len(node.types) != 1:
        return None
    for spelling in pattern.spellings:
        for state in _match(parsed(spelling), Ref(node.name), _State(), graph):
            match = Match(graph, node, state.values, state.inside)
            if pattern.fits(match) and _closed(pattern, match):
                return match
    return None


@functools.cache
def parsed(spelling: str) -> ast.expr:
    """Returns a spelling as an expression."""
    return ast.parse(spelling, mode="eval").body


def _closed(pattern: Pattern, match: Match) -> bool:
    """Returns whether only the pattern reads replaced nodes, with no outside node in between."""
    given = {node.name for node in map(match.node, pattern.gives) if node is not None}
    given.add(match.found.name)
    graph, outputs = match.graph, {name for _, name in match.graph.outputs}
    for name in match.inside - given:
        if not match.inside.issuperset(graph.users[name]):
            return False
        if name in outputs and not pattern.outputs:
            return False
    if any(writes(graph[name]) for name in match.inside):
        return False
    # The kernel's inputs must not depend on its results.
    reads = {name for inner in match.inside for name in graph[inner].inputs} - match.inside
    return len(given) == 1 or not _depend(graph, reads, given)


def _depend(graph: Graph, values: set[str], on: set[str]) -> bool:
    """Returns whether any of `values` is computed from any of `on`."""
    seen, left = set(values), list(values)
    while left:
        for name in graph[left.pop()].inputs:
            if name in on:
                return True
            if name not in seen:
                seen.add(name)
                left.append(name)
    return False


def _same(a: Arg, b: Arg) -> bool:
    if isinstance(a, Ref) or isinstance(b, Ref):
        return a == b
    return type(a) is type(b) and a == b


def _match(wanted: ast.expr, given: Arg, state: _State, graph: Graph) -> Iterator[_State]:
    """Yields every way in which an expression matches an argument."""
    if isinstance(wanted, ast.Constant):
        if not isinstance(given, Ref | tuple) and given == wanted.value:
            yield state
    elif isinstance(wanted, ast.UnaryOp) and isinstance(wanted.operand, ast.Constant):
        value = wanted.operand.value
        if isinstance(value, int) and isinstance(given, int) and given == -value:
            yield state
    elif isinstance(wanted, ast.Name):
        yield from state.bind(wanted.id, given)
    elif isinstance(wanted, ast.NamedExpr):
        for inner in _match(wanted.value, given, state, graph):
            yield from inner.bind(wanted.target.id, given)
    elif isinstance(wanted, ast.Tuple):
        if isinstance(given, tuple) and len(given) == len(wanted.elts):
            yield from _all(list(wanted.elts), list(given), state, graph)
    elif isinstance(given, Ref):
        yield from _operator(wanted, graph[given.name], state, graph)


def _all(wanted: list[ast.expr], given: list[Arg], state: _State, graph: Graph) -> Iterator[_State]:
    """Yields every way in which expressions match arguments one by one."""
    if not wanted:
        yield state
        return
    for inner in _match(wanted[0], given[0], state, graph):
        yield from _all(wanted[1:], given[1:], inner, graph)


def _operator(wanted: ast.expr, node: Node, state: _State, graph: Graph) -> Iterator[_State]:
    """Yields every way in which an expression matches the result of a node."""
    if isinstance(wanted, ast.BinOp):
        name = INFIX[type(wanted.op)]
        sides = [wanted.left, wanted.right]
        yield from _call(name, sides, [], node, state, graph)
        if name == "pow" and isinstance(wanted.right, ast.Constant) and wanted.right.value == 2:
            yield from _call("square", sides[:1], [], node, state, graph)
            yield from _call("mul", [wanted.left, wanted.left], [], node, state, graph)
    elif isinstance(wanted, ast.UnaryOp):
        yield from _call("neg", [wanted.operand], [], node, state, graph)
    elif isinstance(wanted, ast.Call) and isinstance(wanted.func, ast.Name):
        special = SPECIAL.get(wanted.func.id)
        if special is not None:
            yield from special(wanted.args[0], node, state, graph)
        else:
            yield from _call(wanted.func.id, wanted.args, wanted.keywords, node, state, graph)


def _call(
    name: str,
    wanted: list[ast.expr],
    keywords: list[ast.keyword],
    node: Node,
    state: _State,
    graph: Graph,
) -> Iterator[_State]:
    """Matches a node of the operator `name`, of any overload, with these arguments."""
    if node.op != f"aten.{name}" and not node.op.startswith(f"aten.{name}."):
        return
    open_ended = bool(wanted) and isinstance(wanted[-1], ast.Constant) and wanted[-1].value is ...
    wanted = wanted[:-1] if open_ended else wanted
    named = dict(node.kwargs)
    if not open_ended and (
        len(node.args) != len(wanted) or set(named) != {k.arg for k in keywords}
    ):
        return
    if len(node.args) < len(wanted) or not all(keyword.arg in named for keyword in keywords):
        return
    given = [*node.args[: len(wanted)], *(named[str(keyword.arg)] for keyword in keywords)]
    every = [*wanted, *(keyword.value for keyword in keywords)]
    state = state.through(node)
    yield from _all(every, given, state, graph)
    if name in _COMMUTE:
        yield from _all(every, given[::-1], state, graph)


def _wide(inner: ast.expr, node: Node, state: _State, graph: Graph) -> Iterator[_State]:
    if node.op == "aten.to.dtype" and node.type.dtype == "f32":
        source = graph[node.inputs[0]]
        if source.type.dtype in HALF:
            yield from _match(inner, Ref(source.name), state.through(node), graph)
    yield from _match(inner, Ref(node.name), state, graph)


def _narrow(inner: ast.expr, node: Node, state: _State, graph: Graph) -> Iterator[_State]:
    if node.op == "aten.to.dtype" and node.type.dtype in HALF:
        yield from _match(inner, node.args[0], state.through(node), graph)
    yield from _match(inner, Ref(node.name), state, graph)


def _viewed(inner: ast.expr, node: Node, state: _State, graph: Graph) -> Iterator[_State]:
    if node.op == "aten.reshape":
        source = graph[node.inputs[0]]
        if node.type.shape[-1:] == source.type.shape[-1:]:
            yield from _match(inner, Ref(source.name), state.through(node), graph)
    yield from _match(inner, Ref(node.name), state, graph)


def _mean(inner: ast.expr, node: Node, state: _State, graph: Graph) -> Iterator[_State]:
    """Matches aten.mean.dim, or a sum and a division by the count, as `lower_means` writes it."""
    total = node
    if node.op == "aten.div.Tensor" and isinstance(node.args[1], int):
        total = graph[node.inputs[0]]
        whole = graph[total.inputs[0]] if total.inputs else total
        if total.op != "aten.sum.dim_IntList" or whole.type.shape[-1:] != (node.args[1],):
            return
    elif node.op != "aten.mean.dim":
        return
    rank = len(node.type.shape)
    if total.args[1:] not in (((-1,), True), ((rank - 1,), True)) or total.kwargs:
        return
    yield from _match(inner, total.args[0], state.through(node).through(total), graph)


SPECIAL = {"wide": _wide, "narrow": _narrow, "viewed": _viewed, "mean": _mean}
