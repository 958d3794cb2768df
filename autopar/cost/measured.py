"""A cost model that uses measured times, and scaled closed forms where nothing was measured.

Times between two measured sizes are interpolated linearly in logarithms; for matrix products the
interpolation is trilinear in the logarithms of m, n and k. Interpolation passes through every
point, and rises where the points do. If a larger problem was measured as faster, within noise, the
points are first smoothed: a curve by the mean of the neighbours ("pool adjacent violators", Ayer et
al., Annals of Mathematical Statistics 26(4), 1955), a grid by the larger time. Beyond the largest
size, time is proportional to size; below the smallest it is constant.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

from autopar.cost.calibration import Calibration, Product, Timing
from autopar.cost.host_copies import HostCopy
from autopar.cost.kernel_tables import Host
from autopar.cost.measured_host import host_of, is_host
from autopar.cost.model import AnalyticModel
from autopar.cost.work import Gemm, Work, quantising
from autopar.ir.chosen_algorithms import LIBRARY, LIBRARY_ONLY, ChosenAlgorithms
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

Key = TypeVar("Key")
# Operators that were not measured are priced like these, which move bytes.
_GENERIC = ("aten.add.Tensor", "aten.mul.Tensor backward")


class MeasuredModel:
    """Prices of work on a mesh that was calibrated, or on a part of one.

    An axis of the part counts as measured if it has the name and the links of an axis of the whole
    mesh; collectives over other axes use scaled closed forms.

    Args:
        mesh: the devices.
        calibration: measurements on `whole`.
        whole: the mesh of which `mesh` is a part; by default `mesh` itself.

    Attributes:
        chosen: the algorithms, chosen by a plan, of calls that do not name one.

    Raises:
        CalibrationError: measured on another device or other mesh axes.
        UnknownDeviceError, CostError: see `AnalyticModel`.
    """

    chosen: ChosenAlgorithms = LIBRARY_ONLY

    def __init__(self, mesh: Mesh, calibration: Calibration, whole: Mesh | None = None) -> None:
        calibration.check(whole or mesh)
        self.analytic = AnalyticModel(mesh)
        self._whole = AnalyticModel(whole) if whole else self.analytic
        self.device = self.analytic.device
        self.calibration = calibration
        dtypes = {product.dtype for product in calibration.products}
        self._grids = {
            dtype: Grid([p for p in calibration.products if p.dtype == dtype]) for dtype in dtypes
        }
        self._kernels = _curves(((k.op, k.dtype), k.size, k.time) for k in calibration.kernels)
        self._by = {(k.op, k.dtype): k.by for k in calibration.kernels}
        self._same = frozenset(filter(self._measured_axis, mesh.names))
        calls = [c for c in calibration.exchanges if self._same.issuperset(c.axes)]
        self._calls = _curves(((c.kind, c.axes), c.nbytes, c.time) for c in calls if not c.by)
        self._compared = _curves(((c.kind, c.axes, c.by), c.nbytes, c.time) for c in calls if c.by)
        self._scale = self._scales()
        self._known: dict[Work, float] = {}

    def compute(self, work: Work) -> float:
        """Returns the seconds of one kernel; 0 if it neither moves nor computes anything."""
        if work not in self._known:
            self._known[work] = work.share * self._compute(replace(work, share=1.0))
        return self._known[work]

    def collective(self, call: Collective, /) -> float:
        """Returns the seconds of one collective; 0 over a group of one device.

        A quantised collective takes the time of its bytes plus that of its kernels. A call that
        names a compared algorithm takes the time of the library's call, and longer by as much as in
        the comparison.

        Raises:
            MeshError, CostError: see `AnalyticModel.collective`.
        """
        call = self.chosen.named(call)
        if call.quantised:
            kernels = sum(map(self.compute, quantising(call)))
            return kernels + self.collective(replace(call, quantised=0))
        key = call.kind, self._ordered(call.axes)
        library, own = (self._compared.get((*key, by)) for by in (LIBRARY, call.algorithm))
        if library is None or own is None:
            return self._sent(call)
        plain = self._sent(replace(call, algorithm=""))
        return max(plain - library(call.nbytes), 0.0) + own(call.nbytes)

    def _sent(self, call: Collective) -> float:
        """Returns the measured seconds of the library's call, else the scaled closed form."""
        seconds, key = self.analytic.collective(call), (call.kind, self._ordered(call.axes))
        curve = self._calls.get(key) or self._compared.get((*key, LIBRARY))
        if not seconds or curve is None or call.algorithm:
            return seconds * self._scale.get(call.kind, self._scale["collective"])
        return curve(call.nbytes)

    def compared(self, kind: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the algorithms that were measured in addition to the library's call."""
        found = [by for what, over, by in self._compared if (what, over) == (kind, axes)]
        return tuple(by for by in found if by != LIBRARY) if LIBRARY in found else ()

    def host(self, copy: HostCopy) -> float:
        """Returns the seconds of a copy to or from host memory, by the device's figures."""
        return self.analytic.host(copy)

    @property
    def issuing(self) -> Host | None:
        """Seconds in which the host issues work; None if they were not measured."""
        return host_of(self.calibration.kernels, self.device.name)

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        """Returns the names of the links that `call` uses; see `AnalyticModel.resources`."""
        return self.analytic.resources(call)

    def measured(self, item: Work | Collective) -> bool:
        """Returns whether the price of `item` comes from measurements of its own kind, unscaled."""
        if isinstance(item, Collective):
            return (item.kind, self._ordered(item.axes)) in self._calls
        if (item.op, item.dtype) in self._kernels:
            return True
        return item.gemm is not None and item.dtype in self._grids

    def _compute(self, work: Work) -> float:
        analytic = self.analytic.compute(work)
        if not work.flops and not work.nbytes:
            return 0.0
        key = (work.op, work.dtype)
        if key in self._kernels:
            return self._kernels[key](work.flops if self._by[key] == "flops" else work.nbytes)
        if work.gemm is not None:
            grid = self._grids.get(work.dtype)
            return grid(work.gemm) if grid else analytic * self._scale["matmul"]
        generic = self._kernels.get((_GENERIC[work.op.endswith(" backward")], work.dtype))
        return generic(work.nbytes) if generic else analytic * self._scale["kernel"]

    def _measured_axis(self, name: str) -> bool:
        own, whole = self.analytic, self._whole
        return name in whole.mesh.names and own.network.levels((name,)) == whole.network.levels(
            (name,)
        )

    def _ordered(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes in mesh order, without axes of size 1."""
        mesh = self.analytic.mesh
        return tuple(axis.name for axis in mesh.axes if axis.name in axes and axis.size > 1)

    def _scales(self) -> dict[str, float]:
        """Returns for each kind the median ratio of measured times to closed forms."""
        ratios: dict[str, list[float]] = {"matmul": [], "kernel": [], "collective": []}
        for product in self.calibration.products:
            work = Work("aten.mm", product.gemm.flops, 0.0, product.dtype, product.gemm)
            ratios["matmul"].append(product.time.seconds / self._whole.compute(work))
        for kernel in self.calibration.kernels:
            if kernel.by != "nbytes" or is_host(kernel):
                continue
            price = self._whole.compute(Work(kernel.op, kernel.flops, kernel.nbytes, kernel.dtype))
            ratios["kernel"].append(kernel.time.seconds / price if price else 1.0)
        for call in (c for c in self.calibration.exchanges if not c.by):
            price = self._whole.collective(Collective(call.kind, call.axes, int(call.nbytes)))
            ratio = call.time.seconds / price if price else 1.0
            ratios["collective"].append(ratio)
            ratios.setdefault(call.kind, []).append(ratio)
        return {kind: median(values) if values else 1.0 for kind, values in ratios.items()}


class Curve:
    """Seconds by size, rising, interpolated linearly in logarithms.

    Args:
        points: (size, seconds) with distinct sizes, in any order.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        rising = sorted(points)
        self._sizes = [max(size, 1.0) for size, _ in rising]
        self._times = pooled([math.log(seconds) for _, seconds in rising])

    def __call__(self, size: float) -> float:
        """Returns the seconds at `size`."""
        last = self._sizes[-1]
        if size >= last:
            return math.exp(self._times[-1]) * size / last
        after = bisect.bisect_right(self._sizes, size)
        if not after:
            return math.exp(self._times[0])
        low, high = math.log(self._sizes[after - 1]), math.log(self._sizes[after])
        part = (math.log(size) - low) / (high - low)
        return math.exp(self._times[after - 1] * (1 - part) + self._times[after] * part)


class Grid:
    """Seconds of matrix products over a full grid of m, n and k; a batch counts as a longer m."""

    def __init__(self, products: Sequence[Product]) -> None:
        times = {(p.gemm.m, p.gemm.n, p.gemm.k): p.time.seconds for p in products}
        self._sides = [sorted({shape[i] for shape in times}) for i in range(3)]
        self._logs = [[math.log(size) for size in side] for side in self._sides]
        # A product takes at least as long as any that is smaller in all three lengths.
        self._times: dict[tuple[int, ...], float] = {}
        for place in itertools.product(*(range(len(side)) for side in self._sides)):
            shape = tuple(side[i] for side, i in zip(self._sides, place, strict=True))
            before = (
                self._times[(*place[:axis], place[axis] - 1, *place[axis + 1 :])]
                for axis in range(3)
                if place[axis]
            )
            own = math.log(times[shape[0], shape[1], shape[2]])
            self._times[place] = max((own, *before))

    def __call__(self, gemm: Gemm) -> float:
        """Returns the seconds of `gemm`."""
        beyond = 1.0
        corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for length, side, logs in zip(
            (gemm.batch * gemm.m, gemm.n, gemm.k), self._sides, self._logs, strict=True
        ):
            inside = min(max(length, side[0]), side[-1])
            beyond *= max(length, inside) / inside
            low = min(bisect.bisect_right(side, inside) - 1, max(len(side) - 2, 0))
            part = 0.0
            if len(side) > 1:
                part = (math.log(inside) - logs[low]) / (logs[low + 1] - logs[low])
            corners = [
                ((*place, low + step), weight * share)
                for place, weight in corners
                for step, share in ((0, 1 - part), (1, part))
                if share
            ]
        return beyond * math.exp(sum(weight * self._times[place] for place, weight in corners))


def pooled(values: Sequence[float]) -> list[float]:
    """Returns the rising sequence nearest in least squares: falling runs become their means."""
    runs: list[tuple[float, int]] = []
    for value in values:
        runs.append((value, 1))
        while len(runs) > 1 and runs[-2][0] > runs[-1][0]:
            (mean, count), (other, more) = runs.pop(), runs.pop()
            runs.append(((mean * count + other * more) / (count + more), count + more))
    return [mean for mean, count in runs for _ in range(count)]


def _curves(points: Iterable[tuple[Key, float, Timing]]) -> dict[Key, Curve]:
    points_of: dict[Key, list[tuple[float, float]]] = {}
    for key, size, time in points:
        points_of.setdefault(key, []).append((size, time.seconds))
    return {key: Curve(curve) for key, curve in points_of.items()}
