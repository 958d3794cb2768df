"""Normalisations: dimensions of the statistics stay whole."""

from __future__ import annotations

from autopar.intra_op.rule import (
    all_whole,
    argument,
    broadcast,
    dimensions,
    letters,
    rule,
    whole_along,
)
from autopar.ir.graph import Node, Ref
from autopar.ir.tensor import TensorType


def _over_trailing(node: Node, types: tuple[TensorType, ...]) -> str:
    """Keeps `normalized_shape` trailing dimensions whole; mean and deviation may be results."""
    shape = argument(node, 1, "normalized_shape")
    count = len(shape) if isinstance(shape, tuple) else 1
    tail = " ".join(f"n{i}!" for i in range(count))
    ones = " ".join(["1"] * count)
    return f"... {tail}, {tail}, {tail} -> ... {tail}, ... {ones}, ... {ones}"


def _over_one(node: Node, types: tuple[TensorType, ...]) -> str:
    """Returns the rule of softmax and log_softmax, whose devices exchange a maximum and a sum."""
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 1, "dim"), len(names))
    term = " ".join(f"{n}~" if i == dim else n for i, n in enumerate(names))
    return f"{term} -> {term}"


def _batch_norm(node: Node, types: tuple[TensorType, ...]) -> str:
    """Returns the rule of a batch norm, which runs whole in training.

    It computes the statistics of the whole batch, and writes the running statistics, which every
    device holds.
    """
    rank = len(types[0].shape)
    if rank < 2:
        return all_whole(node, types)
    if argument(node, 5, "training") is True:
        tracked = isinstance(argument(node, 3, "running_mean"), Ref)
        names = ["b!", "c!" if tracked else "c", *(f"s{i}!" for i in range(rank - 2))]
    else:
        names = ["b", "c", *(f"s{i}" for i in range(rank - 2))]
    return f"{' '.join(names)}{', c' * (len(types) - 1)} -> {' '.join(names)}"


def _group_norm(node: Node, types: tuple[TensorType, ...]) -> str:
    """Keeps channels whole, as the local number of groups would differ."""
    space = " ".join(f"s{i}!" for i in range(len(types[0].shape) - 2))
    return f"b c! {space}, c, c -> b c {space}"


def _instance_norm(node: Node, types: tuple[TensorType, ...]) -> str:
    """Splits samples and channels; all is whole with running statistics, which are written."""
    tracked = isinstance(argument(node, 3, "running_mean"), Ref)
    b, c = ("b!", "c!") if tracked and argument(node, 5, "use_input_stats") is True else ("b", "c")
    space = " ".join(f"s{i}!" for i in range(len(types[0].shape) - 2))
    return f"{b} {c} {space}{f', {c}' * (len(types) - 1)} -> {b} {c} {space}"


def _weight_norm(node: Node, types: tuple[TensorType, ...]) -> str:
    """w = g v / |v|, the norm taken over all dimensions but one, which g has; over all for -1."""
    rank, dim = len(types[0].shape), argument(node, 2, "dim", 0)
    kept = () if dim == -1 else dimensions(dim, rank)
    names = [n if i in kept else f"{n}!" for i, n in enumerate(letters(rank))]
    return f"{' '.join(names)}, {broadcast(names, types[1])} -> {' '.join(names)}"


_STATISTICS = "const f64[6], const f64[6]>0"
_BATCH = "f64[4, 6, 2], f64[6], f64[6]"
RULES = (
    rule(
        "aten.layer_norm",
        _over_trailing,
        flops="8 out",
        examples=("f64[4, 6, 8], (8,), f64[8], f64[8]", "f64[4, 6, 8], (6, 8)"),
    ),
    rule(
        "aten.native_layer_norm",
        _over_trailing,
        flops="8 out",
        examples=("f64[4, 6, 8], (8,), f64[8], f64[8], 1e-05",),
    ),
    rule("aten.rms_norm", _over_trailing, flops="6 out", examples=("f64[4, 6, 8], (8,), f64[8]",)),
    rule("aten.softmax.int", _over_one, flops="5 out", examples=("f64[4, 6, 8], 1", "f64[6], -1")),
    rule(
        "aten._safe_softmax",
        lambda node, types: whole_along(
            node, types, dimensions(argument(node, 1, "dim"), len(types[0].shape))
        ),
        flops="5 out",
        examples=("f64[4, 6, 8], 1",),
    ),
    rule("aten.log_softmax.int", _over_one, flops="5 out", examples=("f64[4, 6, 8], -1",)),
    rule(
        "aten.batch_norm",
        _batch_norm,
        flops="8 out",
        examples=(
            f"{_BATCH}, {_STATISTICS}, False, 0.1, 1e-05, True",
            f"{_BATCH}, {_STATISTICS}, True, 0.1, 1e-05, True",
            f"{_BATCH}, None, None, True, 0.1, 1e-05, True",
            f"f64[4, 6, 2, 3], None, None, {_STATISTICS}, False, 0.1, 1e-05, True",
        ),
    ),
    rule(
        "aten.instance_norm",
        _instance_norm,
        flops="8 out",
        examples=("f64[4, 6, 8], f64[6], f64[6], None, None, True, 0.1, 1e-05, True",),
    ),
    rule(
        "aten._weight_norm",
        _weight_norm,
        examples=("f64[4, 6], f64[4, 1]", "f64[4, 6, 2], f64[1, 6, 1], 1", "f64[4, 6], f64[], -1"),
    ),
    rule(
        "aten.group_norm",
        _group_norm,
        flops="8 out",
        examples=("f64[4, 6, 2], 3, f64[6], f64[6]", "f64[6, 4, 2, 2], 2"),
    ),
)
