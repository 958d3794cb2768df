"""What kernels have taken the place of, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.units import format_bytes, format_seconds
from autopar.plan import Fused


def render_fused(fused: Mapping[str, Fused]) -> RenderableType:
    """Kernels with how often they stand where, and what they save; empty where there are none."""
    if not fused:
        return Text("")
    table = Table(title="kernels in the place of several operators", title_justify="left", box=None)
    for title in ("kernel", "times", "first", "bytes less", "time less"):
        table.add_column(title, justify="left" if title in ("kernel", "first") else "right")
    for name, entry in fused.items():
        saved = (
            f"{format_bytes(max(entry.nbytes, 0.0))}",
            f"{format_seconds(max(entry.seconds, 0.0))}",
        )
        table.add_row(name, str(entry.count), entry.first, *saved)
    return table
