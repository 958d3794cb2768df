"""Examples of rules: an operator on random operands, run whole and in parts under a strategy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError, RuleError
from autopar.intra_op.proofs.thread_ranks import ThreadDevice, on_all_devices
from autopar.intra_op.rule import OpRule, Signature, resolve
from autopar.intra_op.strategy import Strategy
from autopar.ir.graph import EXTEND, Graph, Node, Ref
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.exchange import local_steps
from autopar.operators.interpret import TORCH_DTYPES, execute, tensor_type
from autopar.operators.localise import localise

_OPERAND = re.compile(r"(const )?((?:bool|b?[cfiu]\d+)\[[\d, ]*\])(?:([<>])(\d+))?")
Device = torch.device | str
_UNDETERMINED = ("aten.empty.memory_format", "aten.empty_like", "aten.new_empty")
# Relative to the largest element, by the coarsest floating operand of an example.
_Outcome = tuple[list[Tensor], list[Tensor | None]]  # results, gradients of the operands
_TOLERANCE = {"f64": 1e-9, "f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Failure:
    """A strategy that computes something wrong.

    Attributes:
        op, example, mesh, strategy: the case that was run, as text.
        rank: the first rank that differs.
        value: the value that differs, "result 0" or "gradient of operand 1", or the error raised.
        difference: the largest difference; infinite if nothing can be compared.
    """

    op: str
    example: str
    mesh: str
    strategy: str
    rank: int
    value: str
    difference: float

    def __str__(self) -> str:
        return (
            f"{self.op}({self.example}) under {self.strategy!r} of {self.mesh}: "
            f"{self.value} differs by {self.difference:.3g} on rank {self.rank}"
        )


@dataclass(frozen=True)
class Case:
    """An operator on an example's operands, with the results of running it whole.

    Attributes:
        rule, example: the rule and the example.
        node: the operator, typed.
        operands: their values; differentiable ones require a gradient.
        results: results of the whole run.
        cotangents: a random gradient for every result.
        gradients: gradient of every operand, None where there is none.
        random: whether only shapes can be compared.
        generator: source of random parts.
    """

    rule: OpRule
    example: str
    node: Node
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    random: bool
    generator: torch.Generator

    @cached_property
    def types(self) -> tuple[TensorType, ...]:
        """Types of the operands."""
        return tuple(map(tensor_type, self.operands))

    @cached_property
    def signature(self) -> Signature:
        """The rule applied to the example; raises RuleError if it does not fit."""
        return resolve(self.rule, self.node, self.types, self.node.types)

    @cached_property
    def written(self) -> frozenset[int]:
        """Positions of the operands that are written into; parts of a cache may be."""
        values = [operand.detach().clone() for operand in self.operands]
        if self.node.op not in ("getitem", EXTEND):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                given = dict(zip(self.node.inputs, values, strict=True))
                execute(self.node, given, _device(values))
        pairs = enumerate(zip(values, self.operands, strict=True))
        return frozenset(i for i, (after, before) in pairs if _difference(after, before))

    @property
    def _tolerance(self) -> float:
        return max(_TOLERANCE.get(dtype, 0.0) for dtype in ("f64", *(t.dtype for t in self.types)))

    def failure(self, strategy: Strategy, mesh: Mesh) -> Failure | None:
        """Returns the worst failure of one strategy, None if it is right."""
        where = (self.rule.op, self.example, str(mesh), str(strategy))
        for i in self.written:
            layout = strategy.operands[i]
            if layout != Layout.replicated(len(layout.dims)):
                return Failure(*where, 0, f"operand {i} is written into and not whole;", math.inf)
        try:
            differences = list(self._differences(strategy, mesh))
        except Exception as error:  # operators written in Python may raise anything
            message = (str(error).splitlines() or [""])[0]
            differences = [(math.inf, 0, f"{type(error).__name__}: {message};")]
        difference, rank, value = max(differences, default=(0.0, 0, ""))
        if difference <= self._tolerance:
            return None
        return Failure(*where, rank, value, difference)

    def _differences(self, strategy: Strategy, mesh: Mesh) -> Iterator[tuple[float, int, str]]:
        """Yields (difference, rank, name) for every result and gradient."""
        layouts = (strategy.operands, strategy.results)
        inputs = [
            self._deal(value.detach(), layout, layout.partial, mesh)
            for value, layout in zip(self.operands, layouts[0], strict=True)
        ]
        owed = [
            self._deal(value, layout, layout.varying, mesh)
            for value, layout in zip(self.cotangents, layouts[1], strict=True)
        ]
        wants = [value.requires_grad for value in self.operands]

        def run(rank: int, device: ThreadDevice | None) -> _Outcome:
            steps = localise(self.node, self.types, *layouts, _extent(mesh, rank), strategy.form)
            local = [part[rank].requires_grad_(w) for part, w in zip(inputs, wants, strict=True)]
            return _run(steps, local, [part[rank] for part in owed], self.random, device)

        if local_steps(self.node, self.types, strategy.operands, strategy.form):
            runs = on_all_devices(mesh, run)
        else:
            runs = [run(rank, None) for rank in range(mesh.size)]
        for i, (whole, layout) in enumerate(zip(self.results, layouts[1], strict=True)):
            parts = [results[i] for results, _ in runs]
            worst = _worst(whole, parts, layout, layout.partial, mesh, self.random)
            yield *worst, f"result {i}"
        for i, (gradient, layout) in enumerate(zip(self.gradients, layouts[0], strict=True)):
            if gradient is not None and not self.random:
                shards = [gradients[i] for _, gradients in runs]
                worst = _worst(gradient, shards, layout, layout.varying, mesh, False)
                yield *worst, f"gradient of operand {i}"

    def _deal(
        self, value: Tensor, layout: Layout, owed: tuple[str, ...], mesh: Mesh
    ) -> list[Tensor]:
        """Returns every rank's copy of its shard: slices, and random summands along `owed`."""
        groups = mesh.groups(owed)
        parts = [_noise(value, self.generator) for _ in groups[0][1:]]
        parts.insert(0, value - sum(parts) if parts else value)
        return [
            _slice(part, layout, rank, mesh).clone(memory_format=torch.contiguous_format)
            for rank, part in sorted(
                pair for group in groups for pair in zip(group, parts, strict=True)
            )
        ]


