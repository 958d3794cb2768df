"""A model with tensors as inputs and outputs, as torch.export traces it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from autopar.capture.attributes import State, Values, changed
from autopar.capture.autograd_functions import TracedFunction, functions_as_operators
from autopar.capture.dtypes.full_losses import losses_in_float32
from autopar.capture.generation.cached_call import CachedCall
from autopar.capture.stand_ins import conversions, flex
from autopar.capture.stand_ins.exchanged import exchanged
from autopar.capture.structure import Inputs, Structure
from autopar.capture.watch import Watch
from autopar.errors import CaptureError

_STAND_INS = (*flex.EXCHANGES, *conversions.EXCHANGES)


def loss_parameters(loss_fn: Callable[..., Tensor] | None) -> list[inspect.Parameter]:
    """Returns the parameters of a loss_fn after the model's output."""
    if loss_fn is None:
        return []
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        return list(inspect.signature(called).parameters.values())[1:]
    except (ValueError, TypeError) as error:
        raise CaptureError(
            "loss_fn has no signature",
            why=str(error),
            todo="pass a function of the output and of arguments of the batch by name",
        ) from error


@dataclass
class _TracedResults:
    """Results and side effects of one traced call.

    Attributes:
        output, labels, loss: structure of the output, names of its tensors, name of the loss.
        assigned: buffers that the call assigned, as in `self.n = self.n + 1`.
        replaced: other tensors of modules that the call assigned.
        numbers: numbers of modules that the call set.
        tensors: tensors of modules that the call set where none was.
    """

    output: Structure
    labels: tuple[str, ...] = ()
    loss: str | None = None
    assigned: tuple[str, ...] = ()
    replaced: frozenset[str] = frozenset()
    numbers: Values = field(default_factory=dict)
    tensors: Values = field(default_factory=dict)


class FlatModel(nn.Module):
    """The model with tensors as inputs and outputs; `seen` describes the call.

    A module's own attributes cannot be used, since torch.export restores them after tracing.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        inputs: Inputs,
        dtype: torch.dtype | None = None,
        pure: bool = False,
        caches: CachedCall | None = None,
    ) -> None:
        super().__init__()
        self.caches = caches
        self.dtype = dtype
        half = (torch.bfloat16, torch.float16)
        self.narrow = dtype if dtype in half and not pure else None
        self.training = model.training
        self.model, self.inputs = model, inputs
        self.loss_fn = _Loss(loss_fn) if inspect.isroutine(loss_fn) else loss_fn
        parameters = loss_parameters(loss_fn)
        self.for_loss = {parameter.name for parameter in parameters}
        self.all_for_loss = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.for_loss_only = self.for_loss - set(inspect.signature(model.forward).parameters)
        self.seen = _TracedResults(Structure(None))
        self.watch = Watch()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the named outputs, then the new values of assigned buffers."""
        batch = dict(zip(self.inputs.names, tensors, strict=True))
        state, buffers = State(self.model), _Buffers(self.model)
        try:
            with (
                self.watch,
                functions_as_operators(),
                exchanged(_STAND_INS),
                losses_in_float32(self.narrow),
            ):
                named = self._call(batch)
            assigned = buffers.assigned()
            self.seen.assigned, self.seen.replaced = tuple(assigned), state.replaced()
            self.seen.numbers, self.seen.tensors = state.numbers, state.tensors
        finally:
            state.restore()
        _refuse_own_gradients(named.values())
        return (*named.values(), *assigned.values())

    def _cast(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Casts a batch to the dtype of the parameters."""
        if self.dtype is None:
            return batch
        return {k: t.to(self.dtype) if t.is_floating_point() else t for k, t in batch.items()}

    def _call(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of model and loss_fn, by name."""
        args, kwargs = self.inputs.rebuild(self._cast(batch), without=self.for_loss_only)
        if self.caches is None:
            value = self.model(*args, **kwargs)
        else:
            value = self.caches(self.model, *args, **kwargs)
        root = ("loss" if value.ndim == 0 else "output") if isinstance(value, Tensor) else ""
        output = Structure.of(value, root, constants=False)
        named = output.flatten(value)
        if self.loss_fn is not None:
            # The loss to differentiate is that of the loss_fn, not the model's own.
            if "loss" in named:
                output = Structure.of(value, "output", constants=False)
                named = output.flatten(value)
            given = self.inputs.structure.rebuild(batch)
            if not self.all_for_loss:
                given = {name: item for name, item in given.items() if name in self.for_loss}
            named = {"loss": self.loss_fn(value, **given), **named}
        self.seen.output, self.seen.labels = output, tuple(named)
        self.seen.loss = _loss_name(named, isinstance(value, (tuple, list)))
        return named


class _Buffers:
    """A model's buffers before a call, which may assign some, as in `self.n = self.n + 1`."""

    def __init__(self, model: nn.Module) -> None:
        self.held: dict[str, tuple[nn.Module, str, Tensor]] = {}
        for path, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self.held[f"{path}.{key}".lstrip(".")] = module, key, buffer

    def assigned(self) -> dict[str, Tensor]:
        """Returns the new values of buffers by name, and restores the modules' own tensors.

        Raises:
            CaptureError: a buffer was set to a value of another type, or to another buffer.
        """
        values: dict[str, Tensor] = {}
        for name, (module, key, buffer) in self.held.items():
            value = module._buffers.get(key)
            module._buffers[key] = buffer
            if value is buffer:
                continue
            others = (b for n, (*_, b) in self.held.items() if n != name)
            if value is None or any(other is buffer for other in others):
                raise changed(module, key)
            if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
                raise changed(module, key)
            values[name] = value
        return values


# autograd.Functions that torch creates for operators of other libraries (which are kept) and for
# branches (which are refused elsewhere, by name), and the one that represents the user's Functions.
_KEPT = ("GeneratedBackwardFor", "CondAutogradOp", TracedFunction.__name__)
_FUNCTIONS = {"BackwardHookFunction": "remove the backward hooks of modules"}


def _refuse_own_gradients(outputs: Iterable[Tensor]) -> None:
    """Raises CaptureError if an output depends on a torch.autograd.Function that was not replaced.

    A trace contains only the forward of such a Function, so its backward would be lost.
    """
    waiting = [output.grad_fn for output in outputs]
    met = set()
    while waiting:
        step = waiting.pop()
        if step is None or step in met:
            continue
        met.add(step)
        waiting += [before for before, _ in step.next_functions]
        name = type(step).__name__.removesuffix("Backward")
        if isinstance(step, BackwardCFunction) and not name.startswith(_KEPT):
            raise CaptureError(
                f"the model uses the torch.autograd.Function {name}",
                why="its own backward would be lost",
                todo=_FUNCTIONS.get(name)
                or "write its forward with operators of torch, or register it as an operator "
                "with torch.library.custom_op and register_autograd",
            )


class _Loss(nn.Module):
    """A function as a module, so that its operators can be attributed to it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


def _loss_name(named: dict[str, Tensor], positional: bool) -> str | None:
    def fits(tensor: Tensor) -> bool:
        return tensor.ndim == 0 and tensor.is_floating_point()

    if "loss" in named:
        return "loss" if fits(named["loss"]) else None
    if positional:
        return next((name for name, tensor in named.items() if fits(tensor)), None)
    return None
