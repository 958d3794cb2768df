"""Runs every benchmark: `python -m benchmarks`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HELPERS = ("__init__", "__main__", "harness", "hosts", "small_tasks")

for script in sorted(Path(__file__).parent.glob("*.py")):
    if script.stem not in HELPERS:
        print(f"== {script.name}", flush=True)
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")
