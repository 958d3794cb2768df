"""Compares the rules with those of torch's DTensor, on one mesh axis of two devices.

An operator on a rule's example is traced to the operators that DTensor sees below autograd, and
every combination of operand placements is propagated through the trace. DTensor allows a
combination if nothing has to be redistributed on the way. No process runs: the process group is
torch's fake one.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from autopar.intra_op.proofs.case import Case, read_example
from autopar.intra_op.rule import OpRule
from autopar.intra_op.strategy import Strategy, strategies
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.interpret import execute

Placements = tuple[Placement, ...]
MESH = Mesh.parse("cpu: x=2")
MOST = 700  # combinations of one example; recurrent layers have more, and are left out
# No operators of torch, so that DTensor has none of them.
OURS = ("getitem", "autopar.detach", "autopar.share", "autopar.write")


@dataclass(frozen=True)
class Difference:
    """A combination that DTensor allows and the rule does not.

    Attributes:
        kind: "wrong" if it does not hold on this example; "sum" if an operand is owed a sum;
            "mean" or "other" if a result is owed a mean or something else that is no sum; "strided"
            if a result is split in strides; and "split".
        example: where.
        operands, results: the placements.
    """

    kind: str
    example: str
    operands: Placements
    results: Placements

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.operands, self.results))
        return f"{self.kind}: ({self.example}) {left} -> {right}"


@dataclass(frozen=True)
class Comparison:
    """A comparison of one rule with DTensor's, over its examples.

    Attributes:
        op: its name.
        unknown: why DTensor has nothing to compare with, empty where it has.
        both, ours: how many combinations both allow, and the rule only.
        theirs: those that DTensor allows only.
    """

    op: str
    unknown: str
    both: int
    ours: int
    theirs: tuple[Difference, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of what DTensor allows only."""
        return frozenset(difference.kind for difference in self.theirs)


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """A mesh of two devices that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def compare(rule: OpRule, mesh: DeviceMesh) -> Comparison:
    """Returns the splits of a rule's examples, and those that DTensor allows."""
    unknown, both, ours, theirs = "", 0, 0, []
    compared = False
    for text in rule.examples:
        case = read_example(rule, text)
        options = [_options(value) for value in case.operands]
        if math.prod(map(len, options)) > MOST:
            unknown = unknown or "too many operands"
            continue
        mine = _mine(case)
        try:
            graph = make_fx(_call(case))(*(value.detach() for value in case.operands))
            _propagate(graph, tuple(Replicate() for _ in options), mesh)
        except Exception as error:  # torch refuses in many ways
            unknown = unknown or f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
            ours += len(mine) - 1
            continue
        compared = True
        found = dict(_allowed(graph, options, mesh))
        agreed = {
            into
            for into, out in found.items()
            if any(_agree(way, out) for way in mine.get(into, ()))
        }
        both, ours = both + len(agreed), ours + len(mine.keys() - found.keys())
        for into in found.keys() - agreed:
            theirs.append(Difference(_kind(case, into, found[into]), text, into, found[into]))
    ordered = tuple(sorted(theirs, key=str))
    return Comparison(rule.op, "" if compared else unknown, both, ours, ordered)


def _call(case: Case) -> Any:
    def call(*tensors: Tensor) -> Any:
        values = dict(zip(case.node.inputs, tensors, strict=True))
        return execute(case.node, values, torch.device("cpu"))

    return call


def _options(value: Tensor) -> list[Placement]:
    """Whole, split along any dimension, or owed a sum."""
    splits = [Shard(dim) for dim, size in enumerate(value.shape) if size > 1]
    return [Replicate(), *splits, *([Partial()] if value.is_floating_point() else [])]


def _allowed(
    graph: fx.GraphModule, options: list[list[Placement]], mesh: DeviceMesh
) -> Iterator[tuple[Placements, Placements]]:
    """(placements of the operands, those of the results) of what needs no redistribution."""
    for into in itertools.product(*options):
        try:
            out = _propagate(graph, into, mesh)
        except Exception:  # a combination that DTensor refuses
            continue
        if out is not None:
            yield into, out


