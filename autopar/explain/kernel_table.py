"""A table of the fused kernels of a plan and their savings."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table

from autopar.ir.units import format_bytes, format_seconds
from autopar.plan_entries import Fused


def render_fused(fused: Mapping[str, Fused]) -> tuple[RenderableType, ...]:
    """Returns a table of kernels with their uses, bytes and seconds saved; () if there are none."""
    if not fused:
        return ()
    table = Table(title="fused kernels", title_justify="left", box=None)
    for title in ("kernel", "uses", "first use", "bytes saved", "time saved"):
        table.add_column(title, justify="left" if title in ("kernel", "first use") else "right")
    for name, entry in fused.items():
        nbytes = f"{'-' * (entry.nbytes < 0)}{format_bytes(abs(entry.nbytes))}"
        seconds = f"{'-' * (entry.seconds < 0)}{format_seconds(abs(entry.seconds))}"
        table.add_row(name, str(entry.count), entry.first, nbytes, seconds)
    return (table,)
