"""Writes by index, as new values: indexed dimensions stay whole, the others can be split."""

from __future__ import annotations

from autopar.intra_op.rule import (
    all_whole,
    argument,
    broadcast,
    dimensions,
    letters,
    rule,
)
from autopar.ir.graph import EXTEND, Node, Ref
from autopar.ir.tensor import TensorType

Types = tuple[TensorType, ...]


def _scatter(node: Node, types: Types) -> str:
    """Splits dimensions other than `dim`, where an element reaches only its own position.

    Sums along `dim` may be added in parts. Only the indexed part of the source is read.
    """
    rank, added = len(types[0].shape), node.op == "aten.scatter_add"
    if not all(tensor.shape for tensor in types):
        return all_whole(node, types)  # a scalar counts as one element
    (dim,) = dimensions(argument(node, 1, "dim"), rank)
    terms: list[list[str]] = [[] for _ in types]
    for i, name in enumerate(letters(rank)):
        if i == dim:
            longer = len(types) > 2 and types[2].shape[dim] != types[1].shape[dim]
            each = ["t!", *(["n!", "m!"] if longer else ["n" if added else "n!"] * 2)]
            each = each[: len(types)]
        else:
            sizes = [tensor.shape[i] for tensor in types]
            aligned = len(set(sizes)) == 1
            each = [name if aligned else f"{name}_{size}!" for size in sizes]
        for term, word in zip(terms, each, strict=True):
            term.append(word)
    into, *rest = map(" ".join, terms)
    return f"{'+' if added else ''}{into}, {', '.join(rest)} -> {into}"


def _index_add(node: Node, types: Types) -> str:
    """Splits the index: its parts add to the sum."""
    into, source = _rows(node, types, "n")
    return f"+{into}, n, {source} -> {into}"


def _index_write(node: Node, types: Types) -> str:
    """index_copy, index_reduce, index_fill: order of writes matters, so the index stays whole."""
    into, source = _rows(node, types, "n!")
    value = source if len(types) == 3 and types[2].shape else ""
    return f"{into}, n!, {value} -> {into}"


def _rows(node: Node, types: Types, row: str) -> tuple[str, str]:
    """Returns the terms of the tensor written into, whole along `dim`, and of the rows written."""
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 1, "dim"), len(names))
    into = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    source = [row if i == dim else n for i, n in enumerate(names)]
    return " ".join(into), " ".join(source)


def _index_put(node: Node, types: Types) -> str:
    """x[i, :, j] = v: v broadcasts to the shape of x[i, :, j]; see the rule of index.Tensor."""
    indices = node.args[1]
    assert isinstance(indices, tuple)
    given = [index for index in indices if isinstance(index, Ref)]
    kinds = types[1 : 1 + len(given)]
    if any(tensor.dtype in ("bool", "u8") for tensor in kinds):
        return all_whole(node, types)
    names = letters(len(types[0].shape))
    at = [i for i, index in enumerate(indices) if isinstance(index, Ref)]
    indexed = [f"i{k}!" for k in range(max(len(tensor.shape) for tensor in kinds))]
    into = " ".join(f"{n}!" if i in at else n for i, n in enumerate(names))
    rest = [n for i, n in enumerate(names) if i not in at]
    place = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    value = broadcast([*rest[:place], *indexed, *rest[place:]], types[-1])
    return f"{', '.join([into, *(broadcast(indexed, t) for t in kinds), value])} -> {into}"


def _select_scatter(node: Node, types: Types) -> str:
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 2, "dim"), len(names))
    into = " ".join(f"{n}!" if i == dim else n for i, n in enumerate(names))
    return f"{into}, {' '.join(n for i, n in enumerate(names) if i != dim)} -> {into}"


def _slice_scatter(node: Node, types: Types) -> str:
    """Keeps a dimension whole if it is overwritten in part."""
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 2, "dim", 0), len(names))
    full = types[0].shape == types[1].shape
    into = " ".join(f"{n}!" if i == dim and not full else n for i, n in enumerate(names))
    part = " ".join("p!" if i == dim and not full else n for i, n in enumerate(names))
    return f"{into}, {part} -> {into}"


def _diagonal(node: Node, types: Types) -> str:
    """Keeps the two dimensions whole; the diagonal comes last."""
    names = letters(len(types[0].shape))
    pair = [argument(node, 2, "dim1", 0), argument(node, 3, "dim2", 1)]
    dims = dimensions(tuple(pair), len(names))
    left = [f"{n}!" if i in dims else n for i, n in enumerate(names)]
    right = [n for i, n in enumerate(names) if i not in dims]
    return f"{' '.join(left)} -> {' '.join([*right, 'k!'])}"


def _diagonal_scatter(node: Node, types: Types) -> str:
    rank = len(types[0].shape)
    pair = [argument(node, 3, "dim1", 0), argument(node, 4, "dim2", 1)]
    dims = dimensions(tuple(pair), rank)
    into = [f"{n}!" if i in dims else n for i, n in enumerate(letters(rank))]
    rest = [n for i, n in enumerate(letters(rank)) if i not in dims]
    return f"{' '.join(into)}, {' '.join([*rest, 'k!'])} -> {' '.join(into)}"


def _diag_embed(node: Node, types: Types) -> str:
    """Turns the last dimension into two, which stay whole."""
    names = letters(len(types[0].shape))
    pair = [argument(node, 2, "dim1", -2), argument(node, 3, "dim2", -1)]
    dims = dimensions(tuple(pair), len(names) + 1)
    beside = iter(names[:-1])
    right = [f"m{i}!" if i in dims else next(beside) for i in range(len(names) + 1)]
    return f"{' '.join([*names[:-1], 'k!'])} -> {' '.join(right)}"


