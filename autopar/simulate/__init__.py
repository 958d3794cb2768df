"""Simulates one training step of a plan: which task runs when on which stream, and its memory.

    graph, plan --step.tasks--> tasks --engine.run--> Timeline

The tasks follow the lines of the lowered program, so memory is counted rather than estimated: the
variables of a function, the tensors that autograd saves, and gradients until they are added up.
This package imports neither solvers nor code generation.
"""

from autopar.simulate.engine import issue_seconds, issued_seconds, run
from autopar.simulate.settings import Settings, settings_on
from autopar.simulate.step import tasks
from autopar.simulate.task import Task, fixed_bytes, kept_bytes
from autopar.simulate.timeline import Span, Timeline, covered

__all__ = [
    "Settings", "Span", "Task", "Timeline", "covered", "fixed_bytes", "issue_seconds",
    "issued_seconds", "kept_bytes", "run", "settings_on", "tasks",
]  # fmt: skip
