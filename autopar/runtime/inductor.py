"""A loaded program whose segments torch.compile has compiled, each a graph without a break.

Collectives stay outside of what is compiled (see `segments`), since they are calls of another
library with an order that all ranks must keep; kernels are opaque inside. The function of a block
is the same for all blocks of a run, and so are its segments: each is compiled once.
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
    """A program, compiled by a backend.

    Args:
        source: a program that `emit` wrote.
        filename: what tracebacks call it.
        backend: one of `BACKENDS`.

    Raises:
        ProgramError: there is no such backend; see `load`, `Generated.of`. A step raises one where
            a segment cannot be compiled, as without a C++ compiler on a CPU, Triton on a GPU.
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
    """ProgramError unless there is such a backend."""
    if backend not in BACKENDS:
        raise ProgramError(
            f"there is no backend {backend!r}", why=f"there are {', '.join(BACKENDS)}"
        )


class _Compiled:
    """A segment, compiled when it is called for the first time."""

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
                todo='pass backend="eager", or install what is missing',
            ) from error
