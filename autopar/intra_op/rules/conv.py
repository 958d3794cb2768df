"""Convolutions, pooling and resampling.

Samples and channels can be split. Space can be split where a part of the output needs only a part
of the input and its neighbours' borders (see `operators/window.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import OpRule, all_whole, argument, rule, whole_along
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType
from autopar.operators.window import halos


def _sliding(node: Node, types: tuple[TensorType, ...], space: int) -> tuple[str, str]:
    """Returns the spatial dimensions of the input and the output of a sliding window."""
    splittable = halos(node, types)
    first = len(types[0].shape) - space
    into, out = [], []
    for i in range(space):
        halo = splittable.get(first + i)
        if halo is None:
            into.append(f"i{i}!")
            out.append(f"r{i}!")
        else:
            name = f"h{i}~{halo.least if halo.least > 1 else ''}"
            into.append(name if halo.stride == 1 else f"({name} s{i})")
            out.append(name)
    return " ".join(into), " ".join(out)


def _names(prefix: str, rank: int) -> str:
    return " ".join(f"{prefix}{i}!" for i in range(rank))


def _conv(space: int, groups: int) -> Callable[[Node, tuple[TensorType, ...]], str]:
    """Returns the rule of a convolution over `space` dimensions; `groups` is an argument index."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        """Keeps channels of a grouped convolution whole, as the local count would differ."""
        kernel, weight = _names("k", space), "co ci"
        if "transpose" in node.op:
            weight = "ci co"
            image, out = _unfolding(node, types, space)
        else:
            image, out = _sliding(node, types, space)
        if argument(node, groups, "groups", 1) != 1:
            return f"... ci! {image}, u! v! {kernel}, co! -> ... co! {out}"
        return f"... ci {image}, {weight} {kernel}, +co -> ... co {out}"

    return spec


def _unfolding(node: Node, types: tuple[TensorType, ...], space: int) -> tuple[str, str]:
    """Returns the spatial dimensions of a transposed convolution; split if no windows overlap."""
    kernel = types[1].shape[-space:]
    into, out = [], []
    for i in range(space):
        length, result = types[0].shape[i - space], node.type.shape[i - space]
        given = argument(node, 3, "stride", 1)
        steps = given[i % len(given)] if isinstance(given, tuple) else given
        alone = kernel[i] == steps and result == length * kernel[i]
        into.append(f"h{i}" if alone else f"i{i}!")
        out.append(f"(h{i} s{i})" if alone else f"r{i}!")
    return " ".join(into), " ".join(out)


def _pool(space: int) -> Callable[[Node, tuple[TensorType, ...]], str]:
    """Returns the rule of pooling, which treats each channel by itself."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        into, out = _sliding(node, types, space)
        return f"... {into} -> ... {out}"

    return spec


def _conv_flops(node: Node, types: tuple[TensorType, ...]) -> str:
    """Counts every weight once per pixel: of the result or, if transposed, of the input."""
    transposed = "transpose" in node.op
    pixels = (types[0] if transposed else node.type).numel
    channels = types[1].shape[0]
    return f"2 {pixels * types[1].numel // channels}"


def _trailing(space: int) -> str:
    """Returns a rule for two operands and results, equal except in the last `space` dimensions."""
    into, out = (", ".join([f"... {_names(prefix, space)}"] * 2) for prefix in "ir")
    return f"{into} -> {out}"


_CONV_EXAMPLES = {
    1: (
        "f64[4, 4, 6], f64[6, 4, 3], f64[6]",
        "f64[2, 4, 6], f64[4, 2, 3], f64[4], (1,), (0,), (1,), 2",
        "f64[2, 4, 7], f64[3, 4, 5], f64[3], (1,), (4,), (2,)",
        "f64[2, 4, 12], f64[6, 4, 1], None, (2,)",
    ),
    2: (
        "f64[2, 4, 4, 3], f64[6, 4, 2, 2], f64[6], (2, 1), (1, 0)",
        "f64[2, 4, 4, 3], f64[4, 2, 2, 2], None, (1, 1), (0, 0), (1, 1), 2",
        "f64[1, 2, 12, 6], f64[3, 2, 3, 3], f64[3], (2, 1), (1, 1)",
    ),
    3: ("f64[2, 4, 2, 3, 2], f64[6, 4, 1, 2, 2], f64[6]",),
}
_SAME = {
    1: "f64[2, 4, 6], f64[6, 4, 3], f64[6], (1,), 'same'",
    2: "f64[2, 4, 3, 3], f64[6, 4, 3, 1], f64[6], (1, 1), 'same'",
    3: "f64[2, 4, 2, 3, 2], f64[6, 4, 1, 3, 1], f64[6], (1, 1, 1), 'same'",
}
_TRANSPOSED_EXAMPLES = {
    "1d": ("f64[2, 4, 3], f64[4, 6, 2], f64[6]",),
    "2d.input": (
        "f64[2, 4, 2, 3], f64[4, 6, 2, 2], f64[6]",
        "f64[2, 2, 4, 6], f64[2, 3, 2, 3], f64[3], (2, 3)",
    ),
    "3d.input": ("f64[2, 4, 2, 3, 2], f64[4, 6, 2, 2, 2], f64[6]",),
}


