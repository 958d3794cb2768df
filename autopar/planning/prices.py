"""The prices that a mesh is planned by, and the memory of its devices."""

from __future__ import annotations

import math

from autopar.cost.calibration import Calibration
from autopar.cost.device import device
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel, CostModel
from autopar.cost.network import Network
from autopar.cost.programs.choice import choose
from autopar.errors import PrecisionError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.precision import Precision
from autopar.planning.options import Options
from autopar.stage_plan import StagePlan


def cost_model(mesh: Mesh, options: Options) -> AnalyticModel | MeasuredModel:
    """The prices to plan by: measured ones where there is a calibration, else closed forms.

    A calibration is of the mesh, or of that which it is a part of by the options.

    Raises:
        CalibrationError: the file cannot be read, or was measured on another device or mesh.
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        PrecisionError: the device has no such arithmetic.
        MeshError, CollectiveError: an algorithm is for axes or sizes that the mesh does not have.
    """
    refuse_what_device_lacks(mesh, options.precision)
    model: AnalyticModel | MeasuredModel
    if options.calibration is None:
        model = AnalyticModel(mesh, in_step=True)
    else:
        model = MeasuredModel(mesh, Calibration.load(options.calibration), options.whole)
    if isinstance(options.collectives, ChosenAlgorithms):
        options.collectives.check(mesh)
        model.chosen = options.collectives
    else:
        model.chosen = choose(Network(mesh, model.device), model.collective)
    return model


def refuse_what_device_lacks(mesh: Mesh, precision: Precision) -> None:
    """PrecisionError if a mesh's devices do not compute in the precision faster than in f32.

    Where the hardware lacks a format, devices.toml has the rate of the one that stands in for it.
    """
    known, compute = device(mesh), precision.compute
    if not compute or known.name.lower() == "cpu":
        return
    if compute in ("bf16", "f16") and known.rate(compute, True) <= known.rate("f32", True):
        raise PrecisionError(
            f"{known.name} does not compute in {compute}",
            why="it has no such arithmetic, so f32 stands in for it",
            todo='pass precision="fp16"' if compute == "bf16" else 'pass precision="fp32"',
        )


def calibration_of(prices: CostModel) -> str:
    """The fingerprint of the calibration behind some prices, "" of closed forms."""
    return prices.calibration.fingerprint if isinstance(prices, MeasuredModel) else ""


def limit_of(mesh: Mesh, options: Options) -> float:
    """Bytes that a device may use."""
    limit = device(mesh).usable if options.memory is None else options.memory
    return parse_quantity(limit, "B") if isinstance(limit, str) else limit


def limit_of_plan(plan: StagePlan) -> float:
    """Bytes of a device that a plan was made within: all that is usable, if it says no limit."""
    return device(plan.mesh).usable if math.isinf(plan.limit) else plan.limit
