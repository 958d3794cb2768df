"""Views and moves of elements: no arithmetic, so partial sums pass through."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from autopar.intra_op.rule import (
    Spec,
    all_whole,
    argument,
    broadcast,
    dimensions,
    letters,
    rule,
    whole_along,
)
from autopar.ir.graph import Arg, Node
from autopar.ir.tensor import TensorType

Types = tuple[TensorType, ...]


def reshape_spec(src: tuple[int, ...], dst: tuple[int, ...]) -> str:
    """Returns the rule of a reshape: dimensions are cut into the coarsest factors both sides share.

    Seen as a range of strides, a dimension spans from one number of elements to a multiple of it.
    Where the ends of both sides' dimensions divide one another, they cut the elements into factors;
    between two common ends where they do not, the dimensions stay whole.
    """
    sides = [[1, *itertools.accumulate(shape, operator.mul)] for shape in (src, dst)]
    cuts = sorted({*sides[0], *sides[1]})
    common = sorted({*sides[0]} & {*sides[1]})
    factors: dict[int, str] = {}  # number of elements before a factor -> its name
    if 0 not in cuts:
        for low, high in itertools.pairwise(common):
            run = [cut for cut in cuts if low <= cut <= high]
            if all(b % a == 0 for a, b in itertools.pairwise(run)):
                factors.update((cut, f"f{cut}") for cut in run[:-1])
    terms = []
    for side, ends in zip("lr", sides, strict=True):
        dims = []
        for i, (low, high) in enumerate(itertools.pairwise(ends)):
            names = [factors[cut] for cut in cuts if low <= cut < high and cut in factors]
            dims.append("1" if low == high else f"({' '.join(names)})" if names else f"{side}{i}!")
        terms.append(" ".join(dims))
    return " -> ".join(terms)


def _reshape(node: Node, types: Types) -> str:
    return reshape_spec(types[0].shape, node.type.shape)


def _moved(names: Sequence[str], order: Sequence[int]) -> str:
    return f"{' '.join(names)} -> {' '.join(names[i] for i in order)}"


def _transpose(node: Node, types: Types) -> str:
    rank = len(types[0].shape)
    order = list(range(rank))
    if not order:
        return " -> "
    a, b = dimensions(node.args[1:3], rank)
    order[a], order[b] = order[b], order[a]
    return _moved(letters(rank), order)


def _reverse(node: Node, types: Types) -> str:
    """Reverses the dimensions (t, numpy_T)."""
    rank = len(types[0].shape)
    return _moved(letters(rank), range(rank)[::-1])


def _permute(node: Node, types: Types) -> str:
    rank = len(types[0].shape)
    return _moved(letters(rank), dimensions(argument(node, 1, "dims"), rank))


def _movedim(node: Node, types: Types) -> str:
    rank = len(types[0].shape)
    sources, targets = (dimensions(arg, rank) for arg in node.args[1:3])
    goes = dict(zip(targets, sources, strict=True))
    rest = iter([i for i in range(rank) if i not in sources])
    return _moved(letters(rank), [goes[i] if i in goes else next(rest) for i in range(rank)])


def _unsqueeze(node: Node, types: Types) -> str:
    names = letters(len(types[0].shape))
    (at,) = dimensions(argument(node, 1, "dim"), len(names) + 1)
    return f"{' '.join(names)} -> {' '.join([*names[:at], '1', *names[at:]])}"


def _squeeze(node: Node, types: Types) -> str:
    """Keeps whole a dimension that is dropped only if its size is 1, as a split could make it 1."""
    shape = types[0].shape
    named = argument(node, 1, "dim")
    dims = () if named == () else dimensions(named, len(shape))
    names = [f"{n}!" if i in dims else n for i, n in enumerate(letters(len(shape)))]
    right = [n for i, n in enumerate(names) if i not in dims or shape[i] > 1]
    return f"{' '.join(names)} -> {' '.join(right)}"


def _expand(node: Node, types: Types) -> str:
    """Gives new and widened dimensions factors that the operand lacks."""
    names = letters(len(node.type.shape))
    return f"{broadcast(names, types[0])} -> {' '.join(names)}"


def _cut(node: Node, types: Types) -> str:
    """Keeps a sliced dimension whole unless the slice takes all of it."""
    pairs = enumerate(zip(types[0].shape, node.type.shape, strict=True))
    return whole_along(node, types, tuple(i for i, (before, after) in pairs if before != after))


def _pad(node: Node, types: Types) -> str:
    """Amounts before and after each dimension, the last dimension first."""
    amounts = argument(node, 1, "pad")
    assert isinstance(amounts, tuple)
    rank = len(types[0].shape)
    padded = [rank - 1 - i for i in range(len(amounts) // 2) if any(amounts[2 * i : 2 * i + 2])]
    return whole_along(node, types, tuple(padded))


def _adds_nothing(node: Node) -> bool:
    """Returns whether the padding is zeros or existing elements."""
    if node.op == "aten.pad" and argument(node, 2, "mode", "constant") != "constant":
        return True
    return not argument(node, 3 if node.op == "aten.pad" else 2, "value", 0)


def _select(node: Node, types: Types) -> str:
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 1, "dim"), len(names))
    left = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(n for i, n in enumerate(names) if i != dim)}"


def _cat(node: Node, types: Types) -> str:
    """Keeps the joined dimension whole; an operand without elements may have no others."""
    rank = len(node.type.shape)
    (dim,) = dimensions(argument(node, 1, "dim", 0), rank)
    terms = [
        " ".join(f"c{k}!" if i == dim else f"d{i}" for i in range(rank))
        if len(tensor.shape) == rank
        else f"c{k}!"
        for k, tensor in enumerate((*types, node.type))
    ]
    return f"{', '.join(terms[:-1])} -> {terms[-1]}"


def _stack(node: Node, types: Types) -> str:
    names = letters(len(types[0].shape))
    (at,) = dimensions(argument(node, 1, "dim", 0), len(names) + 1)
    left = ", ".join([" ".join(names)] * len(types))
    return f"{left} -> {' '.join([*names[:at], 'k!', *names[at:]])}"


def _named(position: int, name: str) -> Spec:
    """Keeps whole the dimensions in argument `position` (flip, roll, narrow)."""

    def spec(node: Node, types: Types) -> str:
        dims: Arg = argument(node, position, name)
        return whole_along(node, types, dimensions(dims, len(types[0].shape)))

    return spec


def _triangle(node: Node, types: Types) -> str:
    rank = len(types[0].shape)
    return whole_along(node, types, (rank - 2, rank - 1))


def _repeat(node: Node, types: Types) -> str:
    """Keeps repeated and new dimensions whole, since copies are placed side by side."""
    src, dst = types[0].shape, node.type.shape
    new = len(dst) - len(src)
    left, right = [], []
    for i, name in enumerate(letters(len(src))):
        same = src[i] == dst[new + i]
        left.append(name if same else f"{name}!")
        right.append(name if same else f"r{i}!")
    return f"{' '.join(left)} -> {' '.join([*(f'n{i}!' for i in range(new)), *right])}"


def _repeat_interleave(node: Node, types: Types) -> str:
    """Splits the repeated dimension, as each element is followed by its copies.

    The copies of a single element cannot be split: every device would make all of them.
    """
    dim, shape = argument(node, 2, "dim"), types[0].shape
    names = letters(len(shape))
    if dim is None:
        row = " ".join(names)
        return f"{row} -> ({row} copies)" if types[0].numel > 1 else all_whole(node, types)
    (at,) = dimensions(dim, len(names))
    copied = f"({names[at]} copies)" if shape[at] > 1 else "copies!"
    right = [copied if i == at else n for i, n in enumerate(names)]
    return f"{' '.join(names)} -> {' '.join(right)}"


def _rot90(node: Node, types: Types) -> str:
    """Swaps the two dimensions, and flips one of them or both."""
    turns = int(str(argument(node, 1, "k", 1))) % 4
    names = letters(len(types[0].shape))
    a, b = dimensions(argument(node, 2, "dims", (0, 1)), len(names))
    flipped = {0: (), 1: (b,), 2: (a, b), 3: (a,)}[turns]
    left = [f"{n}!" if i in flipped else n for i, n in enumerate(names)]
    right = list(left)
    if turns % 2:
        right[a], right[b] = left[b], left[a]
    # Flipping a dimension that both sides name would keep it in place.
    right = [f"r{i}!" if n.endswith("!") else n for i, n in enumerate(right)]
    return f"{' '.join(left)} -> {' '.join(right)}"


def _unfold(node: Node, types: Types) -> str:
    """Cuts one dimension into windows, whose elements come last."""
    names = letters(len(types[0].shape))
    (dim,) = dimensions(argument(node, 1, "dimension"), len(names))
    left = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    right = ["r!" if i == dim else n for i, n in enumerate(names)]
    return f"{' '.join(left)} -> {' '.join(right)} k!"


def _view_dtype(node: Node, types: Types) -> str:
    """Keeps the last dimension whole if the element size changes."""
    same = types[0].nbytes == node.type.nbytes and types[0].shape == node.type.shape
    return "... -> ..." if same else "... k! -> ... r!"


def _meshgrid(node: Node, types: Types) -> str:
    """Returns one dimension for each operand; with "xy" the first two are swapped."""
    names = letters(len(types))
    if str(node.keyword("indexing", "ij")) == "xy":
        names[:2] = names[1::-1]
    left = [n if t.shape else "" for n, t in zip(letters(len(types)), types, strict=True)]
    return f"{', '.join(left)} -> {', '.join([' '.join(names)] * len(types))}"


def _getitem(node: Node, types: Types) -> str:
    """Returns one of several results; the operand's type is that of the first result."""
    if len(types[0].shape) != len(node.type.shape):
        return all_whole(node, types)
    return _cut(node, types)


