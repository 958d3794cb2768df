"""What a model does beside computing values, which a trace of it would lose: refused at its line.

A trace has the operators of one call. A hook, a print, a gradient taken inside, an attribute that
counts calls or a number of Python's `random` leave nothing in it, or a constant. Nothing here
knows torch.export; `capture` watches the model while it traces it.
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

from autopar.capture.autocast_gradients import GradientsInAutocast
from autopar.capture.selected import apply, selects
from autopar.errors import CaptureError
from autopar.operators.assume import assumed

_TORCH, _OURS = os.path.dirname(torch.__file__), os.path.dirname(__file__)
_LIBRARY = sysconfig.get_path("stdlib")


def is_users(file: str) -> bool:
    """Whether a file is code of the user or of a library of models."""
    if file.startswith((_TORCH, _OURS, "<")):
        return False
    return "site-packages" in file or not file.startswith(_LIBRARY)


def place(file: str, line: int) -> str:
    """A line of code as messages show it: "model.py:41  x = self.norm(x)"."""
    return f"{os.path.basename(file)}:{line}  {linecache.getline(file, line).strip()}"


def innermost(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in a traceback, "" if there is none."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        found = place(code.co_filename, trace.tb_lineno) if is_users(code.co_filename) else found
        trace = trace.tb_next
    return found


def current() -> str:
    """The innermost line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


@dataclass(frozen=True)
class _Lost:
    """Why a call has no place in a model that is captured."""

    what: str
    why: str
    todo: str


_PRINTED = _Lost(
    "a tensor is printed",
    "a model is captured once, without values; in training nothing would be printed",
    "leave it out of forward, or return the value with the model's outputs",
)
_HOOKED = _Lost(
    "a hook is put on a tensor",
    "a captured model has no hooks: the gradient would be another one",
    "write what the hook does with operators, or as a torch.library.custom_op with "
    "register_autograd",
)
_LOST = {
    "__repr__": _PRINTED,
    "__format__": _PRINTED,
    "register_hook": _HOOKED,
    "register_post_accumulate_grad_hook": _HOOKED,
    "backward": _Lost(
        "backward is called in forward",
        "autopar computes the gradients of the loss that forward returns",
        "return the loss, and leave backward and the optimizer to program.step",
    ),
}
_UNCREATED = _Lost(
    "torch.autograd.grad without create_graph=True",
    "its result would get a gradient that it does not have",
    "pass create_graph=True and detach the result, or differentiate it as well",
)
_FROZEN = _Lost(
    "forward switches a parameter's gradient on or off",
    "a plan is for parameters that always learn or never",
    "set requires_grad before compile, or use weight.detach() in this place",
)
_INFERENCE = _Lost(
    "torch.inference_mode is on",
    "a trace does not show it",
    "write `with torch.no_grad():`",
)
_SWITCHED = _Lost(
    "gradients are switched on inside of an autocast block, and off around it",
    "torch.export leaves that out of its trace",
    "put the autocast block inside of torch.enable_grad()",
)
_HIDDEN = _Lost(
    "an operator switches gradients off by itself",
    "a trace does not show it",
    "write `with torch.no_grad():` around the operator without _no_grad_ in its name",
)
_GENERATOR = _Lost(
    "random numbers are drawn from a generator of the model's own",
    "its state is no tensor that a program could hold",
    "leave generator= out; seed with torch.manual_seed",
)
_BY_SIZE = {
    "__getitem__": "for x[mask] and x[:n] use torch.where(mask, x, 0) or x * mask, which keep "
    "the size",
    "masked_select": "use torch.where(mask, x, 0), or x * mask, which keep the size",
    "repeat_interleave": "say how many: repeat_interleave(..., output_size=n)",
    **dict.fromkeys(
        ("unique", "unique_consecutive", "bincount"),
        "compute it before the model and pass it as an input",
    ),
    **dict.fromkeys(
        ("arange", "zeros", "ones", "full", "empty", "rand", "randn", "linspace", "narrow"),
        "take the size from a shape or a constant, and mask what is too much",
    ),
}


class Watch(TorchFunctionMode):
    """Sees every call of torch's functions, and refuses those that a trace would lose.

    Attributes:
        failed: the name of the function that raised the last error.
        opaque: the user's last line with something that may not be traced, such as `x.data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed = self.opaque = ""
        self._gradients = GradientsInAutocast()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`; CaptureError if the call or its result has no place in a graph."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        lost = _lost(func, name, args, kwargs)
        if name == "_set_grad_enabled" and not self._gradients.switch(args[0]):
            lost = _SWITCHED
        if lost is not None:
            raise CaptureError(lost.what, where=current(), why=lost.why, todo=lost.todo)
        if name == "__get__" and _accessed(func) == "data":
            func = Tensor.detach  # which is the same to values, and can be traced
        if name in ("requires_grad_", "__get__") and _accessed(func) in ("", "data"):
            self.opaque = current()
        truth = assumed(name, args, sys._getframe(1), current())
        if truth is not None:
            return truth
        if selects(name, (*args, *kwargs.values())):
            return apply(func, args, kwargs, self._gradients.off)
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
        return result


def taken_out(where: str = "") -> CaptureError:
    """The error of a model that takes a number out of a tensor."""
    return CaptureError(
        "a number is taken out of a tensor",
        where=where,
        why="values are not known when a model is captured",
        todo="keep it a tensor: no .item(), int(), float() or .tolist() in forward",
    )


def _accessed(func: Any) -> str:
    """The attribute that a getter or setter is for, "" if `func` is neither."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def _lost(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Lost | None:
    if torch.is_inference_mode_enabled():
        return _INFERENCE
    if name.startswith("_no_grad_"):
        return _HIDDEN
    if isinstance(kwargs.get("generator"), torch.Generator):
        return _GENERATOR
    if func is torch.autograd.grad:
        return None if kwargs.get("create_graph") else _UNCREATED
    switches = name == "requires_grad_" or (
        name == "__set__" and _accessed(func) == "requires_grad"
    )
    if switches and args and isinstance(args[0], nn.Parameter):
        return _FROZEN
    found = _LOST.get(name)
    return None if found is _PRINTED and _within_torch() else found


