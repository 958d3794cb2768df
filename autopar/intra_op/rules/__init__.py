"""The rules, one file per family; each file's `RULES` tuple is discovered by folder."""

from __future__ import annotations

import importlib
import pkgutil

from autopar.intra_op.rule import OpRule, collect


def rules() -> dict[str, OpRule]:
    """Returns all rules by operator name.

    Raises:
        RuleError: two files have a rule for one operator.
    """
    return collect(item for family in families().values() for item in family)


def families() -> dict[str, tuple[OpRule, ...]]:
    """Returns the rules of each file, by its name."""
    modules = {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in _modules()}
    return {name: tuple(module.RULES) for name, module in modules.items()}


def _modules() -> list[pkgutil.ModuleInfo]:
    return sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
