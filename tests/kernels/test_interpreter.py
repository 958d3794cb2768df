"""Starts the tests of `interpreted/` in a process whose Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(
        command,
        cwd=FOLDER.parent.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
