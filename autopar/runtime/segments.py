"""A program's functions cut into segments that a compiler may have whole, and calls of the mesh.

    w = mesh.to_varying(p["w"], axis="gpu")            w = mesh.to_varying(p["w"], axis="gpu")
    h = F.linear(x, w)                                 b = mesh.to_varying(p["b"], axis="gpu")
    b = mesh.to_varying(p["b"], axis="gpu")    =>      (y,) = block_1(b, w, x)
    y = F.gelu(h + b)                                  y = mesh.all_reduce(y, axis="gpu")
    y = mesh.all_reduce(y, axis="gpu")

What reads the mesh, or only names something, stays outside: in its order, which is the same on all
ranks, and as early as its operands are there. So there are as few segments as its order allows.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

_MESH = "mesh"
# What functions are given as tables, from which they read by name.
_TABLES = ("p", "batch")
_Statement = ast.Assign | ast.Expr


def segmented(source: str) -> tuple[ast.Module, tuple[str, ...]]:
    """A program whose functions call segments, and the names of these.

    Args:
        source: a program that `emit` wrote. Lines of loops and branches stay as they are.

    Returns:
        The tree of a module in which everything has the lines of `source`, for tracebacks. Segments
        take tensors and numbers, and return tuples.
    """
    tree, names = ast.parse(source), []
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _MESH in _arguments(node):
            segments = _cut(node)
            names += [segment.name for segment in segments]
            body += segments
        body.append(node)
    tree.body = body
    return ast.fix_missing_locations(tree), tuple(names)


def _cut(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    """The segments of a function, which is changed to call them."""
    cutter = _Cutter(function)
    body: list[ast.stmt] = []
    rest = list(function.body)
    while rest:
        straight: list[_Statement] = []
        while rest and (isinstance(rest[0], ast.Assign) or _is_call(rest[0])):
            straight.append(rest[0])
            del rest[0]
        wanted = {name for line in rest for name in _names(line, ast.Load)}
        body += cutter.cut(straight, wanted)
        body += rest[:1]
        del rest[:1]
    function.body = body
    return cutter.segments


@dataclass(frozen=True)
class _Line:
    """One statement: the local names that it reads and writes, and whether it stays outside."""

    node: _Statement
    reads: frozenset[str]
    writes: tuple[str, ...]
    outside: bool


class _Cutter:
    """Cuts the straight lines of one function.

    Attributes:
        segments: what was cut out so far.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.segments: list[ast.FunctionDef] = []
        self._name = function.name
        self._local = {*_arguments(function), *_names(function, ast.Store)} - {_MESH, *_TABLES}

    def cut(self, nodes: Sequence[_Statement], wanted: Collection[str]) -> Iterator[ast.stmt]:
        """The lines with calls of segments in their place; `wanted` is what is read behind them."""
        before, renamed = self._renamed(list(self._lifted(nodes)))
        yield from before
        lines = [self._line(node) for node in renamed]
        missing = {name for line in lines for name in line.writes}
        while lines:
            for line in [line for line in lines if line.outside]:
                if line.reads & missing:
                    break
                lines.remove(line)
                missing.difference_update(line.writes)
                yield line.node
            segment = []
            for line in list(lines):
                if not line.outside and not line.reads & missing:
                    lines.remove(line)
                    missing.difference_update(line.writes)
                    segment.append(line)
            later = {name for line in lines for name in line.reads} | set(wanted)
            results = [name for line in segment for name in line.writes if name in later]
            if len(segment) == 1:  # a compiler has nothing to put together
                yield segment[0].node
            elif results:
                yield self._call(segment, results)

    def _lifted(self, nodes: Sequence[_Statement]) -> Iterator[_Statement]:
        """The lines, and lines that read from tables what segments take."""
        for node in nodes:
            if not _outside(node):
                lifter = _Lifter(self._fresh)
                node.value = lifter.visit(node.value)
                yield from (ast.copy_location(line, node) for line in lifter.lines)
            yield node

    def _renamed(self, nodes: list[_Statement]) -> tuple[list[ast.Assign], list[_Statement]]:
        """Lines that give values their names for good, and `nodes`, each writing its own names.

        The last value of a name keeps it; what it was before them has another from the beginning.
        """
        left = Counter(name for node in nodes for name in _names(node, ast.Store))
        now = dict.fromkeys(left, "")
        before = []
        for node in nodes:
            for read in (n for n in ast.walk(node.value) if isinstance(n, ast.Name)):
                if read.id in now and not now[read.id]:
                    now[read.id] = self._fresh(read.id)
                    alias = f"{now[read.id]} = {read.id}"
                    before.append(ast.copy_location(_assignment(alias), node))
                read.id = now.get(read.id, read.id)
            for target in node.targets if isinstance(node, ast.Assign) else ():
                for write in (n for n in ast.walk(target) if isinstance(n, ast.Name)):
                    left[write.id] -= 1
                    now[write.id] = self._fresh(write.id) if left[write.id] else write.id
                    write.id = now[write.id]
        return before, nodes

    def _fresh(self, wish: str) -> str:
        """A local name that there is not yet."""
        while wish in self._local:
            wish += "_"
        self._local.add(wish)
        return wish

    def _line(self, node: _Statement) -> _Line:
        reads = frozenset(_names(node, ast.Load) & self._local)
        return _Line(node, reads, tuple(sorted(_names(node, ast.Store))), _outside(node))

    def _call(self, lines: list[_Line], results: list[str]) -> ast.Assign:
        """The call of a segment of these lines, which gives `results`."""
        written = {name for line in lines for name in line.writes}
        given = ", ".join(sorted({name for line in lines for name in line.reads} - written))
        name = f"{self._name}_{len(self.segments) + 1}"
        (function,) = ast.parse(f"def {name}({given}): return ({', '.join(results)},)").body
        assert isinstance(function, ast.FunctionDef)
        first = lines[0].node
        for node in ast.walk(function):
            ast.copy_location(node, first)
        function.body[:0] = [line.node for line in lines]
        self.segments.append(function)
        return ast.copy_location(_assignment(f"({', '.join(results)},) = {name}({given})"), first)


