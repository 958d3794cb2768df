"""Replaces torch.autocast inside a forward by casts of operands.

A trace contains the operators of such a block without the casts, and with results in autocast's
dtypes. This file runs each operator under autocast without values, to observe which operands torch
casts and to which dtype. It needs no copy of torch's lists of operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.composite import has_kernel, is_composite, parts
from autopar.capture.traced_nodes import source_of, tensors_of
from autopar.errors import CaptureError

# These compute products whose operands autocast casts, which a trace does not show.
_HIDDEN = (torch.ops.aten.bilinear.default, torch.ops.aten._trilinear.default)


@dataclass(frozen=True)
class Autocast:
    """An active autocast block.

    Attributes:
        device: the type of its devices.
        dtype: the dtype to which it casts.
    """

    device: str
    dtype: torch.dtype

    def write_out(self, graph: fx.Graph) -> None:
        """Inserts the casts into the graph of the block, which then needs no autocast.

        Nested blocks have graphs of their own and are left unchanged.

        Raises:
            CaptureError: casting the operands does not reproduce autocast's effect on an operator.
        """
        for node in list(graph.nodes):
            if not isinstance(node.target, OpOverload):
                continue
            if node.target in _HIDDEN:
                raise CaptureError(
                    f"{node.target} is called under torch.autocast",
                    where=str(source_of(node)),
                    why="it is unknown which of its products are cast",
                    todo="write F.bilinear as torch.einsum, or switch autocast off around it",
                )
            if self._treats(node):
                self._cast(node)
            elif is_composite(node, ()):
                with torch.autocast(self.device, self.dtype, cache_enabled=False):
                    flows = [_is_floating(item) for item in node.all_input_nodes]
                    inner = parts(node, flows)
                if any(map(self._treats, inner.nodes)):
                    self.write_out(inner)
                    _replace_by(node, inner)

    def _treats(self, node: fx.Node) -> bool:
        """Returns whether autocast handles an operator itself rather than its parts."""
        target, key = node.target, f"Autocast{self.device.upper()}"
        return isinstance(target, OpOverload) and has_kernel(target, key)

    def _cast(self, node: fx.Node) -> None:
        """Casts the operands of an operator as autocast does."""
        with torch.autocast(self.device, self.dtype, cache_enabled=False):
            casts, results = _run(node)
        with torch.autocast(self.device, enabled=False), node.graph.inserting_before(node):
            for item, dtype in casts.items():
                _insert(node, item, dtype)
            _, cast_results = _run(node)
        dtypes, wanted = ([v.dtype for v in values] for values in (cast_results, results))
        if dtypes == wanted:
            return
        if len(wanted) == 1 and any(a.name == "dtype" for a in node.target._schema.arguments):  # type: ignore[union-attr]
            node.kwargs = {**node.kwargs, "dtype": wanted[0]}
            return
        raise CaptureError(
            f"torch.autocast changes more than the operands of {node.target}",
            where=str(source_of(node)),
            why=f"with cast operands its results are {dtypes}, not {wanted}",
            todo="switch autocast off around it, and cast its operands",
        )


class _CastRecorder(TorchDispatchMode):
    """Records which of some tensors are cast, and to which dtype."""

    def __init__(self, operands: dict[fx.Node, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands = operands
        self.casts: dict[fx.Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == "aten._to_copy.default":
            same = [node for node, tensor in self.operands.items() if tensor is args[0]]
            self.casts |= dict.fromkeys(same, result.dtype)
        return result


def _run(node: fx.Node) -> tuple[dict[fx.Node, torch.dtype], list[Tensor]]:
    """Runs an operator without values; returns the operands that it casts, and its results."""
    operands = {item: item.meta["val"] for item in node.all_input_nodes}
    floating = {item: value for item, value in operands.items() if _is_floating(item)}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    with torch.no_grad(), _CastRecorder(floating) as recorder:
        results = node.target(*args, **kwargs)  # type: ignore[operator]
    return recorder.casts, tensors_of(results)


def _is_floating(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


def _insert(node: fx.Node, operand: fx.Node, dtype: torch.dtype) -> None:
    """Casts an operand of an operator."""
    cast = node.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
    cast.meta = {**node.meta, "val": operand.meta["val"].to(dtype)}
    node.replace_input_with(operand, cast)


def _replace_by(node: fx.Node, inner: fx.Graph) -> None:
    """Replaces an operator by the operators of a graph."""
    inputs = (item for item in inner.nodes if item.op == "placeholder")
    places = dict(zip(inputs, node.all_input_nodes, strict=True))
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(inner, places)
    for user in list(node.users):
        if isinstance(results, tuple):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    node.graph.erase_node(node)
