"""Compiles the segments of a program with torch.compile, each as a graph without a break.

Collectives stay outside of the compiled segments (see `segments`), because their order must be the
same on all ranks; kernels are opaque inside. All blocks of a run share one function, so each of its
segments is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import ProgramError
from autopar.runtime import torch_private
from autopar.runtime.generated import Generated
from autopar.runtime.module_loader import load
from autopar.runtime.segments import segmented

# "aot_eager" traces forward and backward of a segment as inductor does, and generates no code.
BACKENDS = ("eager", "aot_eager", "inductor")


def loaded(source: str, filename: str, backend: str) -> Generated:
    """Loads a program and compiles it with a backend.

    Args:
        source: a program that `emit` wrote.
        filename: its name in tracebacks.
        backend: one of `BACKENDS`.

    Raises:
        ProgramError: the backend is unknown, or as `load` and `Generated.of`. A step raises it if a
            segment cannot be compiled, for example without a C++ compiler on a CPU or Triton on a
            GPU.
    """
    check(backend)
    if backend == "eager":
        return Generated.of(load(source, filename))
    tree, segments = segmented(source)
    module = load(source, filename, tree)
    for name in segments:
        setattr(module, name, _Compiled(getattr(module, name), backend))
    return Generated.of(module)


def check(backend: str) -> None:
    """Raises ProgramError if the backend is unknown."""
    if backend not in BACKENDS:
        raise ProgramError(
            f"there is no backend {backend!r}",
            why=f"backends are {', '.join(BACKENDS)}",
            todo="name one of these",
        )


class _Compiled:
    """A segment, which is compiled at its first call."""

    def __init__(self, function: Callable[..., Any], backend: str) -> None:
        self._name, self._backend, self._eager = function.__name__, backend, function
        self._function = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    def __call__(self, *values: Any) -> Any:
        try:
            return self._function(*values)
        except torch_private.compile_error() as error:
            raise ProgramError(
                f"the backend {self._backend!r} cannot compile {self._name}",
                why=str(error).strip().partition("\n")[0],
                todo='pass backend="eager", or install the missing compiler',
            ) from error
