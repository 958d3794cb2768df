"""Names the parts of a step for its profile; see profile.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from autopar.runtime.torch_private import profiling

ACTION, PHASE, CLOCK, WAIT = "action", "phase", "clock", "wait"
_MARK = "autopar "  # prefix of a part's name among the profiler's texts


def part(kind: str, name: object) -> AbstractContextManager[object]:
    """Returns the context of a part of a step: an ACTION of a pipeline, a PHASE, or a WAIT."""
    return record_function(f"{_MARK}{kind} {name}") if profiling() else nullcontext()


def read_part(text: str) -> tuple[str, str] | None:
    """Returns kind and name of a part, None for other profiler entries."""
    if not text.startswith(_MARK):
        return None
    kind, _, name = text.removeprefix(_MARK).partition(" ")
    return kind, name
