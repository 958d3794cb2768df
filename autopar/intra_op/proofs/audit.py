"""Audits rules for dimensions that are kept whole but could be split.

A proof shows that the layouts of a rule are right; an audit looks for layouts that it forbids
without need. On every example, one "!" at a time is dropped from the factor string, and the rule is
proved again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.intra_op.proofs.case import Case, read_example
from autopar.intra_op.proofs.prove import prove
from autopar.intra_op.rule import OpRule, written
from autopar.intra_op.strategy import strategies
from autopar.ir.mesh import Mesh

# Kernels that do not check shapes, and read beyond the end of a part.
_UNCHECKED = ("aten.gru.input",)
# Factors that could be split but should not be.
KEPT = {
    ("autopar.mixture", "k"): "splitting the tokens instead owes no sum",
    ("aten.scaled_dot_product_attention", "e"): "every device would compute all of q k^T",
    ("autopar.sink_attention", "e"): "every device would compute all of q k^T",
}
_WORD = re.compile(r"(\([^)]*\)|[A-Za-z_]\w*)!")


@dataclass(frozen=True)
class Finding:
    """A factor that a rule keeps whole on one example.

    Attributes:
        op, example: the operator and its example.
        spec: the factor string with the factor's "!" dropped.
        factor: name of the factor.
        holds: whether every strategy was right with that string.
        strategies: number of them that split the factor; if 0, nothing was learnt.
        reason: why it should stay whole though it could be split.
    """

    op: str
    example: str
    spec: str
    factor: str
    holds: bool
    strategies: int
    reason: str = ""

    @property
    def telling(self) -> bool:
        """Returns whether the rule or its example should be changed."""
        return not self.strategies or (self.holds and not self.reason)


def audit(rule: OpRule, mesh_sizes: tuple[int, ...] = (2, 3)) -> tuple[Finding, ...]:
    """Tests a rule with each of its whole factors allowed to split.

    Skipped are operators that crash on operands of inconsistent shapes, examples that draw random
    numbers (only shapes can be compared), examples with only zeros as results (any parts sum to
    zeros), factors of size 1, and factors of operands that the operator writes into (every device
    must hold the same afterwards).

    Returns:
        One finding for each example and each factor that is whole on it.

    Raises:
        RuleError: an example cannot be read or run, or the rule does not fit it.
    """
    if rule.op in _UNCHECKED:
        return ()
    findings: list[Finding] = []
    for example in rule.examples:
        case = read_example(rule, example)
        if not case.random and any(result.any() for result in case.results):
            findings += (_try(rule, case, factor, mesh_sizes) for factor in _whole_factors(case))
    return tuple(findings)


def _whole_factors(case: Case) -> Iterator[str]:
    """Yields factors of size over 1 that the rule itself marks "!"."""
    spec = written(case.rule, case.node, case.types)
    marked = dict.fromkeys(
        name for word in _WORD.findall(spec) for name in word.strip("()").split() if name != "1"
    )
    kept = {
        factor
        for position in case.written
        for dim in case.signature.operands[position]
        for factor in dim
    }
    for factor in marked:
        if case.signature.sizes.get(factor, 1) > 1 and factor not in kept:
            yield factor


def _try(rule: OpRule, case: Case, factor: str, mesh_sizes: tuple[int, ...]) -> Finding:
    """Returns the finding for one factor on one example."""
    spec = _freed(written(rule, case.node, case.types), factor)
    trial = replace(case, rule=replace(rule, spec=spec, examples=(case.example,)))
    runs = [
        (way, mesh)
        for mesh in (Mesh.parse(f"cpu: x={size}") for size in mesh_sizes)
        for way in strategies(trial.signature, mesh)
        if factor in dict(way.parts).values()
    ]
    with warnings.catch_warnings():  # torch warns about shapes that do not fit
        warnings.simplefilter("ignore")
        holds = all(trial.failure(way, mesh) is None for way, mesh in runs)
        holds = bool(runs) and holds and prove(trial.rule, mesh_sizes).proved
    reason = KEPT.get((rule.op, factor), "")
    return Finding(rule.op, case.example, spec, factor, holds, len(runs), reason)


def _freed(spec: str, factor: str) -> str:
    """Returns the factor string without the "!" of `factor`."""
    return _WORD.sub(lambda m: m[1] if factor in m[1].strip("()").split() else m[0], spec)
