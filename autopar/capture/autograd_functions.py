"""Traces each `torch.autograd.Function` of the user as one operator, which keeps its backward.

A trace of `MyFunction.apply(x, 2.0)` would contain the operators of its forward, whose gradient may
differ from the Function's. While a model is traced, `functions_as_operators` replaces each call by
one operator; `operators/own_functions.py` describes this operator.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.watch import current
from autopar.errors import CaptureError, ProgramError
from autopar.operators.interpret import DTYPE_NAMES, TORCH_DTYPES
from autopar.operators.own_functions import FUNCTION, find

# A traced call: its name and arguments as JSON, then its tensors.
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("function(str call, Tensor[] tensors) -> Tensor")
_LIBRARY.define("functions(str call, Tensor[] tensors) -> Tensor[]")
_TRACED = ("autopar.function.default", "autopar.functions.default")
_WITHOUT = "or register it as an operator, with torch.library.custom_op and register_autograd"


@contextmanager
def functions_as_operators() -> Iterator[None]:
    """Returns a context in which a call of a user's Function is traced as one operator.

    Reentrant checkpoints are replaced by the function they wrap, since the plan decides what is
    recomputed.
    """
    base: Any = function._SingleLevelFunction  # every Function's `apply` calls its `apply`
    original, thread = base.apply, threading.get_ident()

    def apply(cls: Any, *args: Any) -> Any:
        call = super(base, cls).apply
        if threading.get_ident() != thread or not torch.compiler.is_exporting():
            return call(*args)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        if cls is TracedFunction or cls.__module__.partition(".")[0] == "torch":
            return call(*args)
        return _call(cls, call, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply
        assert base.apply == original, "other code has replaced Function.apply in between"


def _checkpointed(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Runs a reentrant checkpoint, which has no gradients unless one of its arguments has one."""
    flows = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(flows and torch.is_grad_enabled()):
        return run(*args)


