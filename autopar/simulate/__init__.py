"""A simulation of one training step of a plan: what runs when on which stream, and what it holds.

    graph, plan --step.tasks--> tasks --engine.run--> Timeline

Nothing here is measured. The tasks follow the emitted program line by line (`program.py`), so that
memory is counted, not estimated: what a function's variables keep alive, what autograd keeps, what
a gradient needs until it is added. Solvers and code generation are not imported.
"""

from autopar.simulate.engine import run
from autopar.simulate.settings import Settings, settings_on
from autopar.simulate.step import tasks
from autopar.simulate.task import Task, after_forward, fixed_bytes, kept_bytes
from autopar.simulate.timeline import Span, Timeline

__all__ = [
    "Settings", "Span", "Task", "Timeline", "after_forward", "fixed_bytes", "kept_bytes", "run",
    "settings_on", "tasks",
]  # fmt: skip
