"""The user's own `torch.autograd.Function` in a graph: an operator with its own backward.

A trace sees through `MyFunction.apply(x, 2.0)`: it would keep the operators of its forward, whose
gradient is another one. While a model is traced, `carried` puts one operator in the place of each
call; see functions.py for what it is in a graph.
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

# What a trace shows of a call: its name and arguments as JSON, then its tensors.
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("function(str call, Tensor[] tensors) -> Tensor")
_LIBRARY.define("functions(str call, Tensor[] tensors) -> Tensor[]")
_TRACED = ("autopar.function.default", "autopar.functions.default")
_WITHOUT = "or register it as an operator, with torch.library.custom_op and register_autograd"


@contextmanager
def carried() -> Iterator[None]:
    """A block in which every call of the user's own Functions is one operator of the trace.

    Reentrant checkpoints are their function: what is computed again is the plan's decision.
    """
    base: Any = function._SingleLevelFunction  # `apply` of every Function calls this one's
    original, thread = base.apply, threading.get_ident()

    def apply(cls: Any, *args: Any) -> Any:
        call = super(base, cls).apply
        if threading.get_ident() != thread or not torch.compiler.is_exporting():
            return call(*args)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        if cls is CarriedFunction or cls.__module__.partition(".")[0] == "torch":
            return call(*args)
        return _call(cls, call, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply
        assert base.apply == original, "another has replaced Function.apply in between"


def _checkpointed(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint, which gives no gradients where none of its arguments has one."""
    flows = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(flows and torch.is_grad_enabled()):
        return run(*args)


def _call(cls: Any, call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The results of a Function in a trace: one operator, nothing of what it computes."""
    name, tensors = name_of(cls), list[Tensor]()
    written = [_write(arg, tensors, cls) for arg in args]
    results = _results(cls, call, args)
    single = not isinstance(results, tuple)
    outs = (results,) if single else results
    given = [item for item in outs if isinstance(item, Tensor)]
    if not given or any(item is not outs[at] for at, item in enumerate(given)):
        raise CaptureError(
            f"the torch.autograd.Function {cls.__name__} returns something before a tensor",
            where=current(),
            why="the results of an operator are tensors",
            todo=f"return its tensors first, {_WITHOUT}",
        )
    types = [[DTYPE_NAMES[t.dtype], [*t.shape], [*t.stride()], t.requires_grad] for t in given]
    text = json.dumps({"name": name, "args": written, "results": types, "single": single})
    made: Any = CarriedFunction.apply(text, *tensors)  # type: ignore[no-untyped-call]
    return made if single else (*made, *outs[len(given) :])


class CarriedFunction(torch.autograd.Function):
    """The operator in the trace; gradients flow through it to what the Function gives any."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: Tensor) -> Any:
        """Results without values, of which those that have no gradient are marked."""
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
        """There is none before the program runs; CaptureError."""
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


def is_carried(op: str) -> bool:
    """Whether a traced operator stands for a call of a Function."""
    return op in _TRACED


def call_of(text: Any, tensors: Any) -> tuple[str, list[Any]]:
    """The operator and the arguments of a traced call, `tensors` in their places."""
    call = json.loads(text)
    return call["name"], [_read(arg, tensors) for arg in call["args"]]


def _write(arg: Any, tensors: list[Tensor], cls: type) -> Any:
    """An argument as JSON; tensors are numbered."""
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
        why="the arguments of an operator are tensors, numbers, texts, dtypes and lists of these",
        todo=f"pass it the tensors and numbers that it needs, {_WITHOUT}",
    )


def _read(arg: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(arg, list):
        return tuple(_read(item, tensors) for item in arg)
    if isinstance(arg, dict):
        return tensors[arg["tensor"]] if "tensor" in arg else TORCH_DTYPES[arg["dtype"]]
    return arg


class _Effects(TorchDispatchMode):
    """Sees what a Function does that one operator cannot say."""

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
    """What the Function returns for tensors like these, without values; its backward is tried.

    Raises:
        CaptureError: it cannot run without values, or does what an operator cannot.
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
            else "an operator of a graph makes values and changes none",
            todo="do that outside of it, and pass it the result",
        )
    return results


def _like(arg: Any, fakes: list[Tensor]) -> Any:
    """A tensor without values in the place of each."""
    if isinstance(arg, (list, tuple)):
        return [_like(item, fakes) for item in arg]
    if not isinstance(arg, Tensor):
        return arg
    device = "cpu" if arg.device.type == "meta" else arg.device
    made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
    fakes.append(made.requires_grad_(arg.requires_grad))
    # A leaf may not be returned as it is, or changed.
    return made.alias() if hasattr(made, "alias") else torch.ops.aten.alias(made)


def _try_backward(results: Any, fakes: Sequence[Tensor], effects: _Effects) -> None:
    """Look at the backward as well, as far as it runs without values."""
    outs = results if isinstance(results, tuple) else (results,)
    flows = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
    wanted = [fake for fake in fakes if fake.requires_grad]
    try:
        with effects:
            gradients = [torch.empty_like(out) for out in flows]
            torch.autograd.grad(flows, wanted, gradients, allow_unused=True)
    except Exception:  # of the user's code; it may read values
        return


def name_of(cls: type) -> str:
    """The operator "function.module:Name" of a class.

    Raises:
        CaptureError: the class is not found by this name.
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
        f"the torch.autograd.Function {cls.__name__} is not found by its name",
        where=current(),
        why=f"a program calls it as {cls.__module__}.{cls.__qualname__}",
        todo="define it at the top of a module, not inside a function",
    )
