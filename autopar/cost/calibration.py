"""Calibration: times measured on one machine, as a value and as a TOML file.

The file reads like a table, one measurement per line:

    [matmul.f32]                   # batch x m x n x k = seconds, relative spread
    "1 x 64 x 64 x 64" = [1.1e-05, 0.04]

    [kernel."aten.gelu".f32]       # FLOPs, bytes, seconds, relative spread
    points = [[4096, 8192, 5.0e-06, 0.02]]

    [collective.all_reduce]        # axes: bytes of payload, seconds, relative spread
    "data, tensor" = [[4096, 1.0e-04, 0.1]]
    "data, tensor by 2d_torus" = [[4096, 0.9e-04, 0.1]]

Rows with `by` compare algorithms with one another and with the library's call, "by library".
Seconds are medians over runs; a run takes as long as its slowest process. The spread is half the
interquartile range divided by the median. A file is refused if it has a number that is not finite
and positive, an unknown dtype or collective, or a larger problem that is faster beyond noise.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomlkit

from autopar.cost.collective_seconds import KINDS
from autopar.cost.work import Gemm
from autopar.errors import AutoparError, CalibrationError
from autopar.files.checked_values import Fields, Integer, Number, Row, Table, Text, shown
from autopar.files.kinds import Kind
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES

VERSION = 1
FILE = Kind("the calibration", CalibrationError, "run `autopar calibrate -o FILE` first")
NOISE = 1.0  # share by which a larger problem may be faster, besides both spreads


@dataclass(frozen=True)
class Timing:
    """A measured time: the median in seconds, and the spread as a share of the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Product:
    """A measured matrix product."""

    dtype: str
    gemm: Gemm
    time: Timing

    def __str__(self) -> str:
        return f"matmul in {self.dtype} of {self.gemm.m} x {self.gemm.n} x {self.gemm.k}"


@dataclass(frozen=True)
class Kernel:
    """A measured operator with its FLOPs and bytes; "aten.gelu backward" is the gradient of gelu.

    `by` names the quantity that the time depends on: "nbytes", or "flops" on matrix units.
    """

    op: str
    dtype: str
    flops: float
    nbytes: float
    time: Timing
    by: str = "nbytes"

    @property
    def size(self) -> float:
        """FLOPs or bytes, whichever the time depends on."""
        return self.flops if self.by == "flops" else self.nbytes

    @property
    def curve(self) -> tuple[str, ...]:
        """Key of the curve that this point belongs to."""
        return self.op, self.dtype

    def __str__(self) -> str:
        return f"{self.op} in {self.dtype} at {self.size:.0f}"