def _convolutions() -> tuple[OpRule, ...]:
    plain = [(f"aten.conv{n}d", n, 6, _CONV_EXAMPLES[n]) for n in (1, 2, 3)]
    plain += [(f"aten.conv{n}d.padding", n, 6, (_SAME[n],)) for n in (1, 2, 3)]
    plain += [
        (f"aten.conv_transpose{kind}", int(kind[0]), 6, examples)
        for kind, examples in _TRANSPOSED_EXAMPLES.items()
    ]
    return tuple(
        rule(op, _conv(space, groups), flops=_conv_flops, examples=examples)
        for op, space, groups, examples in plain
    )


_LINE, _PLANE, _CUBE = "f64[4, 6, 8]", "f64[2, 6, 4, 8]", "f64[2, 2, 4, 2, 4]"
_POOLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "avg_pool1d": (1, (f"{_LINE}, (2,)", f"{_LINE}, (3,), (1,), (1,)")),
    "avg_pool2d": (2, (f"{_PLANE}, (2, 2)", f"{_PLANE}, (3, 3), (1, 1), (1, 1), False, False")),
    "avg_pool3d": (3, (f"{_CUBE}, (2, 1, 2)",)),
    "max_pool1d": (1, (f"{_LINE}, (2,)",)),
    "max_pool2d": (2, (f"{_PLANE}, (3, 2), (1, 2), (1, 0)", f"{_PLANE}, (3, 3), (2, 2), (1, 1)")),
    "max_pool3d": (3, (f"{_CUBE}, (2, 1, 2)",)),
}
_SPATIAL = {
    "max_pool1d_with_indices": (1, f"{_LINE}, (2,)"),
    "max_pool2d_with_indices": (2, f"{_PLANE}, (2, 2)"),
    "max_pool3d_with_indices": (3, f"{_CUBE}, (2, 1, 2)"),
    "max_unpool2d": (2, "f64[2, 6, 2, 4], i64[2, 6, 2, 4]<8, (4, 8)"),
    "max_unpool3d": (
        3,
        "f64[2, 2, 2, 2, 2], i64[2, 2, 2, 2, 2]<8, (4, 2, 4), (2, 1, 2), (0, 0, 0)",
    ),
    "adaptive_avg_pool1d": (1, f"{_LINE}, (2,)"),
    "adaptive_avg_pool2d": (2, f"{_PLANE}, (1, 1)"),
    "adaptive_avg_pool3d": (3, f"{_CUBE}, (2, 1, 2)"),
    "adaptive_max_pool1d": (1, f"{_LINE}, (2,)"),
    "adaptive_max_pool2d": (2, f"{_PLANE}, (2, 2)"),
    "adaptive_max_pool3d": (3, f"{_CUBE}, (2, 1, 2)"),
    "upsample_linear1d.vec": (1, f"{_LINE}, (12,), False, None"),
    "upsample_bilinear2d.vec": (2, f"{_PLANE}, (8, 12), False, None"),
    "upsample_trilinear3d.vec": (3, f"{_CUBE}, (6, 4, 6), False, None"),
    "upsample_bicubic2d.vec": (2, f"{_PLANE}, (8, 12), False, None"),
    "_upsample_bilinear2d_aa": (2, f"{_PLANE}, (2, 6), False"),
    "_upsample_bilinear2d_aa.vec": (2, f"{_PLANE}, (2, 6), False, None"),
    "_upsample_bicubic2d_aa.vec": (2, f"{_PLANE}, (2, 6), False, None"),
}


def _nearest(space: int) -> Callable[[Node, tuple[TensorType, ...]], str]:
    """Returns a rule for repeating every pixel an integral number of times."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        given = argument(node, 2, "scale_factors")
        scales = given if isinstance(given, tuple) else ()
        into, out = [], []
        for i in range(space):
            length, result = types[0].shape[i - space], node.type.shape[i - space]
            alike = result % length == 0 and result // length in scales[i : i + 1]
            into.append(f"h{i}" if alike else f"i{i}!")
            out.append(f"(h{i} s{i})" if alike else f"r{i}!")
        return f"... {' '.join(into)} -> ... {' '.join(out)}"

    return spec


_NEAREST = tuple(
    (f"aten.{op}{n}d.vec", n, (f"{x}, None, {(1.5,) * n}", f"{x}, None, {(2.0,) * n}"))
    for op in ("upsample_nearest", "_upsample_nearest_exact")
    for n, x in ((1, _LINE), (2, _PLANE), (3, _CUBE))
)


def _shuffled(node: Node, types: tuple[TensorType, ...]) -> str:
    return whole_along(node, types, (1,))


def _windows(node: Node, types: tuple[TensorType, ...]) -> str:
    """Orders a window's elements after its channel; a single channel is one row and stays whole."""
    image, columns = "... c h! w!", "... (c k) l!"
    outward = node.op == "aten.im2col"
    if (types[0] if outward else node.type).shape[-3] == 1:
        image, columns = "... 1 h! w!", "... k! l!"
    return f"{image} -> {columns}" if outward else f"{columns} -> {image}"


