"""Finds the kernels, one file each, and makes torch operators of them when asked to.

    from autopar_kernels.registry import operators, register

    register()
    y, rstd = torch.ops.autopar_kernels.rms_norm(x, weight, 1e-6)

Operators are opaque: a graph holds one node for each, with shapes from `Operator.fake`. On a GPU
the Triton kernel runs, elsewhere the reference. Importing registers nothing.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

import torch

from .operator import NAMESPACE, KernelError, KernelWarning, Operator

__all__ = ["KernelError", "KernelWarning", "Operator", "operators", "register"]


def operators() -> dict[str, Operator]:
    """All operators by name, from the `OPERATORS` of every file of this folder's parent.

    Raises:
        KernelError: two operators have one name.
    """
    package = importlib.import_module(__name__.rpartition(".")[0])
    found: dict[str, Operator] = {}
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        if module.ispkg:
            continue
        for operator in importlib.import_module(f"{package.__name__}.{module.name}").OPERATORS:
            if operator.name in found:
                raise KernelError(f"two operators are called {operator.name}")
            found[operator.name] = operator
    return found


@functools.cache
def register(*, strict: bool = False) -> torch.library.Library:
    """Define every operator as `torch.ops.autopar_kernels.<name>`, once in a process.

    Args:
        strict: whether a kernel that does not take its operands is an error (KernelError), in place
            of a warning and the reference.

    Returns:
        The library that holds them; they live as long as it does.

    Raises:
        RuntimeError: they were registered before with another choice of `strict`.
    """
    library = torch.library.Library(NAMESPACE, "DEF")
    for operator in operators().values():
        library.define(operator.schema)
        run = functools.partial(operator.run, strict=strict)
        # Operators that only call others are differentiated as a whole like the rest.
        library.impl(operator.name, run, "CompositeExplicitAutograd")
        name = f"{NAMESPACE}::{operator.name}"
        torch.library.register_fake(name, operator.fake, lib=library)
        if operator.gradient is not None:
            torch.library.register_autograd(
                name, operator.gradient.backward, setup_context=operator.gradient.setup, lib=library
            )
    return library
