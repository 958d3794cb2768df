"""Assumptions about a model's tensors, checked whenever the program runs.

If a branch only raises an error or repairs numbers (see branches.py), the trace skips the branch,
and the graph keeps its condition as an operand of a value that is used later:

    %h_1 = autopar.assume(%h, %all, True, 'model.py:7  if not (x > 0).all():')

returns %h, and raises an AssumptionError if %all differs from the assumption. The condition is
replicated on every device that computes it, so all devices raise the error together.
"""

from __future__ import annotations

from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AssumptionError
from autopar.ir.graph import Graph, Node, Ref
from autopar.operators.branches import ASSUME, Guard, guard

_CHECK = "autopar.check"  # a check in a trace that is not yet attached to a value
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("check(Tensor condition, bool expected, str where) -> Tensor")
_LIBRARY.impl(
    "check", lambda condition, expected, where: condition.clone(), "CompositeExplicitAutograd"
)
_TRUTH = ("__bool__", "is_nonzero", "item", "_assert")


def assumed(name: str, args: tuple[Any, ...], frame: FrameType, where: str) -> bool | None:
    """Returns the truth value that a traced tensor is assumed to have; None if undecidable.

    Args:
        name, args: the torch function that reads the value, and its arguments.
        frame: the calling frame.
        where: the user's line.
    """
    if name not in _TRUTH or not args or not isinstance(args[0], Tensor) or args[0].numel() != 1:
        return None
    condition = args[0]
    if name == "item" and condition.dtype is not torch.bool:
        return None
    # torch._assert is traced as a single operator, whose call no mode observes.
    branch = Guard(True, True) if name == "_assert" else guard(frame)
    if branch is None:
        return None
    if branch.checked:
        condition = condition.detach().reshape(())
        truth = condition if condition.dtype is torch.bool else condition != 0
        torch.ops.autopar.check(truth, branch.value, where)
    return branch.value


def assume(x: Tensor, condition: Tensor, expected: bool, where: str) -> Tensor:
    """Returns `x` if a condition has the expected value.

    Raises:
        AssumptionError: the condition has another value.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(condition, FakeTensor) and bool(condition) != expected:
        raise AssumptionError(
            "the batch takes a branch that the model was captured without",
            where=where,
            why=f"its condition was assumed to be {expected} for every batch",
            todo="correct the batch or the numbers that this line guards against, or select with "
            "torch.where, which computes both sides",
        )
    return x


def tie(graph: Graph) -> Graph:
    """Returns `graph` with each check attached to a value that is needed, so that the check runs.

    This is the last floating value before the check that is read after it (in a repeated block, a
    value of the same block). If there is none, it is the first such value after the check, or an
    output.
    """
    while (at := next((i for i, n in enumerate(graph.nodes) if n.op == _CHECK), None)) is not None:
        graph = _tied(graph, at)
    return graph


def _tied(graph: Graph, at: int) -> Graph:
    check = graph.nodes[at]
    before, after = list(graph.nodes[:at]), list(graph.nodes[at + 1 :])
    read = {name for node in after for name in node.inputs if node.op != _CHECK}
    read |= {name for _, name in graph.outputs}

    def carries(node: Node) -> bool:
        return not node.is_leaf and len(node.types) == 1 and node.type.floating

    carrier = next((n for n in reversed(before) if carries(n) and n.name in read), None)
    if carrier is None:
        carrier = next((n for n in after if carries(n)), None)
        if carrier is None:  # no computed value could be affected
            return replace(graph, nodes=tuple(before + after))
        place = after.index(carrier) + 1
        before, after = before + after[:place], after[place:]
    tied = replace(
        check,
        op=ASSUME,
        args=(Ref(carrier.name), *check.args),
        types=carrier.types,
        requires_grad=carrier.requires_grad,
    )

    def renamed(name: str) -> str:
        return tied.name if name == carrier.name else name

    after = [node.map_refs(lambda name: Ref(renamed(name))) for node in after]
    outputs = tuple((user, renamed(name)) for user, name in graph.outputs)
    loss = graph.loss and renamed(graph.loss)
    return replace(graph, nodes=(*before, tied, *after), outputs=outputs, loss=loss)
