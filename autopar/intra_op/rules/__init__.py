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
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in _modules()]
    return collect(item for module in modules for item in module.RULES)


def _modules() -> list[pkgutil.ModuleInfo]:
    return sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
