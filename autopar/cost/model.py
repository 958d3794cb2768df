"""The interface of cost models, and the analytic cost model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from autopar.cost.algorithms import Level
from autopar.cost.collective_seconds import collective_seconds
from autopar.cost.compute import kernel_seconds
from autopar.cost.device import device
from autopar.cost.host_copies import HostCopy, host_seconds
from autopar.cost.network import Network
from autopar.cost.programs.simulated_seconds import MessageCosts, simulated_seconds
from autopar.cost.work import Gemm, NodeWork, Work, quantising
from autopar.errors import CostError
from autopar.ir.chosen_algorithms import LIBRARY_ONLY, Algorithm, ChosenAlgorithms
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

__all__ = ["AnalyticModel", "Checked", "CostModel", "Gemm", "NodeWork", "Work"]


class CostModel(Protocol):
    """Prices of kernels and collectives: finite, non-negative seconds; others raise CostError."""

    def compute(self, work: Work) -> float:
        """Returns the seconds of one operator on one device."""
        ...

    def collective(self, call: Collective, /) -> float:
        """Returns the seconds of one collective."""
        ...


class Checked:
    """Wraps a cost model and raises CostError for any price that is not finite and non-negative."""

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def compute(self, work: Work) -> float:
        """Returns the model's seconds for `work`, checked."""
        return _price(self.model.compute(work), work)

    def collective(self, call: Collective, /) -> float:
        """Returns the model's seconds for `call`, checked."""
        return _price(self.model.collective(call), call)


class AnalyticModel:
    """Closed forms over the figures of a mesh's device and links, without measurements.

    Args:
        mesh: the devices.
        in_step: whether kernels are priced as parts of a long step, where clocks are lower and
            other work overlaps with them (`step_efficiency` of the device), or each as run alone.
        whole: all devices of that step, of which `mesh` is a part; by default there are no others.

    Attributes:
        chosen: the algorithms, chosen by a plan, of calls that do not name one.

    Raises:
        UnknownDeviceError: the device is neither described nor in devices.toml.
        CostError: impossible figures of the device or of an axis.
    """

    chosen: ChosenAlgorithms = LIBRARY_ONLY

    def __init__(self, mesh: Mesh, *, in_step: bool = False, whole: Mesh | None = None) -> None:
        self.mesh, self.in_step = mesh, in_step * (whole or mesh).size
        self.device = device(mesh)
        self.network = Network(mesh, self.device)
        # Shapes repeat in a model and among strategies.
        self._known: dict[Work, float] = {}
        self._sent: dict[Collective, float] = {}

    def compute(self, work: Work) -> float:
        """Returns the seconds of `work` by the roofline model (see cost/compute.py)."""
        if work not in self._known:
            seconds = kernel_seconds(
                self.device, work.op, work.flops, work.nbytes, work.dtype, work.gemm,
                in_step=self.in_step, convolved=work.convolved,
            )  # fmt: skip
            self._known[work] = _price(seconds * work.share, work, work.flops, work.nbytes)
        return self._known[work]

    def collective(self, call: Collective, /) -> float:
        """Returns the seconds of a collective, with the kernels that quantise its payload if any.

        A call of the library is priced by `collective_seconds.py`; one that names its algorithm
        is simulated (`programs/simulated_seconds.py`).

        Raises:
            MeshError: the mesh has no such axis.
            CollectiveError: the algorithm does not exist, or not for this number of devices.
            CostError: an unknown kind, a negative payload, or a price that is not finite.
        """
        call = self.chosen.named(call)
        if call not in self._sent:
            seconds = self._sent_by(call, self.network.levels(call.axes))
            seconds += sum(map(self.compute, quantising(call)))
            self._sent[call] = _price(seconds, call, call.nbytes)
        return self._sent[call]

    def _sent_by(self, call: Collective, levels: tuple[Level, ...]) -> float:
        if not call.algorithm or not levels:
            return collective_seconds(call.kind, levels, call.nbytes)
        by = Algorithm.parse(call.algorithm)
        order = sorted(call.axes, key=self.mesh.names.index)
        written = by.over([self.mesh.axis_size(name) for name in order])
        pace = MessageCosts.of(self.device, levels)
        return simulated_seconds(call.kind, replace(by, shape=written), levels, call.nbytes, pace)

    def host(self, copy: HostCopy) -> float:
        """Returns the seconds of a copy to or from host memory (see cost/host_copies.py)."""
        return host_seconds(self.device, copy.nbytes)

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        """Returns the names of the links that `call` uses, outermost first; empty for one device.

        Calls that share a link slow each other down (see `simulate/engine.py`).

        Raises:
            MeshError: the mesh has no such axis.
        """
        return self.network.resources(call.axes)


def _price(seconds: float, item: Work | Collective, *amounts: float) -> float:
    """Returns `seconds` if it and the `amounts` behind it are finite and not negative."""
    for value in (seconds, *amounts):
        if not 0 <= value < math.inf:  # true for a NaN
            raise CostError(
                f"the price of {item} is {seconds} seconds",
                why="prices, FLOPs and bytes must be finite and not negative",
                todo="check the sizes of the operator and the figures of the mesh and its device",
            )
    return seconds
