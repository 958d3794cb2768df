"""Packs tensors as int8 blocks for sending, as priced by `autopar/ir/int8_blocks.py`.

Blocks do not cross from one tensor, or one device's part of it, into the next, so that no value
depends on which tensors are sent together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.int8_blocks import BLOCK, BLOCK_BYTES, blocks
from autopar_kernels.registry import register

_LIBRARY = register()  # keeps the operators registered
_OPS = torch.ops.autopar_kernels


def pack(rows: Sequence[Tensor]) -> Tensor:
    """Packs tensors [parts, n] as int8 [parts, bytes]: per part all blocks, then their scales."""
    whole = [row if row.shape[1] % BLOCK == 0 else _filled(row) for row in rows]
    numbers = whole[0] if len(whole) == 1 else torch.cat(whole, 1)
    q, scales = _OPS.quantize_int8(numbers.contiguous(), BLOCK)
    scales = scales.float().view(len(numbers), -1)
    return torch.cat([q, scales.view(torch.int8)], 1)


def unpack(packed: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Inverts `pack`: returns a tensor [parts, n], of `dtype`, for each of the lengths n."""
    q, scales = _parts(packed)
    flat = _OPS.dequantize_reduce(q.view(1, -1), scales.view(1, -1), BLOCK, 1.0, dtype)
    return _cut(flat.view(len(packed), -1), lengths)


def _filled(row: Tensor) -> Tensor:
    return F.pad(row, (0, -row.shape[1] % BLOCK))


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q [parts, n] and scales [parts, n / BLOCK]."""
    numbers = packed.shape[1] // BLOCK_BYTES * BLOCK
    q, scales = packed.split([numbers, packed.shape[1] - numbers], 1)
    return q.contiguous(), scales.contiguous().view(torch.float32)


def _cut(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    whole = flat.split([blocks(length) * BLOCK for length in lengths], -1)
    return [part.narrow(-1, 0, length) for part, length in zip(whole, lengths, strict=True)]
