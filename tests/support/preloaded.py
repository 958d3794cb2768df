"""Imports and compiles everything that ranks of tests need, once in the server that forks them.

Importing this module does the work: torch, autopar, the models, and all that a first capture and a
first plan load.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import threading

from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support import models

for name in (
    "compile", "operators.kernels", "planning.frontier", "runtime.api", "runtime.recompute",
    "session.compiler", "session.evaluation", "session.generation.pair",
):  # fmt: skip
    importlib.import_module(f"autopar.{name}")
importlib.import_module("pytest")  # which the module of every test imports
model, batch = models.gpt2(layers=1)
captured = capture_graph(model, (), batch, Options(), Trace(None))
made = make_plan(captured.graph, Mesh.parse("cpu: gpu=4"), Options(), Trace(None))
# A rank's collector would visit all of this, and so copy every page of it.
gc.freeze()
gc.set_threshold(10_000, 10, 10)  # of ranks, too
atexit.register(gc.unfreeze)  # of the server, whose extensions else report leaks
assert threading.active_count() == 1, "a process with threads must not be forked"
