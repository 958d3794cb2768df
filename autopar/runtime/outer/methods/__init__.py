"""Outer methods: every module of this folder defines a `PromptMethod` or a `LateMethod`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Sequence
from importlib import import_module, util

from autopar.errors import OptionError
from autopar.ir.replicas.outer_value import Outer
from autopar.runtime.outer.method import Method


def methods(path: Sequence[str] = ()) -> dict[str, type[Method]]:
    """Returns all outer methods by name, in alphabetical order.

    Args:
        path: folders to search instead of this one.

    Raises:
        OptionError: two modules define methods of the same name.
    """
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(list(path) or __path__):
        if path:
            spec = info.module_finder.find_spec(info.name, None)
            assert spec is not None
            assert spec.loader is not None
            module = util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = import_module(f"{__name__}.{info.name}")
        for _, each in inspect.getmembers(module, inspect.isclass):
            if issubclass(each, Method) and each.__module__ == module.__name__:
                if each.NAME in found:
                    raise OptionError(f"two outer methods are called {each.NAME!r}")
                found[each.NAME] = each
    return dict(sorted(found.items()))


def method_of(outer: Outer) -> Method:
    """Returns the method of an `Outer`; raises OptionError if its settings are invalid."""
    known = methods()
    if outer.method not in known:
        raise OptionError(
            f"there is no outer method {outer.method!r}",
            why=f"there are {', '.join(known)}",
            todo='write e.g. "co2 over node, tau=12"',
        )
    return known[outer.method](outer.given)
