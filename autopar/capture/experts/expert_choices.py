"""Tracks which tensors of a trace hold the expert choices of tokens.

`topk` and `argmax` return the experts of every token, each expert at most once. Comparisons with a
number, `one_hot`, views and sums keep the meaning of these tensors. Their dimensions are named:
"token", "slot" (one of the choices of a token), and "expert".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

IDS, MASK, ANY = "ids", "mask", "any"
_SAME = """to long int bool float half double bfloat16 type type_as contiguous detach clone
    int32 int64"""


@dataclass(frozen=True)
class Choice:
    """The meaning of a tensor of expert choices.

    Attributes:
        what: `IDS` if the elements are expert numbers, `MASK` if an element is nonzero where a
            token chose an expert, `ANY` if it is a scalar that is nonzero if any token did.
        dims: names of the dimensions.
        root: the tensor of expert numbers from which it was computed; two tensors mean the same
            only if they have the same root.
        expert: the expert of a mask that has no dimension "expert".
        experts: number of experts.
    """

    what: str
    dims: tuple[str, ...]
    root: int
    expert: int | None = None
    experts: int = 0

    def without(self, at: set[int], **changes: Any) -> Choice:
        """Returns the meaning without some dimensions."""
        dims = tuple(dim for n, dim in enumerate(self.dims) if n not in at)
        return replace(self, dims=dims, **changes)


Step = Callable[[Choice, Tensor, Sequence[Any], dict[str, Any], Any], Choice | None]


@dataclass
class Choices:
    """The meanings of the tensors of one trace, by the identity of the tensor."""

    _known: dict[int, tuple[Tensor, int, Choice]] = field(default_factory=dict)
    _masks: dict[object, Tensor] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)  # masks that replace several equal ones

    def of(self, x: Any) -> Choice | None:
        """Returns the meaning of a value; None if it has none, or was written in place since."""
        tensor, version, choice = self._known.get(id(x), (None, 0, None))
        return choice if tensor is not None and tensor._version == version else None

    def noted(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
        """Records the meaning of the result of a call.

        Returns:
            The result, or an earlier mask of the same meaning, so that equal masks are one tensor.
        """
        if not args or not isinstance(args[0], Tensor):
            return result
        source, choice = args[0], self.of(args[0])
        if choice is None:
            choice = _routed(name, source, args[1:], kwargs)
            ids = result[1] if choice and isinstance(result, tuple) else result
            if choice is not None and isinstance(ids, Tensor):
                self._known[id(ids)] = ids, ids._version, replace(choice, root=id(ids))
            return result
        step = _STEPS.get(name.strip("_"))
        if step is None or not isinstance(result, Tensor):
            return result
        choice = step(choice, source, args[1:], kwargs, result)
        return result if choice is None else self.meaning(result, choice)

    def meaning(self, x: Tensor, choice: Choice) -> Tensor:
        """Records the meaning of a tensor; returns it, or an earlier mask of the same meaning."""
        if choice.what == MASK:
            key = (choice, tuple(x.shape), x.dtype)
            earlier = self._masks.setdefault(key, x)
            if self.of(earlier) == choice:
                self.shared.add(id(earlier))
                return earlier
            self._masks[key] = x
        self._known[id(x)] = x, x._version, choice
        return x


def _routed(name: str, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Choice | None:
    """Returns the meaning of the indices of the largest elements of the last dimension."""
    if name not in ("topk", "sort", "argsort", "argmax", "max") or not x.dim():
        return None
    at = 1 if name == "topk" else 0
    dim = kwargs.get("dim", args[at] if len(args) > at else None if "max" in name else -1)
    if not isinstance(dim, int) or dim % x.dim() != x.dim() - 1:
        return None
    tokens = ("token",) * (x.dim() - 1)
    if "max" not in name:
        return Choice(IDS, (*tokens, "slot"), 0, None, x.shape[-1])
    kept = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    return Choice(IDS, (*tokens, "slot") if kept else tokens, 0, None, x.shape[-1])


def _viewed(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    """Returns the meaning of a view.

    It may merge dimensions of tokens, merge tokens with slots, or add a dimension as the only slot.
    """
    old, new = x.shape, result.shape
    rest = len(of.dims)
    while rest and of.dims[rest - 1] != "token":
        rest -= 1
    if set(of.dims[:rest]) - {"token"}:
        return of if old == new else None
    tail = len(of.dims) - rest
    if tail == 0 or (tuple(old[rest:]) == tuple(new[len(new) - tail :]) and len(new) >= tail):
        tokens = ["token"] * (len(new) - tail)
        if "slot" not in of.dims and len(tokens) > 1 and new[len(tokens) - 1] == 1:
            tokens[-1] = "slot"
        return replace(of, dims=(*tokens, *of.dims[rest:]))
    return replace(of, dims=("token",)) if of.dims[rest:] == ("slot",) and len(new) == 1 else None


def _permuted(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    given = kwargs.get("dims", args[0] if args and not isinstance(args[0], int) else args)
    return _reordered(of, [at % len(of.dims) for at in given])


def _transposed(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    order = list(range(len(of.dims)))
    first, second = args if len(args) == 2 else (0, 1)
    if kwargs or (not args and len(order) != 2):
        return None
    order[first], order[second] = order[second], order[first]
    return _reordered(of, order)


def _reordered(of: Choice, order: list[int]) -> Choice | None:
    """Returns the meaning with permuted dimensions; None if dimensions of tokens are permuted."""
    tokens = [at for at in order if of.dims[at] == "token"]
    dims = tuple(of.dims[at] for at in order)
    return replace(of, dims=dims) if tokens == sorted(tokens) else None


def _equal(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    number = args[0] if args else None
    plain = isinstance(number, int) and not isinstance(number, bool)
    return replace(of, what=MASK, expert=number) if plain and of.what == IDS else None


def _one_hot(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    return replace(of, what=MASK, dims=(*of.dims, "expert")) if of.what == IDS else None


def _reduced(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    """Returns the meaning of a sum over all elements, or over slots: at most one is nonzero."""
    if of.what != MASK:
        return None
    dim = kwargs.get("dim", args[0] if args else None)
    if dim is None:
        return (
            Choice(ANY, (), of.root, of.expert) if not kwargs and "expert" not in of.dims else None
        )
    at = {d % len(of.dims) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    kept = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    if all(n in at or dim == "expert" for n, dim in enumerate(of.dims)) and not kept:
        return of.without(at, what=ANY)  # of every expert, or of one
    slots = all(of.dims[n] == "slot" for n in at)
    return of.without(at) if slots and not kept and isinstance(result, Tensor) else None


def _taken(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    """Returns the meaning of one slot or expert, selected by number, or of a range of slots."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if len(index) > len(of.dims) + 1:
        return None
    if Ellipsis in [i if i is Ellipsis else None for i in index]:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(of.dims) - len(index) + 1), *index[at + 1 :])
    gone, expert, one, part_of_slots = set(), of.expert, -1, False
    for n, part in enumerate(index):
        if isinstance(part, int) and not isinstance(part, bool) and of.dims[n] != "token":
            gone.add(n)
            part_of_slots |= of.dims[n] == "slot"
            expert = part % x.shape[n] if of.dims[n] == "expert" else expert
        elif isinstance(part, slice) and of.dims[n] == "expert" and result.shape[n] == 1:
            expert, one = part.indices(x.shape[n])[0], n
        elif not isinstance(part, slice) or (part != slice(None) and of.dims[n] != "slot"):
            return None
        part_of_slots |= part != slice(None) and of.dims[n] == "slot"
    root = id(result) if part_of_slots else of.root
    dims = tuple("one" if n == one else dim for n, dim in enumerate(of.dims))
    return replace(of, dims=dims).without(gone, expert=expert, root=root)


