"""Traces products of row ranges with one weight each, whose lengths depend on values.

    counts = chosen.sum(0).tolist()
    pieces = [linear(piece, weight[i]) for i, piece in enumerate(x.split(counts))]
    y = torch.cat(pieces)

The lengths of the pieces are unknown, but together the pieces are the rows of x. The loop is traced
as one grouped product, in which every piece has its own weight. Other operations raise CaptureError
at the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar.capture.experts.expert_rows import StandIn, refused
from autopar.capture.stand_ins.dropout import drops
from autopar.operators.grouped_products import grouped_linear

# Elementwise functions.
_ALONE = ("silu", "relu", "gelu", "sigmoid", "tanh", "exp", "square", "neg", "softplus")


class Number:
    """An element of a tensor [pieces], as `tolist` and `item` return it; acts as an int.

    Attributes:
        tensor: the tensor.
        at: index of the element.
        read: returns its value, or raises the error of reading a value in a trace.
    """

    def __init__(self, tensor: Tensor, at: int, read: Callable[[], int]) -> None:
        self.tensor, self.at, self.read = tensor, at, read

    def __index__(self) -> int:
        return self.read()

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())

    def __hash__(self) -> int:
        return hash(self.read())


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.read(), name)(*args)


_METHODS = """add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod neg abs eq ne
    lt le gt ge str repr format"""
for _name in _METHODS.split():
    setattr(Number, f"__{_name}__", _method(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class _Step:
    """An operation on a piece.

    Attributes:
        function: a function of rows; None for a product.
        weight, bias: of all pieces, [pieces, out, in] and [pieces, out].
        turned: whether the weight is [pieces, in, out] instead.
    """

    function: Any = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    turned: bool = False

    def same(self, other: _Step) -> bool:
        """Returns whether another piece has the same step."""
        return (
            self.function is other.function
            and self.weight is other.weight
            and self.bias is other.bias
            and self.turned == other.turned
        )

    def on(self, rows: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """Returns the rows of all pieces after the step."""
        if self.weight is None:
            result: Tensor = self.function(rows)
            return result
        weight = self.weight.transpose(1, 2) if self.turned else self.weight
        product: Tensor = grouped_linear(rows, weight, ends)
        if self.bias is None:
            return product
        return product + self.bias.repeat_interleave(counts, 0, output_size=rows.shape[0])


@dataclass(frozen=True, eq=False)
class Piece(StandIn):
    """One piece of rows.

    Attributes:
        rows: the rows of all pieces.
        counts, ends: number of rows of each piece, and the index after its last row.
        number: the number of this piece.
        steps: the operations applied so far.
    """

    rows: Tensor
    counts: Tensor
    ends: Tensor
    number: int
    steps: tuple[_Step, ...] = ()


@dataclass
class RowCounts:
    """The row counts of one trace, and weights selected from a stack of weights, by identity."""

    _taken: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)
    _ends: dict[int, Tensor] = field(default_factory=dict)
    _reads: bool = False  # whether a count is being read as a plain number

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call with such pieces; NotImplemented for any other call."""
        first = args[0] if args else None
        if name == "item" and not self._reads and id(first) in self._taken:
            _, tensor, at = self._taken[id(first)]
            return Number(tensor, at, lambda: self._read(args[0]))
        if name in ("split", "split_with_sizes") and isinstance(first, Tensor):
            pieces = self._split(first, *args[1:], **kwargs)
            if pieces is not NotImplemented:
                return pieces
        if isinstance(first, Piece):
            return self._step(first, func, name, args[1:], kwargs)
        if name in ("cat", "concat") and isinstance(first, (list, tuple)) and _pieces(first):
            return _joined(first, *args[1:], **kwargs)
        given = _read([*args, *kwargs.values()])
        if given is None:
            return NotImplemented
        return func(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    def note(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Records weights that are selected from a stack, and numbers that are read of a tensor."""
        if name == "unbind" and args[1:] in ((), (0,)) and args[0].dim() in (1, 2, 3):
            for at, item in enumerate(result):
                self._taken[id(item)] = item, args[0], at
        taken = name == "__getitem__" and isinstance(args[1], int) and isinstance(result, Tensor)
        if taken and args[0].dim() in (2, 3):
            self._taken[id(result)] = result, args[0], args[1] % len(args[0])

    def _read(self, element: Tensor) -> int:
        self._reads = True
        try:
            return int(element.item())
        finally:
            self._reads = False

    def _split(self, x: Tensor, sizes: Any = None, dim: int = 0, **more: Any) -> Any:
        sizes = next(iter(more.values())) if sizes is None and more else sizes
        counted = isinstance(sizes, (list, tuple)) and all(isinstance(n, Number) for n in sizes)
        if not (counted and sizes) or dim not in (0, -x.dim()) or x.dim() != 2:
            return NotImplemented
        counts = sizes[0].tensor
        if [(id(n.tensor), n.at) for n in sizes] != [(id(counts), at) for at in range(len(counts))]:
            raise refused("split", "the lengths are not all of one tensor, in order")
        if id(counts) not in self._ends:
            self._ends[id(counts)] = counts.cumsum(0, dtype=torch.int32)
        ends = self._ends[id(counts)]
        return tuple(Piece(x, counts, ends, number) for number in range(len(counts)))

    def _step(
        self, piece: Piece, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Piece:
        if name == "dropout" and not drops(*args, **kwargs):
            return piece
        if name == "linear":
            weight, bias = [*args, *kwargs.values(), None][:2]
            step = _Step(None, self._of(weight, piece), self._of(bias, piece))
            if step.weight is None or (bias is not None and step.bias is None):
                raise refused("linear", "its weight is not one of a stack")
        elif name.strip("_") in ("matmul", "mm") and len(args) == 1:
            step = _Step(None, self._of(args[0], piece), turned=True)
            if step.weight is None:
                raise refused(name, "its weight is not one of a stack")
        elif name in _ALONE and not args and not kwargs:
            step = _Step(func)
        else:
            raise refused(name)
        return replace(piece, steps=(*piece.steps, step))

    def _of(self, weight: Any, piece: Piece) -> Tensor | None:
        """Returns the stack from which a piece's weight was selected; None if there is none."""
        _, stack, number = self._taken.get(id(weight), (None, None, -1))
        whole = stack is not None and len(stack) == len(piece.counts)
        return stack if whole and number == piece.number else None


def _read(args: list[Any]) -> list[Any] | None:
    """Returns arguments with counts replaced by their values; None if there are no counts."""
    lists = [list(arg) if isinstance(arg, (list, tuple)) else [arg] for arg in args]
    if not any(isinstance(item, Number) for items in lists for item in items):
        return None
    values = [[n.read() if isinstance(n, Number) else n for n in items] for items in lists]
    pairs = zip(args, values, strict=True)
    return [type(a)(v) if isinstance(a, (list, tuple)) else v[0] for a, v in pairs]


def _pieces(items: Sequence[Any]) -> bool:
    return any(isinstance(item, Piece) for item in items)


def _joined(pieces: Sequence[Any], dim: int = 0) -> Tensor:
    """Returns the concatenated rows of the pieces after their operations."""
    first = pieces[0]
    same = isinstance(first, Piece) and dim in (0, -2) and len(pieces) == len(first.counts)
    for number, piece in enumerate(pieces):
        same = same and isinstance(piece, Piece) and piece.number == number
        same = same and piece.rows is first.rows and piece.counts is first.counts
        same = same and len(piece.steps) == len(first.steps)
        same = same and all(a.same(b) for a, b in zip(piece.steps, first.steps, strict=True))
    if not same:
        raise refused("cat", "the pieces are not all of one tensor, in order and treated alike")
    rows: Tensor = first.rows
    for step in first.steps:
        rows = step.on(rows, first.counts, first.ends)
    return rows
