"""The prices by which a mesh is planned, and the memory of its devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost.calibration import Calibration
from autopar.cost.device import device, refuse_unlike
from autopar.cost.kernel_tables import Host
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel, CostModel
from autopar.cost.network import Network
from autopar.cost.overlap import TAKE_TURNS
from autopar.cost.programs.choice import choose
from autopar.cost.programs.row_check import checked
from autopar.errors import CalibrationError, PrecisionError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.executed.execution import Execution
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.precision import Precision
from autopar.planning.options import Options
from autopar.stage_plan import StagePlan


def cost_model(mesh: Mesh, options: Options) -> AnalyticModel | MeasuredModel:
    """Returns the prices of a mesh: measured ones if there is a calibration, else closed forms.

    A calibration must be of this mesh, or of `options.whole`, which contains it.

    Raises:
        CalibrationError: the file cannot be read, or was measured on another device or mesh.
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        PrecisionError: the device does not support the precision.
        MeshError, CollectiveError: an algorithm is for axes or sizes that the mesh does not have.
    """
    refuse_unsupported(mesh, options.precision)
    model: AnalyticModel | MeasuredModel
    if options.calibration is None:
        model = AnalyticModel(mesh, in_step=True, whole=options.whole)
    else:
        model = MeasuredModel(mesh, Calibration.load(options.calibration), options.whole)
    if isinstance(options.collectives, ChosenAlgorithms):
        model.chosen = checked(options.collectives, mesh)
    else:
        compared = model.compared if isinstance(model, MeasuredModel) else None
        chosen = choose(Network(mesh, model.device), model.collective, compared)
        model.chosen = checked(chosen, mesh)
    return model


def refuse_unsupported(mesh: Mesh, precision: Precision) -> None:
    """Raises PrecisionError if a mesh's devices compute no faster in the precision than in f32.

    If the hardware lacks a format, devices.toml has the rate of the format that emulates it.
    """
    known, compute = device(mesh), precision.compute
    if not compute or known.name.lower() == "cpu":
        return
    if compute in ("bf16", "f16") and known.rate(compute, True) <= known.rate("f32", True):
        raise PrecisionError(
            f"{known.name} does not compute in {compute}",
            why="the hardware lacks this format, and f32 emulates it",
            todo='pass precision="fp16"' if compute == "bf16" else 'pass precision="fp32"',
        )


def calibration_of(prices: CostModel) -> str:
    """Returns the fingerprint of the calibration behind some prices, "" for closed forms."""
    return prices.calibration.fingerprint if isinstance(prices, MeasuredModel) else ""


def host_of(prices: CostModel) -> Host | None:
    """Returns the figures of the host that a calibration measured, None for closed forms."""
    return prices.issuing if isinstance(prices, MeasuredModel) else None


def slowdown_of(mesh: Mesh, execution: Execution) -> float:
    """Returns the slowdown of kernels and collectives while both run; 2 if nothing overlaps."""
    return TAKE_TURNS if execution.waits else device(mesh).slowdown


def limit_of(mesh: Mesh, options: Options) -> float:
    """Returns the memory limit of a device in bytes; all of it where the allocator's is known."""
    chip = device(mesh)
    usual = chip.memory if options.execution.reserve else chip.usable
    limit = usual if options.memory is None else options.memory
    return parse_quantity(limit, "B") if isinstance(limit, str) else limit


def limits_of(mesh: Mesh, options: Options) -> dict[str, float]:
    """Returns the memory limit in bytes of every kind of device, by `Mesh.kind`."""
    return {part.kind: limit_of(part, options) for part in mesh.parts}


def by_kind(memory: float | Mapping[str, float], mesh: Mesh) -> Mapping[str, float]:
    """Returns the bytes of every kind of device, given one number or numbers by `Mesh.kind`."""
    return memory if isinstance(memory, Mapping) else {part.kind: memory for part in mesh.parts}


def check_prices(mesh: Mesh, options: Options, staged: bool) -> None:
    """Raises the errors of `cost_model`, and MeshError for unlike devices without stages.

    Args:
        mesh: all devices.
        options: options of planning.
        staged: whether each stage may have devices of its own.
    """
    if not staged:
        refuse_unlike(mesh)
    if mesh.unlike and options.calibration is not None:
        raise CalibrationError(
            f"a calibration does not price {mesh}",
            where=str(options.calibration),
            why="it was measured on one kind of device, and the mesh has several",
            todo="plan without it: closed forms price every device of devices.toml",
        )
    for part in mesh.parts:
        cost_model(part, options)


def limit_of_plan(plan: StagePlan) -> float:
    """Returns the memory limit that a plan was made with in bytes, by default the usable memory."""
    return device(plan.mesh).usable if math.isinf(plan.limit) else plan.limit
