"""Traces `x[mask]`, whose size is unknown, as all rows together with the mask.

How many rows a mask selects depends on its values, but it is at most the number of its elements.
Row-wise operations run on all rows; sums, means and losses leave out the rows that are not
selected. Those rows contain ones, so that results are finite, and no gradient flows out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from autopar.capture.stand_ins.dropout import dropout_error, drops
from autopar.errors import CaptureError

# Row-wise functions of one operand, and of several operands.
_UNARY = """abs neg negative exp expm1 log log1p log2 sqrt rsqrt square sigmoid logsigmoid tanh sin
    cos erf relu gelu silu softplus leaky_relu elu hardtanh hardswish mish clamp clamp_min clamp_max
    clip float double half bfloat16 long int bool to type detach contiguous clone linear layer_norm
    embedding logical_not rms_norm matmul glu __matmul__ __neg__ __invert__ __abs__"""
_SEVERAL = """add sub subtract mul multiply div divide true_divide pow maximum minimum where eq ne
    lt le gt ge logical_and logical_or type_as __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __rtruediv__ __pow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__
    rsub"""
_ALONG = (
    "softmax log_softmax sum mean amax amin logsumexp argmax argmin norm normalize cumsum chunk"
)
_LOSSES = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
    binary_cross_entropy_with_logits"""
_VIEWS = ("view", "reshape", "squeeze", "unsqueeze")
_ROWWISE = frozenset((_UNARY + _SEVERAL).split())
_FILLED = {"sum": 0.0, "mean": 0.0, "amax": -torch.inf, "amin": torch.inf, "logsumexp": -torch.inf}


@dataclass(frozen=True)
class _Key:
    """A key that is equal for equal masks: views of the same memory without a write in between."""

    mask: Tensor = field(compare=False)  # kept alive, so that its memory is not reused
    place: object

    @classmethod
    def of(cls, mask: Tensor) -> _Key:
        """Returns the key of a mask."""
        if not mask.is_contiguous():
            return cls(mask, id(mask))
        memory = mask.untyped_storage()._cdata, mask.storage_offset(), mask.numel()
        return cls(mask, (*memory, mask._version))


