"""Analyses the source of branches in the user's code that depend on a tensor's value.

Most of them are guards: they raise an error, warn, or repair numbers that are not finite. A model
is captured as if the guards were not taken, and the program checks this assumption (see assume.py).
If both sides of a branch compute something, the model cannot be captured.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

ASSUME = "autopar.assume"  # the operator
_HINTS = ("_detect_is_causal_mask",)  # in torch: selects a faster kernel, or an equivalent mask
_NOT_FINITE = re.compile(r"\b(isinf|isnan|isfinite|isposinf|isneginf)\b")
_TELLS = re.compile(r"warn|log|print")


@dataclass(frozen=True)
class Guard:
    """A branch that is assumed not to be taken.

    Attributes:
        value: the assumed truth value of the tensor.
        checked: whether the program must check the assumption: the branch would raise an error or
            compute something else.
    """

    value: bool
    checked: bool


def guard(frame: FrameType) -> Guard | None:
    """Returns the assumption for the tensor that `frame` converts to bool, or None."""
    code = frame.f_code
    if code.co_name in _HINTS and frame.f_globals["__name__"].startswith("torch."):
        return Guard(False, False)
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    conditions = [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Assert))]
    # The position of a jump is that of another part; the instruction before computes its condition.
    at = frame.f_lasti // 2
    asks = dis.opname[code.co_code[2 * at]].startswith(("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY"))
    for place in reversed([*code.co_positions()][: at + (not asks)]):
        for node in conditions:
            for part, turned in _parts(node.test):
                if _covers(part, place):
                    wanted, checked = _wanted(node)
                    return None if wanted is None else Guard(wanted != turned, checked)
        if place[0] is not None and place[0] < code.co_firstlineno:
            return None
    return None


def _parts(test: ast.expr, turned: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the parts of a condition, and whether each is negated."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value, turned)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not turned)
    else:
        yield test, turned


def _covers(node: ast.expr, place: tuple[int | None, ...]) -> bool:
    first, last, left, right = place
    if first is None or last is None or left is None or right is None:
        return False
    if node.end_lineno is None or node.end_col_offset is None:
        return False
    begins = (node.lineno, node.col_offset) <= (first, left)
    return begins and (last, right) <= (node.end_lineno, node.end_col_offset)


def _wanted(node: ast.If | ast.Assert) -> tuple[bool | None, bool]:
    """Returns the usual outcome of a condition, and whether the other outcome changes results."""
    if isinstance(node, ast.Assert) or (node.orelse and _raises(node.orelse)):
        return True, True
    if _raises(node.body):
        return False, True
    if not node.orelse and all(map(_tells, node.body)):
        return False, False
    mends = _NOT_FINITE.search(ast.unparse(node.test)) and all(map(_assigns, node.body))
    return (False, True) if mends and not node.orelse else (None, False)


def _raises(body: list[ast.stmt]) -> bool:
    """Returns whether statements do nothing but raise an error."""
    return isinstance(body[-1], ast.Raise) and all(map(_is_plain, body[:-1]))


def _is_plain(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr))


def _tells(node: ast.stmt) -> bool:
    """Returns whether a statement is a warning, a log entry, a print, or nothing."""
    if isinstance(node, ast.Pass):
        return True
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return bool(_TELLS.search(ast.unparse(node.value.func)))


def _assigns(node: ast.stmt) -> bool:
    """Returns whether a statement sets local names."""
    return isinstance(node, ast.Assign) and all(map(_is_local, node.targets))


def _is_local(target: ast.expr) -> bool:
    names: Iterator[ast.AST] = ast.walk(target)
    return all(isinstance(name, (ast.Name, ast.Tuple, ast.Store)) for name in names)
