"""Look-ups, split by index, by the other dimensions, or by the rows of the table.

If rows are split, every device looks up the rows it has and the results add up.
"""

from __future__ import annotations

from autopar.intra_op.rule import all_whole, argument, broadcast, dimensions, letters, rule
from autopar.ir.graph import Node, Ref
from autopar.ir.tensor import TensorType


def _index(node: Node, types: tuple[TensorType, ...]) -> str:
    """x[i, :, j]: the index tensors broadcast against one another.

    Their common dimensions take the place of the first indexed one, or come first where the indexed
    ones are not adjacent (NumPy, "Combining advanced and basic indexing").
    """
    indices = node.args[1]
    assert isinstance(indices, tuple)
    if any(tensor.dtype in ("bool", "u8") for tensor in types[1:]):
        return all_whole(node, types)
    names = letters(len(types[0].shape))
    at = [i for i, index in enumerate(indices) if isinstance(index, Ref)]
    rank = max(len(tensor.shape) for tensor in types[1:])
    indexed = [f"i{k}" for k in range(rank)]
    terms = [" ".join(f"{n}!" if i in at else n for i, n in enumerate(names))]
    terms += [broadcast(indexed, tensor) for tensor in types[1:]]
    rest = [n for i, n in enumerate(names) if i not in at]
    place = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    return f"{', '.join(terms)} -> {' '.join([*rest[:place], *indexed, *rest[place:]])}"


def _embedding(node: Node, types: tuple[TensorType, ...]) -> str:
    """Keeps the indices whole if gradients are scaled by how often a row is read."""
    if argument(node, 3, "scale_grad_by_freq", False) is not True:
        return "v h, ... -> ... h"
    reads = " ".join(f"{name}!" for name in letters(len(types[1].shape)))
    return f"v! h, {reads} -> {reads} h"


def _gather(node: Node, types: tuple[TensorType, ...]) -> str:
    """Splits dimensions other than `dim`, where an index reads only its own position."""
    into, index = types[0].shape, types[1].shape
    if len(into) != len(index) or not into:
        return all_whole(node, types)  # a scalar counts as one element, an empty index as any shape
    (dim,) = dimensions(argument(node, 1, "dim"), len(index))
    left, right = [], []
    for i, name in enumerate(letters(len(index))):
        if i == dim or into[i] != index[i]:
            left.append(f"t{i}" if i == dim and types[0].floating else f"t{i}!")
            right.append(name if i == dim else f"{name}!")
        else:
            left.append(name)
            right.append(name)
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(right)}"


def _index_select(node: Node, types: tuple[TensorType, ...]) -> str:
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 1, "dim"), len(names))
    searched = "" if types[0].floating else "!"
    left = [f"{n}{searched}" if i == dim else n for i, n in enumerate(names)]
    right = ["k" if i == dim else n for i, n in enumerate(names)]
    return f"{' '.join(left)}, k -> {' '.join(right)}"


_BAGS = "f64[8, 6], i64[6]<8, i64[1]<1"
RULES = (
    *(
        rule(
            f"aten.embedding_bag{overload}",
            all_whole,  # bags of one size are rewritten as look-ups and sums, which split
            examples=tuple(f"{_BAGS}, False, {mode}{tail}" for mode in range(3)),
        )
        for overload, tail in (("", ""), (".padding_idx", ", False, None, False, None"))
    ),
    rule("aten.one_hot", "... -> ... k!", examples=("i64[4, 6]<8, 8",)),
    rule(
        "aten.embedding",
        _embedding,
        examples=(
            "f64[8, 6], i64[4, 6]<8",
            "f64[7, 6], i64[4]<7, 2",
            "f64[8, 6], i64[6]<3, -1, True",
        ),
    ),
    rule(
        "aten.index.Tensor",
        _index,
        linear=((0,),),
        examples=(
            "f64[8, 6], (i64[4]<8,)",
            "f64[4, 8, 6], (None, i64[4, 1]<8, i64[6]<6)",
            "f64[8, 4, 3], (i64[6]<8, None, i64[6]<3)",
            "i64[4, 6, 2], (None, None, i64[]<2)",
        ),
    ),
    rule(
        "aten.gather",
        _gather,
        linear=((0,),),
        examples=("f64[4, 6], 1, i64[4, 2]<6", "f64[6, 8], 0, i64[4, 6]<6"),
    ),
    rule("aten.index_select", _index_select, linear=((0,),), examples=("f64[4, 8], 1, i64[6]<8",)),
)
