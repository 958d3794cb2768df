"""Turns errors of torch.export into advice: the user's line, the cause, and a remedy."""

from __future__ import annotations

import os
import traceback
from itertools import chain

import torch

from autopar.capture.watch import BY_SIZE, innermost, taken_out
from autopar.errors import CaptureError

_TORCH = os.path.dirname(torch.__file__)
_HIGHER = os.path.join(_TORCH, "_higher_order_ops")
_VALUES = "values are not known when a model is captured"
_NUMBERS = ("item", "tolist", "__int__", "__float__", "__index__", "__complex__")
# torch functions that need something which a trace does not provide, such as values.
_BY_FUNCTION = {
    **dict.fromkeys(
        ("numpy", "__array__"),
        "write it with operators of torch, or wrap it as one: torch.library.custom_op",
    ),
    **dict.fromkeys(("tensor", "as_tensor"), "join tensors with torch.stack or torch.cat"),
    "__deepcopy__": "copy the module in __init__, or call the module itself",
}
_FUNCTIONS = (
    "write it without torch.func and vmap: with batched operators, or "
    "torch.autograd.grad(..., create_graph=True)"
)
_LOST = "constant's list"  # of tensors that are no values of the trace
_BY_MESSAGE = {
    "functorch": _FUNCTIONS,
    _LOST: "write .detach() for .data, and do not change what requires a gradient",
}
# Files of torch and of libraries on the stack of the error.
_BY_FILE = {
    os.path.join(_TORCH, "distributed"): "leave collectives out of the model: autopar puts them "
    "where they are needed",
    "cache_utils.py": "train without a key-value cache: pass use_cache=False",
}
_ELSE = (
    "run model(*args, **kwargs) by itself; if it runs, write this line with operators of torch or "
    "wrap it as one, with torch.library.custom_op"
)
# Statements that depend on a tensor's value.
_BY_WORD = {
    "while": "run a fixed number of rounds and let torch.where stop the update, or move the loop "
    "out of forward",
    "assert": "check it before the model is called, or remove the check",
    "for": "loop over a number that is known beforehand, such as a size",
}
_BY_VALUE = (
    "choose between values with torch.where or a mask, which computes both, or move the choice out "
    "of forward"
)


def explain(
    error: Exception, failed: str, opaque: str, differentiated: str = "", transformed: bool = False
) -> CaptureError:
    """Returns an error that says what stopped torch.export, on which line, and what to do.

    Args:
        error: the error that it raised.
        failed: the name of the torch function that failed, "" if none did.
        opaque: a line that may cause failures after the trace.
        differentiated: a line that computes a gradient, "" if there is none.
        transformed: whether torch.func or vmap transformed a part of the model.
    """
    message, where = str(error).strip(), innermost(error.__traceback__)
    if differentiated and _LOST in message:
        return CaptureError(
            "the model computes a gradient that torch.export cannot trace",
            where=differentiated,
            why="it traces above autograd, and loses what linears and activations keep for their "
            "gradients",
            todo="write this derivative out with operators of torch, or as the result of a "
            "torch.library.custom_op with register_autograd",
        )
    if "data-dependent" in message or "DataDependent" in type(error).__name__:
        return _chosen(where, failed)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for file in files:
        name = os.path.basename(file).removesuffix(".py")
        if file.startswith(_HIGHER) or name == "flex_attention":
            return unsupported(name, where)
    by_file = (todo for key, todo in _BY_FILE.items() if any(key in file for file in files))
    by_message = [todo for key, todo in _BY_MESSAGE.items() if key in message]
    if transformed and "FakeTensor" in message:  # which torch 2.11 says where others say functorch
        by_message.append(_FUNCTIONS)
    return CaptureError(
        "torch.export cannot trace the model",
        where=where or opaque,
        why=f"{type(error).__name__}: {message.partition(chr(10))[0].partition('. ')[0]}",
        todo=_BY_FUNCTION.get(failed) or next(chain(by_message, by_file), _ELSE),
    )


def _chosen(where: str, failed: str) -> CaptureError:
    """Returns the error of a line on which Python depends on a tensor's value."""
    word = where.partition("  ")[2].split(" ")[0]
    if failed in _NUMBERS and word not in _BY_WORD:
        return taken_out(where)
    return CaptureError(
        "torch.export cannot trace the model: it branches on values",
        where=where,
        why=_VALUES,
        todo=_BY_WORD.get(word) or BY_SIZE.get(failed, _BY_VALUE),
    )


def unsupported(name: str, where: str = "") -> CaptureError:
    """Returns the error of a higher-order operator, by name: "cond", "scan", "vmap"."""
    todo = {
        "cond": "compute both branches and choose with torch.where",
        "while_loop": "run a fixed number of rounds in a Python loop",
        "scan": "write it as a Python loop over a known size, or as cumsum, cumprod or cummax",
        "associative_scan": "write it as cumsum, cumprod or cummax where it is one",
        "map": "write it with batched operators, or as a Python loop over a known size",
    }.get(name, _FUNCTIONS)
    return CaptureError(
        f"the model uses torch's {name}",
        where=where,
        why="a graph has no operators that run functions of the model",
        todo=todo,
    )