@dataclass(frozen=True)
class Exchange:
    """A measured collective with `nbytes` payload bytes per device over `axes`, in mesh order.

    `by` names the algorithm in a comparison of algorithms, LIBRARY for the library's call there; ""
    is the library's call as programs make it.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    time: Timing
    by: str = ""

    @property
    def over(self) -> str:
        """Axes and algorithm as text."""
        return ", ".join(self.axes) + (f" by {self.by}" if self.by else "")

    @property
    def size(self) -> float:
        """Payload in bytes, which the time depends on."""
        return self.nbytes

    @property
    def curve(self) -> tuple[str, ...]:
        """Key of the curve that this point belongs to."""
        return self.kind, self.over

    def __str__(self) -> str:
        return f"{self.kind} over {self.over} at {self.nbytes:.0f}"


Point = Product | Kernel | Exchange


@dataclass(frozen=True)
class Calibration:
    """All measurements of one mesh.

    Attributes:
        mesh: device, axes and sizes that were measured.
        torch, date: torch version and day of the measurement.
        products: a full grid of m, n and k for each dtype.
        kernels, exchanges: several sizes of each; all three are sorted.

    Raises:
        CalibrationError: an impossible figure, or a grid with holes.
    """

    mesh: Mesh
    torch: str
    date: str
    products: tuple[Product, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    def __post_init__(self) -> None:
        for name in ("products", "kernels", "exchanges"):
            object.__setattr__(self, name, tuple(sorted(getattr(self, name), key=_place)))
        points: list[Point] = [*self.products, *self.kernels, *self.exchanges]
        seen: set[str] = set()
        for point in points:
            _check_point(point)
            if str(point) in seen:
                raise CalibrationError(f"{point} was measured twice", todo="calibrate again")
            seen.add(str(point))
        for exchange in self.exchanges:
            unknown = [axis for axis in exchange.axes if axis not in self.mesh.names]
            if unknown or not exchange.axes:
                raise CalibrationError(
                    f"a collective over {', '.join(exchange.axes) or 'no axis'}",
                    where=str(self.mesh),
                    why=f"the mesh's axes are {', '.join(self.mesh.names)}",
                )
        for dtype in {product.dtype for product in self.products}:
            _check_grid(dtype, [p for p in self.products if p.dtype == dtype])
        for small, large in disorder(points):
            raise CalibrationError(
                f"the larger of two problems is faster: {large.time.seconds:.3g} after "
                f"{small.time.seconds:.3g} s",
                where=f"{small}, {large}",
                why=f"their spreads are {small.time.spread:.0%} and {large.time.spread:.0%}",
                todo="calibrate again on a quiet machine",
            )

    def check(self, mesh: Mesh) -> None:
        """Raises a CalibrationError that names the difference unless `mesh` is the measured one."""
        if self.mesh.device != mesh.device:
            raise CalibrationError(
                f"the calibration is of the device {self.mesh.device!r}",
                where=str(mesh),
                why=f"the mesh has {mesh.device!r}, whose times differ",
                todo="calibrate on a machine with that device",
            )
        if (self.mesh.names, self.mesh.shape) != (mesh.names, mesh.shape):
            raise CalibrationError(
                "the calibration is of another mesh",
                where=str(mesh),
                why=f"it was measured on {self.mesh}",
                todo=f'run `autopar calibrate --mesh "{mesh}"`',
            )

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that identify the measured figures."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """Returns the text of the file; `from_toml` reads it back to an equal value."""
        document = tomlkit.document()
        document.add(tomlkit.comment("autopar calibration: medians in seconds, relative spreads."))
        document["version"] = VERSION
        document["mesh"] = str(self.mesh)
        document["torch"] = self.torch
        document["date"] = self.date
        products: dict[str, dict[str, list[float]]] = {}
        for item in self.products:
            g = item.gemm
            shape = f"{g.batch} x {g.m} x {g.n} x {g.k}"
            products.setdefault(item.dtype, {})[shape] = _numbers(item.time)
        kernels: dict[str, dict[str, Any]] = {}
        for kernel in self.kernels:
            table = kernels.setdefault(kernel.op, {})
            entry = table.setdefault(kernel.dtype, {"by": kernel.by, "points": []})
            entry["points"].append([kernel.flops, kernel.nbytes, *_numbers(kernel.time)])
        calls: dict[str, dict[str, list[list[float]]]] = {}
        for call in self.exchanges:
            over = calls.setdefault(call.kind, {})
            over.setdefault(call.over, []).append([call.nbytes, *_numbers(call.time)])
        document["matmul"], document["kernel"], document["collective"] = products, kernels, calls
        return tomlkit.dumps(document)

    @classmethod
    def from_toml(cls, text: str, where: str = "") -> Calibration:
        """Reads a calibration from TOML.

        Raises:
            CalibrationError: the text is not TOML, or has a damaged entry or an impossible figure.
        """
        table = FILE.toml(text, where)
        if table.get("version") != VERSION:
            raise CalibrationError(
                f"the calibration has version {shown(table.get('version'))}",
                where=where,
                why=f"this version of autopar reads {VERSION}",
                todo="calibrate again",
            )
        try:
            return _read(table, where)
        except AutoparError as error:
            place = "; ".join(filter(None, (where, error.where.removeprefix(where))))
            raise CalibrationError(
                error.what, where=place, why=error.why, todo=error.todo or "calibrate again"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a calibration file; raises CalibrationError if it is missing or damaged."""
        return cls.from_toml(FILE.text(path), where=str(path))


def _read(table: dict[str, Any], where: str) -> Calibration:
    fields = Fields(table, CalibrationError, "the calibration", where)
    products = fields.take("matmul", Table(Table(_TIME)), {})
    kernels = fields.take("kernel", Table(Table(_curve)), {})
    calls = fields.take("collective", Table(Table(Row(_point(3)))), {})
    mesh, torch, date = (fields.take(name, Text()) for name in ("mesh", "torch", "date"))
    fields.take("version", Integer())
    fields.end()
    return Calibration(
        Mesh.parse(mesh),
        torch,
        date,
        tuple(
            Product(dtype, _gemm(shape), Timing(*numbers))
            for dtype, shapes in products.items()
            for shape, numbers in shapes.items()
        ),
        tuple(
            Kernel(op, dtype, flops, nbytes, Timing(seconds, spread), by)
            for op, dtypes in kernels.items()
            for dtype, (by, points) in dtypes.items()
            for flops, nbytes, seconds, spread in points
        ),
        tuple(
            Exchange(kind, tuple(axes.split(", ")), nbytes, Timing(seconds, spread), by)
            for kind, over in calls.items()
            for text, points in over.items()
            for axes, _, by in (text.partition(" by "),)
            for nbytes, seconds, spread in points
        ),
    )