def _pixels(node: Node, types: tuple[TensorType, ...]) -> str:
    """Maps channels to pixels, or back; with one channel the outermost factor would be p."""
    packed, spread = "... (c p q) h w", "... c (h p) (w q)"
    outward = node.op == "aten.pixel_shuffle"
    many, few = (types[0], node.type) if outward else (node.type, types[0])
    if not many.numel or (few.shape[-3] == 1 and many.shape[-2] == 1):
        return "... i! j! k! -> ... l! m! n!"
    return f"{packed} -> {spread}" if outward else f"{spread} -> {packed}"


def _fractional(space: int) -> Callable[[Node, tuple[TensorType, ...]], str]:
    """Gives each channel of each sample random numbers of its own, drawn beforehand."""

    def spec(node: Node, types: tuple[TensorType, ...]) -> str:
        if len(types[0].shape) != space + 2:
            return all_whole(node, types)
        image, out = _names("i", space), _names("o", space)
        return f"b c {image}, b c k! -> b c {out}, b c {out}"

    return spec


def _grid(node: Node, types: tuple[TensorType, ...]) -> str:
    """Keeps images whole, since every grid point may read anywhere in its image."""
    space = len(types[0].shape) - 2
    into, out = _names("i", space), " ".join(f"o{i}" for i in range(space))
    return f"b c {into}, b {out} k! -> b c {out}"


RULES = (
    *_convolutions(),
    *(
        rule(f"aten.{op}", _pool(space), linear="max" not in op, examples=examples)
        for op, (space, examples) in _POOLS.items()
    ),
    *(
        rule(op, _nearest(space), linear=True, examples=examples)
        for op, space, examples in _NEAREST
    ),
    *(
        rule(f"aten.{op}", _trailing(space), linear="max" not in op, examples=(example,))
        for op, (space, example) in _SPATIAL.items()
    ),
    rule(
        "aten.im2col",
        _windows,
        examples=(
            f"{_PLANE}, (2, 2), (1, 1), (0, 0), (2, 2)",
            "f64[2, 1, 4, 8], (2, 2), (1, 1), (0, 0), (2, 2)",
        ),
    ),
    rule(
        "aten.col2im",
        _windows,
        examples=(
            "f64[2, 24, 8], (4, 8), (2, 2), (1, 1), (0, 0), (2, 2)",
            "f64[2, 4, 8], (4, 8), (2, 2), (1, 1), (0, 0), (2, 2)",
        ),
    ),
    *(
        rule(
            f"aten.fractional_max_pool{space}d",
            _fractional(space),
            examples=(f"{image}, {(2,) * space}, {(2,) * space}, const f64[2, 4, {space}]<1",),
        )
        for space, image in ((2, "f64[2, 4, 6, 6]"), (3, "f64[2, 4, 6, 6, 6]"))
    ),
    rule(
        "aten.grid_sampler_3d",
        _grid,
        linear=((0,),),
        examples=(f"{_CUBE}, f64[2, 2, 4, 2, 3]<1, 0, 0, False",),
    ),
    rule(
        "aten.grid_sampler",
        _grid,
        linear=((0,),),
        examples=(
            f"{_PLANE}, f64[2, 4, 6, 2]<1, 0, 0, False",
            f"{_CUBE}, f64[2, 2, 4, 2, 3]<1, 0, 0, False",
        ),
    ),
    rule("aten.affine_grid_generator", all_whole, examples=("f64[2, 2, 3], (2, 3, 2, 4), False",)),
    rule(
        "aten.pixel_shuffle",
        _pixels,
        linear=True,
        examples=("f64[2, 24, 4, 6], 2", "f64[2, 4, 1, 6], 2"),
    ),
    rule(
        "aten.pixel_unshuffle",
        _pixels,
        linear=True,
        examples=("f64[2, 6, 4, 12], 2", "f64[2, 1, 2, 12], 2"),
    ),
    rule("aten.channel_shuffle", _shuffled, linear=True, examples=("f64[4, 6, 2, 2], 3",)),
)
