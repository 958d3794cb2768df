"""Benchmarks on a GPU, with the kernels of this checkout, whether they are installed or not."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

NAME = "autopar_kernels"
FOLDER = Path(__file__).parent.parent.parent / "kernels"


def _importable() -> None:
    """Let `autopar_kernels` be the folder of this checkout, unless it has been imported."""
    if NAME in sys.modules:
        return
    places = [str(FOLDER)]
    spec = spec_from_file_location(NAME, FOLDER / "__init__.py", submodule_search_locations=places)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = module_from_spec(spec)
    spec.loader.exec_module(module)


_importable()
