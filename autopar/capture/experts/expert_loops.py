"""Traces a loop over experts, each applied to the tokens that chose it, as one mixture.

    mask = one_hot(ids, experts).permute(2, 1, 0)
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        slot, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, f(x[token], up[expert], down[expert]) * weights[token, slot, None])

The number of tokens of an expert depends on tensor values. The loop therefore runs once, for a
placeholder that represents all experts, and the operations on its rows are recorded. `index_add_`
then adds the result of `autopar.mixture` of the same weights. Other operations raise CaptureError
at the user's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar.capture.experts.expert_choices import Choices
from autopar.capture.experts.expert_rows import (
    Expert,
    Hits,
    Mask,
    Places,
    Rows,
    Share,
    StandIn,
    Weight,
    refused,
)
from autopar.capture.stand_ins.dropout import drops
from autopar.operators.activation import FUNCTIONS

_UNCHANGED = ("contiguous", "clone", "to", "type", "type_as", "float", "double", "bfloat16", "half")


@dataclass(frozen=True)
class _Chosen:
    """A one-hot tensor of the experts that tokens chose, or a sum of it.

    Attributes:
        ids: the experts of every token, [tokens, slots].
        dims: names of its dimensions: "token", "slot" and "expert".
        experts: number of experts.
        seen: whether it tells which experts have a row.
    """

    ids: Tensor
    dims: tuple[str, ...]
    experts: int
    seen: bool = False

    def moved(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Chosen | None:
        """Returns the result of `permute`, `transpose` or `sum`; None if its meaning is unknown."""
        dims, given = self.dims, args[0] if args else kwargs.get("dim", kwargs.get("dims"))
        if name == "permute":
            order = given if isinstance(given, (tuple, list)) else args
            return replace(self, dims=tuple(dims[at] for at in order))
        if name == "transpose" and len(args) == 2:
            first, second = (at % len(dims) for at in args)
            swapped = {first: dims[second], second: dims[first]}
            return replace(self, dims=tuple(swapped.get(at, dim) for at, dim in enumerate(dims)))
        if name == "sum" and len(args) < 2 and set(kwargs) <= {"dim"} and given is not None:
            out = {
                at % len(dims) for at in (given if isinstance(given, (tuple, list)) else [given])
            }
            return replace(self, dims=tuple(dim for at, dim in enumerate(dims) if at not in out))
        return None


@dataclass
class ExpertLoops:
    """The loops over experts of one trace, with the tensors that control them, by identity.

    Attributes:
        choices: what is known of the numbers of experts.
    """

    choices: Choices
    _known: dict[int, tuple[Tensor, _Chosen]] = field(default_factory=dict)

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call inside such a loop; NotImplemented for any other call.

        Raises:
            CaptureError: the call needs the number of rows, which is unknown.
        """
        given = [*args, *kwargs.values()]
        inside = [x for arg in given for x in (arg if isinstance(arg, (tuple, list)) else [arg])]
        if any(isinstance(x, StandIn) for x in inside):
            chosen = self._of(args[0]) if name == "__getitem__" else None
            if chosen is not None:
                return _mask(chosen, args[1])
            return applied(func, args, kwargs)
        chosen = self._of(args[0]) if args else None
        if name == "nonzero" and chosen is not None and chosen.seen:
            apart = bool(kwargs.get("as_tuple"))
            hits = Hits(chosen.ids, chosen.experts, not apart)
            return (hits,) if apart else hits
        return NotImplemented

    @staticmethod
    def numbered(args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arguments with experts replaced by their numbers, where these are known.

        The first argument is kept, because it is the object whose method is called.
        """
        return tuple(
            arg.index() if at and isinstance(arg, Expert) and arg.numbered else arg
            for at, arg in enumerate(args)
        )

    def note(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Records the result of a call if a loop over experts may iterate over it."""
        if not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        chosen = self._of(args[0])
        if name == "one_hot" and args[0].dim() == 2:
            known = self.choices.of(args[0])  # often there is one class more, which no token has
            experts = result.shape[-1] if known is None else known.experts or result.shape[-1]
            chosen = _Chosen(args[0], ("token", "slot", "expert"), experts)
        elif chosen is None or chosen.seen:
            return
        elif (
            name in ("greater", "gt", "__gt__") and args[1:] == (0,) and chosen.dims == ("expert",)
        ):
            chosen = replace(chosen, seen=True)
        else:
            chosen = chosen.moved(name, args[1:], kwargs)
        if chosen is not None:
            self._known[id(result)] = result, chosen

    def _of(self, x: Any) -> _Chosen | None:
        held = self._known.get(id(x))
        return None if held is None else held[1]


def _mask(chosen: _Chosen, index: Any) -> Mask:
    """Returns the part of a one-hot tensor for one expert."""
    if not isinstance(index, Expert) or chosen.dims[:1] != ("expert",) or len(chosen.dims) != 3:
        raise refused("__getitem__")
    index.stands_for_all()
    return Mask(chosen.ids, chosen.dims[1:])


def applied(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function with an argument from a loop over experts.

    Raises:
        CaptureError: the result depends on the number of rows, or is not part of a mixture.
    """
    name = str(getattr(func, "__name__", func)).strip("_")
    first = args[0] if args else None
    if name == "getitem" and isinstance(first, Tensor):
        return _taken(first, args[1])
    if name == "index_add" and str(func.__name__).endswith("_") and isinstance(first, Tensor):
        return _added(first, *args[1:], **kwargs)
    if isinstance(first, Mask):
        return _places(first, name, kwargs)
    if name == "linear" and isinstance(first, Rows):
        return _linear(*args, **kwargs)
    if name in ("matmul", "mm") and isinstance(first, Rows) and isinstance(args[1], Weight):
        return first.multiplied(_straight(args[1], not args[1].turned), None)
    if isinstance(first, Weight) and name in ("t", "transpose", "get") and first.every.dim() == 3:
        return replace(first, turned=not first.turned)
    if isinstance(first, Share) and (name, args[1:]) in _COLUMNS:
        return replace(first, column=True)
    if isinstance(first, Expert) and name in ("squeeze", "item"):
        return first.scalar()
    if isinstance(first, Hits) and name in ("squeeze", "flatten", "tolist", "cpu", "detach"):
        flat = name in ("squeeze", "flatten") or (name == "tolist" and not first.column)
        return replace(first, column=first.column and not flat)
    if isinstance(first, Rows):
        return _of_rows(first, func, name, args[1:], kwargs)
    if name in FUNCTIONS and len(args) == 2 and isinstance(args[1], Rows) and not kwargs:
        return _function(name, args)
    raise refused(name)


_COLUMNS: list[tuple[str, Any]] = [
    ("unsqueeze", (-1,)), ("unsqueeze", (1,)), ("getitem", ((slice(None), None),)),
    ("getitem", ((..., None),)),
]  # fmt: skip


def _taken(x: Tensor, index: Any) -> StandIn:
    """Returns x[index] for an index from a loop over experts."""
    match index:
        case Expert() if x.dim() in (2, 3):
            index.stands_for_all()
            return Weight(x)
        case Places(of="token") | (None, Places(of="token")) if (
            x.dim() == 2 and x.shape[0] == _ids(index).shape[0]
        ):
            return Rows(_ids(index), x)
        case (Places(of="token") as token, Places(of="slot") as slot, *rest) if (
            token.ids is slot.ids and x.shape == token.ids.shape and rest in ([], [None])
        ):
            return Share(token.ids, x, bool(rest))
    raise refused("__getitem__")


def _ids(index: Any) -> Tensor:
    ids: Tensor = (index[1] if isinstance(index, tuple) else index).ids
    return ids


def _places(mask: Mask, name: str, kwargs: dict[str, Any]) -> Any:
    if name == "where" or (name == "nonzero" and kwargs.get("as_tuple")):
        return tuple(Places(mask.ids, dim) for dim in mask.dims)
    if name == "squeeze":
        return mask
    raise refused(name)


def _linear(rows: Rows, weight: Any, bias: Any = None) -> Rows:
    held = bias is None or (isinstance(bias, Weight) and bias.every.dim() == 2)
    if not isinstance(weight, Weight) or not held:
        raise refused("linear", "its weight is not one of each expert")
    return rows.multiplied(_straight(weight, weight.turned), None if bias is None else bias.every)


def _straight(weight: Weight, turned: bool) -> Tensor:
    """Returns weights as [experts, out, in]."""
    return weight.every.transpose(1, 2) if turned else weight.every


def _of_rows(rows: Rows, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a function whose first argument is rows of an expert."""
    if name == "dropout" and not drops(*args, **kwargs):
        return rows
    if name in _UNCHANGED:
        kept = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        whole = rows.weights is not None  # a mixture has the dtype of its tokens
        if whole or all(dtype == rows.dtype for dtype in kept):
            return rows
    if name in ("view", "reshape") and (*args, *kwargs.values()) in (
        (-1, rows.width), ((-1, rows.width),),
    ):  # fmt: skip
        return rows
    along = args[1] if len(args) > 1 else kwargs.get("dim")
    if (name, rows.text, args[:1], rows.width % 2) == ("chunk", "@0", (2,), 0) and along in (-1, 1):
        return _halves(rows)
    if name == "getitem" and rows.text == "@0" and isinstance(args[0], tuple):
        run = args[0][-1]
        if args[0][:-1] in ((...,), (slice(None),)) and isinstance(run, slice):
            start, end, step = run.indices(rows.width)
            return replace(rows, products=(rows.products[0].part(start, end, step),))
    if name in ("mul", "multiply", "imul", "rmul") and isinstance(args[0], Share):
        return _weighted(rows, args[0])
    if name in ("add", "radd", "iadd") and isinstance(args[0], Weight):
        return rows.biased(args[0].every)
    if name == "gelu":
        exact = kwargs.get("approximate", "none") == "none"
        return _function("gelu" if exact else "gelu_tanh", (rows,))
    if name in FUNCTIONS or name.lstrip("ri") in FUNCTIONS or name in _ALIASES:
        return _function(_ALIASES.get(name, name), (rows, *args), kwargs)
    raise refused(name)


_ALIASES = {
    "multiply": "mul", "rmul": "mul", "imul": "mul", "radd": "add", "iadd": "add",
    "truediv": "div", "divide": "div", "subtract": "sub", "negative": "neg", "isub": "sub",
}  # fmt: skip


def _halves(rows: Rows) -> tuple[Rows, Rows]:
    """Returns the first and the second half of the features of a product."""
    (whole,), half = rows.products, rows.width // 2
    first, second = (whole.part(at, at + half, 1) for at in (0, half))
    return replace(rows, products=(first,)), replace(rows, products=(second,))


def _weighted(rows: Rows, share: Share) -> Rows:
    if rows.down is None or rows.weights is not None or not share.column:
        raise refused("mul", "weights of rows multiply the result of an expert, once")
    if share.ids is not rows.ids:
        raise refused("mul", "the weights are those of other experts")
    return replace(rows, weights=share.weights)


def _function(name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Rows:
    """Returns the rows after an elementwise function."""
    args = [*args, *_in_order(name, kwargs or {})]
    rows = next(arg for arg in args if isinstance(arg, Rows))
    if name not in FUNCTIONS or not rows.text or rows.down is not None or len(args) > 3:
        raise refused(name)
    if len(args) > 1 and isinstance(args[0], Rows) and isinstance(args[1], Rows):
        left, right, products = args[0].joined(args[1])
        return replace(rows, text=f"{name}({left}, {right})", products=products)
    parts = []
    for arg in args:
        if isinstance(arg, bool) or not (arg is None or isinstance(arg, (int, float, Rows))):
            raise refused(name)
        parts.append(arg.text if isinstance(arg, Rows) else repr(arg))
    return replace(rows, text=f"{name}({', '.join(parts)})")


def _in_order(name: str, kwargs: dict[str, Any]) -> list[Any]:
    """Returns keyword arguments by position."""
    if name == "clamp" and set(kwargs) <= {"min", "max"}:
        return [kwargs.get("min"), kwargs.get("max")] if kwargs else []
    if {key: value for key, value in kwargs.items() if key != "inplace" or value}:
        raise refused(name)
    return []


def _added(out: Tensor, dim: Any, index: Any, rows: Any, alpha: Any = 1) -> Tensor:
    """Adds the mixture that computes the recorded rows."""
    token = isinstance(index, Places) and index.of == "token" and isinstance(rows, Rows)
    if dim not in (0, -2) or not token or alpha != 1 or rows.ids is not index.ids:
        raise refused("index_add_")
    return out.add_(rows.mixture().to(out.dtype))
