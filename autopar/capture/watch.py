"""Raises CaptureError at the user's line for torch calls whose effect a trace would lose.

A trace consists of the operators of one call of the model. It does not contain hooks, prints, or
gradients that are computed inside, or it contains only a constant in their place. Changes of the
model itself are detected by `attributes.py`. This file does not use torch.export; `capture` uses
it while it traces the model.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from contextlib import nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.dtypes.autocast_gradients import GradientsInAutocast
from autopar.capture.experts.expert_loops import ExpertLoops
from autopar.capture.experts.expert_masks import ExpertMasks
from autopar.capture.experts.row_counts import RowCounts
from autopar.capture.lost_calls import SWITCHED, accessed, lost_call
from autopar.capture.stand_ins.ctc_loss import ctc_loss
from autopar.capture.stand_ins.known_ranges import KnownRanges
from autopar.capture.stand_ins.random_branches import RandomBranches
from autopar.capture.stand_ins.selected import apply, selects
from autopar.capture.torch_functions import opened
from autopar.capture.traced_nodes import BY_MASK
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


BY_SIZE = {
    "__getitem__": "for x[mask] and x[:n] use torch.where(mask, x, 0) or x * mask, which keep "
    "the size",
    "masked_select": "use torch.where(mask, x, 0), or x * mask, which keep the size",
    "_pack_padded_sequence": "pass padded sequences without packing them, mask the output, and "
    "take the last state of a sequence with torch.gather",
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
        opaque: the user's last line with an operation that may not be traceable, such as `x.data`.
        differentiated: the user's last line that computes a gradient.
        transformed: whether torch.func or vmap transformed a part of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed = self.opaque = self.differentiated = ""
        self.transformed = False
        self._gradients = GradientsInAutocast()
        self._counts, self._masks = RowCounts(), ExpertMasks()
        self._loops = ExpertLoops(self._masks.choices)
        self._draws, self._ranges = RandomBranches(), KnownRanges()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`; raises CaptureError if the call or its result cannot be part of a graph."""
        kwargs, args = kwargs or {}, self._loops.numbered(args)
        name = str(getattr(func, "__name__", func))
        self.transformed |= torch._C._functorch.peek_interpreter_stack() is not None
        lost = lost_call(func, name, args, kwargs)
        if name == "_set_grad_enabled" and not self._gradients.switch(args[0]):
            lost = SWITCHED
        if lost is not None:
            raise CaptureError(lost.what, where=current(), why=lost.why, todo=lost.todo)
        if name == "__get__" and accessed(func) == "data":
            func = Tensor.detach  # equal in values, and traceable
        if name in ("requires_grad_", "__get__") and accessed(func) in ("", "data"):
            self.opaque = current()
        result = self._masks.call(func, name, args, kwargs)
        if result is not NotImplemented:
            return result
        line = current()
        if func is torch.autograd.grad:
            self.differentiated = line
        truth = self._draws.truth(name, args, line)
        if truth is None:
            truth = assumed(name, args, sys._getframe(1), line)
        if truth is not None:
            return truth
        if name == "ctc_loss":
            return ctc_loss(*args, **kwargs)
        found = self._ranges.call(name, args, kwargs)
        if found is not NotImplemented:
            return found
        if selects(name, (*args, *kwargs.values())):
            return apply(func, args, kwargs, self._gradients.off)
        for stand_ins in (self._counts, self._loops):
            result = stand_ins.call(func, name, args, kwargs)
            if result is not NotImplemented:
                return result
        result = self._masks.hits(name, args, kwargs)
        if result is not NotImplemented:
            return result
        inside = opened(func)
        try:
            with self if inside else nullcontext():
                result = self._gradients.call(inside or func, name, args, kwargs)
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
        self._draws.note(name, args, result)
        self._ranges.note(name, args, result)
        return self._masks.choices.noted(name, args, kwargs, result)


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
            todo=BY_SIZE.get(name, BY_MASK),
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