def read_example(rule: OpRule, example: str, device: Device = "cpu") -> Case:
    """Reads and runs an example; only the operator's name is taken from the rule.

    Raises:
        RuleError: the example cannot be read, or torch refuses it.
    """
    generator = torch.Generator().manual_seed(0)
    operands: list[Tensor] = []

    def operand(match: re.Match[str]) -> str:
        constant, text, relation, bound = match.groups()
        value = _draw(TensorType.parse(text), relation, int(bound or 0), generator)
        operands.append(value.to(device).requires_grad_(_flows(value) and not constant))
        return f"%x{len(operands) - 1}"

    text = f"graph 'example'\n%y = {rule.op}({_OPERAND.sub(operand, example)}) : ()"
    try:
        node = parse_graph(text).nodes[0]
    except AutoparError as error:
        raise RuleError(
            f"cannot read an example of {rule.op}", where=example, why=error.why
        ) from error
    with own_randomness(device):
        return _case(rule, node, operands, example, generator)


def read_node(rule: OpRule, graph: Graph, node: Node) -> Case:
    """Runs a node of a graph on random operands of the shapes that it reads there.

    Floating operands become float64, integers are 0 or 1 and so valid as indices.

    Raises:
        RuleError: torch refuses the node.
    """
    generator = torch.Generator().manual_seed(0)
    operands = []
    for source in map(graph.__getitem__, node.inputs):
        kind = replace(source.type, dtype="f64") if source.type.floating else source.type
        grad = source.requires_grad and node.requires_grad
        operands.append(_draw(kind, None, 0, generator).requires_grad_(grad and kind.floating))
    return read_call(rule, node, operands)


def read_call(rule: OpRule, node: Node, operands: Sequence[Tensor]) -> Case:
    """Runs a node of a graph on the given operands, in the order in which it reads them.

    Operands that require a gradient get one.

    Raises:
        RuleError: torch refuses the node.
    """
    numbers = itertools.count()
    node = node.map_refs(lambda _: Ref(f"x{next(numbers)}"))
    with own_randomness("cpu"):
        generator = torch.Generator().manual_seed(1)  # a different stream than the operands'
        return _case(rule, node, list(operands), str(node.source), generator)


def own_randomness(device: Device) -> AbstractContextManager[None]:
    """Returns a context whose random numbers leave the caller's generators unchanged."""
    at = torch.device(device)
    return torch.random.fork_rng([] if at.type == "cpu" else [at])


def _device(operands: Sequence[Tensor]) -> torch.device:
    """Returns the device of these operands."""
    return next((operand.device for operand in operands), torch.device("cpu"))


def _case(
    rule: OpRule, node: Node, operands: list[Tensor], text: str, generator: torch.Generator
) -> Case:
    """Runs a node whole, twice with different random numbers, and backwards."""
    try:
        torch.manual_seed(0)
        results, _ = _run((node,), operands, [], forward_only=True)
        torch.manual_seed(1)
        again, _ = _run((node,), operands, [], forward_only=True)
    except Exception as error:  # operators written in Python may raise anything
        raise RuleError(f"cannot run {rule.op}", where=text, why=str(error)) from error
    cotangents = [_noise(result, generator) for result in results]
    try:
        _, gradients = _run((node,), operands, cotangents)
    except Exception as error:
        raise RuleError(
            f"cannot run {rule.op} backwards",
            where=text,
            why=str(error),
            todo='mark operands that take no gradient: "const f64[4, 6]"',
        ) from error
    random = rule.op in _UNDETERMINED or any(map(_difference, results, again))
    node = replace(
        node,
        types=tuple(tensor_type(result) for result in results),
        requires_grad=any(result.requires_grad for result in results),
    )
    detached = tuple(result.detach() for result in results)
    return Case(
        rule, text, node, tuple(operands), detached, tuple(cotangents), tuple(gradients),
        random, generator,
    )  # fmt: skip