def _whole_term(prefix: str, tensor: TensorType) -> str:
    return " ".join(f"{prefix}{i}!" for i in range(len(tensor.shape)))


def _take(node: Node, types: Types) -> str:
    return f"{_whole_term('t', types[0])}, ... -> ..."


def _take_along(node: Node, types: Types) -> str:
    """Like gather, but the operands broadcast in dimensions other than `dim`."""
    dim = argument(node, 2, "dim")
    if dim is None:  # of the flattened tensor
        row = " ".join(letters(len(types[1].shape)))
        return f"{_whole_term('t', types[0])}, {row} -> ({row})"
    names = letters(len(types[0].shape))
    (at,) = dimensions(dim, len(names))
    into, index = ([f"t{at}!" if i == at else n for i, n in enumerate(names)], names)
    return f"{broadcast(into, types[0])}, {broadcast(index, types[1])} -> {' '.join(names)}"


_X, _COLUMNS = "f64[4, 6]", "i64[4, 2]<6"
_INTO, _ROWS = f"{_X}, 1, {_COLUMNS}", "f64[6, 4], 0, i64[2]<6"
_NARROW = "f64[6, 4], 1, i64[2, 2]<4, f64[2, 2]"
_SCATTERS = {
    "scatter.src": (f"{_INTO}, f64[4, 2]", f"{_INTO}, const {_X}"),
    "scatter.value": (f"{_INTO}, 0.5",),
    "scatter.reduce": (f"const {_INTO}, const f64[4, 2], reduce='add'",),
    "scatter.value_reduce": (f"const {_INTO}, 2.0, reduce='multiply'",),
    "scatter_reduce.two": (f"{_INTO}, f64[4, 2], 'amax'", f"{_INTO}, f64[4, 2], 'mean'"),
}
_WRITES = {
    "index_copy": (f"{_ROWS}, f64[2, 4]",),
    "index_reduce": (f"{_ROWS}, f64[2, 4], 'amax'",),
    "index_fill.int_Scalar": (f"{_ROWS}, 0.5",),
    "index_fill.int_Tensor": (f"{_ROWS}, f64[]",),
}
# Old and new values together, for operators that only move values.
_MOVES = ("scatter.src", "index_copy", "index_fill.int_Tensor")
RULES = (
    *(
        rule(f"aten.{op}", spec, linear=((0, 2),) if op in _MOVES else (), examples=examples)
        for spec, table in ((_scatter, _SCATTERS), (_index_write, _WRITES))
        for op, examples in table.items()
    ),
    rule(
        "aten.scatter_add",
        _scatter,
        linear=((0, 2),),
        examples=(f"{_INTO}, f64[4, 2]", _NARROW, "f64[6, 4], 0, i64[2, 4]<6, f64[2, 4]"),
    ),
    rule(
        "aten.index_add",
        _index_add,
        linear=((0, 2),),
        examples=(f"{_ROWS}, f64[2, 4]", "f64[4, 6], -1, i64[4]<6, f64[4, 4], alpha=2"),
    ),
    rule(
        "aten.index_put",
        _index_put,
        linear=lambda node: ((0, len(node.inputs) - 1),),
        examples=(
            "f64[8, 6], (i64[2]<8,), f64[2, 6]",
            "f64[8, 6], (i64[2]<8,), f64[6], True",
            "f64[4, 8, 6], (None, i64[2, 1]<8, i64[3]<6), f64[4, 2, 3], True",
            "f64[8, 4, 6], (i64[2]<8, None, i64[2]<6), f64[2, 4], True",
            "f64[4, 6], (bool[4, 6],), f64[]",
        ),
    ),
    rule(
        "aten.select_scatter",
        _select_scatter,
        linear=True,
        examples=("f64[4, 6], f64[4], 1, 2", "f64[4, 6], f64[6], 0, -1"),
    ),
    rule(
        "aten.slice_scatter",
        _slice_scatter,
        linear=True,
        examples=(
            "f64[4, 6], f64[4, 2], 1, 2, 4",
            "f64[4, 6], f64[2, 6], 0, 0, 4, 2",
            f"{_X}, {_X}",
        ),
    ),
    *(
        rule(
            f"aten.{op}",
            _diagonal,
            linear=True,
            examples=("f64[4, 6, 8], 0, 0, 1", "f64[4, 6, 6], 0, -2, -1", "f64[4, 6]"),
        )
        for op in ("diagonal", "diagonal_copy")
    ),
    rule(
        "aten.diagonal_scatter",
        _diagonal_scatter,
        linear=True,
        examples=("f64[4, 6, 8], f64[4, 6], 0, 1, 2",),
    ),
    rule(
        "aten.diag_embed",
        _diag_embed,
        linear=True,
        examples=("f64[4, 6]", "f64[4, 6], 1, 0, 2"),
    ),
    rule(
        "aten.take",
        _take,
        linear=((0,),),
        examples=("f64[4, 6], i64[4, 6]<24", "f64[2, 3, 2], i64[6]<12"),
    ),
    rule(
        "aten.take_along_dim",
        _take_along,
        linear=((0,),),
        examples=(
            "f64[4, 6], i64[4, 2]<6, 1",
            "f64[1, 6], i64[4, 2]<6, 1",
            "f64[4, 6], i64[6]<24",
            "f64[4, 6], i64[4, 2]<24",
        ),
    ),
    rule(EXTEND, _index_write, examples=(f"const {_ROWS}, const f64[2, 4]",)),
    rule("aten.masked_scatter", all_whole, examples=("f64[4, 6], bool[4, 6], f64[4, 6]",)),
)