def _call(cls: Any, call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns the results of a Function in a trace, as one operator without its inner operators."""
    name, tensors = name_of(cls), list[Tensor]()
    written = [_write(arg, tensors, cls) for arg in args]
    results = _results(cls, call, args)
    single = not isinstance(results, tuple)
    outs = (results,) if single else results
    given = [item for item in outs if isinstance(item, Tensor)]
    if not given or any(item is not outs[at] for at, item in enumerate(given)):
        raise CaptureError(
            f"the torch.autograd.Function {cls.__name__} does not return its tensors first",
            where=current(),
            why="the results of an operator are tensors",
            todo=f"return its tensors first, {_WITHOUT}",
        )
    types = [[DTYPE_NAMES[t.dtype], [*t.shape], [*t.stride()], t.requires_grad] for t in given]
    text = json.dumps({"name": name, "args": written, "results": types, "single": single})
    traced: Any = TracedFunction.apply(text, *tensors)  # type: ignore[no-untyped-call]
    return traced if single else (*traced, *outs[len(given) :])


class TracedFunction(torch.autograd.Function):
    """The traced operator; its results require gradients where those of the Function do."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: Tensor) -> Any:
        """Returns results without values; results without gradients are marked as such."""
        call = json.loads(text)
        if call["single"]:
            results = [torch.ops.autopar.function(text, tensors)]
        else:
            results = torch.ops.autopar.functions(text, tensors)
        flows = [requires for *_, requires in call["results"]]
        ctx.mark_non_differentiable(*(t for t, f in zip(results, flows, strict=True) if not f))
        return results[0] if call["single"] else tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raises CaptureError: there is no backward before the program runs."""
        raise CaptureError(
            "a gradient is taken through a torch.autograd.Function inside forward",
            where=current(),
            why="its backward is run by the program, not while the model is captured",
            todo=f"write its forward with operators of torch, {_WITHOUT}",
        )


def _fake(text: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    device = tensors[0].device if tensors else torch.device("cpu")
    return [
        torch.empty_strided(size, stride, dtype=TORCH_DTYPES[dtype], device=device)
        for dtype, size, stride, _ in json.loads(text)["results"]
    ]


torch.library.register_fake("autopar::functions", _fake, lib=_LIBRARY)
torch.library.register_fake("autopar::function", lambda *given: _fake(*given)[0], lib=_LIBRARY)


def is_function_call(op: str) -> bool:
    """Returns whether a traced operator represents a call of a Function."""
    return op in _TRACED


def call_of(text: Any, tensors: Any) -> tuple[str, list[Any]]:
    """Returns the operator and the arguments of a traced call, with `tensors` inserted."""
    call = json.loads(text)
    return call["name"], [_read(arg, tensors) for arg in call["args"]]


def _write(arg: Any, tensors: list[Tensor], cls: type) -> Any:
    """Returns an argument as JSON, with tensors numbered."""
    if isinstance(arg, Tensor):
        tensors.append(arg)
        return {"tensor": len(tensors) - 1}
    if isinstance(arg, torch.dtype) and arg in DTYPE_NAMES:
        return {"dtype": DTYPE_NAMES[arg]}
    if isinstance(arg, (list, tuple)):
        return [_write(item, tensors, cls) for item in arg]
    if arg is None or type(arg) in (bool, int, float, str):
        return arg
    raise CaptureError(
        f"the torch.autograd.Function {cls.__name__} takes a {type(arg).__name__}",
        where=current(),
        why="the arguments of an operator are tensors, numbers, strings, dtypes and lists of these",
        todo=f"pass it the tensors and numbers that it needs, {_WITHOUT}",
    )


def _read(arg: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(arg, list):
        return tuple(_read(item, tensors) for item in arg)
    if isinstance(arg, dict):
        return tensors[arg["tensor"]] if "tensor" in arg else TORCH_DTYPES[arg["dtype"]]
    return arg


class _Effects(TorchDispatchMode):
    """Detects effects of a Function that an operator cannot have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = "draws random numbers"
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen = "calls collectives"
        return func(*args, **(kwargs or {}))


def _results(cls: Any, call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs the Function on tensors without values, tries its backward, and returns its results.

    Raises:
        CaptureError: it needs values, or has an effect that an operator cannot have.
    """
    effects = _Effects()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), FakeTensorMode():
        fakes: list[Tensor] = []
        given = [_like(arg, fakes) for arg in args]
        versions = [fake._version for fake in fakes]
        try:
            with effects, torch.enable_grad():
                results = call(*given)
        except Exception as error:
            raise CaptureError(
                f"the torch.autograd.Function {cls.__name__} cannot run without values",
                where=current(),
                why=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                todo=f"write its forward with operators of torch, {_WITHOUT}",
            ) from error
        if [fake._version for fake in fakes] != versions:
            effects.seen = "changes its arguments in place"
        _try_backward(results, fakes, effects)
    if effects.seen:
        raise CaptureError(
            f"the torch.autograd.Function {cls.__name__} {effects.seen}",
            where=current(),
            why="every device runs it, on a part or whole: they would not agree"
            if "place" not in effects.seen
            else "an operator of a graph computes values and changes none",
            todo="do that outside of it, and pass it the result",
        )
    return results


def _like(arg: Any, fakes: list[Tensor]) -> Any:
    """Returns the argument with tensors replaced by ones without values."""
    if isinstance(arg, (list, tuple)):
        return [_like(item, fakes) for item in arg]
    if not isinstance(arg, Tensor):
        return arg
    device = "cpu" if arg.device.type == "meta" else arg.device
    fake = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
    fakes.append(fake.requires_grad_(arg.requires_grad))
    # A leaf may not be returned unchanged, or modified.
    return fake.alias() if hasattr(fake, "alias") else torch.ops.aten.alias(fake)


def _try_backward(results: Any, fakes: Sequence[Tensor], effects: _Effects) -> None:
    """Checks the backward too, unless it needs values."""
    outs = results if isinstance(results, tuple) else (results,)
    flows = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
    wanted = [fake for fake in fakes if fake.requires_grad]
    try:
        with effects:
            gradients = [torch.empty_like(out) for out in flows]
            torch.autograd.grad(flows, wanted, gradients, allow_unused=True)
    except Exception:  # user code, which may read values
        return


def name_of(cls: type) -> str:
    """Returns the operator name "function.module:Name" of a class.

    Raises:
        CaptureError: the class cannot be found by this name.
    """
    called = f"{cls.__module__}:{cls.__qualname__}"
    parts = [*cls.__module__.split("."), *cls.__qualname__.split(".")]
    if all(part.isidentifier() for part in parts):
        try:
            if find(called) is cls:
                return FUNCTION + called
        except ProgramError:
            pass
    raise CaptureError(
        f"the torch.autograd.Function {cls.__name__} cannot be found by its name",
        where=current(),
        why=f"a program calls it as {cls.__module__}.{cls.__qualname__}",
        todo="define it at the top of a module, not inside a function",
    )
