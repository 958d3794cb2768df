"""Matrix products on grids of devices, each of which has a block of every matrix."""

from __future__ import annotations


def turns(side: int, contracted: int) -> int:
    """Returns the number of turns on a grid of side x side devices."""
    return min(side, contracted)
