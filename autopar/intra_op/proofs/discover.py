"""Discovers the rule of an operator by running it on halves of its operands.

For every choice of at most one dimension of each operand, the operator runs on both halves. If each
result of the two runs is one half of the whole result along some dimension, those dimensions run
over one factor. If the results of the halves sum to the whole, the factor is contracted, perhaps
with other operands added (a bias). The resulting factor string is then proved, backwards too, and
factors that fail the proof are marked whole.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.intra_op.proofs.case import Case, read_example
from autopar.intra_op.proofs.prove import prove
from autopar.intra_op.proofs.terms import Factor, Position, Terms, write
from autopar.intra_op.rule import Groups, OpRule, graph_name, resolve
from autopar.intra_op.strategy import strategies
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.interpret import execute
from autopar.operators.localise import SHAPE_ARGUMENT, localise

_SHARDS = Mesh.parse("cpu: x=2")
_MOST_CHOICES = 20_000
_MATRIX, _STACK, _PLANE = "f64[4, 6]", "f64[4, 6, 8]", "f64[2, 4, 6, 8]"
# Operands to try if no example is given; all that the operator accepts are used.
SAMPLES = (
    _STACK, _MATRIX, _PLANE, "f64[4, 6]>0", "i64[4, 6]<8", "bool[4, 6]",
    f"{_MATRIX}, f64[6]", f"{_STACK}, {_STACK}", f"{_MATRIX}, f64[6, 8]",
    "f64[4, 4, 6], f64[4, 6, 8]", f"{_MATRIX}, f64[8, 6]", "f64[4], f64[6]", "f64[6], f64[6]",
    "i64[4, 6]<8, i64[6]<8", "bool[4, 6], bool[6]",
    f"{_MATRIX}, f64[6], f64[4, 6]>0", "f64[4, 6], f64[8, 6], f64[8]",
    "f64[4, 8, 4, 6], f64[4, 8, 6, 6], f64[4, 8, 6, 2]",
)  # fmt: skip


def discover(op: str, examples: Sequence[str] = ()) -> OpRule:
    """Returns a proved rule for an operator.

    The operator is run on operands that may not fit one another, as a user might call it; a kernel
    that does not check them may crash the process.

    Args:
        op: its name, "aten.mm" or "mylib::op".
        examples: argument lists as in `OpRule.examples`; by default those of `SAMPLES` that it
            accepts.

    Raises:
        RuleError: an example cannot be run, none of the samples can, the operator draws random
            numbers, or no one factor string fits all the examples.
    """
    op = graph_name(op)
    cases = _cases(op, examples)
    with warnings.catch_warnings():  # torch warns about shapes that do not fit
        warnings.simplefilter("ignore")
        proved = [_proved(case) for case in cases]
    return _merge(cases, proved)


def _cases(op: str, examples: Sequence[str]) -> list[Case]:
    """Returns the examples, run whole."""
    bare = OpRule(op, "")
    if examples:
        cases = [read_example(bare, example) for example in examples]
    else:
        cases = list(_samples(bare))
    if not cases:
        raise RuleError(
            f"{op} takes none of the sample operands",
            todo='give an example of its arguments: --example "f64[4, 6], f64[6], 2"',
        )
    for case in cases:
        if case.random:
            raise RuleError(
                f"{op} draws random numbers",
                where=case.example,
                why="no two runs agree",
            )
    return cases


def _samples(bare: OpRule) -> Iterator[Case]:
    """Yields samples that the operator accepts, only those with the fewest operands."""
    taken: int | None = None
    for sample in SAMPLES:
        case = _read(bare, sample) or _read(bare, re.sub(r"\bf64", "const f64", sample))
        if case is None:
            continue
        taken = len(case.operands) if taken is None else taken
        if len(case.operands) == taken and case.results:
            yield case


def _read(bare: OpRule, example: str) -> Case | None:
    try:
        return read_example(bare, example)
    except RuleError:
        return None


def _proved(case: Case) -> tuple[Terms, Groups]:
    """Returns the rule of one example; factors that a proof refutes are whole or not linear."""
    factors, linear = list(_factors(case)), _linear(case)
    while True:
        terms, names = write(case.types, case.node.types, factors)
        report = prove(OpRule(case.rule.op, str(terms), "", linear, (case.example,)))
        if report.proved:
            return terms, linear
        failed = {part for f in report.failures for part in _parts(f.strategy)}
        wrong = [factor for factor, name in zip(factors, names, strict=True) if name in failed]
        if linear and failed & {f.strategy.split("@")[0] for f in report.failures} - {*names}:
            linear = ()
        elif wrong:
            factors = [factor for factor in factors if factor is not wrong[-1]]
        else:
            raise RuleError(f"no rule fits {case.rule.op}", where=case.example, why=str(report))


def _parts(strategy: str) -> list[str]:
    """Returns the factors that a strategy, as text, splits: "m@x k@y" -> m, k."""
    return [part.split("@")[0] for part in strategy.split()]


def _merge(cases: list[Case], found: list[tuple[Terms, Groups]]) -> OpRule:
    """Returns one factor string that matches the result for each example."""
    examples = tuple(case.example for case in cases)
    linear = _common(cases, [groups for _, groups in found])
    for short in (short for terms, _ in found for short in (*terms.shortened(), terms)):
        merged = OpRule(cases[0].rule.op, str(short), "", linear, examples)
        same = all(
            _ways(merged, case) == _ways(replace(merged, spec=str(terms)), case)
            for case, (terms, _) in zip(cases, found, strict=True)
        )
        if same and prove(merged).proved:
            return merged
    raise RuleError(
        f"no one factor string fits every example of {cases[0].rule.op}",
        why="; ".join(
            f"({c.example}): {terms}" for c, (terms, _) in zip(cases, found, strict=True)
        ),
        todo="write a function that gives the string, see autopar/intra_op/rule.py",
    )


def _common(cases: list[Case], found: list[Groups]) -> Groups:
    """Returns the linear groups of all examples; booleans and integers do not count."""
    telling = [
        set(groups)
        for case, groups in zip(cases, found, strict=True)
        if all(kind.floating for kind in case.node.types)
    ]
    return tuple(sorted(set.intersection(*telling))) if telling else ()


def _ways(rule: OpRule, case: Case) -> set[tuple[object, ...]] | None:
    """Returns the layouts of every strategy on two devices; None if the rule does not fit."""
    try:
        signature = resolve(rule, case.node, case.types, case.node.types)
    except RuleError:
        return None
    return {(way.operands, way.results) for way in strategies(signature, _SHARDS)}


def _factors(case: Case) -> Iterator[Factor]:
    """Yields disjoint sets of dimensions that can be split together, smallest first."""
    used: set[Position] = set()
    results: set[Position] = set()
    for choice in _choices(case):
        if used & set(choice):
            continue
        # One dimension of an operand cannot correspond to several of a result: zeros((4, 6)).
        while (factor := _try(case, choice, results)) is not None:
            used.update(choice)
            results.update((i, dim) for i, dim in enumerate(factor.results) if dim is not None)
            yield factor
            if choice:
                break


def _choices(case: Case) -> list[tuple[Position, ...]]:
    """Returns the combinations of at most one dimension of each operand."""
    options = [
        [
            None,
            *((i, d) for d, n in enumerate(tensor.shape) if n > 1 and i not in case.written),
        ]
        for i, tensor in enumerate(case.operands)
    ]
    if math.prod(map(len, options)) > _MOST_CHOICES:
        raise RuleError(
            f"{case.rule.op} has too many operands to try all splits",
            where=case.example,
            todo="give an example with fewer operands or dimensions",
        )
    picks = [tuple(p for p in pick if p is not None) for pick in itertools.product(*options)]
    return sorted(picks, key=len)


def _try(case: Case, choice: tuple[Position, ...], taken: set[Position]) -> Factor | None:
    """Returns the factor of a choice of dimensions, if the halves' results recombine."""
    if case.node.op in SHAPE_ARGUMENT:
        places: list[int | None] = [*range(len(case.node.type.shape)), None]
    else:
        places = [None] if choice else []
    for place in places:
        halves = _run_halves(case, choice, place, ())
        dims = None if halves is None else _recombine(case, halves, taken)
        if dims is not None and _divides(case, Factor(choice, dims)):
            return Factor(choice, dims)
    return _contraction(case, choice) if choice else None


