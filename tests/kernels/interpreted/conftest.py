"""These tests run kernels in Triton's interpreter, in a process that `test_interpreter.py` starts.

Whether a process interprets is settled when Triton is imported, for all of it.
"""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]

if INTERPRETING:
    from pathlib import Path

    from autopar_kernels.registry import launch, register
    from tests.kernels import rounding

    rounding.install()
    register(strict=True)

    @pytest.fixture(autouse=True)
    def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks so small that small tensors have several of them, and a ragged one."""
        held = launch.read(Path(__file__).parent / "launches.toml")
        monkeypatch.setattr(launch, "table", lambda: held)
