"""Strategies: every way to split one operator over a mesh, with the layouts it implies.

A strategy gives each mesh axis one part: a factor of the rule to split; nothing (every device along
the axis computes the same); or, for linear operators, to pass through a partial sum (`+`, or `+1`
for the second of several linear groups of operands) or a partial gradient (`-`). Several axes may
split one factor; they stack in mesh order, outermost first. Where a rule allows it, one axis splits
two factors together (`e&...0`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from autopar.intra_op.axis_runs import on_many, within_runs
from autopar.intra_op.rule import Dims, Groups, OpRule, Signature, resolve
from autopar.ir.graph import Node
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.form import Form, Part
from autopar.operators.forms import forms_of

NOTHING, PARTIAL, VARYING, TOGETHER = "", "+", "-", "&"


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator.

    Attributes:
        parts: for each mesh axis its factor, two of them with TOGETHER in between, or NOTHING,
            PARTIAL or VARYING.
        operands, results: the layouts it needs and gives.
        form: name of the implementation, "" for none (see `operators/form.py`).
    """

    parts: tuple[tuple[str, str], ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    form: str = ""

    def __str__(self) -> str:
        split = " ".join(f"{part}@{axis}" for axis, part in self.parts if part) or "whole"
        return f"{split} by {self.form}" if self.form else split

    def share(self, sizes: dict[str, int], mesh: Mesh) -> float:
        """Returns the share of the operator's FLOPs that the busiest device runs.

        Along an axis that splits two factors, each device computes its part of the second.
        """
        largest = dict(sizes)
        for axis, part in self.parts:
            factor = part.rpartition(TOGETHER)[2]
            if factor in sizes:
                largest[factor] = -(-largest[factor] // mesh.axis_size(axis))
        # A tensor without elements has a factor of size 0, and nothing to compute.
        return math.prod(largest[factor] / size for factor, size in sizes.items() if size)


def strategies(signature: Signature, mesh: Mesh, runs: int | None = None) -> tuple[Strategy, ...]:
    """Returns all legal strategies of one operator on a mesh; running it whole is always first.

    Args:
        signature: of the operator.
        mesh: the devices.
        runs: into how many runs of equal parts a strategy may divide the axes; None for any number
            (see `axis_runs.py`).
    """
    choices = [NOTHING, *signature.splittable]
    choices += [TOGETHER.join(pair) for pair in signature.together]
    choices += [f"{PARTIAL}{i or ''}" for i in range(len(signature.linear))]
    choices += [VARYING] if signature.varying else []
    axes = [axis for axis in mesh.axes if axis.size > 1]

    rule = _Effects(
        tuple(choices),
        signature.operands,
        signature.results,
        signature.additive,
        signature.linear,
        frozenset(signature.exchanged),
        tuple(signature.tied.items()),
        frozenset(factor for factor, size in signature.sizes.items() if size > 1),
    )
    return _laid_out(rule, tuple(_assignments(signature, axes, choices, runs)))


class _Effects(NamedTuple):
    """All that determines the effects of parts; see `Signature`.

    Attributes:
        choices: the possible parts of an axis.
        solid: factors of more than one element.
    """

    choices: tuple[str, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    additive: tuple[bool, ...]
    linear: Groups
    exchanged: frozenset[str]
    tied: tuple[tuple[str, str], ...]
    solid: frozenset[str]


@lru_cache(maxsize=1 << 9)
def _laid_out(
    rule: _Effects, assignments: tuple[tuple[tuple[str, str], ...], ...]
) -> tuple[Strategy, ...]:
    """Returns the strategies of some assignments; kept for meshes and batches of other sizes."""

    def tensor(dims: Dims, operand: int | None) -> _Tensor:
        effects = {part: _effect(part, dims, rule, operand) for part in rule.choices}
        return _Tensor(len(dims), effects)

    operands = [tensor(dims, number) for number, dims in enumerate(rule.operands)]
    results = [tensor(dims, None) for dims in rule.results]
    return tuple(
        Strategy(
            parts,
            tuple(tensor.layout(parts) for tensor in operands),
            tuple(tensor.layout(parts) for tensor in results),
        )
        for parts in assignments
    )


def form_strategies(
    node: Node, types: tuple[TensorType, ...], mesh: Mesh, runs: int | None = None
) -> Iterator[tuple[Strategy, float]]:
    """Yields the strategies of all forms of a node, with the share of its FLOPs on a device.

    Args:
        node: an operator.
        types: types of the tensors that it reads.
        mesh: the devices.
        runs: see `strategies`; restricts forms on many axes only.

    Raises:
        RuleError: a form's factor string cannot be read or does not fit.
    """
    for form in forms_of(node.op):
        yield from _strategies(form, node, types, mesh, runs)


def _strategies(
    form: Form, node: Node, types: tuple[TensorType, ...], mesh: Mesh, runs: int | None
) -> Iterator[tuple[Strategy, float]]:
    spec = form.spec(node, types)
    if not spec:
        return
    rule = OpRule(form.op, spec, together=form.together)
    signature = resolve(rule, node, types, node.types)
    for strategy in strategies(signature, mesh, on_many(runs, mesh)):
        if form.fits(Part(node, types, strategy.operands, mesh)):
            share = strategy.share(signature.sizes, mesh)
            yield replace(strategy, form=form.name), share


def _assignments(
    signature: Signature, axes: list[Axis], choices: list[str], runs: int | None
) -> Iterator[tuple[tuple[str, str], ...]]:
    rows = signature.rows
    factors = {part: part.split(TOGETHER) for part in choices}

    @cache
    def splits(factor: str, count: int) -> bool:
        return _splits(signature, factor, count)

    # A factor that one axis cannot split, it cannot split beside others.
    fitting = [
        [part for part in choices if all(splits(factor, axis.size) for factor in factors[part])]
        for axis in axes
    ]
    for parts in itertools.product(*fitting):
        if not within_runs(parts, runs, rows):
            continue
        ways: dict[str, int] = {}
        for axis, part in zip(axes, parts, strict=True):
            for factor in factors[part]:
                ways[factor] = ways.get(factor, 1) * axis.size
        if all(itertools.starmap(splits, ways.items())):
            yield tuple((axis.name, part) for axis, part in zip(axes, parts, strict=True))


def _splits(signature: Signature, part: str, count: int) -> bool:
    """Returns whether a factor splits `count` ways.

    Parts may differ by an element if the factor has its dimensions to itself. Within a merged
    dimension uneven parts would not be contiguous.
    """
    alike = [part, *(factor for factor, other in signature.tied.items() if other == part)]
    for factor in alike:
        size = signature.sizes.get(factor, 0)
        if size // count < signature.exchanged.get(part, 0):
            return False
        if size % count and (size < count or factor in signature.merged):
            return False
    return True


class _Tensor:
    """An operand or a result.

    Args:
        rank: number of its dimensions.
        effects: the effect of each part along its axis: the dimension that it splits, PARTIAL,
            VARYING or NOTHING.
    """

    def __init__(self, rank: int, effects: Mapping[str, int | str]) -> None:
        self.rank, self.effects = rank, effects

    def layout(self, parts: tuple[tuple[str, str], ...]) -> Layout:
        """Returns its layout under a strategy."""
        return _layout(self.rank, tuple((axis, self.effects[part]) for axis, part in parts))


@lru_cache(maxsize=1 << 14)
def _layout(rank: int, effects: tuple[tuple[str, int | str], ...]) -> Layout:
    """Returns the layout of a tensor, given the effect of each axis; operators have many alike."""
    split: list[tuple[str, ...]] = [()] * rank
    partial, varying = list[str](), list[str]()
    for axis, effect in effects:
        if isinstance(effect, int):
            split[effect] = (*split[effect], axis)
        elif effect == PARTIAL:
            partial.append(axis)
        elif effect == VARYING:
            varying.append(axis)
    return Layout(tuple(split), tuple(partial), tuple(varying))


def _effect(part: str, dims: Dims, rule: _Effects, operand: int | None) -> int | str:
    """Returns the effect of a part along its axis on the operand of that number, or on a result."""
    if part == NOTHING:
        return NOTHING
    factors = part.split(TOGETHER)
    for number, dim in enumerate(dims):
        if any(_leads(factor, dim, rule) for factor in factors):
            return number
    if operand is None and part in rule.exchanged:
        return NOTHING  # the operator has already combined it
    return PARTIAL if _summed(part, rule, operand) else VARYING


def _summed(part: str, rule: _Effects, operand: int | None) -> bool:
    """Returns whether a tensor that lacks the factor `part` is a partial sum along its axis."""
    if part == VARYING:
        return False
    if operand is None:
        return True
    if part.startswith(PARTIAL):
        return operand in rule.linear[int(part.removeprefix(PARTIAL) or 0)]
    produced = {f for dims in rule.results for dim in dims for f in dim}
    return rule.additive[operand] and produced.isdisjoint(part.split(TOGETHER))


def _leads(factor: str, dim: tuple[str, ...], rule: _Effects) -> bool:
    solid = [f for f in dim if f in rule.solid]
    return bool(solid) and dict(rule.tied).get(solid[0], solid[0]) == factor
