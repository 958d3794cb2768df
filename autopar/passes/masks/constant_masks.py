"""Values of a graph that depend on no leaf and no random number, such as causal masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Ref
from autopar.ir.rewrite import writes
from autopar.operators.interpret import execute

# Larger constants, repetitions not counted, are not evaluated, since that would need gigabytes.
_LARGEST = 2**28
ANDS = {"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and"}


def constant_numbers(graph: Graph) -> dict[str, int]:
    """Numbers values that depend on no leaf and no randomness; equal values get equal numbers."""
    numbers: dict[str, int] = {}
    seen: dict[str, int] = {}
    for node in graph.nodes:
        if node.is_leaf or writes(node) or any(name not in numbers for name in node.inputs):
            continue
        if not _deterministic(node.op):
            continue
        plain = node.map_refs(lambda name: Ref(str(numbers[name])))
        numbers[node.name] = seen.setdefault(repr((plain.op, plain.args, plain.kwargs)), len(seen))
    return numbers


def _deterministic(op: str) -> bool:
    """Returns whether torch has the operator and it draws no random numbers."""
    if op in ("getitem", "autopar.detach", "autopar.share"):
        return True
    return _overload(op) is not None and not _has_tag(op, torch.Tag.nondeterministic_seeded)


def _overload(op: str) -> Any:
    """Returns torch's operator of that name, None if it has none."""
    namespace, name, overload = (*op.split("."), "default", "default")[:3]
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload, None)


def _has_tag(op: str, tag: torch.Tag) -> bool:
    return tag in getattr(_overload(op), "tags", ())


def _elementwise(op: str) -> bool:
    """Returns whether each element of the result depends only on the operands' same element."""
    return _has_tag(op, torch.Tag.pointwise) or op in ANDS or op.startswith("aten.to.")


def _views(op: str) -> bool:
    """Returns whether the result shares its operand's storage."""
    schema = getattr(_overload(op), "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def constant_value(graph: Graph, name: str) -> Tensor | None:
    """Returns the value `name`, computed on the CPU; None if that would need too much memory.

    Repetitions of a mask for every sequence of the batch are computed once: elementwise operators
    see one element of every repeated dimension.
    """
    needed = {name}
    stack = [name]
    while stack:
        for read in graph[stack.pop()].inputs:
            if read not in needed:
                needed.add(read)
                stack.append(read)
    left = {n: sum(user in needed for user in graph.users[n]) for n in needed}
    results: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.name not in needed:
            continue
        reads = {read: results[read] for read in node.inputs}
        elementwise = bool(reads) and _elementwise(node.op)
        if elementwise:
            reads = {read: unexpanded(value) for read, value in reads.items()}
        size = node.type.numel
        if elementwise:
            size = math.prod(torch.broadcast_shapes(*(value.shape for value in reads.values())))
        if size > _LARGEST and (elementwise or not _views(node.op)):
            return None
        value = execute(node, reads, torch.device("cpu"))
        results[node.name] = (value if elementwise else _repeating(value)).expand(node.type.shape)
        for read in dict.fromkeys(node.inputs):
            left[read] -= 1
            if not left[read]:
                del results[read]
    return results[name]


def unexpanded(value: Tensor) -> Tensor:
    """Returns `value` with one element along each expanded dimension."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride == 0:
            value = value.narrow(dim, 0, 1)
    return value


def _repeating(value: Tensor) -> Tensor:
    """Returns `value` with one element along each dimension whose elements are all equal."""
    value = unexpanded(value)
    for dim, size in enumerate(value.shape):
        first = value.narrow(dim, 0, min(size, 1))
        if size > 1 and bool((value == first).all()):
            value = first
    return value


def shown_by(mask: Tensor | None) -> Tensor | None:
    """Returns where a mask allows attention; None if it does more than hide keys, or is unknown.

    Args:
        mask: bool, or float with 0 where attention is allowed and the dtype's lowest value or less
            elsewhere; None if it is too large.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool(((mask == 0) | hidden).all()) else None
