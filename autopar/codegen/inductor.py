"""A loaded program whose block functions torch.compile has compiled, one by one.

Kernels are opaque inside them; collectives stay outside of what is compiled, since they are calls
of another library with an order that all ranks must keep. All blocks of a run are one compiled
function: it reads its parameters under the first block's names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from autopar.codegen.runtime import Runtime
from autopar.errors import ProgramError

BACKENDS = ("eager", "inductor")
_BLOCK = re.compile(r"_block(_\d+)?$")


def compiled(module: ModuleType, source: str, backend: str) -> ModuleType:
    """`module`, its blocks compiled if the backend is "inductor".

    Args:
        module: loaded from `source`, and nobody else's.
        source: a program that `emit` wrote.
        backend: one of `BACKENDS`.

    Raises:
        ProgramError: there is no such backend.
    """
    check(backend)
    if backend == "eager":
        return module
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and _BLOCK.search(function.name):
            block = _Block(getattr(module, function.name), function)
            setattr(module, function.name, block)
    return module


def check(backend: str) -> None:
    """ProgramError unless there is such a backend."""
    if backend not in BACKENDS:
        raise ProgramError(
            f"there is no backend {backend!r}", why=f"there are {' and '.join(BACKENDS)}"
        )


class _Block:
    """The function of one run of blocks: (mesh, p, number of the block or its names, *values)."""

    def __init__(self, function: Callable[..., Any], text: ast.FunctionDef) -> None:
        self.function = torch.compile(function, dynamic=False)
        self.index = text.args.args[2].arg
        self.keys = tuple(_reads(text))
        self.first: Any = None
        self.mesh: _Outside | None = None

    def __call__(self, mesh: Runtime, p: Mapping[str, Tensor], index: Any, *values: Tensor) -> Any:
        if self.first is None:
            self.first, self.mesh = index, _Outside(mesh)
        read = {self._key(key, self.first): p[self._key(key, index)] for key in self.keys}
        return self.function(self.mesh, read, self.first, *values)

    def _key(self, key: CodeType, index: Any) -> str:
        """The name under which a block reads a parameter."""
        return str(eval(key, {self.index: index}))


def _reads(text: ast.FunctionDef) -> list[CodeType]:
    """The expressions for names of parameters, `p[...]`, in a function."""
    found = {
        ast.unparse(node.slice)
        for node in ast.walk(text)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        if node.value.id == "p"
    }
    return [compile(expression, "<names of parameters>", "eval") for expression in sorted(found)]


class _Outside:
    """A runtime of which every call interrupts what is compiled."""

    def __init__(self, mesh: Runtime) -> None:
        self.device = mesh.device
        for name in dir(mesh):
            method = None if name.startswith("_") else getattr(mesh, name)
            if callable(method) and hasattr(method, "__func__"):
                setattr(self, name, torch.compiler.disable(method))