def _compared(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    return of if of.what in (MASK, ANY) and tuple(args) == (0,) else None


def _dropped(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    """A copy of a mask without some elements, such as those beyond an expert's capacity."""
    kept = args[0] if args else None
    some = isinstance(kept, Tensor) and kept.dtype == torch.bool and result is not x
    if of.what != MASK or not some or result.shape != x.shape:
        return None
    return replace(of, root=id(result))


def _same(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    return None if of.what == IDS and result.dtype == torch.bool else of


def _squeezed(of: Choice, x: Tensor, args: Any, kwargs: Any, result: Any) -> Choice | None:
    dim = kwargs.get("dim", args[0] if args else None)
    if not isinstance(dim, int):
        return of if x.shape == result.shape else None
    return of if x.shape == result.shape else of.without({dim % x.dim()})


_STEPS: dict[str, Step] = {
    **dict.fromkeys(_SAME.split(), _same),
    **dict.fromkeys(("view", "reshape", "flatten", "ravel"), _viewed),
    **dict.fromkeys(("any", "sum", "amax", "count_nonzero"), _reduced),
    **dict.fromkeys(("gt", "greater", "ne", "not_equal"), _compared),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transposed),
    **dict.fromkeys(("mul", "multiply", "and", "logical_and"), _dropped),
    "eq": _equal,
    "one_hot": _one_hot,
    "permute": _permuted,
    "getitem": _taken,
    "squeeze": _squeezed,
}
