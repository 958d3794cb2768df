"""Tracks the gradient reductions that a row must still make before an update may use them.

A gradient is summed over every axis of its stage's mesh, for every parameter. A row may do so in
several actions, each for some parameters over some axes, at once or begun and awaited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from autopar.ir.action import ALL, COPIES, SYNC, SYNC_AWAIT, SYNC_BEGIN, UPDATE, Action
from autopar.ir.pipeline_step import Wiring

_OTHERS = ""  # parameters, or axes, that no action names
_Sum = tuple[str, str]  # parameter, axis
_Gradient = tuple[int, int, int]  # stage, copy, microbatch


class MissingSums:
    """The sums that the gradients of a row still need.

    Args:
        row: row of one rank.
        wiring: connections of the stages; gives the axes of their meshes.
    """

    def __init__(self, row: Sequence[Action], wiring: Wiring) -> None:
        self._wiring = wiring
        sums = [one for one in row if one.over != COPIES]
        self._names = {name for one in sums for name in one.names} | {_OTHERS}
        self._axes = {axis for one in sums for axis in one.axes} or {_OTHERS}
        self._missing: dict[_Gradient, set[_Sum]] = {}
        self._begun: dict[Action, dict[_Gradient, set[_Sum]]] = {}

    def _sums(self, action: Action) -> set[_Sum]:
        """Returns the sums of its stage's gradients that an action performs."""
        axes: Iterable[str] = action.axes or self._mesh(action) or self._axes
        return set(product(action.names or self._names, axes))

    def _mesh(self, action: Action) -> tuple[str, ...]:
        return self._wiring.axes[action.stage] if self._wiring.axes else ()

    def computed(self, action: Action) -> None:
        """Notes a compute action: a backward owes all sums of its gradients."""
        if action.kind in "BW":
            plain = action._replace(names=(), over="")
            self._missing[action.stage, action.copy, action.microbatch] = self._sums(plain)

    def ended(self, action: Action) -> str:
        """Records a sum or an update; returns why it is invalid at this place, or ""."""
        own = {
            key: sums
            for key, sums in self._missing.items()
            if key[:2] == (action.stage, action.copy)
            and (action.microbatch == ALL or key[2] <= action.microbatch)
        }
        if action.kind == UPDATE:
            waiting = (key in own for row in self._begun.values() for key in row)
            if any(own.values()) or any(waiting):
                return f"gradients of stage {action.stage} are not synchronised"
            for key in own:
                del self._missing[key]
        elif action.kind == SYNC_AWAIT:
            if self._begun.pop(action._replace(kind=SYNC_BEGIN), None) is None:
                return "the sum that it waits for has not begun"
        elif action.kind in (SYNC, SYNC_BEGIN):
            return self._begins(action, own)
        return ""

    def _begins(self, action: Action, own: dict[_Gradient, set[_Sum]]) -> str:
        """Notes a sum that begins; returns as `ended`."""
        wanted, mesh = self._sums(action), self._mesh(action)
        strange = set(action.axes) - set(mesh or action.axes)
        if strange:
            return f"the mesh of stage {action.stage} has no axis {min(strange)}"
        fresh = {key: sums for key, sums in own.items() if sums}
        for key, sums in fresh.items():
            # A sum that has begun is not available until it is awaited.
            away = [row[key] for row in self._begun.values() if key in row]
            if wanted - sums - set().union(*away):
                return f"gradients of stage {action.stage} would be added up twice"
        if action.kind == SYNC_BEGIN:
            self._begun[action] = {key: sums & wanted for key, sums in fresh.items()}
        for sums in fresh.values():
            sums -= wanted
        return ""
