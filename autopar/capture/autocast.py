"""torch.autocast inside a forward, as casts of the operands of those operators that it casts for.

A trace has the operators of such a block as the model wrote them, and results in the dtypes that
autocast gave them. Which operands it casts, and to what, is asked of torch itself, one operator
after the other, so that none of its lists is repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.composite import has_kernel, is_composite, parts
from autopar.capture.traced import source_of, tensors_of
from autopar.errors import CaptureError

# These call products that autocast casts for, where a trace does not see them.
_HIDDEN = (torch.ops.aten.bilinear.default, torch.ops.aten._trilinear.default)


@dataclass(frozen=True)
class Autocast:
    """A block of autocast that is switched on: the kind of its devices, and its dtype."""

    device: str
    dtype: torch.dtype

    def write_out(self, graph: fx.Graph) -> None:
        """Put the casts into the graph of such a block; it is the same without autocast then.

        Blocks in it, whose graphs are their own, are left as they are.

        Raises:
            CaptureError: casts of operands do not do what autocast does to an operator.
        """
        for node in list(graph.nodes):
            if not isinstance(node.target, OpOverload):
                continue
            if node.target in _HIDDEN:
                raise CaptureError(
                    f"{node.target} is called under torch.autocast",
                    where=str(source_of(node)),
                    why="which of its products are cast is not known",
                    todo="write F.bilinear as torch.einsum, or switch autocast off around it",
                )
            if self._treats(node):
                self._cast(node)
            elif is_composite(node, ()):
                with torch.autocast(self.device, self.dtype, cache_enabled=False):
                    flows = [_is_floating(item) for item in node.all_input_nodes]
                    made = parts(node, flows)
                if any(map(self._treats, made.nodes)):
                    self.write_out(made)
                    _take_apart(node, made)

    def _treats(self, node: fx.Node) -> bool:
        """Returns whether autocast looks at an operator itself, not at those that it is made of."""
        target, key = node.target, f"Autocast{self.device.upper()}"
        return isinstance(target, OpOverload) and has_kernel(target, key)

    def _cast(self, node: fx.Node) -> None:
        """Cast the operands of an operator as autocast does."""
        with torch.autocast(self.device, self.dtype, cache_enabled=False):
            casts, results = _run(node)
        with torch.autocast(self.device, enabled=False), node.graph.inserting_before(node):
            for item, dtype in casts.items():
                _insert(node, item, dtype)
            _, made = _run(node)
        dtypes, wanted = [value.dtype for value in made], [value.dtype for value in results]
        if dtypes == wanted:
            return
        if len(wanted) == 1 and any(a.name == "dtype" for a in node.target._schema.arguments):  # type: ignore[union-attr]
            node.kwargs = {**node.kwargs, "dtype": wanted[0]}
            return
        raise CaptureError(
            f"torch.autocast changes more than the operands of {node.target}",
            where=str(source_of(node)),
            why=f"with these cast its results are {dtypes}, not {wanted}",
            todo="switch autocast off around it, and cast its operands",
        )


class _Seen(TorchDispatchMode):
    """Notes which of some tensors are cast, and to what."""

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
    """The operands that an operator casts when it runs without values, and its results."""
    operands = {item: item.meta["val"] for item in node.all_input_nodes}
    floating = {item: value for item, value in operands.items() if _is_floating(item)}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    with torch.no_grad(), _Seen(floating) as seen:
        results = node.target(*args, **kwargs)  # type: ignore[operator]
    return seen.casts, tensors_of(results)


def _is_floating(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


def _insert(node: fx.Node, operand: fx.Node, dtype: torch.dtype) -> None:
    """Let an operator read an operand in another dtype."""
    cast = node.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
    cast.meta = {**node.meta, "val": operand.meta["val"].to(dtype)}
    node.replace_input_with(operand, cast)


def _take_apart(node: fx.Node, made: fx.Graph) -> None:
    """Put the operators of a graph in the place of one."""
    inputs = (item for item in made.nodes if item.op == "placeholder")
    places = dict(zip(inputs, node.all_input_nodes, strict=True))
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(made, places)
    for user in list(node.users):
        if isinstance(results, tuple):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    node.graph.erase_node(node)
