"""Refuses, at the user's line, side effects of a model that a trace would lose.

A trace has the operators of one call. A hook, a print, a gradient computed inside, an attribute
that counts calls or a number of Python's `random` leave no trace, or only a constant. This file
does not know torch.export; `capture` uses it while it traces the model.
"""

from __future__ import annotations

import inspect
import linecache
import os
import random
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.dtypes.autocast_gradients import GradientsInAutocast
from autopar.capture.experts.expert_loops import ExpertLoops
from autopar.capture.experts.row_counts import RowCounts
from autopar.capture.lost_calls import SWITCHED, accessed, lost_call
from autopar.capture.selected import apply, selects
from autopar.capture.traced import BY_MASK
from autopar.errors import CaptureError
from autopar.operators.assume import assumed

_TORCH, _OURS = os.path.dirname(torch.__file__), os.path.dirname(__file__)
_LIBRARY = sysconfig.get_path("stdlib")


def is_users(file: str) -> bool:
    """Returns whether a file belongs to the user or to a library of models."""
    if file.startswith((_TORCH, _OURS, "<")):
        return False
    return "site-packages" in file or not file.startswith(_LIBRARY)


def place(file: str, line: int) -> str:
    """Returns a line of code as messages show it: "model.py:41  x = self.norm(x)"."""
    return f"{os.path.basename(file)}:{line}  {linecache.getline(file, line).strip()}"


def innermost(trace: TracebackType | None) -> str:
    """Returns the innermost line of the user's code in a traceback, "" if there is none."""
    line = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        line = place(code.co_filename, trace.tb_lineno) if is_users(code.co_filename) else line
        trace = trace.tb_next
    return line


def current() -> str:
    """Returns the innermost running line of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


_BY_SIZE = {
    "__getitem__": "for x[mask] and x[:n] use torch.where(mask, x, 0) or x * mask, which keep "
    "the size",
    "masked_select": "use torch.where(mask, x, 0), or x * mask, which keep the size",
    "repeat_interleave": "state the size: repeat_interleave(..., output_size=n)",
    **dict.fromkeys(
        ("unique", "unique_consecutive", "bincount"),
        "compute it before the model and pass it as an input",
    ),
    **dict.fromkeys(
        ("arange", "zeros", "ones", "full", "empty", "rand", "randn", "linspace", "narrow"),
        "take the size from a shape or a constant, and mask the excess",
    ),
}


class Watch(TorchFunctionMode):
    """Observes every call of torch's functions, and refuses those that a trace would lose.

    Attributes:
        failed: the name of the function that raised the last error.
        opaque: the user's last line with something that may not be traceable, such as `x.data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed = self.opaque = ""
        self._gradients = GradientsInAutocast()
        self._loops, self._counts = ExpertLoops(), RowCounts()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`; raises CaptureError if the call or its result cannot be part of a graph."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        lost = lost_call(func, name, args, kwargs)
        if name == "_set_grad_enabled" and not self._gradients.switch(args[0]):
            lost = SWITCHED
        if lost is not None:
            raise CaptureError(lost.what, where=current(), why=lost.why, todo=lost.todo)
        if name == "__get__" and accessed(func) == "data":
            func = Tensor.detach  # equal in values, and traceable
        if name in ("requires_grad_", "__get__") and accessed(func) in ("", "data"):
            self.opaque = current()
        truth = assumed(name, args, sys._getframe(1), current())
        if truth is not None:
            return truth
        if selects(name, (*args, *kwargs.values())):
            return apply(func, args, kwargs, self._gradients.off)
        for stand_ins in (self._counts, self._loops):
            result = stand_ins.call(func, name, args, kwargs)
            if result is not NotImplemented:
                return result
        try:
            result = self._gradients.call(func, name, args, kwargs)
        except Exception:
            self.failed = name
            raise
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise taken_out(current())
            if isinstance(item, Tensor) and not item.is_sparse:
                _refuse_unknown_sizes(item, name)
        self._loops.note(name, args, kwargs, result)
        self._counts.note(name, args, result)
        return result


def taken_out(where: str = "") -> CaptureError:
    """Returns the error of a model that converts a tensor to a Python number."""
    return CaptureError(
        "a tensor is converted to a Python number",
        where=where,
        why="values are not known when a model is captured",
        todo="keep it a tensor: no .item(), int(), float() or .tolist() in forward",
    )


def _refuse_unknown_sizes(tensor: Tensor, name: str) -> None:
    if not all(isinstance(size, int) for size in tensor.shape):
        sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in tensor.shape)
        raise CaptureError(
            f"a tensor of sizes [{sizes}]",
            where=current(),
            why="its sizes depend on values, which are not known when a model is captured",
            todo=_BY_SIZE.get(name, BY_MASK),
        )


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError if a parameter has a hook on its gradient."""
    for name, parameter in model.named_parameters():
        # There is no public query for hooks.
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"the parameter {name!r} has a hook on its gradient",
                why="a program has its own parameters, in shards, without hooks",
                todo="remove it, and do its work in forward",
            )


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


class State:
    """A model's state other than parameters and buffers, before a call."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            path: module
            for path, module in model.named_modules()
            # Attributes of torch's own modules are not state.
            if not type(module).__module__.startswith("torch.")
        }
        self._held = {key: _Held.of(value) for key, value in self._attributes()}
        # A library may install hooks in the first call, and remember it in an attribute.
        tables = (vars(module)[name] for module in model.modules() for name in _HOOKS)
        self._hooks = [(table, dict(table)) for table in tables]
        self._random = random.getstate(), np.random.get_state()

    def _attributes(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in _COMMON:
                    yield (path, name), value

    def replaced(self) -> frozenset[str]:
        """Returns the names of tensors, other than buffers, that the call has replaced.

        Raises:
            CaptureError: the call has changed a number or a container, or drawn random numbers that
                are not torch's.
        """
        names = set()
        for (path, name), value in self._attributes():
            before = self._held.get((path, name))
            if before is None or before.mark in (None, _mark(value)):
                continue
            if not isinstance(before.value, Tensor):
                raise changed(self.modules[path], name)
            names.add(f"{path}.{name}".lstrip("."))
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


def changed(module: nn.Module, name: str) -> CaptureError:
    """Returns the error of a model that keeps state in an attribute."""
    return CaptureError(
        f"forward changes self.{name} of {type(module).__name__}",
        where=_search([module], rf"self\.{name}\b\s*(?:\[.*\])?\s*(?:[-+*/|&@%]?=(?!=)|\.\w+\()"),
        why="its value at capture would be a constant of the program",
        todo=f'keep it in a buffer, register_buffer("{name}", torch.tensor(...)); if every call '
        "sets it again, initialise it to None",
    )


_COMMON = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and value == {})


def _mark(value: object) -> object:
    """Returns a value that differs if an attribute was changed; None if it is not checked."""
    if isinstance(value, (bool, int, float, complex, str)):
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
