"""The user's own `torch.autograd.Function`s as operators of a graph.

    %y = function.models.bloom:GeLUFunction(%x, 2.0) : f32[8, 16] grad

names the class by module and name, and has the arguments of its `apply`. The program runs the
forward and backward of the class itself, so it must be able to import the class by this name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from autopar.errors import ProgramError
from autopar.ir.graph import Graph, Node

FUNCTION = "function."  # prefix of operators that are the user's Functions
SPLIT = "autopar.function"  # a Function with a rule, see intra_op/proofs/own_function_rules.py


@dataclass(frozen=True)
class Joint:
    """The operators of a forward and a backward.

    Attributes:
        graph: its inputs are the operands and the gradients of results; it has no outputs.
        operands, results: names of the values of the forward.
        cotangents: for each result, the name of its gradient; "" if it has none.
        gradients: for each operand, the name of its gradient; "" if it has none.
    """

    graph: Graph
    operands: tuple[str, ...]
    results: tuple[str, ...]
    cotangents: tuple[str, ...]
    gradients: tuple[str, ...]


def called(node: Node) -> tuple[str, int] | None:
    """Returns the name "module:Name" of a node's Function, and the index of its first argument."""
    if node.op == SPLIT:
        return str(node.args[0]), 2
    return (node.op.removeprefix(FUNCTION), 0) if node.op.startswith(FUNCTION) else None


def find(called: str) -> Any:
    """Returns the class "module:Name".

    Raises:
        ProgramError: the class does not exist.
    """
    module, _, name = called.partition(":")
    try:
        attribute: Any = importlib.import_module(module)
        for part in name.split("."):
            attribute = getattr(attribute, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProgramError(
            f"there is no torch.autograd.Function {module}:{name}",
            why=f"{type(error).__name__}: {error}",
            todo="make it importable where the program runs, since the program calls it by name",
        ) from None
    return attribute


def find_all(*names: str) -> dict[str, Any]:
    """Returns a program's classes by name, "module:Name"; raises ProgramError for a missing one."""
    return {name: find(name) for name in names}
