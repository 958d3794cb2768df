"""Launch parameters of kernels: a committed table, by kernel, architecture and size.

    [rms_norm.any]
    rows = [{ up_to = 1024, warps = 4 }, { up_to = 8192, warps = 8 }, { warps = 16 }]

means: rows of up to 1024 elements are normalised by 4 warps, longer ones by more. An architecture
with its own table ("sm_90") uses that in place of "any". `python -m benchmarks.gpu.tune` writes
such tables on a GPU; nothing is tuned when a program runs.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .language import architecture

TABLE = Path(__file__).parent / "launches.toml"
Table = Mapping[str, Mapping[str, tuple["Launch", ...]]]


@dataclass(frozen=True)
class Launch:
    """One row of the table.

    Attributes:
        block: elements that a program handles at a time, where the kernel leaves that open.
        warps: number of warps, of 32 threads each.
        stages: iterations of a loop whose loads are in flight at once.
        programs: number of programs per processor that share a kernel's loop.
        up_to: the largest size that the row covers; None for all larger ones.
    """

    block: int = 0
    warps: int = 4
    stages: int = 3
    programs: int = 1
    up_to: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Returns Triton's launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def launch(kernel: str, size: int) -> Launch:
    """Returns the row of `kernel` for this architecture and a size, as the kernel measures it.

    Raises:
        KeyError: the table has no such kernel.
    """
    for row in rows(kernel, architecture()):
        if row.up_to is None or size <= row.up_to:
            return row
    raise KeyError(f"{TABLE.name}: no row of {kernel} is for size {size}")


def rows(kernel: str, arch: str) -> tuple[Launch, ...]:
    """Returns all rows of a kernel for an architecture, by size."""
    held = table()[kernel]
    return held.get(arch, held["any"])


@functools.cache
def table() -> Table:
    """Returns the committed table."""
    return read(TABLE)


def read(path: Path) -> Table:
    """Reads a table of launches from a file."""
    held: Mapping[str, Mapping[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        kernel: {
            arch: tuple(Launch(**row) for row in entry["rows"]) for arch, entry in archs.items()
        }
        for kernel, archs in held.items()
    }