def _within_torch() -> bool:
    """Whether it is torch that formats a tensor, for a message of its own."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.endswith(("overrides.py", "_tensor.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _refuse_unknown_sizes(tensor: Tensor, name: str) -> None:
    if not all(isinstance(size, int) for size in tensor.shape):
        sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in tensor.shape)
        raise CaptureError(
            f"a tensor of sizes [{sizes}]",
            where=current(),
            why="its sizes depend on values, which are not known when a model is captured",
            todo=_BY_SIZE.get(name, "choose by torch.where or a mask, which keeps the size"),
        )


def refuse_hooks(model: nn.Module) -> None:
    """CaptureError if a parameter has a hook on its gradient."""
    for name, parameter in model.named_parameters():
        # There is no public way to ask for hooks.
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"the parameter {name!r} has a hook on its gradient",
                why="a program has parameters of its own, in parts, without hooks",
                todo="remove it, and do in forward what it does",
            )


@dataclass(frozen=True)
class _Held:
    """An attribute of a module before the call.

    Attributes:
        value: what it was.
        items: what was in it, if it is a container.
        mark: what would show a change.
    """

    value: Any
    items: Any
    mark: object

    @classmethod
    def of(cls, value: Any) -> _Held:
        """An attribute's value as it is now."""
        container = isinstance(value, (dict, list, set, deque))
        return cls(value, copy(value) if container else None, _mark(value))

    def again(self) -> Any:
        """The value as it was, the very object."""
        if isinstance(self.value, (list, deque)):
            self.value.clear()
            self.value.extend(self.items)
        elif isinstance(self.value, (dict, set)):
            self.value.clear()
            self.value.update(self.items)
        return self.value


class State:
    """What a model holds beside parameters and buffers, as it was before a call."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            path: module
            for path, module in model.named_modules()
            # What torch's own modules keep is no state.
            if not type(module).__module__.startswith("torch.")
        }
        self._held = {key: _Held.of(value) for key, value in self._attributes()}
        self._random = random.getstate(), np.random.get_state()

    def _attributes(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in _COMMON:
                    yield (path, name), value

    def replaced(self) -> frozenset[str]:
        """Names of the tensors, no buffers, that the call has replaced.

        Raises:
            CaptureError: the call has changed a number or a container, or drawn random numbers
                that are not torch's.
        """
        found = set()
        for (path, name), value in self._attributes():
            held = self._held.get((path, name))
            if held is None or held.mark in (None, _mark(value)):
                continue
            if not isinstance(held.value, Tensor):
                raise changed(self.modules[path], name)
            found.add(f"{path}.{name}".lstrip("."))
        if not _same_state(self._random, (random.getstate(), np.random.get_state())):
            raise CaptureError(
                "forward draws random numbers that are not torch's",
                where=_search(self.modules.values(), r"\brandom\."),
                why="they would be drawn once, when the model is captured",
                todo="draw with torch, e.g. torch.rand, or pass them as an input",
            )
        return frozenset(found)

    def restore(self) -> None:
        """Give back to the modules what they held, so that no tensor of the trace is left."""
        for (path, name), value in list(self._attributes()):
            held = self._held.get((path, name))
            if held is None:
                delattr(self.modules[path], name)
            elif held.mark != _mark(value):
                setattr(self.modules[path], name, held.again())


def changed(module: nn.Module, name: str) -> CaptureError:
    """The error of a model that keeps a state of its own in an attribute."""
    return CaptureError(
        f"forward changes self.{name} of {type(module).__name__}",
        where=_search([module], rf"self\.{name}\b\s*(?:\[.*\])?\s*(?:[-+*/|&@%]?=(?!=)|\.\w+\()"),
        why="its value at capture would be a constant of the program",
        todo=f'keep it in a buffer, register_buffer("{name}", torch.tensor(...)); if every call '
        "sets it anew, let it begin as None",
    )


_COMMON = frozenset(vars(nn.Module()))


def _mark(value: object) -> object:
    """What shows that an attribute was changed; None for what is not looked at."""
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
    """The first line in the methods of modules, but for __init__, on which a pattern is found."""
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
