"""Bytes and seconds in a readable form, and whole numbers as users write them."""

from __future__ import annotations

import re

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_bytes(count: float) -> str:
    """Returns three figures and a binary unit: "28 MiB", "1.5 GiB"."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_SIZES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_SIZES[unit]}" if count < 1000 else f"{count:.0f} {_SIZES[unit]}"


def format_seconds(seconds: float) -> str:
    """Returns three figures and a unit from us to s: "0.07 ms" reads "70 us"."""
    for scale, unit in _TIMES:
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us" if seconds else "0 s"


def parse_whole(word: str) -> int | None:
    """Returns the number that one to nine decimal digits write; None for any other text."""
    return int(word) if re.fullmatch("[0-9]{1,9}", word) else None