_X = "f64[4, 6, 8]"
_VIEWS: dict[str, tuple[Spec, tuple[str, ...]]] = {
    "view": (_reshape, (f"{_X}, (24, 8)", f"{_X}, (4, 6, 2, 4)", "f64[4, 6], (8, 3)")),
    "reshape": (_reshape, (f"{_X}, (4, 48)", "f64[24], (4, 1, 6)", "f64[2, 6], (3, 4)")),
    "flatten.using_ints": (_reshape, (f"{_X}, 1", f"{_X}, 0, 1")),
    "transpose.int": (_transpose, (f"{_X}, 1, -1", "f64[], 0, 0")),
    "swapaxes": (_transpose, (f"{_X}, 0, 1",)),
    "t": (_reverse, ("f64[4, 6]", "f64[4]")),
    "numpy_T": (_reverse, ("f64[4, 6]",)),
    "permute": (_permute, (f"{_X}, (2, 0, 1)",)),
    "movedim.int": (_movedim, (f"{_X}, 0, -1",)),
    "movedim.intlist": (_movedim, (f"{_X}, (0, 1), (2, 0)",)),
    "unsqueeze": (_unsqueeze, ("f64[4, 6], 1", "f64[4, 6], -1")),
    "squeeze": (_squeeze, ("f64[2, 1, 3]",)),
    "squeeze.dim": (_squeeze, ("f64[4, 1, 6], 1", "f64[2, 6], 0")),
    "squeeze.dims": (_squeeze, ("f64[2, 1, 6], (0, 1)", "f64[4, 1], ()")),
    "expand": (_expand, ("f64[4, 1], (6, 4, 8)", "f64[], (4, 6)", "f64[6], (4, -1)")),
    "slice.Tensor": (_cut, (f"{_X}, 1, 2, 5", f"{_X}, 0, 0, 9223372036854775807")),
    "narrow": (_named(1, "dim"), (f"{_X}, 1, 2, 4",)),
    "unfold": (_unfold, (f"{_X}, 1, 4, 2", f"{_X}, -1, 2, 2")),
    "as_strided": (all_whole, ("f64[4, 6], (4, 2), (6, 3)",)),
    "meshgrid.indexing": (
        _meshgrid,
        ("(f64[4], f64[6]), indexing='ij'", "(f64[4], f64[6], f64[2]), indexing='xy'"),
    ),
    "select.int": (_select, (f"{_X}, 1, -1",)),
    "cat": (
        _cat,
        (
            "(f64[4, 6], f64[4, 2]), 1",
            "(f64[4, 6], f64[4, 6], f64[2, 6])",
            "(f64[0], f64[4, 6]), 1",
        ),
    ),
    "stack": (_stack, ("(f64[4, 6], f64[4, 6]), 1", "(f64[4, 6], f64[4, 6]), -1")),
    "rot90": (_rot90, (f"{_X}, 1, (0, 1)", f"{_X}, 2, (1, 2)", f"{_X}, 3, (0, 2)", f"{_X}, 4")),
    "block_diag": (all_whole, ("(f64[4, 2], f64[2, 4])",)),
    "flip": (_named(1, "dims"), (f"{_X}, (1,)",)),
    "roll": (_named(2, "dims"), (f"{_X}, (1,), (1,)", "f64[4, 6], (1,)")),
    "tril": (_triangle, (_X, f"{_X}, -1")),
    "triu": (_triangle, (f"{_X}, 1",)),
    "repeat": (_repeat, ("f64[4, 6], (2, 1)", "f64[4, 6], (2, 1, 3)")),
    "tile": (_repeat, ("f64[4, 6], (2, 1)", "f64[4, 6], (2, 1, 3)")),
    "repeat_interleave.self_int": (
        _repeat_interleave,
        (f"{_X}, 2, 1", "f64[4, 6], 2", "f64[4, 1], 2, 1", "f64[1], 4"),
    ),
}
_MOVED: dict[str, tuple[Spec, tuple[str, ...]]] = {
    "pad": (
        _pad,
        (
            f"{_X}, (1, 3)",
            f"{_X}, (1, 1), 'reflect'",
            f"{_X}, (0, 0, 1, -1)",
            f"{_X}, (1, 3), 'constant', 2.5",
        ),
    ),
    "constant_pad_nd": (_pad, ("i64[4, 6]<8, (0, 2), -100",)),
}
RULES = (
    *(rule(f"aten.{op}", spec, linear=True, examples=x) for op, (spec, x) in _VIEWS.items()),
    *(
        rule(f"aten.{op}", spec, linear=_adds_nothing, examples=x)
        for op, (spec, x) in _MOVED.items()
    ),
    rule("aten.view.dtype", _view_dtype, examples=("i32[4, 6], f32", "i32[4, 6], i64")),
    rule("getitem", _getitem, linear=True, examples=("f64[4, 6], 0",)),
)
