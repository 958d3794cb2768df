"""Proofs of rules: shard the operands, run the operator on every rank, recombine, compare.

A rule claims that its layouts are right in both directions. The proof needs no process group: for
every example of the rule and every strategy on small meshes, the operator runs once whole, and once
per rank on the shards that the layouts give. A partial operand is divided into random summands. The
ranks' results must recombine to the whole result, and, from a gradient divided in the same way,
the gradients of the operands must recombine too.

    kind    value on a rank          gradient on a rank
    S       its slice                its slice
    R       the whole                the whole
    V       the whole                a part of the sum
    P       a part of the sum        the whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.intra_op.proofs.case import (
    Case,
    Device,
    Failure,
    own_randomness,
    read_call,
    read_example,
    read_node,
)
from autopar.intra_op.rule import OpRule, resolve
from autopar.intra_op.strategy import Strategy, form_strategies, strategies
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.operators.forms import forms_of
from autopar.operators.interpret import tensor_type


@dataclass(frozen=True)
class Report:
    """Result of a proof.

    Attributes:
        op: operator name.
        strategies: number of strategies that were run.
        failures: strategies that were wrong.
    """

    op: str
    strategies: int
    failures: tuple[Failure, ...]

    @property
    def proved(self) -> bool:
        """Returns whether at least one strategy ran and none was wrong."""
        return self.strategies > 0 and not self.failures

    def __str__(self) -> str:
        verdict = "\n".join(map(str, self.failures)) or "proved"
        return f"{self.op}: {self.strategies} strategies, {verdict}"


def prove(rule: OpRule, mesh_sizes: tuple[int, ...] = (2, 3), device: Device = "cpu") -> Report:
    """Runs a rule's examples under every strategy, on one axis of each size and on two axes.

    Operators that draw random numbers or leave memory uninitialised are compared by shape only.

    Args:
        rule: the rule.
        mesh_sizes: sizes of the axes.
        device: where the operator runs.

    Raises:
        RuleError: an example cannot be read or run, or the rule does not fit it.
    """
    with own_randomness(device):
        cases = [read_example(rule, text, device) for text in rule.examples]
        return _report(rule, cases, mesh_sizes)


def prove_forms(rule: OpRule, mesh_sizes: tuple[int, ...] = (2, 3)) -> Report:
    """Runs the forms of a rule's operator under every strategy, on the rule's examples and theirs.

    Raises:
        RuleError: an example cannot be read or run, or a form does not fit it.
    """
    texts = (text for form in forms_of(rule.op) for text in form.examples)
    with own_randomness("cpu"):
        cases = [read_example(rule, text) for text in dict.fromkeys((*rule.examples, *texts))]
        more = (text for form in forms_of(rule.op) for text in form.meshes)
        return _report(rule, cases, mesh_sizes, _formed, tuple(dict.fromkeys(more)))


def prove_aliased(rule: OpRule, mesh_sizes: tuple[int, ...] = (2, 3)) -> Report:
    """Proves a rule with one value in the place of several operands; see `aliased`.

    Raises:
        RuleError: an example cannot be read or run, or the rule does not fit it.
    """
    with own_randomness("cpu"):
        cases = [aliased(read_example(rule, text)) for text in rule.examples]
        return _report(rule, [case for case in cases if case is not None], mesh_sizes)


def aliased(case: Case) -> Case | None:
    """Returns a case whose operator reads one value as several operands, each in its own layout.

    The largest operand of a dtype replaces all of them, or else one of several of equal type.

    Returns:
        None if no operands have equal types, or torch or the rule rejects such calls.
    """
    ordered = sorted(case.operands, key=Tensor.numel, reverse=True)
    for alike in (_dtype, tensor_type):
        first: dict[object, Tensor] = {}
        for value in ordered:
            first.setdefault(alike(value), value)
        if len(first) == len(ordered):
            continue
        copies = [
            first[alike(value)].detach().clone().requires_grad_(value.requires_grad)
            for value in case.operands
        ]
        try:
            same = read_call(case.rule, case.node, copies)
            resolve(case.rule, same.node, same.types, same.node.types)
        except RuleError:
            continue
        return same
    return None


def _dtype(value: Tensor) -> torch.dtype:
    return value.dtype


def prove_node(
    rule: OpRule, graph: Graph, node: Node, mesh_sizes: tuple[int, ...] = (2,)
) -> Report:
    """Proves a rule on one node of a graph, with random operands of the shapes it has there.

    Floating operands become float64, integers are 0 or 1 and so valid as indices.

    Raises:
        RuleError: torch refuses the node, or the rule does not fit it.
    """
    with own_randomness("cpu"):
        return _report(rule, [read_node(rule, graph, node)], mesh_sizes)


def _formed(case: Case, mesh: Mesh) -> Sequence[Strategy]:
    """Returns the strategies of the operator's forms; on three axes, of forms that need three."""
    forms = {form.name for form in forms_of(case.node.op) if str(mesh) in form.meshes}
    every = [strategy for strategy, _ in form_strategies(case.node, case.types, mesh)]
    return [strategy for strategy in every if len(mesh.axes) < 3 or strategy.form in forms]


def _plain(case: Case, mesh: Mesh) -> Sequence[Strategy]:
    """Returns the strategies of the rule."""
    return strategies(case.signature, mesh)


def _report(
    rule: OpRule,
    cases: Sequence[Case],
    mesh_sizes: tuple[int, ...],
    ways: Callable[[Case, Mesh], Sequence[Strategy]] = _plain,
    further: tuple[str, ...] = (),
) -> Report:
    meshes = [Mesh.parse(text) for text in further]
    meshes += [Mesh.parse(f"cpu: x={size}") for size in mesh_sizes]
    meshes += [Mesh.parse(f"cpu: y={mesh_sizes[0]}, x={size}") for size in mesh_sizes]
    runs = [
        (case, strategy, mesh) for case in cases for mesh in meshes for strategy in ways(case, mesh)
    ]
    failures = [case.failure(strategy, mesh) for case, strategy, mesh in runs]
    return Report(rule.op, len(runs), tuple(failure for failure in failures if failure is not None))
