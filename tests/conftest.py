"""Loaded before any test, and before torch is."""

import atexit
import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# An example may take long on a busy machine.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Tensors are tiny and workers share the cores: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests are written for CPUs; see CONTRIBUTING.md for those that also run on a GPU.
if os.environ.get("AUTOPAR_TESTS_ON_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Ranks are forked from a server that asks whether there is a GPU, which must not initialise CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def pytest_addoption(parser: Any) -> None:
    """Adds the command-line options of some tests."""
    parser.addoption(
        "--update-golden", action="store_true", help="write the sources of tests/golden anew"
    )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Puts the files that start processes first: they take longest, and short ones fill up the end.

    Ranks are such processes, and interpreters.
    """
    starting = {"run_ranks", "subprocess"}
    items.sort(key=lambda item: starting.isdisjoint(vars(item.module)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares Python's collector what lives to the end: imported modules, and thousands of tests.

    Each visit to them takes a third of a second, a twelfth of the processor time of planning tests.
    What tests leave behind is visited less often than usual, too: most of it are small values.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()
        atexit.register(gc.unfreeze)  # else extensions report what lives to the end as leaks
