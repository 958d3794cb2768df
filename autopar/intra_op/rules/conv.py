"""Convolutions, pooling and resampling: samples and channels split, space stays whole."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import OpRule, argument, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType


def _names(prefix: str, rank: int) -> str:
    return " ".join(f"{prefix}{i}!" for i in range(rank))


def _conv(space: int, groups: int) -> Callable[[Node, tuple[TensorType, ...]], str]:
    """A convolution over `space` dimensions whose argument number `groups` counts the groups."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        """Channels of a grouped convolution stay whole: the local count would be another."""
        image, kernel, out = (_names(prefix, space) for prefix in "ikr")
        weight = "ci co" if "transpose" in node.op else "co ci"
        if argument(node, groups, "groups", 1) != 1:
            return f"... ci! {image}, u! v! {kernel}, co! -> ... co! {out}"
        return f"... ci {image}, {weight} {kernel}, +co -> ... co {out}"

    return spec


def _conv_flops(node: Node, types: tuple[TensorType, ...]) -> str:
    """Every element of the weight meets every pixel: of the result, or transposed, of the input."""
    transposed = "transpose" in node.op
    pixels = (types[0] if transposed else node.type).numel
    channels = types[1].shape[0]
    return f"2 {pixels * types[1].numel // channels}"


def _trailing(space: int) -> str:
    return f"... {_names('i', space)} -> ... {_names('r', space)}, ... {_names('r', space)}"


_CONV_EXAMPLES = {
    1: (
        "f64[4, 4, 6], f64[6, 4, 3], f64[6]",
        "f64[2, 4, 6], f64[4, 2, 3], f64[4], (1,), (0,), (1,), 2",
    ),
    2: (
        "f64[2, 4, 4, 3], f64[6, 4, 2, 2], f64[6], (2, 1), (1, 0)",
        "f64[2, 4, 4, 3], f64[4, 2, 2, 2], None, (1, 1), (0, 0), (1, 1), 2",
    ),
    3: ("f64[2, 4, 2, 3, 2], f64[6, 4, 1, 2, 2], f64[6]",),
}
_TRANSPOSED_EXAMPLES = {
    "1d": ("f64[2, 4, 3], f64[4, 6, 2], f64[6]",),
    "2d.input": ("f64[2, 4, 2, 3], f64[4, 6, 2, 2], f64[6]",),
}


def _convolutions() -> tuple[OpRule, ...]:
    plain = [(f"aten.conv{n}d", n, 6, _CONV_EXAMPLES[n]) for n in (1, 2, 3)]
    same = ("f64[2, 4, 3, 3], f64[6, 4, 3, 1], f64[6], (1, 1), 'same'",)
    plain.append(("aten.conv2d.padding", 2, 6, same))
    plain += [
        (f"aten.conv_transpose{kind}", int(kind[0]), 6, examples)
        for kind, examples in _TRANSPOSED_EXAMPLES.items()
    ]
    return tuple(
        rule(op, _conv(space, groups), flops=_conv_flops, examples=examples)
        for op, space, groups, examples in plain
    )


_LINE, _PLANE = "f64[4, 6, 8]", "f64[2, 6, 4, 8]"
_SPATIAL = {
    "avg_pool1d": (1, f"{_LINE}, (2,)"),
    "avg_pool2d": (2, f"{_PLANE}, (2, 2)"),
    "max_pool1d": (1, f"{_LINE}, (2,)"),
    "max_pool2d": (2, f"{_PLANE}, (3, 2), (1, 2), (1, 0)"),
    "max_pool2d_with_indices": (2, f"{_PLANE}, (2, 2)"),
    "adaptive_avg_pool1d": (1, f"{_LINE}, (2,)"),
    "adaptive_avg_pool2d": (2, f"{_PLANE}, (1, 1)"),
    "adaptive_max_pool2d": (2, f"{_PLANE}, (2, 2)"),
    "upsample_nearest2d.vec": (2, f"{_PLANE}, (8, 12), None"),
    "upsample_bilinear2d.vec": (2, f"{_PLANE}, (8, 12), False, None"),
    "upsample_bicubic2d.vec": (2, f"{_PLANE}, (8, 12), False, None"),
}
RULES = (
    *_convolutions(),
    *(
        rule(f"aten.{op}", _trailing(space), examples=(example,))
        for op, (space, example) in _SPATIAL.items()
    ),
)
