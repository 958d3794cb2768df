"""Suggests options or devices with which a plan would fit into memory, with their step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_seconds
from autopar.stage_plan import StagePlan

if TYPE_CHECKING:
    from autopar.planning.options import Options


def with_remedies(
    planned: Callable[[Options, Mesh], StagePlan], options: Options, mesh: Mesh
) -> StagePlan:
    """Returns the fastest plan within memory; if nothing fits, adds remedies to the error.

    Args:
        planned: plans under some options on some devices.
        options: the user's options.
        mesh: the devices.

    Raises:
        InfeasibleError: nothing fits; names other options or devices with which a plan does.
    """
    try:
        return planned(options, mesh)
    except InfeasibleError as error:
        remedies = []
        for text, other, devices in _remedies(options, mesh):
            with suppress(AutoparError):
                seconds = planned(other, devices).predicted.step_seconds
                remedies.append(f"{text} ({format_seconds(seconds)} a step)")
        if remedies:
            error.todo = f"it fits with {', or with '.join(remedies)}; else {error.todo}"
        raise


def _remedies(options: Options, mesh: Mesh) -> Iterator[tuple[str, Options, Mesh]]:
    """Yields each remedy's text, options and devices."""
    free = replace(options, recompute="auto", state=None)
    if (options.recompute, options.state) != (free.recompute, free.state):
        yield 'recompute="auto" and state=None', free, mesh
    if options.offload == "none":
        yield 'offload="auto"', replace(free, offload="auto"), mesh
    outer = mesh.axes[0]
    more = replace(mesh, axes=(replace(outer, size=2 * outer.size), *mesh.axes[1:]))
    yield f"twice as many devices, {outer.name}={2 * outer.size}", options, more
