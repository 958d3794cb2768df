"""Traces FlexAttention as attention with a mask, or by its scores if a score_mod changes them.

torch.nn.attention.flex_attention compiles the user's functions of positions and, on CPUs, has no
backward. While a model is traced, these functions run on tensors of all batches, heads, queries and
keys instead, so that the graph contains their operators; see `exchanged.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.stand_ins.exchanged import exchange
from autopar.errors import CaptureError

_LARGEST = 2**28  # elements of a mask that is compared with its blocks
_MARK = "_traced_by_autopar"  # attribute of a BlockMask that is built while a model is traced


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    """Runs as the code of torch's function, with the names of torch's module."""
    from autopar.capture.stand_ins.exchanged import called

    return called("_flex_attention", *args, **kwargs)


def _create_block_mask(*args: Any, **kwargs: Any) -> Any:
    """Runs as the code of torch's function, with the names of torch's module."""
    from autopar.capture.stand_ins.exchanged import called

    return called("_create_block_mask", *args, **kwargs)


def _block_mask(
    mask_mod: Callable[..., Tensor], B: Any, H: Any, Q_LEN: int, KV_LEN: int, *_: Any, **__: Any
) -> BlockMask:
    """Returns a mask without its blocks, which a trace does not need."""
    mask = object.__new__(BlockMask)
    mask.seq_lengths, mask.mask_mod = (Q_LEN, KV_LEN), mask_mod
    setattr(mask, _MARK, (B or 1, H or 1))
    return mask


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *wants_lse: Any,
    **options: Any,
) -> Any:
    """Returns attention as torch.nn.attention.flex_attention does, with plain operators."""
    return_aux = options.get("return_aux")
    lse_alone = bool(wants_lse[0] if wants_lse else options.get("return_lse"))
    if query.dim() != 4 or (not enable_gqa and query.shape[1] != key.shape[1]):
        raise ValueError("flex_attention takes [batch, heads, positions, width], and equal heads")
    at = _numbers((*query.shape[:3], key.shape[2]), query.device)
    mask = None if block_mask is None else _mask(block_mask, at)
    if return_aux is not None and return_aux.max_scores:
        raise CaptureError(
            "flex_attention returns its largest scores",
            why="gradients do not flow through them, and no form of attention has them",
            todo="leave out max_scores",
        )
    scores, fused, sums = _scores(query, key, scale), score_mod is None, mask
    if score_mod is not None:
        with _Followed(scores) as followed:
            scores = score_mod(scores, *at)
        fused, sums = followed.mask(scores, mask, query.dtype)
    out, lse = _weighted(scores, mask, value)
    if fused:  # nothing then reads the result of the scores
        out = F.scaled_dot_product_attention(
            query, key, value, sums, scale=scale, enable_gqa=enable_gqa
        )
    if return_aux is not None:
        return out, flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if lse_alone else out


def _numbers(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the indices of batches, heads, queries and keys, each along its own dimension."""
    numbers = []
    for dim, size in enumerate(sizes):
        shape = [1] * 4
        shape[dim] = size
        numbers.append(torch.arange(size, device=device).view(shape))
    return tuple(numbers)


def _mask(block_mask: BlockMask, at: Sequence[Tensor]) -> Tensor:
    """Returns which keys each query attends to, [batch or 1, heads or 1, queries, keys]."""
    sizes = at[2].numel(), at[3].numel()
    if tuple(block_mask.seq_lengths) != sizes:
        raise ValueError(
            f"block_mask is of {tuple(block_mask.seq_lengths)} queries and keys, not of {sizes}"
        )
    if not hasattr(block_mask, _MARK):
        _check_blocks(block_mask)
    with _Positions():
        mask: Tensor = block_mask.mask_mod(*at)
    return mask.expand(*mask.shape[:-2], *sizes) if mask.dim() > 1 else mask.expand(1, 1, *sizes)


def _check_blocks(block_mask: BlockMask) -> None:
    """Raises CaptureError if the blocks of a mask are not those that follow from its function."""
    with _disable_current_modes():
        same = math.prod(block_mask.shape) <= _LARGEST and _follow(block_mask)
    if not same:
        raise CaptureError(
            "the blocks of a BlockMask do not follow from its mask_mod, or are too many to check",
            why="the program evaluates mask_mod by position, so that it can split sequences",
            todo="call create_block_mask in forward, with a mask_mod that describes the whole mask",
        )


