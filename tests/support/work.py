"""Counts work, where a clock would tell how busy the machine is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls_of(run: Callable[[], object]) -> int:
    """Returns how many functions of Python and of C are called in a run, in this thread.

    What happens inside compiled loops and inside torch is not counted, nor is the collection of
    garbage, which comes at any time.
    """
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
