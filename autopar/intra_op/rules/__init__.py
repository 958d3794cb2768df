"""The rules, one family a file; a file's `RULES` is a tuple of values, found by folder."""

from __future__ import annotations

import importlib
import pkgutil

from autopar.intra_op.rule import OpRule, collect


def rules() -> dict[str, OpRule]:
    """All rules by operator name.

    Raises:
        RuleError: two files have a rule for one operator.
    """
    return collect(item for family in families().values() for item in family)


def families() -> dict[str, tuple[OpRule, ...]]:
    """The rules of each file, by its name."""
    modules = {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in _modules()}
    return {name: tuple(module.RULES) for name, module in modules.items()}


def _modules() -> list[pkgutil.ModuleInfo]:
    return sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