def _follow(block_mask: BlockMask) -> bool:
    """Returns whether the blocks that a mask lists are those in which its function is true."""
    *lead, queries, keys = block_mask.shape
    high, wide = block_mask.BLOCK_SIZE
    with _Positions():
        seen = block_mask.mask_mod(*_numbers((*lead, queries, keys), torch.device("cpu")))
    padded = F.pad(seen.expand(*lead, queries, keys), (0, -keys % wide, 0, -queries % high))
    due = padded.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high)).any(-1).any(-2)
    given = torch.zeros_like(due, dtype=torch.int32)
    for counts, order in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if counts is not None and order is not None:
            listed = torch.arange(order.shape[-1]) < counts.unsqueeze(-1)
            given.scatter_add_(-1, order.long(), listed.int())
    return bool((given.bool() == due).all())


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Returns scaled products in at least float32, [batch, heads, queries, keys]."""
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    products = query @ key.transpose(-2, -1)
    wide = products if products.dtype == torch.float64 else products.float()
    return wide * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)


def _weighted(scores: Tensor, mask: Tensor | None, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns attention by given scores, 0 for queries without keys, and their logsumexp."""
    least = torch.finfo(scores.dtype).min
    if mask is not None:
        scores = scores.masked_fill(~mask, least)
    scores = scores.clamp(min=least)
    weights = (scores.softmax(-1) * (scores > least)).to(value.dtype)
    if value.shape[1] != weights.shape[1]:
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    lse = scores.logsumexp(-1)
    return weights @ value, lse.masked_fill(lse <= least, -torch.inf)


class _Positions(TorchFunctionMode):
    """Runs a function of one position on all positions: `ids[b][i]` means `ids[b, i]`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            return _looked_up(args[0], args[1])
        return func(*args, **(kwargs or {}))


class _Followed(_Positions):
    """Also tracks the terms added to the scores, and where scores become minus infinity."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self._shape, self._dtype = scores.shape, scores.dtype
        self._now: Any = scores
        self._bias: Any = 0.0
        self._before: list[Tensor] = []
        self._additive = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        given = (*args, *(kwargs or {}).values())
        again = any(item is old for item in given for old in self._before)
        if again or not self._additive:
            self._additive = False
        elif any(item is self._now for item in given):
            bias = None if kwargs else self._added(func.__name__.strip("_"), args)
            self._additive = bias is not None
            self._before.append(self._now)
            self._now, self._bias = result, bias
        return result

    def _added(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns the sum of terms added to the scores; None if a call did more than add."""
        if name in ("add", "radd") and len(args) == 2:
            return self._bias + (args[1] if args[0] is self._now else args[0])
        if name == "sub" and len(args) == 2 and args[0] is self._now:
            return self._bias - args[1]
        hides = name == "where" and len(args) == 3 and args[1] is self._now
        if hides and not isinstance(args[2], Tensor) and args[2] == -torch.inf:
            bias = self._bias
            wide = bias.to(self._dtype) if isinstance(bias, Tensor) else bias
            return torch.where(args[0], wide, -torch.inf)
        return None

    def mask(
        self, result: Tensor, mask: Tensor | None, dtype: torch.dtype
    ) -> tuple[bool, Tensor | None]:
        """Returns whether an additive mask replaces the score_mod, and that mask in a dtype.

        In half precision the mask would be rounded, while scores are not.
        """
        if not self._additive or result is not self._now:
            return False, None
        if not isinstance(self._bias, Tensor):  # a number, which all weights share
            return True, mask
        if dtype != self._dtype:
            return False, None
        bias = self._bias.to(dtype).expand(*self._bias.shape[:-2], *self._shape[-2:])
        return True, bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def _looked_up(table: Tensor, index: Any) -> Any:
    """Returns elements of a table, or a `_Row` that takes further indices."""
    given = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, Tensor) and item.dim() == 4 for item in given):
        return table[index]
    if not all(isinstance(item, (Tensor, int)) for item in given):
        raise CaptureError(
            "a function of flex_attention slices a tensor at a position",
            todo="index every dimension, with positions and numbers only",
        )
    return table[given] if len(given) == table.dim() else _Row(table, given)


class _Row:
    """A tensor of which some leading dimensions are indexed by positions."""

    def __init__(self, table: Tensor, given: tuple[Any, ...]) -> None:
        self.table, self.given = table, given

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return _looked_up(self.table, (*self.given, *more))


EXCHANGES = (
    exchange(flex.flex_attention, _flex_attention, _attention),
    exchange(flex.create_block_mask, _create_block_mask, _block_mask),
)
