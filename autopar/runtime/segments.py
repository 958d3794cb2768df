"""Splits a program's functions into segments for a compiler, and calls of the mesh between them.

    w = mesh.to_varying(p["w"], axis="gpu")            w = mesh.to_varying(p["w"], axis="gpu")
    h = F.linear(x, w)                                 b = mesh.to_varying(p["b"], axis="gpu")
    b = mesh.to_varying(p["b"], axis="gpu")    =>      (y,) = block_1(b, w, x)
    y = F.gelu(h + b)                                  y = mesh.all_reduce(y, axis="gpu")
    y = mesh.all_reduce(y, axis="gpu")

Statements that read the mesh, and aliases, stay outside of segments. They keep their order, which
is the same on all ranks, and run as soon as their operands are available. This gives the fewest
segments that the order allows.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

_MESH = "mesh"
# Arguments from which functions read entries by name.
_TABLES = ("p", "batch")
_Statement = ast.Assign | ast.Expr


def segmented(source: str) -> tuple[ast.Module, tuple[str, ...]]:
    """Splits a program into segments.

    Args:
        source: a program that `emit` wrote. Statements of loops and branches are unchanged.

    Returns:
        The syntax tree of the module, with the line numbers of `source`, and the names of the
        segments. Segments take tensors and numbers, and return tuples.
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
    """Returns the segments of a function, and changes the function to call them."""
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
    """A statement.

    Attributes:
        node: its syntax tree.
        reads, writes: local names.
        outside: whether it stays outside of segments.
    """

    node: _Statement
    reads: frozenset[str]
    writes: tuple[str, ...]
    outside: bool


class _Cutter:
    """Splits the straight-line code of one function.

    Attributes:
        segments: the segments so far.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self.segments: list[ast.FunctionDef] = []
        self._name = function.name
        self._local = {*_arguments(function), *_names(function, ast.Store)} - {_MESH, *_TABLES}

    def cut(self, nodes: Sequence[_Statement], wanted: Collection[str]) -> Iterator[ast.stmt]:
        """Yields the statements, with calls in place of segments; `wanted` names are read later."""
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
            if len(segment) == 1:  # a compiler has nothing to fuse
                yield segment[0].node
            elif results:
                yield self._call(segment, results)

    def _lifted(self, nodes: Sequence[_Statement]) -> Iterator[_Statement]:
        """Yields the statements, preceded by statements that read table entries for segments."""
        for node in nodes:
            if not _outside(node):
                lifter = _Lifter(self._fresh)
                node.value = lifter.visit(node.value)
                yield from (ast.copy_location(line, node) for line in lifter.lines)
            yield node

    def _renamed(self, nodes: list[_Statement]) -> tuple[list[ast.Assign], list[_Statement]]:
        """Renames variables so that each statement writes names of its own.

        The last value of a variable keeps its name; values from before the statements get an alias.

        Returns:
            The aliases, and the renamed statements.
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
        """Returns an unused local name."""
        while wish in self._local:
            wish += "_"
        self._local.add(wish)
        return wish

    def _line(self, node: _Statement) -> _Line:
        reads = frozenset(_names(node, ast.Load) & self._local)
        return _Line(node, reads, tuple(sorted(_names(node, ast.Store))), _outside(node))

    def _call(self, lines: list[_Line], results: list[str]) -> ast.Assign:
        """Creates a segment of statements, and returns the call that assigns its `results`."""
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
    """Replaces table entries by names.

    Args:
        fresh: returns an unused name.

    Attributes:
        lines: the statements that assign these names.
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
    """Returns the names that a statement reads or writes."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, how)}


def _is_entry(node: ast.AST) -> bool:
    """Returns whether a node reads from a table."""
    table = node.value if isinstance(node, ast.Subscript) else None
    return isinstance(table, ast.Name) and table.id in _TABLES


def _is_call(node: ast.stmt) -> TypeGuard[ast.Expr]:
    """Returns whether a statement calls the mesh for a side effect: `mesh.write("b", b)`."""
    return isinstance(node, ast.Expr) and _MESH in _names(node, ast.Load)


def _outside(node: _Statement) -> bool:
    # Aliases too, because the runtime identifies parameters by their tensors.
    return (
        isinstance(node.value, ast.Name)
        or _is_entry(node.value)
        or _MESH in _names(node.value, ast.Load)
    )
