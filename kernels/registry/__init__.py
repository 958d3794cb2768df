"""Finds the kernels, one file each, and registers them as torch operators on request.

    from autopar_kernels.registry import operators, register

    register()
    y, rstd = torch.ops.autopar_kernels.rms_norm(x, weight, 1e-6)

Operators are opaque: a graph has one node for each, with shapes from `Operator.fake`. On a GPU the
Triton kernel runs, elsewhere the reference. Importing registers nothing.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

import torch

from .operator import NAMESPACE, KernelError, KernelWarning, Operator

__all__ = ["KernelError", "KernelWarning", "Operator", "operators", "register"]


def operators() -> dict[str, Operator]:
    """Returns all operators by name, from the `OPERATORS` of every file of the parent folder.

    Raises:
        KernelError: two operators have the same name.
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


def register(*, strict: bool | None = None) -> torch.library.Library:
    """Defines every operator as `torch.ops.autopar_kernels.<name>`, once in a process.

    Args:
        strict: whether operands that a kernel does not support raise KernelError, in place of a
            warning and the reference; by default as before, or False.

    Returns:
        The library of the operators, which exist as long as it does.

    Raises:
        KernelError: they were registered before with another `strict`.
    """
    made = _made()
    if not made:
        made[bool(strict)] = _defined(bool(strict))
    ((known, library),) = made.items()
    if strict not in (None, known):
        raise KernelError(
            f"the kernels are registered with strict={known}: pass strict={strict} before anything "
            "else registers them, such as a program that uses them"
        )
    return library


@functools.cache
def _made() -> dict[bool, torch.library.Library]:
    """Returns the library of this process by its choice of `strict`, once there is one."""
    return {}


def _defined(strict: bool) -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for operator in operators().values():
        library.define(operator.schema)
        run = functools.partial(operator.run, strict=strict)
        # Composite operators, which call others, are differentiated as a whole like the rest.
        library.impl(operator.name, run, "CompositeExplicitAutograd")
        name = f"{NAMESPACE}::{operator.name}"
        torch.library.register_fake(name, operator.fake, lib=library)
        if operator.gradient is not None:
            torch.library.register_autograd(
                name, operator.gradient.backward, setup_context=operator.gradient.setup, lib=library
            )
    return library