def _propagate(graph: fx.GraphModule, into: Placements, mesh: DeviceMesh) -> Placements | None:
    """Placements of the results; None if an operator on the way asks for others than there are."""
    values: dict[fx.Node, Any] = {}
    given = iter(into)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = _spec(node.meta["val"], next(given), mesh)
        elif node.op == "get_attr":
            values[node] = _spec(getattr(graph, node.target), Replicate(), mesh)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target is operator.getitem:
                values[node] = args[0][args[1]]
            elif any(isinstance(leaf, DTensorSpec) for leaf in tree_leaves((args, kwargs))):
                values[node] = _step(node.target, args, dict(kwargs))
                if values[node] is None:
                    return None
            else:  # made out of nothing
                values[node] = _spec(node.meta["val"], Replicate(), mesh)
    results = fx.node.map_arg(graph.graph.output_node().args[0], values.__getitem__)
    listed = results if isinstance(results, (tuple, list)) else [results]
    return tuple(spec.placements[0] for spec in listed)


def _spec(value: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensorSpec:
    kind = TensorMeta(value.shape, value.stride(), value.dtype)
    return DTensorSpec(mesh, (placement,), tensor_meta=kind)


def _step(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """The layouts that one operator gives; None if it wants its operands in others."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    info = info or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    plain = tuple(list(arg) if isinstance(arg, list) else arg for arg in args)
    schema = OpSchema(op, plain, kwargs, schema_info=info)
    found = propagator.propagate_op_sharding_non_cached(schema)
    if found.needs_redistribute:  # of operands, or only of arguments that name a shape
        wanted = [spec.placements for spec in found.redistribute_schema.args_spec]
        if wanted != [spec.placements for spec in schema.args_spec]:
            return None
    return found.output_spec


def _mine(case: Case) -> dict[Placements, set[Placements]]:
    """What the rule allows: placements of the operands, and those of the results with them."""
    found: dict[Placements, set[Placements]] = {}
    for way in strategies(case.signature, MESH):
        into, out = (tuple(map(_placement, side)) for side in (way.operands, way.results))
        found.setdefault(into, set()).add(out)
    return found


def _owed(placement: Placement) -> str:
    """What a placement is owed: "sum", "avg", another reduction, or nothing."""
    if isinstance(placement, _NormPartial):
        return "norm"
    return str(placement.reduce_op) if isinstance(placement, Partial) else ""


def _agree(mine: Placements, theirs: Placements) -> bool:
    """Whether results are placed alike; what is owed may also be settled inside the operator."""
    return all(
        a == b or _owed(a) == _owed(b) == "sum" or (isinstance(a, Replicate) and _owed(b) != "")
        for a, b in zip(mine, theirs, strict=True)
    )


def _kind(case: Case, into: Placements, out: Placements) -> str:
    """The kind of a difference."""
    owed = {_owed(placement) for placement in out}
    if any(isinstance(placement, _StridedShard) for placement in out):
        return "strided"
    if not owed <= {"", "sum"}:
        return "mean" if owed <= {"", "sum", "avg"} else "other"
    shapes = [[len(tensor.shape) for tensor in side] for side in (case.types, case.results)]
    layouts = [
        tuple(map(_layout, side, ranks)) for side, ranks in zip((into, out), shapes, strict=True)
    ]
    forwards = replace(
        case,
        operands=tuple(value.detach() for value in case.operands),
        gradients=(None,) * len(case.operands),
    )
    writes = case.written  # which must be whole for another reason
    if not writes and forwards.failure(Strategy((), *layouts), MESH) is not None:
        return "wrong"
    return "sum" if any(map(_owed, into)) else "split"


def _layout(placement: Placement, rank: int) -> Layout:
    split = [("x",) if placement == Shard(dim) else () for dim in range(rank)]
    return Layout(tuple(split), ("x",) if _owed(placement) else ())


def _placement(layout: Layout) -> Placement:
    for dim, axes in enumerate(layout.dims):
        if axes:
            return Shard(dim)
    return Partial() if layout.partial else Replicate()
