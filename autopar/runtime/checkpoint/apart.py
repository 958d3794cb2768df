"""What else a checkpoint keeps: a scheduler, and the state of replicas that train apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part


class Scheduler(Protocol):
    """A learning-rate scheduler, as those of torch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved state."""


class Apart(Protocol):
    """The state of replicas that train apart, beside that of one program."""

    def saved(self, own: Sequence[Part]) -> list[Part]:
        """Returns what this rank saves, given its replica's parts; all ranks call it."""

    def wanted(self, own: Sequence[Part], index: Index) -> list[Part]:
        """Returns what this rank reads, given what its replica's program wants."""

    def details(self) -> dict[str, Any]:
        """Returns values that are alike on all ranks."""

    def take(self, details: Any) -> None:
        """Goes on from saved details, or begins anew without any that fit."""
