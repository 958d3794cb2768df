"""Loaded before any test, and before torch is."""

import os
from typing import Any

# Tensors are tiny and workers share the cores: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: Any) -> None:
    """Adds the command-line options of some tests."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the sources of tests/golden anew"
    )
