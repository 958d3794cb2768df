"""Convolutions and pooling as sliding windows: the elements that a shard needs from its neighbours.

Output o reads the inputs from o s - p to o s - p + d (k - 1), for kernel k, stride s, padding p and
dilation d. If the input is s times as long as the output, a device with the outputs [a, b) has the
inputs [a s, b s). It also needs p inputs before these and d (k - 1) + 1 - s - p after them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Node
from autopar.ir.rewrite import argument
from autopar.ir.tensor import TensorType

_OPERATOR = re.compile(r"aten\.(conv|max_pool|avg_pool)([123])d(\.padding)?$")
_CEIL = {"max_pool": 5, "avg_pool": 4}


@dataclass(frozen=True)
class Halo:
    """The inputs that a shard of one dimension needs in addition to its own.

    Attributes:
        before, after: number of elements before and after its own; negative if it needs fewer.
        stride: inputs per output.
        fill: value beyond the ends.
    """

    before: int
    after: int
    stride: int
    fill: float

    @property
    def least(self) -> int:
        """The minimum number of outputs of a shard that needs only its direct neighbours."""
        return max(1, -(-max(self.before, self.after) // self.stride))


def windowed(node: Node) -> bool:
    """Returns whether the operator slides a window."""
    return _OPERATOR.match(node.op) is not None


def halos(node: Node, types: tuple[TensorType, ...]) -> dict[int, Halo]:
    """Returns the splittable dimensions of the input, with the halo that their shards need.

    Args:
        node: an operator for which `windowed` is true.
        types: types of its operands.
    """
    kind, space = _kind(node)
    kernel, stride, padding, dilation = _window(node, types)
    if not padding or _refused(node, kind, padding):
        return {}
    halo_of = {}
    fill = -math.inf if kind == "max_pool" else 0.0
    for i in range(space):
        dim = len(types[0].shape) - space + i
        length, steps = types[0].shape[dim], node.type.shape[dim]
        halo = Halo(
            padding[i], dilation[i] * (kernel[i] - 1) + 1 - stride[i] - padding[i], stride[i], fill
        )
        if length == steps * stride[i] and halo.after <= padding[i]:
            halo_of[dim] = halo
    return halo_of


def without_padding(
    node: Node, value: Arg, types: tuple[TensorType, ...], dims: frozenset[int]
) -> Node:
    """Returns the operator on `value`, which already contains the borders along `dims`."""
    kind, space = _kind(node)
    kernel, stride, padding, dilation = _window(node, types)
    first = len(types[0].shape) - space
    left = tuple(0 if first + i in dims else pad for i, pad in enumerate(padding))
    if kind == "conv":
        bias, groups = argument(node, 2, "bias"), argument(node, 6, "groups", 1)
        args: tuple[Arg, ...] = (value, node.args[1], bias, stride, left, dilation, groups)
        op = node.op.removesuffix(".padding")
        return replace(node, op=op, args=args, kwargs=())
    args = (value, kernel, stride, left)
    if kind == "max_pool":
        args += (dilation,)
    elif len(node.args) > 6 or node.keyword("divisor_override") is not None:
        args += (False, True, argument(node, 6, "divisor_override"))
    return replace(node, args=args, kwargs=())


def _kind(node: Node) -> tuple[str, int]:
    match = _OPERATOR.match(node.op)
    assert match is not None
    return match[1], int(match[2])


def _window(
    node: Node, types: tuple[TensorType, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns (kernel, stride, padding, dilation), one number per dimension.

    Padding is empty if it differs between the two sides.
    """
    kind, space = _kind(node)
    if kind != "conv":
        kernel = _numbers(argument(node, 1, "kernel_size"), space, (1,) * space)
        stride = _numbers(argument(node, 2, "stride"), space, kernel)
        padding = _numbers(argument(node, 3, "padding"), space, (0,) * space)
        dilated = argument(node, 4, "dilation") if kind == "max_pool" else None
        return kernel, stride, padding, _numbers(dilated, space, (1,) * space)
    kernel = types[1].shape[-space:]
    ones = (1,) * space
    stride = _numbers(argument(node, 3, "stride"), space, ones)
    dilation = _numbers(argument(node, 5, "dilation"), space, ones)
    padded = argument(node, 4, "padding")
    if padded == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        even = all(total % 2 == 0 for total in reach)
        return kernel, stride, tuple(t // 2 for t in reach) if even else (), dilation
    given = None if padded == "valid" else padded
    return kernel, stride, _numbers(given, space, (0,) * space), dilation


def _numbers(arg: Arg, space: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns one number per dimension."""
    if isinstance(arg, int):
        return (arg,) * space
    numbers = tuple(int(str(n)) for n in arg) if isinstance(arg, tuple) else ()
    return numbers * space if len(numbers) == 1 else numbers or default


def _refused(node: Node, kind: str, padding: tuple[int, ...]) -> bool:
    """Returns whether windows at the ends differ from those inside."""
    if kind == "conv":
        return False
    if argument(node, _CEIL[kind], "ceil_mode", False) is True:
        return True
    counts_padding = argument(node, 5, "count_include_pad", True) is True
    return kind == "avg_pool" and any(padding) and not counts_padding
