"""The rules of one compilation: autopar's, discovered by folder, and the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.errors import RuleError
from autopar.intra_op.rule import OpRule, collect
from autopar.intra_op.rules import rules
from autopar.operators.own_functions import SPLIT

if TYPE_CHECKING:
    import torch

# A Function that can be split has its rule in its call, see `proofs/own_function_rules.py`.
FUNCTION = OpRule(SPLIT, lambda node, types: str(node.args[1]))


def table(own: Sequence[OpRule] = (), device: torch.device | None = None) -> dict[str, OpRule]:
    """Returns all rules by operator; the user's own, proved here, take precedence.

    An annotation has the rule of a share, which is also the identity. A Function that can be split
    has the rule stated in its call. Rules are proved on the CPU, or on `device` for operators
    without a CPU implementation.

    Raises:
        RuleError: one of them is not a rule, has no example, cannot be run or is wrong, or two are
            for one operator.
    """
    for item in own:
        if not isinstance(item, OpRule):
            raise RuleError(f"{item!r} is not a rule", todo="make it with autopar.rule(...)")
        _check(item, device)
    known = rules()
    annotation = replace(known["autopar.share"], op="autopar.shard")
    return {**known, annotation.op: annotation, FUNCTION.op: FUNCTION, **collect(own)}


def _check(item: OpRule, device: torch.device | None) -> None:
    if not item.examples:
        raise RuleError(
            f"the rule of {item.op} has no example",
            why="a rule is proved before it is used",
            todo='add some, e.g. examples=["f64[4, 6], f64[6]"], with sizes that can be split',
        )
    from autopar.intra_op.proofs.prove import prove

    try:
        report = prove(item)
    except RuleError:
        if device is None or device.type == "cpu":
            raise
        report = prove(item, device=device)
    if not report.proved:
        raise RuleError(
            f"the rule {item.spec!r} of {item.op} is wrong"
            if isinstance(item.spec, str)
            else f"the rule of {item.op} is wrong",
            where="\n        ".join(map(str, report.failures[:3])),
            why=f"{len(report.failures)} of {report.strategies} strategies compute something else",
            todo=f"see what can be split: autopar rules --discover {item.op}",
        )
