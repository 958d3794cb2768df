"""Forms of matrix products on grids: their layouts, calls, messages, work and memory.

    x [rows @ down, contracted @ depth across], w [contracted @ depth down, columns @ across]
    -> [rows @ down, columns @ across] +sum(depth)

Along the axes `across` and `down`, blocks are gathered in panels (`product.py`). Along `depth`,
every layer of devices multiplies a part of the contracted elements, and the product is a partial
sum. If it is read split, a reduce_scatter follows, as an ordinary change of layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.ir.collective import Collective
from autopar.ir.graph import Arg, Node
from autopar.ir.tensor import DTYPE_BYTES, TensorType, part_of
from autopar.operators.device_work import Gemm, NodeWork, Work
from autopar.operators.form import Calls, Form, Kwargs, Layouts, Part, Types
from autopar.operators.panels import turns

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.operators.peer_devices import Axes, Devices

LINEAR = "aten.linear"
# Operators, with examples on which their forms are proved.
PRODUCTS = {
    LINEAR: ("f64[5, 12], f64[6, 12], f64[6]", "f64[2, 4, 12], f64[4, 12]"),
    "aten.matmul": ("f64[4, 6, 12], f64[12, 6]", "f64[2, 5, 12], f64[2, 12, 7]"),
    "aten.mm": ("f64[6, 12], f64[12, 5]",),
    "aten.bmm": ("f64[3, 4, 12], f64[3, 12, 4]",),
}
# Pairs that one axis may split: a factor of one operand and the contracted factor of the other, or
# the contracted factors of both.
_TOGETHER = "k n, l ..., l m, k l"


@dataclass(frozen=True)
class GridAxes:
    """The mesh axes of a grid, outermost first."""

    across: tuple[str, ...]
    down: tuple[str, ...]
    depth: tuple[str, ...]


def sides(op: str, operands: Layouts, ways: Callable[[str], int]) -> GridAxes | None:
    """Returns the axes of the grid that layouts describe; None if they describe no grid.

    Args:
        op: the operator.
        operands: layouts of x and w.
        ways: returns the number of devices along an axis.
    """
    x, w = operands[:2]
    contracted, columns = (w.dims[-1], w.dims[0]) if op == LINEAR else w.dims[-2:]
    rows = {axis for dim in x.dims[:-1] for axis in dim}
    across = tuple(axis for axis in x.dims[-1] if axis in columns)
    down = tuple(axis for axis in contracted if axis in rows)
    # Both operands must have the same parts of the contracted elements, and the same depth axes.
    cuts = [
        [(ways(axis), axis if axis not in own else "") for axis in dims]
        for dims, own in ((x.dims[-1], across), (contracted, down))
    ]
    if not across or cuts[0] != cuts[1]:
        return None
    return GridAxes(across, down, tuple(axis for _, axis in cuts[0] if axis))


def sides_of(part: Part) -> GridAxes | None:
    """Returns the axes of the grid of a product in given layouts; None if there is no grid."""
    found = sides(part.node.op, part.operands, part.mesh.axis_size)
    if found is None or part.types[0].shape[-1] % part.ways(part.axes(0, -1)):
        return None
    return found


def grid_forms(
    name: str, fits: Callable[[int, int], bool], needs: str, mesh: str = ""
) -> tuple[Form, ...]:
    """Returns a form for each of `PRODUCTS`.

    Args:
        name: name of the form.
        fits: returns whether it applies, given the numbers of devices along a side and in depth.
        needs: as in `Form`.
        mesh: as in `Form`.
    """
    return tuple(_grid_form(name, op, fits, needs, mesh) for op in PRODUCTS)


def _grid_form(name: str, op: str, fits: Callable[[int, int], bool], needs: str, mesh: str) -> Form:

    def applies(part: Part) -> bool:
        found = sides_of(part)
        return found is not None and fits(part.ways(found.across), part.ways(found.depth))

    return Form(
        name,
        op,
        _spec,
        applies,
        f"{needs}; all blocks have equally many contracted elements",
        f"{op.partition('.')[2]}_{name.replace('.', '')}",
        _linear if op == LINEAR else _matmul,
        _write,
        _sends,
        _work,
        _scratch,
        _turns,
        PRODUCTS[op],
        _TOGETHER,
        _alone,
        (mesh,) if mesh else (),
    )


def _spec(node: Node, types: Types) -> str:
    """Returns the factor string of x @ w, where w is a matrix or has the leading dimensions of x.

    Linears in 8 bits have none, since their scales belong to whole rows. A bias is replicated along
    `down`, and a summand of a partial sum along `depth`.
    """
    x, w, *bias = types
    if len(x.shape) < 2 or len(w.shape) < 2 or 1 in (*x.shape[-1:], *w.shape[-2:]):
        return ""
    if node.part.narrow:
        return ""
    if node.op == LINEAR:
        fits = len(w.shape) == 2 and all(added.shape == w.shape[:1] for added in bias)
        return "... k!, n l!, +n -> ... n" if fits else ""
    if len(w.shape) == 2:
        return "... k!, l! n -> ... n"
    if x.shape[:-2] != w.shape[:-2]:
        return ""
    lead = " ".join(f"b{i}" for i in range(len(x.shape) - 2))
    return f"{lead} m k!, {lead} l! n -> {lead} m n"


def _linear(
    mesh: Devices, x: Tensor, weight: Tensor, bias: Tensor | None = None, **axes: Any
) -> Tensor:
    """Computes a linear whose blocks of x and of the weight are gathered in panels."""
    result = _matmul(mesh, x, weight.mT, **axes)
    return result if bias is None else result + bias


def _matmul(mesh: Devices, x: Tensor, w: Tensor, *, across: Axes, down: Axes) -> Tensor:
    """Computes a product whose blocks of both operands are gathered in panels."""
    from autopar.operators.panels.product import Grid, product

    return product(x, w, Grid(mesh.group(across), mesh.group(down)))


def _write(node: Node, types: Types, operands: Layouts) -> tuple[tuple[Arg, ...], Kwargs]:
    found = sides(node.op, operands, lambda axis: 0)
    assert found is not None
    return node.args, (("across", _one(found.across)), ("down", _one(found.down)))


def _one(axes: tuple[str, ...]) -> Arg:
    return axes[0] if len(axes) == 1 else axes


@dataclass(frozen=True)
class _Blocks:
    """Lengths of one device's blocks.

    Attributes:
        batch: number of pairs of matrices.
        rows, contracted, columns: lengths of these dimensions.
        side: number of devices along a side of the grid.
        dtype: dtype of the elements.
    """

    batch: int
    rows: int
    contracted: int
    columns: int
    side: int
    dtype: str

    @classmethod
    def of(cls, part: Part) -> _Blocks:
        found = sides_of(part)
        assert found is not None
        x, w = part.operand(0), part.operand(1)
        batch = math.prod(w.shape[:-2])
        columns = w.shape[0] if part.node.op == LINEAR else w.shape[-1]
        rows = math.prod(x.shape[:-1]) // batch
        return cls(batch, rows, x.shape[-1], columns, part.ways(found.across), x.dtype)

    @property
    def slices(self) -> list[int]:
        """Numbers of contracted elements of a block that are sent in each turn."""
        count = turns(self.side, self.contracted)
        return [part_of(self.contracted, count, turn)[1] for turn in range(count)]

    def panels(self, contracted: int) -> tuple[int, int]:
        """Returns the bytes of the panels of x and w for slices of so many elements."""
        size = self.batch * contracted * self.side * DTYPE_BYTES[self.dtype]
        return size * self.rows, size * self.columns


def _sends(part: Part) -> Calls:
    """Returns the panels of every turn; backwards also those of both gradients.

    Collectives that overlap with nothing come first: the first panels, and the last gradients.
    """
    found, blocks = sides_of(part), _Blocks.of(part)
    assert found is not None
    pairs = [
        tuple(
            Collective("all_to_all", axes, nbytes)
            for axes, nbytes in zip((found.across, found.down), blocks.panels(length), strict=True)
        )
        for length in blocks.slices
    ]
    forward = tuple(call for pair in pairs for call in pair)
    first, *later = pairs
    gradients = [*pairs[-1:], *pairs[:-1]]
    back = (*first, *gradients[0], *(c for pair in (*later, *gradients[1:]) for c in pair))
    return forward, back


def _alone(part: Part) -> tuple[int, int]:
    return 2, 4


def _turns(part: Part) -> int:
    return len(_Blocks.of(part).slices)


def _work(part: Part) -> NodeWork:
    """Returns one product per turn, added to a sum in at least float32; two backwards."""
    blocks, forward, backward = _Blocks.of(part), list[Work](), list[Work]()
    dtype, out = blocks.dtype, blocks.batch * blocks.rows * blocks.columns
    size, wide = DTYPE_BYTES[dtype], max(DTYPE_BYTES[dtype], 4)
    for length in blocks.slices:
        x, w = blocks.panels(length)
        inner, moved = length * blocks.side, float(x + w + out * size)
        unit = math.gcd(inner, blocks.columns)  # of the rows of x and w, and of those of the result
        lengths = blocks.rows, blocks.columns, inner
        for kernels, shapes in (
            (forward, (lengths,)),
            (backward, ((lengths[0], inner, lengths[1]), (inner, lengths[1], lengths[0]))),
        ):
            for shape in shapes:
                gemm = Gemm(blocks.batch, *shape, unit)
                kernels.append(Work(part.node.op, gemm.flops, moved, dtype, gemm))
        summed = float(x + w)  # the parts that other devices computed
        backward.append(Work("sum of gradients", summed / size, 2 * summed, dtype))
    added = out * (len(blocks.slices) - 1)
    if added:
        forward.append(Work("sum of panels", float(added), float((size + 2 * wide) * added), dtype))
    return NodeWork(tuple(forward), tuple(backward))


def _scratch(part: Part) -> tuple[float, float]:
    """Returns the bytes of two pairs of panels as they are sent, arrive and are joined.

    Forwards, a sum in at least float32 is added; backwards, the panels of gradients.
    """
    blocks = _Blocks.of(part)
    pair = float(sum(blocks.panels(max(blocks.slices))))
    out = TensorType(blocks.dtype, (blocks.batch, blocks.rows, blocks.columns))
    wide = out.numel * max(DTYPE_BYTES[blocks.dtype], 4)
    return 4 * pair + out.nbytes + wide, 8 * pair
