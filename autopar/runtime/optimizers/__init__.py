"""Descriptions of optimizers that two observed steps do not explain: one module each.

A module holds

- `NAME`: name of the optimizer, for messages;
- `rules(optimizer)`: the rules of parameters in the first group of an optimizer, by which planner,
  simulator and runtime treat them, or None if the module does not describe it;
- `instead(optimizer)`, if needed: an optimizer with the same groups, options and state, to be used
  in place of that one, or None. If its attribute `owners` is set, its step may let one owner work
  on whole parameters; see `autopar/runtime/update/owners.py`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from torch.optim import Optimizer

from autopar.errors import ProgramError
from autopar.ir.update import Rule


def described(optimizer: Optimizer) -> tuple[Rule, ...] | None:
    """Returns the rules of a described optimizer's first group, None if no module describes it.

    Raises:
        ProgramError: two modules have one name.
    """
    for module in _modules():
        rules: tuple[Rule, ...] | None = module.rules(optimizer)
        if rules is not None:
            return rules
    return None


def replaced(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer to be used in place of one, itself in nearly all cases."""
    for module in _modules():
        instead = getattr(module, "instead", lambda _: None)(optimizer)
        if isinstance(instead, Optimizer):
            return instead
    return optimizer


def _modules() -> Iterator[ModuleType]:
    names: dict[str, str] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = import_module(f"{__name__}.{info.name}")
        other = names.setdefault(module.NAME, info.name)
        if other != info.name:
            raise ProgramError(
                f"two modules describe the optimizer {module.NAME!r}",
                why=f"they are {other} and {info.name}",
                todo="give one of them another NAME",
            )
        yield module
