"""Forms of operators, one file each: it defines `FORM`, or `FORMS` for several operators."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import PlanError, RuleError
from autopar.operators.form import Form

PLAIN = "plain"  # the name in pins of an operator without a form


@functools.cache
def forms() -> Mapping[tuple[str, str], Form]:
    """Returns all forms by operator and name.

    Raises:
        RuleError: two forms of an operator have the same name, or two forms the same method.
    """
    found: dict[tuple[str, str], Form] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        file = importlib.import_module(f"{__name__}.{module.name}")
        several: tuple[Form, ...] = file.FORMS if hasattr(file, "FORMS") else (file.FORM,)
        for form in several:
            if (form.op, form.name) in found or form.name == PLAIN:
                raise RuleError(f"two forms of {form.op} are called {form.name!r}")
            found[form.op, form.name] = form
    methods = [form.method for form in found.values()]
    if len(set(methods)) < len(methods):
        raise RuleError(f"two forms have one method; the methods are {', '.join(methods)}")
    return found


def forms_of(op: str) -> tuple[Form, ...]:
    """Returns the forms of an operator."""
    return tuple(form for form in forms().values() if form.op == op)


def form_named(op: str, name: str) -> Form:
    """Returns a form of an operator.

    Raises:
        PlanError: the operator has no form of that name.
    """
    if (op, name) not in forms():
        known = ", ".join(form.name for form in forms_of(op))
        raise PlanError(
            f"{op} has no form {name!r}", why=f"its forms are {known or 'none but its own'}"
        )
    return forms()[op, name]


def method(name: str) -> Callable[..., Any] | None:
    """Returns the function that runs a form, by the name of its method; None for other names."""
    return next((form.run for form in forms().values() if form.method == name), None)
