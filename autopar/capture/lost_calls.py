"""Calls whose effects a captured model would lose, and the reasons."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class LostCall:
    """A reason why a call cannot be part of a captured model."""

    what: str
    why: str
    todo: str


_PRINTED = LostCall(
    "a tensor is printed",
    "a model is captured once, without values; in training nothing would be printed",
    "remove it from forward, or return the value with the model's outputs",
)
_HOOKED = LostCall(
    "a hook is registered on a tensor",
    "a captured model has no hooks: the gradient would differ",
    "replace the hook by operators, or by a torch.library.custom_op with register_autograd",
)
_LOST = {
    "__repr__": _PRINTED,
    "__format__": _PRINTED,
    "register_hook": _HOOKED,
    "register_post_accumulate_grad_hook": _HOOKED,
    "backward": LostCall(
        "backward is called in forward",
        "autopar computes the gradients of the loss that forward returns",
        "return the loss, and leave backward and the optimizer to program.step",
    ),
}
_UNCREATED = LostCall(
    "torch.autograd.grad without create_graph=True",
    "its result would get a gradient that it has not in the model",
    "pass create_graph=True and detach the result, or differentiate it as well",
)
_FROZEN = LostCall(
    "forward switches a parameter's gradient on or off",
    "in a plan each parameter is either trained or frozen",
    "set requires_grad before compile, or use weight.detach() here",
)
_INFERENCE = LostCall(
    "torch.inference_mode is on",
    "a trace does not record it",
    "write `with torch.no_grad():`",
)
SWITCHED = LostCall(
    "gradients are switched on inside an autocast block, and off around it",
    "torch.export does not record it",
    "put the autocast block inside torch.enable_grad()",
)
_HIDDEN = LostCall(
    "an operator switches gradients off by itself",
    "a trace does not record it",
    "write `with torch.no_grad():` around the operator without _no_grad_ in its name",
)
_GENERATOR = LostCall(
    "random numbers are drawn from the model's own generator",
    "a program cannot hold its state, which is not a tensor",
    "omit generator=, and seed with torch.manual_seed",
)


def accessed(func: Any) -> str:
    """Returns the attribute of a getter or setter, "" if `func` is neither."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def lost_call(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LostCall | None:
    """Returns why a call cannot be part of a captured model, None if it can."""
    if torch.is_inference_mode_enabled():
        return _INFERENCE
    if name.startswith("_no_grad_"):
        return _HIDDEN
    if isinstance(kwargs.get("generator"), torch.Generator):
        return _GENERATOR
    if func is torch.autograd.grad:
        return None if kwargs.get("create_graph") else _UNCREATED
    switches = name == "requires_grad_" or (name == "__set__" and accessed(func) == "requires_grad")
    if switches and args and isinstance(args[0], nn.Parameter):
        return _FROZEN
    reason = _LOST.get(name)
    return None if reason is _PRINTED and _within_torch() else reason


def _within_torch() -> bool:
    """Returns whether torch itself formats a tensor, for one of its messages."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.endswith(("overrides.py", "_tensor.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)
