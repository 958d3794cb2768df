"""Published model configurations as data, and the `MODEL` argument of the command line.

Used by the command line, the benchmarks and the tests; the compiler does not depend on it.
Building a model imports torch and transformers; its configuration needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.zoo.spec import Spec, names, spec

if TYPE_CHECKING:
    from autopar.zoo.construction import build, example_inputs
    from autopar.zoo.loading import load, read_config

__all__ = ["Spec", "build", "example_inputs", "load", "names", "read_config", "spec"]

_HOMES = {
    "build": "construction",
    "example_inputs": "construction",
    "load": "loading",
    "read_config": "loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"autopar.zoo.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'autopar.zoo' has no attribute {name!r}")
