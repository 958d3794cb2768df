"""What would help where no plan fits into memory, with what each would cost in time."""

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
    """The cheapest plan within memory.

    Args:
        planned: plans under some options on some devices.
        options: what a user said.
        mesh: the devices.

    Raises:
        InfeasibleError: nothing fits; tells with which other options or devices a plan does.
    """
    try:
        return planned(options, mesh)
    except InfeasibleError as error:
        found = []
        for words, other, devices in _remedies(options, mesh):
            with suppress(AutoparError):
                seconds = planned(other, devices).predicted.step_seconds
                found.append(f"{words} ({format_seconds(seconds)} a step)")
        if found:
            error.todo = f"it fits with {', or with '.join(found)}; else {error.todo}"
        raise


def _remedies(options: Options, mesh: Mesh) -> Iterator[tuple[str, Options, Mesh]]:
    """In words, and the options and devices that they mean."""
    free = replace(options, recompute="auto", state=None)
    if (options.recompute, options.state) != (free.recompute, free.state):
        yield 'recompute="auto" and state=None', free, mesh
    if options.offload == "none":
        yield 'offload="auto"', replace(free, offload="auto"), mesh
    outer = mesh.axes[0]
    more = replace(mesh, axes=(replace(outer, size=2 * outer.size), *mesh.axes[1:]))
    yield f"twice as many devices, {outer.name}={2 * outer.size}", options, more
