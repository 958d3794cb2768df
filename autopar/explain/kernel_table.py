"""What kernels have taken the place of, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table

from autopar.ir.units import format_bytes, format_seconds
from autopar.plan_entries import Fused


def render_fused(fused: Mapping[str, Fused]) -> tuple[RenderableType, ...]:
    """A table of the kernels, how often each stands where, and what it saves; () without any."""
    if not fused:
        return ()
    table = Table(title="kernels in the place of several operators", title_justify="left", box=None)
    for title in ("kernel", "times", "first", "bytes less", "time less"):
        table.add_column(title, justify="left" if title in ("kernel", "first") else "right")
    for name, entry in fused.items():
        nbytes = f"{'-' * (entry.nbytes < 0)}{format_bytes(abs(entry.nbytes))}"
        seconds = f"{'-' * (entry.seconds < 0)}{format_seconds(abs(entry.seconds))}"
        table.add_row(name, str(entry.count), entry.first, nbytes, seconds)
    return (table,)
