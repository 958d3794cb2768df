"""Checks that a generated program consists only of the few constructs that programs need.

All text from outside is escaped when it is printed (`lower/literals.py`). As a second barrier, the
finished source is parsed here, so that anything that slips through raises an error and never runs.
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
_CALLED = ("range", "float", "getattr")  # built-in functions of Python that are used
_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign,
    ast.For, ast.If, ast.With, ast.withitem, ast.Expr, ast.Import, ast.ImportFrom, ast.alias,
    ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.keyword, ast.Subscript, ast.Slice,
    ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare, ast.JoinedStr,
    ast.FormattedValue, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_BITWISE = re.compile(r"__i?(and|or|xor|lshift|rshift)__")  # operators of aten, as in x & y
_OF_TORCH = (BuiltinFunctionType, torch.dtype, torch.memory_format)
_FLAT = ("F", "kernels", "mesh")  # only their direct attributes are used


def names_in(code: str) -> set[str]:
    """Returns the names that some code reads; raises ProgramError if it does not parse."""
    return {node.id for node in ast.walk(_parsed(code)) if isinstance(node, ast.Name)}


def check_source(source: str) -> None:
    """Checks a program against the constructs that `emit` writes.

    Raises:
        ProgramError: it does not parse, or has a statement, a name or a call that no program needs.
    """
    tree = _parsed(source)
    for node, why in _violations(tree):
        raise ProgramError(
            "the generated program is not valid",
            where=f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)[:200]}",
            why=why,
            todo="report this; it may come from an unusual name in the model or the plan",
        )


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(
            "the generated program is not valid", why=f"it does not parse: {error}"
        ) from error


def _violations(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yields nodes that do not belong in a program, each with the reason."""
    bound = set(_bound(tree))
    for name in bound & set(dir(builtins)):
        yield tree, f"{name!r} is a built-in name"
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            yield statement, "statements outside of functions are not allowed"
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            yield node, f"{type(node).__name__} is not allowed"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            if not set(names) <= set(_MODULES):
                yield node, "this import is not allowed"
        elif isinstance(node, ast.FunctionDef) and (node.decorator_list or node not in tree.body):
            yield node, "decorated and nested functions are not allowed"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id not in bound and node.id not in _CALLED:
                yield node, f"the name {node.id!r} is not defined"
        elif isinstance(node, ast.Attribute):
            why = _attribute(node)
            if why:
                yield node, why
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            plain = len(node.args) == 2 and ast.unparse(node.args[0]).startswith("aten.")
            if not (plain and isinstance(node.args[1], ast.Constant)):
                yield node, "getattr may only name an overload of an operator"


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yields every name that the program binds."""
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
    """Returns why an attribute may not be read, "" if it may."""
    path: list[str] = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        path.insert(0, value.attr)
        value = value.value
    root = value.id if isinstance(value, ast.Name) else ""
    last = path[-1]
    if root == "torch" and path[0] != "ops":
        known = isinstance(getattr(torch, last, None), _OF_TORCH)
        return "" if len(path) == 1 and known else "it is not an operator of torch"
    if root in _FLAT and len(path) > 1:
        return f"it is not a function of {root}"
    if root in ("aten", "torch"):
        private = last.startswith("__") and not _BITWISE.fullmatch(last)
    else:
        private = last.startswith("_")
    return "it is private" if private else ""