class Selected:
    """The rows of a tensor that a mask selects, in place of a tensor.

    Attributes:
        rows: all rows, [elements of the mask, ...].
        mask: which of them are selected, [elements of the mask].
        key: equal for masks that are the same.
    """

    def __init__(self, rows: Tensor, mask: Tensor, key: _Key) -> None:
        self.rows, self.mask, self.key = rows, mask, key
        self.dtype, self.device, self.ndim = rows.dtype, rows.device, rows.ndim

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Selected:
        """Returns x[mask]."""
        count, rest = mask.numel(), x.shape[mask.ndim :]
        flat = mask.reshape(count)
        rows = torch.where(_beside(flat, len(rest) + 1), x.reshape(count, *rest), x.new_ones(()))
        return cls(rows, flat, _Key.of(mask))

    @property
    def source(self) -> Tensor:
        """The mask as it was given."""
        return self.key.mask

    def like(self, rows: Any) -> Any:
        """Returns the same selection of other rows."""
        if isinstance(rows, Tensor):
            return Selected(rows, self.mask, self.key)
        return type(rows)(map(self.like, rows))

    def filled(self, value: float) -> Tensor:
        """Returns all rows, with `value` in those that are not selected."""
        return torch.where(_beside(self.mask, self.ndim), self.rows, self.rows.new_full((), value))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of a torch function of selected rows."""
        return apply(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name, None)
        if name.startswith("__"):
            raise AttributeError(name)
        if not callable(function):
            raise _refused(name)
        return partial(_method(name), self)

    def dim(self) -> int:
        """The number of dimensions."""
        return self.ndim

    def is_floating_point(self) -> bool:
        """Returns whether its elements are floating."""
        return self.rows.is_floating_point()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, tuple) or index[0] != slice(None):
            raise _refused("__getitem__")
        return self.like(self.rows[index])

    def __len__(self) -> int:
        raise _refused("len")

    def __bool__(self) -> bool:
        raise _refused("bool")


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Selected, *args: Any) -> Any:
        return apply(getattr(Tensor, name), (self, *args), {})

    return call


for _name in _ROWWISE:
    if _name.startswith("__"):
        setattr(Selected, _name, _operator(_name))
Selected.__hash__ = object.__hash__  # type: ignore[method-assign]


def _method(name: str) -> Callable[..., Any]:
    """Returns a tensor method that is dispatched to any active mode, including the model's own.

    The methods of Tensor cannot be used: when a mode calls them, they accept tensors only.
    """

    def method(self: Selected | Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Tensor):
            return getattr(Tensor, name)(self, *args, **kwargs)
        return handle_torch_function(method, (self,), self, *args, **kwargs)

    method.__name__ = name
    return method


def selects(name: str, args: Sequence[Any]) -> bool:
    """Returns whether a call selects rows by a mask, or has an argument of such rows."""
    lists = (arg for arg in args if isinstance(arg, (tuple, list)))
    if any(isinstance(arg, Selected) for arg in chain(args, *lists)):
        return True
    if len(args) < 2 or not isinstance(args[0], Tensor):
        return False
    if name == "__getitem__" and isinstance(args[1], tuple):
        mask, *rest = args[1] or (None,)
        plain = all(isinstance(part, (int, slice)) or part is None for part in rest)
        return plain and isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.ndim > 0
    if not isinstance(args[1], Tensor):
        return False
    indexed = name == "__getitem__" or (name == "masked_select" and args[0].shape == args[1].shape)
    return indexed and args[1].dtype is torch.bool and args[1].ndim > 0


def apply(func: Any, args: Sequence[Any], kwargs: dict[str, Any], off: bool = False) -> Any:
    """Calls a function for which `selects` is true.

    Args:
        func: the function.
        args, kwargs: its arguments.
        off: whether gradients are disabled in a way that a trace does not record.

    Raises:
        CaptureError: the result depends on the number of rows, or mixes rows of several masks.
    """
    name = str(getattr(func, "__name__", func))
    if off:
        raise _refused(name, "gradients are switched off inside an autocast block")
    if name in ("__getitem__", "masked_select") and not isinstance(args[0], Selected):
        mask, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
        rows = Selected.of(args[0], mask)
        return rows[(slice(None), *rest)] if rest else rows
    if name == "__setitem__":
        return _assign(*args)
    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Selected)]
    if not given:  # in a list
        raise _refused(name)
    first = given[0]
    if any(other.key != first.key for other in given):
        raise _refused(name, "its operands are selected by several masks")
    plain = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    alike = all(other.ndim == first.ndim for other in given)
    alike = alike and all(other.ndim < first.ndim for other in plain)
    if name in ("cross_entropy", "nll_loss"):
        return _classified(func, *args, **kwargs)
    if name in _LOSSES.split() and alike and len(args) <= 2:
        reduction = kwargs.pop("reduction", "mean")
        losses = first.like(func(*map(_rows, args), **_mapped(kwargs), reduction="none"))
        return losses if reduction == "none" else _reduced(reduction, losses)
    if name in _ALONG.split():
        return _along(func, name, first, *args[1:], **kwargs)
    if name == "dropout" and args[0] is first and not drops(*args[1:], **kwargs):
        return first
    if name in _VIEWS and args[0] is first:
        return _viewed(first, name, args[1:], kwargs)
    alone = args[0] is first and len(given) == 1
    alone = alone and (first.ndim > 1 or name not in ("linear", "matmul", "__matmul__", "glu"))
    if not (alike if name in _SEVERAL.split() else alone and name in _UNARY.split()):
        raise _refused(name)
    return first.like(func(*map(_rows, args), **_mapped(kwargs)))


def _viewed(of: Selected, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns rows with dimensions of size one added or removed."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or not all(isinstance(size, int) for size in sizes):
        raise _refused(name)
    if name == "squeeze":  # of rows whose number is unknown, so that they stay
        (dim,) = sizes
        return of.like(of.rows if dim % of.ndim == 0 else of.rows.squeeze(dim))
    if name == "unsqueeze":
        (dim,) = sizes
        at = dim % (of.ndim + 1)
        if at == 0:
            raise _refused(name)
        return of.like(of.rows.unsqueeze(at))
    rest = of.rows.shape[1:]
    if tuple(sizes[:1]) != (-1,) or math.prod(sizes[1:]) != math.prod(rest):
        raise _refused(name)
    return of.like(of.rows.reshape(of.rows.shape[0], *sizes[1:]))


def _along(func: Any, name: str, of: Selected, *args: Any, **kwargs: Any) -> Any:
    """Applies a function along dimensions: within each row, or over the rows."""
    at = 1 if name in ("norm", "normalize", "chunk") else 0
    dims = kwargs.get("dim", args[at] if len(args) > at else 1 if name == "normalize" else None)
    dims = [dims] if isinstance(dims, int) else dims or range(of.ndim)
    named = {dim % of.ndim for dim in dims}
    if 0 not in named:
        return of.like(func(of.rows, *args, **kwargs))
    if name not in _FILLED or 1 < len(named) < of.ndim or not of.is_floating_point():
        raise _refused(name)
    if name == "mean":
        total = torch.sum(of.filled(0.0), *args, **kwargs)
        each = 1 if len(named) == 1 else of.rows[0].numel()
        return total / (of.mask.sum() * each)
    return func(of.filled(_FILLED[name]), *args, **kwargs)


def _reduced(reduction: str, losses: Selected) -> Tensor:
    if reduction not in ("mean", "sum"):
        raise _refused(f"reduction={reduction!r}")
    total = losses.filled(0.0).sum()
    return total if reduction == "sum" else total / (losses.mask.sum() * losses.rows[0].numel())


def _classified(func: Any, x: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a classification loss that ignores rows that are not selected."""
    if not isinstance(x, Selected) or not isinstance(target, Selected) or args:
        raise _refused(func.__name__)
    if target.is_floating_point():
        reduction = kwargs.pop("reduction", "mean")
        losses = x.like(func(x.rows, target.rows, **kwargs, reduction="none"))
        return losses if reduction == "none" else _reduced(reduction, losses)
    ignored = kwargs.get("ignore_index", -100)
    result = func(x.rows, target.filled(ignored), **kwargs)
    return x.like(result) if kwargs.get("reduction") == "none" else result


def _assign(into: Any, index: Any, value: Any) -> None:
    """Sets into[mask] to rows that the same mask selects."""
    if isinstance(into, Selected) or not isinstance(index, Tensor) or not index.ndim:
        raise _refused("__setitem__")
    if not isinstance(value, Selected) or _Key.of(index) != value.key:
        raise _refused("__setitem__", "they are selected by several masks")
    mask = _beside(index, into.ndim)
    into.copy_(torch.where(mask, value.rows.reshape(into.shape).to(into.dtype), into))


def _beside(mask: Tensor, ndim: int) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (ndim - mask.ndim))


def _rows(value: Any) -> Any:
    return value.rows if isinstance(value, Selected) else value


def _mapped(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _rows(value) for key, value in values.items()}


def _refused(
    name: str, why: str = "how many rows a mask selects depends on its values"
) -> CaptureError:
    if name == "dropout":
        return dropout_error("the rows that a mask selects, x[mask]")
    return CaptureError(
        f"{name} of the rows that a mask selects, x[mask]",
        why=f"{why}; only row-wise operations, sums, means and losses are supported",
        todo="use torch.where(mask, x, 0) or x * mask, which keep the size, and mask.sum()",
    )
