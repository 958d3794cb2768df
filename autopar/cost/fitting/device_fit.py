"""Fits the constants of a device's prices to measured seconds.

Half of the measurements, selected by a hash of their sizes, are fitted. The simplex method starts
from the previous constants, and minimises the mean absolute logarithm of predicted over measured
seconds. The other half gives the error of the fit for sizes that it has not seen. A few constants
can be fitted to fewer measurements; then all are fitted, and the error is that of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, TypeVar

from autopar.cost.device import Device, devices
from autopar.cost.fitting.measurements import ATTENTION, PRODUCTS, Call, Sample
from autopar.cost.fitting.simplex import simplex
from autopar.cost.kernel_tables import Attention, Links, Products
from autopar.errors import CostError

# Constants that are fitted: name -> (largest value that makes sense, value to begin at if it is 0).
Constants = dict[str, tuple[float, float]]
Table = TypeVar("Table", Products, Attention, Links)
_LAUNCH: Constants = {"launch": (1e-3, 4e-6)}
_MEMORY: Constants = {"memory_efficiency": (1.0, 0.8), "memory_ramp": (1e10, 1e6)}
_PRODUCTS: Constants = {
    "efficiency": (1.0, 0.9), "k_half": (1e3, 100.0), "k_latency": (1e-7, 1e-9),
    "small_tile": (2.0, 0.1), "split": (1e-4, 3e-6), "memory": (0.95, 0.9),
    "memory_small": (0.95, 0.8), "memory_ramp": (1e10, 1e8), "throttle": (1.0, 0.2),
    "throttle_after": (1.0, 1e-3),
}  # fmt: skip
_ATTENTION: Constants = {
    "efficiency": (1.0, 0.8), "softmax": (128.0, 30.0), "start": (32.0, 1.0),
    "block_latency": (1e-4, 2e-6), "memory": (0.95, 0.6), "call": (1e-3, 1e-5),
}  # fmt: skip
CONSTANTS = {PRODUCTS: (*_LAUNCH, *_PRODUCTS), ATTENTION: tuple(_ATTENTION)}
_LINKS: Constants = {
    "ll_base": (1e-3, 7e-6), "ll128_base": (1e-3, 1e-5), "simple_base": (1e-3, 2e-5),
    "ll_hop": (1e-4, 1e-6), "ll128_hop": (1e-4, 1e-6), "simple_hop": (1e-4, 2e-6),
    "ll_share": (1.0, 0.04), "ll128_share": (1.0, 0.4), "own": (2.0, 0.4),
    "first_base": (1e-3, 1e-5), "second_base": (1e-3, 2e-5), "third_base": (1e-3, 3e-5),
    "first_share": (1.0, 0.1), "second_share": (1.0, 0.6), "third_share": (1.0, 0.9),
    "direct_hop": (1e-4, 1e-7), "switch_base": (1e-3, 2e-5),
}  # fmt: skip
_NODE: Constants = {"intra_efficiency": (1.0, 0.8)}
_PLAIN: Constants = {"intra_bandwidth": (1e13, 25e9), "intra_latency": (1e-2, 1e-5)}
_LEAST = 40  # measurements, of which a hash deals out about half to be fitted
_FEW = 2  # measurements for each of a few constants, all of which are fitted
_ALIKE = "A100-80"  # whose links a device begins with that has no row of its own


@dataclass(frozen=True)
class Residuals:
    """Relative errors on measurements that were not fitted, if any: the median, and nine in ten."""

    error: float
    spread: float


def fit_memory(device: Device, measured: Iterable[Sample]) -> tuple[Device, Residuals]:
    """Returns a device with fitted `memory_efficiency`, `memory_ramp` and `launch`.

    Raises:
        CostError: too few measurements.
    """
    constants = {**_LAUNCH, **_MEMORY}
    return _fitted(partial(_with, device), constants, _begin(device, constants), tuple(measured))


def fit_products(
    device: Device,
    measured: Iterable[Sample],
    launch: float | None = None,
    only: Collection[str] = (),
) -> tuple[Products, float]:
    """Returns the constants of matrix products, and the seconds of a launch, for a device.

    Args:
        device: its other figures, and the constants to begin with.
        measured: products.
        launch: seconds of a launch if they are known from other kernels; None to fit them.
        only: names of the constants to fit, while the others remain as they are; all by default.

    Raises:
        CostError: too few measurements.
    """
    start = replace(device.products, tile_rows=0, tile_columns=0)
    known = _LAUNCH if launch is None else {}
    free = _chosen({**known, **_PRODUCTS}, only)

    def made(values: dict[str, Any]) -> Device:
        table = replace(start, **{name: values[name] for name in _PRODUCTS if name in free})
        table = replace(table, memory_small=min(table.memory_small, table.memory))
        seconds = device.launch if launch is None else launch
        return replace(device, launch=values.get("launch", seconds), products=table)

    begin = _begin(start, {name: free[name] for name in _PRODUCTS if name in free})
    begin |= _begin(device, {name: free[name] for name in _LAUNCH if name in free})
    found = tuple(measured)
    chip, far = _fitted(made, free, begin, found, few=bool(only))
    return _row(chip.products, device, far, len(found)), chip.launch


def fit_attention(
    device: Device, measured: Iterable[Sample], only: Collection[str] = ()
) -> Attention:
    """Returns the constants of fused attention for a device; takes and raises as `fit_products`."""
    free = _chosen(_ATTENTION, only)

    def made(values: dict[str, Any]) -> Device:
        return replace(device, attention=replace(device.attention, **values))

    begin = _begin(device.attention, free)
    found = tuple(measured)
    chip, far = _fitted(made, free, begin, found, few=bool(only))
    return _row(chip.attention, device, far, len(found))


def fit_links(device: Device, measured: Iterable[Sample]) -> tuple[Device, Residuals]:
    """Returns a device with fitted figures of the links inside its nodes.

    With NCCL these are a row of their table, `intra_efficiency` and `switch_reduction`; with a
    library whose protocols are unknown, `intra_bandwidth` and `intra_latency`.

    Raises:
        CostError: too few measurements, or more devices than a node has.
    """
    found = tuple(measured)
    most = max((each.what.devices for each in found if isinstance(each.what, Call)), default=0)
    if most > device.devices_per_node:
        raise CostError(
            f"a collective of {most} devices of {device.name} cannot be fitted",
            why=f"a node has {device.devices_per_node}, and links between nodes are not fitted",
            todo="leave out rows of more devices, or correct devices_per_node in devices.toml",
        )
    if device.library != "NCCL":
        return _fitted(partial(_with, device), _PLAIN, _begin(device, _PLAIN), found)
    start = device.links or next(one.links for one in devices() if one.name == _ALIKE)
    assert start is not None
    switch: Constants = {"switch_reduction": (2 * device.intra_bandwidth, 1.0)}
    node = {**_NODE, **(switch if device.switch_reduction else {})}

    def made(values: dict[str, Any]) -> Device:
        links = replace(start, **{name: values[name] for name in _LINKS})
        return replace(device, links=links, **{name: values[name] for name in node})

    begin = {**_begin(device, node), **_begin(start, _LINKS)}
    chip, far = _fitted(made, {**node, **_LINKS}, begin, found)
    assert chip.links is not None
    return replace(chip, links=_row(chip.links, device, far)), far


def _with(device: Device, values: dict[str, Any]) -> Device:
    return replace(device, **values)


def errors(device: Device, measured: Iterable[Sample]) -> list[float]:
    """Returns the relative errors of a device's prices, without their signs, in rising order."""
    return sorted(abs(each.predicted(device) / each.seconds - 1) for each in measured)