def _draw(kind: TensorType, relation: str | None, bound: int, generator: torch.Generator) -> Tensor:
    """Draws a random operand: any numbers, positive ones (">"), or from 0 up to `bound` ("<")."""
    dtype = TORCH_DTYPES[kind.dtype]
    if not kind.floating:
        low, high = (1, 9) if relation == ">" else (0, bound or 2)
        return torch.randint(low, high, kind.shape, generator=generator).to(dtype)
    if relation is None:
        return torch.randn(kind.shape, dtype=dtype, generator=generator)
    value = torch.rand(kind.shape, dtype=dtype, generator=generator) * 0.9 + 0.05
    return value + 0.5 if relation == ">" else value * bound


def _flows(value: Tensor) -> bool:
    """Returns whether a value can have a gradient."""
    return value.is_floating_point() or value.is_complex()


def _numbers(value: Tensor) -> Tensor:
    """Returns real numbers: both parts of complex ones."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws random numbers of the shape and dtype of `like`."""
    if _flows(like):
        return torch.randn(like.shape, dtype=like.dtype, generator=generator).to(like.device)
    return torch.randint(0, 9, like.shape, generator=generator).to(like)


def _run(
    steps: Sequence[Node],
    operands: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    forward_only: bool = False,
    device: ThreadDevice | None = None,
) -> _Outcome:
    """Returns the results of the last step, and the gradients of operands that require one.

    In-place operators work on copies.
    """
    names = {name: None for step in steps for name in step.inputs}
    computed = {step.name for step in steps}
    copies = [value.detach().clone().requires_grad_(value.requires_grad) for value in operands]
    read = [name for name in names if name not in computed]
    values: dict[str, Any] = dict(zip(read, copies, strict=True))
    if steps[0].op == "getitem":
        values = {name: (value,) for name, value in values.items()}
    for step in steps:
        values[step.name] = execute(step, values, _device(copies), device)
    value = values[steps[-1].name]
    results = [value] if isinstance(value, Tensor) else list(value)
    gradients: list[Tensor | None] = [None] * len(copies)
    if forward_only:
        return results, gradients
    pairs = zip(results, cotangents, strict=True)
    flows = [(result, cotangent) for result, cotangent in pairs if result.requires_grad]
    wanted = [i for i, copy in enumerate(copies) if copy.requires_grad]
    if flows and wanted:
        found = torch.autograd.grad(
            [result for result, _ in flows],
            [copies[i] for i in wanted],
            [cotangent for _, cotangent in flows],
            allow_unused=True,
        )
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
    return results, gradients


def _slice(value: Tensor, layout: Layout, rank: int, mesh: Mesh) -> Tensor:
    """Returns a rank's slice of the split dimensions of `value`."""
    position = mesh.coordinate(rank)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            value = value.tensor_split(mesh.axis_size(axis), dim)[position[axis]]
    return value


def _extent(mesh: Mesh, rank: int) -> Callable[[int, tuple[str, ...]], int]:
    """Returns a function from a split dimension to the number of a rank's elements."""
    position = mesh.coordinate(rank)
    return lambda size, axes: Layout((axes,)).local_shape((size,), mesh, position)[0]


def _worst(
    whole: Tensor,
    parts: Sequence[Tensor | None],
    layout: Layout,
    owed: tuple[str, ...],
    mesh: Mesh,
    shape_only: bool,
) -> tuple[float, int]:
    """Returns the largest difference over ranks and its rank, after summing along `owed`."""
    worst = (0.0, 0)
    for group in mesh.groups(owed):
        held = [part.detach() for part in map(parts.__getitem__, group) if part is not None]
        for rank in group:
            expected = _slice(whole, layout, rank, mesh)
            if len(held) < len(group) or any(part.shape != expected.shape for part in held):
                difference = math.inf
            elif shape_only:
                difference = 0.0
            else:
                total = held[0] if len(held) == 1 else torch.stack(held).sum(0)
                difference = _difference(total, expected)
            worst = max(worst, (difference, rank))
    return worst


def _difference(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors of one shape, relative for large elements.

    NaN equals NaN, and infinity equals infinity.
    """
    a, b = (_numbers(tensor.detach()).double().flatten() for tensor in (one, other))
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    if not unequal.any():
        return 0.0
    scale = max(1.0, b.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    difference = (a - b)[unequal].abs().max().item() / scale
    return math.inf if math.isnan(difference) else difference
