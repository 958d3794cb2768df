"""The few kinds of Python that a generated program is made of; anything else is never written.

All text from outside is escaped where it is printed (`literals.py`). Here the finished source is
read as Python reads it, so that what slips through is an error and never a line that runs.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from types import BuiltinFunctionType

import torch

from autopar.errors import ProgramError

_MODULES = (
    "torch", "torch.nn.functional", "torch.utils.checkpoint", "autopar.runtime.api",
)  # fmt: skip
_CALLED = ("range", "float", "getattr")  # of Python's own functions
_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign,
    ast.For, ast.If, ast.With, ast.withitem, ast.Expr, ast.Import, ast.ImportFrom, ast.alias,
    ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.Subscript, ast.Slice,
    ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr,
    ast.FormattedValue, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_BITWISE = re.compile(r"__i?(and|or|xor|lshift|rshift)__")  # operators of aten, as in x & y
_OF_TORCH = (BuiltinFunctionType, torch.dtype, torch.memory_format)
_FLAT = ("F", "kernels", "mesh")  # only what they hold themselves is used


def names_in(code: str) -> set[str]:
    """The names that some code reads; ProgramError if it is no Python."""
    return {node.id for node in ast.walk(_parsed(code)) if isinstance(node, ast.Name)}


def check_source(source: str) -> None:
    """Compare a program with what `emit` writes.

    Raises:
        ProgramError: it is no Python, or has a statement, a name or a call that no program needs.
    """
    tree = _parsed(source)
    for node, why in _strange(tree):
        raise ProgramError(
            "a program is not written",
            where=f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)[:200]}",
            why=why,
            todo="compare the names in model and plan with Python's; this should not happen",
        )


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError("a program is not written", why=f"it is no Python: {error}") from error


def _strange(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """What does not belong into a program, with the reason."""
    bound = set(_bound(tree))
    for name in bound & set(dir(builtins)):
        yield tree, f"{name!r} is a name of Python's own"
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            yield statement, "nothing runs outside of functions"
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            yield node, f"no program has {type(node).__name__}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            if not set(names) <= set(_MODULES):
                yield node, "no program imports this"
        elif isinstance(node, ast.FunctionDef) and (node.decorator_list or node not in tree.body):
            yield node, "functions are plain ones"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id not in bound and node.id not in _CALLED:
                yield node, f"nothing is called {node.id!r}"
        elif isinstance(node, ast.Attribute):
            why = _attribute(node)
            if why:
                yield node, why
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            plain = len(node.args) == 2 and ast.unparse(node.args[0]).startswith("aten.")
            if not (plain and isinstance(node.args[1], ast.Constant)):
                yield node, "getattr names an overload of an operator"


def _bound(tree: ast.Module) -> Iterator[str]:
    """Every name that the program gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _attribute(node: ast.Attribute) -> str:
    """Why this attribute is none that a program reads, "" if it is."""
    path: list[str] = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        path.insert(0, value.attr)
        value = value.value
    root = value.id if isinstance(value, ast.Name) else ""
    last = path[-1]
    if root == "torch" and path[0] != "ops":
        known = isinstance(getattr(torch, last, None), _OF_TORCH)
        return "" if len(path) == 1 and known else "it is no operator of torch"
    if root in _FLAT and len(path) > 1:
        return f"it is no function of {root}"
    if root in ("aten", "torch"):
        private = last.startswith("__") and not _BITWISE.fullmatch(last)
    else:
        private = last.startswith("_")
    return "it is private" if private else ""
