"""What the searches for one schedule and one number of microbatches share."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.inter_op.prices import Prices
from autopar.inter_op.stage import Law


@dataclass(frozen=True)
class Draft:
    """A pipeline by numbers: for each stage its sub-mesh and (row, first, last, option) chunks."""

    law: Law
    microbatches: int
    seconds: float
    stages: tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...]

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(row, sub-mesh) of every chunk."""
        return [(chunk[0], q) for q, chunks in self.stages for chunk in chunks]


@dataclass(frozen=True)
class Space:
    """What pipelines there are.

    Attributes:
        prices: of stages.
        devices: of the cluster.
        memory: bytes of a device.
        most_stages: how many there may be.
    """

    prices: Prices
    devices: int
    memory: float
    most_stages: int