def _chosen(constants: Constants, only: Collection[str]) -> Constants:
    """Returns the constants of the names `only`; all if there are none."""
    return {name: constants[name] for name in constants if name in only or not only}


def _begin(source: object, constants: Constants) -> dict[str, float]:
    return {name: getattr(source, name) or value for name, (_, value) in constants.items()}


def _row(table: Table, device: Device, far: Residuals, count: int = _LEAST) -> Table:
    """Returns a table with its errors; with a base if too few measurements to hold some out."""
    row = replace(table, measured=device.name, error=far.error, spread=far.spread)
    if isinstance(row, Links):
        return row
    own = table.measured == device.name
    return replace(row, base="" if count >= _LEAST else row.base if own else table.measured)


def _fitted(
    made: Callable[[dict[str, Any]], Device],
    constants: Constants,
    begin: dict[str, float],
    measured: Sequence[Sample],
    *,
    few: bool = False,
) -> tuple[Device, Residuals]:
    """Returns the fitted device and its errors on the measurements held out.

    Fits all and holds out none of `few` measurements.
    """
    inside = [each for each in measured if each.fitted]
    outside = [each for each in measured if not each.fitted]
    if len(measured) < _LEAST or min(len(inside), len(outside)) < _LEAST // 4:
        if not few or len(measured) < _FEW * len(constants):
            raise CostError(
                f"{len(measured)} measurements are too few to fit {len(constants)} constants",
                why=f"{len(inside)} would be fitted and {len(outside)} held out",
                todo=f"measure at least {_LEAST} sizes, from small to large, or name a constant "
                f"for every {_FEW} measurements by --only",
            )
        inside = outside = list(measured)
    limits = [top for top, _ in constants.values()]

    def bounded(logs: Sequence[float]) -> list[float]:
        return [min(math.exp(min(x, 50.0)), top) for x, top in zip(logs, limits, strict=True)]

    def device(values: Sequence[float]) -> Device:
        return made(dict(zip(constants, values, strict=True)))

    def loss(logs: Sequence[float]) -> float:
        chip = device(bounded(logs))
        return fmean(abs(math.log(each.predicted(chip) / each.seconds)) for each in inside)

    logs = [math.log(min(begin[name], top)) for name, (top, _) in constants.items()]
    for size in (0.3, 0.15, 0.1):
        logs = simplex(loss, logs, size, 50 * len(logs))
    chip = device([float(f"{value:.4g}") for value in bounded(logs)])
    far = errors(chip, outside)
    return chip, Residuals(round(median(far), 4), round(far[int(0.9 * len(far))], 4))
