"""Detects a model's changes of its own attributes, which a trace would lose, and undoes them."""

from __future__ import annotations

import inspect
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.capture.watch import is_users, place
from autopar.errors import CaptureError

CHANGES = "forward changes self."  # begins the error for an attribute that a call sets


@dataclass(frozen=True)
class _Held:
    """An attribute of a module before the call.

    Attributes:
        value: its value.
        items: its contents, if it is a container.
        mark: a value that differs after a change.
    """

    value: Any
    items: Any
    mark: object

    @classmethod
    def of(cls, value: Any) -> _Held:
        """Records an attribute's current value."""
        container = isinstance(value, (dict, list, set, deque))
        return cls(value, copy(value) if container else None, _mark(value))

    def again(self) -> Any:
        """Restores the value: the same object with its former contents."""
        if isinstance(self.value, (list, deque)):
            self.value.clear()
            self.value.extend(self.items)
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self.items)
        return self.value


Values = dict[tuple[str, str], Any]  # path of a module, name of an attribute -> its value


class State:
    """A model's state other than parameters and buffers, before a call.

    Attributes:
        numbers: numbers and texts that the call has set, found by `replaced`.
        tensors: tensors that the call has set where none was, found by `replaced`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            path: module
            for path, module in model.named_modules()
            # Attributes of torch's own modules are not state.
            if not type(module).__module__.startswith("torch.")
        }
        self._held = {key: _Held.of(value) for key, value in self._attributes()}
        # A library may install hooks in the first call, and record that in an attribute.
        tables = (vars(module)[name] for module in model.modules() for name in _HOOKS)
        self._hooks = [(table, dict(table)) for table in tables]
        self._random = random.getstate(), np.random.get_state()
        self.numbers: Values = {}
        self.tensors: Values = {}

    def _attributes(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in _COMMON:
                    yield (path, name), value

    def replaced(self) -> frozenset[str]:
        """Returns the names of tensors, other than buffers, that the call has replaced.

        Raises:
            CaptureError: the call has changed a container, or drawn random numbers from another
                generator than torch's.
        """
        names = set()
        for (path, name), value in self._attributes():
            before = self._held.get((path, name))
            if isinstance(value, Tensor) and (before is None or before.value is None):
                self.tensors[path, name] = value
            if before is None or before.mark in (None, _mark(value)):
                continue
            if isinstance(before.value, Tensor):
                names.add(f"{path}.{name}".lstrip("."))
            elif isinstance(value, _NUMBERS):
                self.numbers[path, name] = value
            else:
                raise changed(self.modules[path], name)
        if not _same_state(self._random, (random.getstate(), np.random.get_state())):
            raise CaptureError(
                "forward draws random numbers that are not torch's",
                where=_search(self.modules.values(), r"\brandom\."),
                why="they would be drawn once, when the model is captured",
                todo="draw with torch, e.g. torch.rand, or pass them as an input",
            )
        return frozenset(names)

    def restore(self) -> None:
        """Restores the modules' attributes and hooks, so that nothing of the trace remains."""
        for table, kept in self._hooks:
            table.clear()
            table.update(kept)
        for (path, name), value in list(self._attributes()):
            before = self._held.get((path, name))
            if before is None:
                delattr(self.modules[path], name)
            elif before.mark != _mark(value):
                setattr(self.modules[path], name, before.again())


@contextmanager
def set_to(model: nn.Module, values: Values) -> Iterator[None]:
    """Sets attributes of a model's modules, and restores them on exit; values of tensors are 0."""
    before = State(model)
    try:
        for (path, name), value in values.items():
            if isinstance(value, Tensor):
                one = torch.zeros((), dtype=value.dtype, device=value.device)
                value = one.expand(tuple(map(int, value.shape)))
            setattr(model.get_submodule(path), name, value)
        yield
    finally:
        before.restore()


def changed(module: nn.Module, name: str) -> CaptureError:
    """Returns the error of a model that keeps state in an attribute."""
    return CaptureError(
        f"{CHANGES}{name} of {type(module).__name__}",
        where=_search([module], rf"self\.{name}\b\s*(?:\[.*\])?\s*(?:[-+*/|&@%]?=(?!=)|\.\w+\()"),
        why="its value at capture would be a constant of the program",
        todo=f'keep it in a buffer, register_buffer("{name}", torch.tensor(...)); if every call '
        "sets it again, initialise it to None",
    )


_NUMBERS = (bool, int, float, complex, str)
_COMMON = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and value == {})


def _mark(value: object) -> object:
    """Returns a value that differs if an attribute was changed; None if it is not checked."""
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, dict):
        return tuple((repr(key), _mark(item)) for key, item in value.items())
    if isinstance(value, (list, set, deque)):
        return tuple(map(_mark, value))
    return None


def _same_state(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    (kind, keys, *rest), (other_kind, other_keys, *other_rest) = before[1], after[1]
    same = (kind, rest) == (other_kind, other_rest) and np.array_equal(keys, other_keys)
    return bool(before[0] == after[0] and same)


def _search(modules: Iterable[nn.Module], pattern: str) -> str:
    """Returns the first line in the methods of modules, except __init__, that matches a pattern."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    methods = (m for kind in kinds for m in vars(kind).values() if inspect.isfunction(m))
    for method in methods:
        file = method.__code__.co_filename
        if method.__name__ == "__init__" or not is_users(file):
            continue
        try:
            lines, start = inspect.getsourcelines(method)
        except OSError:
            continue
        for number, line in enumerate(lines, start):
            if re.search(pattern, line):
                return place(file, number)
    return ""
