"""CostModel: what the planner asks of any cost model, and the analytic one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from autopar.cost.collective import collective_seconds
from autopar.cost.compute import roofline
from autopar.cost.device import device
from autopar.cost.network import Network
from autopar.errors import CostError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh


@dataclass(frozen=True)
class Gemm:
    """`batch` matrix products of m x k by k x n elements, on one device."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each of batch x m x n x k."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Work:
    """One kernel as a cost model sees it, on one device: its share of FLOPs and of bytes moved.

    `dtype` is that of the operands. `gemm` is the shape of what matrix units can do, None for what
    runs on vector units.
    """

    op: str
    flops: float
    nbytes: float
    dtype: str
    gemm: Gemm | None = None


@dataclass(frozen=True)
class NodeWork:
    """The kernels of one operator, run once: forwards, and backwards where it has a gradient."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


class CostModel(Protocol):
    """Prices in seconds, finite and not negative; anything else is a CostError."""

    def compute(self, work: Work) -> float:
        """Seconds of one operator on one device."""
        ...

    def collective(self, call: Collective, /) -> float:
        """Seconds of one collective."""
        ...


class Checked:
    """A cost model whose prices are looked at one by one; CostError for one that is no price."""

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def compute(self, work: Work) -> float:
        """What the model says of `work`."""
        return _price(self.model.compute(work), work)

    def collective(self, call: Collective, /) -> float:
        """What the model says of `call`."""
        return _price(self.model.collective(call), call)


class AnalyticModel:
    """Closed forms over the figures of a mesh's device and links; nothing is measured.

    Raises:
        UnknownDeviceError: the device is neither described nor in devices.toml.
        CostError: figures of the device or of an axis that make no sense.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.device = device(mesh)
        self.network = Network(mesh, self.device)

    def compute(self, work: Work) -> float:
        """Seconds of `work` by the roofline (see cost/compute.py)."""
        seconds = roofline(self.device, work.flops, work.nbytes, work.dtype, work.gemm is not None)
        return _price(seconds, work, work.flops, work.nbytes)

    def collective(self, call: Collective, /) -> float:
        """Seconds of `call` over the levels of its axes (see cost/network.py, cost/collective.py).

        Raises:
            MeshError: an axis that the mesh does not have.
            CostError: an unknown kind, a negative payload, or a price that is not finite.
        """
        seconds = collective_seconds(call.kind, self.network.levels(call.axes), call.nbytes)
        return _price(seconds, call, call.nbytes)

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        """Names of the links that `call` keeps busy, outermost first; none for a lone device.

        Calls with a name in common slow each other down (see `cost.collective.shared`).

        Raises:
            MeshError: an axis that the mesh does not have.
        """
        return self.network.resources(call.axes)


def _price(seconds: float, item: Work | Collective, *amounts: float) -> float:
    """`seconds`, if it and the amounts that it was made from are finite and not negative."""
    if not all(math.isfinite(value) and value >= 0 for value in (seconds, *amounts)):
        raise CostError(
            f"the price of {item} is {seconds} seconds",
            why="prices, FLOPs and bytes must be finite and not negative",
            todo="check the sizes of the operator and the figures of the mesh and its device",
        )
    return seconds
