"""The parts of a step, by name, for its profile; see profile.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from autopar.runtime.torch_private import profiling

ACTION, PHASE, CLOCK, WAIT = "action", "phase", "clock", "wait"
_MARK = "autopar "  # begins the name of a part, which torch's profiler knows as text only


def part(kind: str, name: object) -> AbstractContextManager[object]:
    """A context that is a part of a step: an ACTION of a pipeline, a PHASE, or a WAIT."""
    return record_function(f"{_MARK}{kind} {name}") if profiling() else nullcontext()


def read_part(text: str) -> tuple[str, str] | None:
    """Kind and name of a part, None for what else is profiled."""
    if not text.startswith(_MARK):
        return None
    kind, _, name = text.removeprefix(_MARK).partition(" ")
    return kind, name
