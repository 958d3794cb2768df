"""Audits of rules: is a dimension that a rule keeps whole one that could be split?

A proof shows that what a rule allows is right; an audit looks for what it forbids without need. On
every example one "!" at a time is dropped from the factor string, and the rule is proved again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from autopar.intra_op.prove import Case, prove, read_example
from autopar.intra_op.rule import OpRule, Signature, resolve, written
from autopar.ir.interpret import execute

_WORD = re.compile(r"(\([^)]*\)|[A-Za-z_]\w*)!")


@dataclass(frozen=True)
class Finding:
    """A factor that a rule keeps whole on one example.

    Attributes:
        op, example: where.
        spec: the factor string with the factor's "!" dropped.
        factor: its name.
        holds: whether every strategy was right with that string.
        strategies: how many of them split the factor; with none, nothing was learnt.
    """

    op: str
    example: str
    spec: str
    factor: str
    holds: bool
    strategies: int


def audit(rule: OpRule, mesh_sizes: tuple[int, ...] = (2, 3)) -> tuple[Finding, ...]:
    """What becomes of a rule when each of its whole factors may be split.

    Left out are examples that draw random numbers, of which only shapes can be compared, those
    that give nothing but zeros, of which any parts are parts of a sum, factors of size 1, and
    factors of operands that the operator writes into: every device must hold the same afterwards.

    Returns:
        One finding for each example and each factor that is whole on it.

    Raises:
        RuleError: an example cannot be read or run, or the rule does not fit it.
    """
    found: list[Finding] = []
    for example in rule.examples:
        case = read_example(rule, example)
        if not case.random and any(result.any() for result in case.results):
            found += (_try(rule, case, factor, mesh_sizes) for factor in _whole_factors(case))
    return tuple(found)


def _whole_factors(case: Case) -> Iterator[str]:
    """Factors marked "!" by the rule itself, larger than 1."""
    spec = written(case.rule, case.node, case.types)
    marked = dict.fromkeys(
        name for word in _WORD.findall(spec) for name in word.strip("()").split() if name != "1"
    )
    kept = {
        factor
        for position in _written_operands(case)
        for dim in case.signature.operands[position]
        for factor in dim
    }
    for factor in marked:
        if case.signature.sizes.get(factor, 1) > 1 and factor not in kept:
            yield factor


def _written_operands(case: Case) -> list[int]:
    """Positions of the operands that are others after the operator has run."""
    values = [operand.detach().clone() for operand in case.operands]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        results = dict(zip(case.node.inputs, values, strict=True))
        if case.node.op != "getitem":
            execute(case.node, results, torch.device("cpu"))
    pairs = zip(values, case.operands, strict=True)
    return [i for i, (after, before) in enumerate(pairs) if not after.equal(before)]


def _try(rule: OpRule, case: Case, factor: str, mesh_sizes: tuple[int, ...]) -> Finding:
    """One factor freed on one example."""
    spec = _freed(written(rule, case.node, case.types), factor)
    trial = replace(rule, spec=spec, examples=(case.example,))
    signature = resolve(trial, case.node, case.types, case.node.types)
    sizes = [size for size in mesh_sizes if _splits(signature, factor, size)]
    with warnings.catch_warnings():  # torch wonders at shapes that do not fit
        warnings.simplefilter("ignore")
        holds = bool(sizes) and all(prove(trial, (size,)).proved for size in sizes)
    return Finding(rule.op, case.example, spec, factor, holds, len(sizes))


def _freed(spec: str, factor: str) -> str:
    """The factor string without the marks of `factor`."""
    return _WORD.sub(lambda m: m[1] if factor in m[1].strip("()").split() else m[0], spec)


def _splits(signature: Signature, factor: str, size: int) -> bool:
    return factor in signature.splittable and signature.sizes[factor] % size == 0