class _Lifter(ast.NodeTransformer):
    """Puts names in the place of what is read from tables.

    Args:
        fresh: gives a name that there is not yet.

    Attributes:
        lines: which give these names their values.
    """

    def __init__(self, fresh: Callable[[str], str]) -> None:
        self.lines: list[ast.Assign] = []
        self._fresh = fresh

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if not _is_entry(node):
            self.generic_visit(node)
            return node
        name = self._fresh("entry")
        self.lines.append(_assignment(f"{name} = {ast.unparse(node)}"))
        return ast.copy_location(ast.Name(name, ast.Load()), node)


def _assignment(text: str) -> ast.Assign:
    (line,) = ast.parse(text).body
    assert isinstance(line, ast.Assign)
    return line


def _arguments(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def _names(node: ast.AST, how: type[ast.expr_context]) -> set[str]:
    """The names that are read or written somewhere in a statement."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in found if isinstance(name.ctx, how)}


def _is_entry(node: ast.AST) -> bool:
    """Whether it reads from a table."""
    table = node.value if isinstance(node, ast.Subscript) else None
    return isinstance(table, ast.Name) and table.id in _TABLES


def _is_call(node: ast.stmt) -> TypeGuard[ast.Expr]:
    """Whether it is a call of the mesh for what it does: `mesh.write("b", b)`."""
    return isinstance(node, ast.Expr) and _MESH in _names(node, ast.Load)


def _outside(node: _Statement) -> bool:
    # Aliases too: the runtime knows parameters by the tensors that are held.
    return (
        isinstance(node.value, ast.Name)
        or _is_entry(node.value)
        or _MESH in _names(node.value, ast.Load)
    )