def _point(count: int) -> Callable[[Any], tuple[float, ...]]:
    """Returns a check for rows of `count` numbers; `_check_point` judges their ranges."""

    def check(value: Any) -> tuple[float, ...]:
        numbers = tuple(map(Number(-math.inf, math.inf), Row(lambda each: each)(value)))
        if len(numbers) != count:
            raise ValueError(f"{count} numbers are expected")
        return numbers

    return check


_TIME = _point(2)


def _curve(entry: Any) -> tuple[str, tuple[tuple[float, ...], ...]]:
    fields = Fields(entry, CalibrationError, "a kernel")
    by = fields.take("by", Text(known=("nbytes", "flops")))
    points = fields.take("points", Row(_point(4)))
    fields.end()
    return by, points


def _gemm(shape: str) -> Gemm:
    match = re.fullmatch(r"([0-9]{1,9}) x ([0-9]{1,9}) x ([0-9]{1,9}) x ([0-9]{1,9})", shape)
    if match is None:
        why = 'it is written "1 x 64 x 64 x 64"'
        raise CalibrationError(f"cannot read the shape {shown(shape)}", why=why)
    return Gemm(*map(int, (*match.groups(), 0)))  # rows of any length


def _numbers(time: Timing) -> list[float]:
    return [time.seconds, time.spread]


def _place(point: Point) -> tuple[object, ...]:
    """Returns the sort key of a point among those of its type."""
    if isinstance(point, Product):
        return point.dtype, point.gemm.m, point.gemm.n, point.gemm.k
    return point.curve, point.size


def disorder(points: Iterable[Point]) -> Iterator[tuple[Point, Point]]:
    """Yields neighbours (smaller, larger) of which the larger is faster beyond noise."""
    curves: dict[tuple[str, ...], list[Kernel | Exchange]] = {}
    grids: dict[str, dict[tuple[int, int, int], Product]] = {}
    for point in points:
        if isinstance(point, Product):
            g = point.gemm
            grids.setdefault(point.dtype, {})[g.m, g.n, g.k] = point
        else:
            curves.setdefault(point.curve, []).append(point)
    pairs: list[tuple[Point, Point]] = []
    for curve in curves.values():
        rising = sorted(((point.size, i) for i, point in enumerate(curve)))
        pairs += pairwise(curve[i] for _, i in rising)
    for grid in grids.values():
        pairs += _neighbours(grid)
    for small, large in pairs:
        slack = (1 + NOISE) * (1 + small.time.spread) * (1 + large.time.spread)
        if large.time.seconds * slack < small.time.seconds:
            yield small, large


def _neighbours(grid: dict[tuple[int, int, int], Product]) -> Iterator[tuple[Product, Product]]:
    """Yields pairs of products that differ by one grid step in m, n or k."""
    for i in range(3):
        lines: dict[tuple[int, ...], list[tuple[int, Product]]] = {}
        for shape, product in grid.items():
            lines.setdefault((*shape[:i], *shape[i + 1 :]), []).append((shape[i], product))
        for line in lines.values():
            for (_, small), (_, large) in pairwise(sorted(line, key=lambda entry: entry[0])):
                yield small, large


def _check_point(point: Point) -> None:
    """Raises CalibrationError for an impossible time or size, or an unknown word."""
    time = point.time
    word, known = (point.kind, KINDS) if isinstance(point, Exchange) else (point.dtype, DTYPE_BYTES)
    if isinstance(point, Product):
        sizes: list[float] = [point.gemm.m, point.gemm.n, point.gemm.k]
    else:
        sizes = [point.size]
    if isinstance(point, Exchange) and point.by not in ("", LIBRARY):
        Algorithm.parse(point.by)
    if not (0 < time.seconds < math.inf and 0 <= time.spread < math.inf):
        what = f"a time of {time.seconds} seconds with a spread of {time.spread}"
        why = "times are finite and positive, spreads finite and not negative"
    elif word not in known:
        what = f"unknown dtype or collective {word!r}"
        why = f"the known ones are {', '.join(known)}"
    elif isinstance(point, Product) and (point.gemm.batch != 1 or min(sizes) < 1):
        what, why = f"the product {point}", "it is one product with positive m, n and k"
    elif not all(0 <= size < math.inf for size in sizes):
        what, why = f"the size of {point}", "sizes are finite and not negative"
    else:
        return
    raise CalibrationError(what, where=str(point), why=why, todo="calibrate again")


def _check_grid(dtype: str, products: Sequence[Product]) -> None:
    """Raises CalibrationError unless the products fill a grid of m, n and k."""
    shapes = {(p.gemm.m, p.gemm.n, p.gemm.k) for p in products}
    sides = [len({shape[i] for shape in shapes}) for i in range(3)]
    if not math.prod(sides) == len(shapes) == len(products):
        raise CalibrationError(
            f"the measured products in {dtype} do not form a complete grid",
            why=f"{len(products)} were measured of {' x '.join(map(str, sides))}",
            todo="calibrate again",
        )