def _divides(case: Case, factor: Factor) -> bool:
    """Returns whether the smallest of a factor's dimensions divides the others."""
    sizes = [case.operands[i].shape[dim] for i, dim in factor.operands]
    places = zip(case.results, factor.results, strict=True)
    sizes += [result.shape[dim] for result, dim in places if dim is not None]
    return all(size % min(sizes) == 0 for size in sizes)


def _contraction(case: Case, choice: tuple[Position, ...]) -> Factor | None:
    """Returns a contraction, with the operands that are added once under it."""
    split = {i for i, _ in choice}
    rest = [i for i, kind in enumerate(case.types) if i not in split and kind.floating]
    summed: tuple[int | None, ...] = (None,) * len(case.results)
    for count in range(1, len(rest) + 1):
        for added in itertools.combinations(rest, count):
            halves = _run_halves(case, choice, None, added)
            if halves is not None and _all_sum(case, halves):
                return Factor(choice, summed, added)
    return None


def _run_halves(
    case: Case, choice: tuple[Position, ...], place: int | None, added: tuple[int, ...]
) -> list[list[Tensor]] | None:
    """Returns each half's results; None if the operator refuses.

    Args:
        case: the whole run.
        choice: the dimensions to halve.
        place: the dimension of the first result whose size an argument names, if it is halved.
        added: operands of which each half gets a random summand.
    """
    values = [[value.detach(), value.detach()] for value in case.operands]
    for i, dim in choice:
        values[i] = [half.clone() for half in values[i][0].tensor_split(2, dim)]
    for i in added:
        like = values[i][0]
        part = torch.randn(like.shape, dtype=like.dtype, generator=case.generator)
        values[i] = [part, values[i][0] - part]
    split = tuple(("x",) if d == place else () for d in range(len(case.node.type.shape)))
    extents = [lambda size, _: (size + 1) // 2, lambda size, _: size // 2]
    whole = tuple(Layout.replicated(len(kind.shape)) for kind in case.types)
    halves = []
    for half, extent in enumerate(extents):
        (node,) = localise(case.node, case.types, whole, (Layout(split),), extent)
        copies = (value[half].clone() for value in values)
        try:
            with torch.no_grad():
                given = dict(zip(node.inputs, copies, strict=True))
                value = execute(node, given, torch.device("cpu"))
        except Exception:  # operators may refuse halves in any way
            return None
        halves.append([value] if isinstance(value, Tensor) else list(value))
    return halves


def _recombine(
    case: Case, halves: list[list[Tensor]], taken: set[Position]
) -> tuple[int | None, ...] | None:
    """Returns the dimension along which each result is split, None where the halves sum to it."""
    joined: list[int | None] = []
    for i, (whole, *parts) in enumerate(zip(case.results, *halves, strict=True)):
        dims = [
            dim
            for dim in range(whole.ndim)
            if (i, dim) not in taken and _joins(case, whole, parts, dim)
        ]
        if not dims and not _sums(case, whole, parts):
            return None
        joined.append(dims[0] if dims else None)
    return tuple(joined)


def _joins(case: Case, whole: Tensor, parts: list[Tensor], dim: int) -> bool:
    return all(
        part.shape == half.shape and _same(case, half, part)
        for part, half in zip(parts, whole.tensor_split(2, dim), strict=True)
    )


def _sums(case: Case, whole: Tensor, parts: list[Tensor]) -> bool:
    """Returns whether parts sum to the whole; zeros and booleans do not count as evidence."""
    fits = all(part.shape == whole.shape for part in parts) and whole.dtype != torch.bool
    return fits and bool(whole.any()) and _same(case, whole, parts[0] + parts[1])


def _all_sum(case: Case, halves: list[list[Tensor]]) -> bool:
    rows = zip(case.results, *halves, strict=True)
    return all(_sums(case, whole, parts) for whole, *parts in rows)


def _same(case: Case, one: Tensor, other: Tensor) -> bool:
    close = 1e-4 if any(kind.dtype == "f32" for kind in case.types) else 1e-9
    return torch.allclose(one, other.to(one.dtype), rtol=close, atol=close, equal_nan=True)


def _linear(case: Case) -> Groups:
    """Returns the largest sets of operands in which the results are jointly linear."""
    floating = [i for i, t in enumerate(case.types) if t.floating and i not in case.written]
    if not all(kind.floating for kind in case.node.types):
        return ()
    groups: list[tuple[int, ...]] = []
    for count in range(len(floating), 0, -1):
        for group in itertools.combinations(floating, count):
            if any(set(group) <= set(larger) for larger in groups):
                continue
            halves = _run_halves(case, (), None, group)
            if halves is not None and _all_sum(case, halves):
                groups.append(group)
    return tuple(sorted(groups))


def source(rule: OpRule) -> str:
    """Returns a rule as Python source, to be pasted into a file of rules or a program."""
    own = not rule.op.startswith("aten.")
    name = rule.op.replace(".", "::", 1) if own else rule.op
    lines = [f"{'autopar.' if own else ''}rule(", f'    "{name}",', f'    "{rule.spec}",']
    if rule.linear:
        lines.append(f"    linear={rule.linear},")
    lines += [
        "    examples=(",
        *(f'        "{example}",' for example in rule.examples),
        "    ),",
        ")",
    ]
    return "\n".join(lines)
