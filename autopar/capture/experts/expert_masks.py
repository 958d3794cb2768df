"""Traces loops over expert numbers, in which each expert processes the tokens that chose it.

    for i, expert in enumerate(self.experts):
        token, slot = torch.where(ids == i)
        out[token] += weights[token, slot, None] * expert(x[token])

A token chooses an expert at most once, so the rows are those that a mask of tokens selects, and are
traced like these (see `stand_ins/selected.py`). `passes/experts/looped_experts.py` then merges the
loop into a mixture. An expert that no token chose adds nothing; a branch that skips such experts is
therefore traced as if every expert had tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.experts.expert_choices import ANY, IDS, MASK, Choice, Choices
from autopar.capture.experts.expert_rows import Count, Hits, StandIn, refused
from autopar.capture.stand_ins.selected import Selected

_TRUTH = ("__bool__", "is_nonzero", "item")
_IN_PLACE = ("iand", "ior", "ixor", "iadd", "isub", "imul")
_COMPARED = {"gt": True, "ne": True, "greater": True, "not_equal": True, "eq": False, "le": False}


@dataclass(frozen=True, eq=False)
class Positions(StandIn):
    """Indices of the chosen elements of a mask along one of its dimensions.

    Attributes:
        mask: the mask, with the dimensions of tokens first.
        tokens: a mask over the dimensions of tokens: whether a token has a chosen element.
        at: index of the dimension in `mask`.
    """

    mask: Tensor
    tokens: Tensor
    at: int

    @property
    def shape(self) -> tuple[Count]:
        """The number of indices."""
        return (Count(),)

    def numel(self) -> Count:
        """Returns the number of indices."""
        return Count()

    def size(self, dim: int = 0) -> Count:
        """Returns the number of indices."""
        return Count()

    def tolist(self) -> Positions:
        """Returns the indices themselves: a list of them is used like the tensor."""
        return self

    def __len__(self) -> int:
        raise refused("len", "how many rows an expert has depends on values: ask numel() == 0")


@dataclass(frozen=True, eq=False)
class PositionTable(StandIn):
    """Indices of the chosen elements of a mask, [elements, dimensions]."""

    columns: tuple[Positions, ...]


@dataclass
class ExpertMasks:
    """Masks of the tokens that chose an expert, in one trace."""

    choices: Choices = field(default_factory=Choices)
    _assumed: set[tuple[int, int | None]] = field(default_factory=set)

    def call(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call with such masks or positions; NotImplemented for others.

        Raises:
            CaptureError: the call needs the number of rows, which is unknown.
        """
        given = [*args, *kwargs.values()]
        inside = [x for arg in given for x in (arg if isinstance(arg, (tuple, list)) else [arg])]
        if any(isinstance(x, (Positions, PositionTable)) for x in inside):
            return _positioned(name, args, kwargs)
        if any(isinstance(x, Selected) for x in inside):
            self._refuse_averages(name, args, kwargs)
        if name == "__getitem__" and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            return self.selected(args[0], args[1])
        choice = self.choices.of(args[0]) if args else None
        if choice is None:
            return NotImplemented
        if id(args[0]) in self.choices.shared and _writes(name):
            raise refused(name, "a mask that is computed twice is one, and is not written")
        if choice.what == IDS and name in ("unique", "bincount"):
            return self._counted(choice, name, args, kwargs)
        if choice.what == ANY:
            return NotImplemented if choice.dims else self._truth(choice, name, args, kwargs)
        if choice.what != MASK or "expert" in choice.dims:
            return NotImplemented
        found = name == "where" and len(given) == 1
        if found or (name == "nonzero" and kwargs.get("as_tuple")):
            return self._places(args[0], choice)
        if name in ("nonzero", "argwhere"):
            return PositionTable(self._places(args[0], choice))
        return NotImplemented

    def _counted(
        self, choice: Choice, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the experts that have rows, or the number of rows of each expert."""
        if name == "unique" and not any(v for k, v in kwargs.items() if k != "sorted"):
            return Hits(args[0], choice.experts, False, numbered=True)
        if name == "bincount" and kwargs in ({"minlength": choice.experts},) and len(args) == 1:
            counts = F.one_hot(args[0], choice.experts).sum(0)
            return self.choices.meaning(counts, replace(choice, what=ANY, dims=("expert",)))
        return NotImplemented

    def hits(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the experts that have rows by `nonzero`, NotImplemented for any other call."""
        choice = self.choices.of(args[0]) if name == "nonzero" and args else None
        if choice is None or choice.what != ANY or choice.dims != ("expert",):
            return NotImplemented
        apart = bool(kwargs.get("as_tuple"))
        found = Hits(args[0], args[0].numel(), not apart, numbered=True)
        return (found,) if apart else found

    def selected(self, x: Any, mask: Any) -> Any:
        """Returns x[mask] for a mask of tokens and slots; NotImplemented for other masks."""
        choice = self.choices.of(mask)
        if choice is None or choice.what != MASK or choice.dims[-1:] != ("slot",):
            return NotImplemented
        if choice.dims.count("slot") != 1 or "expert" in choice.dims:
            return NotImplemented
        return _taken(x, self._places(mask, choice))

    def _places(self, mask: Tensor, choice: Choice) -> tuple[Positions, ...]:
        """Returns the positions of the chosen elements of a mask, one for each dimension."""
        self._assumed.add((choice.root, choice.expert))  # a comparison of their number assumes it
        dims = choice.dims
        order = sorted(range(len(dims)), key=lambda at: dims[at] != "token")
        moved = mask if order == list(range(len(dims))) else mask.permute(order)
        tokens = moved if moved.dtype == torch.bool else moved != 0
        slots = dims.count("slot")
        for _ in range(slots):
            tokens = tokens.any(-1)
        of_tokens = replace(choice, dims=("token",) * (len(dims) - slots))
        tokens = self.choices.meaning(tokens, of_tokens)
        return tuple(Positions(moved, tokens, order.index(at)) for at in range(len(dims)))

    def _truth(self, choice: Choice, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Assumes that an expert has rows, since an expert without rows adds nothing."""
        compared = name.strip("_") in _COMPARED and args[1:] == (0,) and not kwargs
        if not compared and name not in _TRUTH:
            return NotImplemented
        self._assumed.add((choice.root, choice.expert))
        if compared:
            return _COMPARED[name.strip("_")]
        return Count() if name == "item" and args[0].dtype != torch.bool else True

    def _refuse_averages(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises CaptureError for a mean over rows of an expert that was assumed to have some."""
        if name == "mean":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            dims = dim if isinstance(dim, (tuple, list)) else (dim,)
            if isinstance(args[0], Selected) and all(d and d % args[0].ndim for d in dims):
                return
        elif not name.endswith(("_loss", "cross_entropy", "_with_logits")):
            return
        for x in args:
            choice = self.choices.of(x.source) if isinstance(x, Selected) else None
            if choice is not None and (choice.root, choice.expert) in self._assumed:
                raise refused(name, "an expert may have no row, and a branch leaves it out")


def _writes(name: str) -> bool:
    """Returns whether a method writes its tensor."""
    inside = name.strip("_")
    written = name.endswith("_") and not name.startswith("__")
    return written or name == "__setitem__" or (name.startswith("__i") and inside in _IN_PLACE)


def _positioned(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function with an argument that holds positions of chosen tokens.

    Raises:
        CaptureError: the result depends on the number of positions.
    """
    first, plain = args[0] if args else None, name.strip("_")
    if isinstance(first, Tensor):
        if plain == "getitem":
            return _taken(first, args[1])
        if plain == "index_select" and len(args) == 3 and args[1] == 0:
            return _taken(first, args[2])
        written = name.endswith("_")
        if plain == "index_add" and not kwargs and len(args) == 4 and args[1] in (0, -first.dim()):
            return _added(first, args[2], args[3], written)
        if (
            plain in ("setitem", "index_put")
            and len(args) == 3
            and not set(kwargs) - {"accumulate"}
        ):
            if plain == "index_put" and kwargs.get("accumulate"):
                return _added(first, args[1], args[2], written)
            if written:
                _set(first, args[1], args[2])
                return first
    if isinstance(first, PositionTable):
        return _column(first, plain, args[1:], kwargs)
    if isinstance(first, Positions) and plain in ("to", "long", "detach", "contiguous", "flatten"):
        return first
    raise refused(name)


def _column(of: PositionTable, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns a column of the positions, or all columns."""
    if len(of.columns) == 1 and name in ("squeeze", "flatten", "ravel"):
        return of.columns[0]
    if len(of.columns) == 1 and name in ("view", "reshape") and tuple(args) == (-1,):
        return of.columns[0]
    if name in ("t", "unbind") and (args or (1,)) in ((1,), (-1,)) and not kwargs:
        return of.columns
    if name == "unbind" and not args and kwargs in ({"dim": 1}, {"dim": -1}):
        return of.columns
    if name == "getitem" and isinstance(args[0], tuple) and args[0][:1] in ((slice(None),), (...,)):
        at = args[0][1:]
        if len(at) == 1 and isinstance(at[0], int):
            return of.columns[at[0]]
    raise refused(name)


def _tokens_of(x: Tensor, index: Any) -> tuple[Positions, list[Any]]:
    """Returns the positions of tokens at the start of an index, and the rest of the index."""
    items = list(index) if isinstance(index, tuple) else [index]
    first = items[0] if items else None
    if not isinstance(first, Positions):
        raise refused("__getitem__")
    count = first.tokens.dim()
    heads = items[:count]
    same = [isinstance(p, Positions) and p.tokens is first.tokens and p.at == n
            for n, p in enumerate(heads)]  # fmt: skip
    if not all(same) or len(heads) < count or x.shape[:count] != first.tokens.shape:
        raise refused("__getitem__")
    return first, items[count:]


def _taken(x: Tensor, index: Any) -> Any:
    """Returns the rows of x of tokens that chose an expert, or their weights."""
    if isinstance(index, tuple) and len(index) == 2 and index[0] is None:
        index = index[1]  # a dimension of size one, which a view removes again
    first, rest = _tokens_of(x, index)
    while rest and isinstance(rest[-1], slice) and rest[-1] == slice(None):
        rest.pop()
    tokens, slots = first.tokens, first.mask.dim() - first.tokens.dim()
    if rest and isinstance(rest[0], Positions):
        if slots != 1 or rest[0].tokens is not tokens or rest[0].at != tokens.dim():
            raise refused("__getitem__")
        if x.shape[: first.mask.dim()] != first.mask.shape:
            raise refused("__getitem__")
        mask = first.mask if first.mask.dtype == torch.bool else first.mask != 0
        chosen = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        # A token chooses an expert at most once: the sum has one element.
        x, rest = torch.where(chosen, x, x.new_zeros(())).sum(tokens.dim()), rest[1:]
    rows = Selected.of(x, tokens)
    return rows[(slice(None), *rest)] if rest else rows


def _rows(x: Tensor, index: Any, rows: Any) -> tuple[Tensor, Selected]:
    """Returns the mask of tokens of an index, and the rows for the same tokens."""
    first, rest = _tokens_of(x, index)
    if rest or not isinstance(rows, Selected) or rows.source is not first.tokens:
        raise refused("index_add_", "the rows are not those of the same tokens")
    return first.tokens, rows


def _added(out: Tensor, index: Any, rows: Any, written: bool) -> Tensor:
    """Adds rows to the rows of their tokens; no token occurs twice."""
    _, selected = _rows(out, index, rows)
    each = selected.filled(0.0).reshape(out.shape).to(out.dtype)
    return out.add_(each) if written else out + each


def _set(out: Tensor, index: Any, rows: Any) -> None:
    tokens, selected = _rows(out, index, rows)
    mask = tokens.reshape(*tokens.shape, *[1] * (out.dim() - tokens.dim()))
    out.copy_(torch.where(mask, selected.rows.reshape(out.shape).to(out.dtype), out))
