"""Blocks of a mask cover every visible pair once, and little else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.operators.attention.blocks import Block
from autopar.operators.attention.mask_blocks import visible

SIZE = 300


def documents(*lengths: int) -> Tensor:
    """A causal mask of documents of these lengths in turn."""
    ids = torch.arange(SIZE).repeat_interleave(torch.tensor(lengths * SIZE)[:SIZE])[:SIZE]
    return (ids[:, None] == ids).tril()


def window(size: int) -> Tensor:
    at = torch.arange(SIZE)
    return (at[:, None] >= at) & (at[:, None] - at < size)


MASKS = {
    "one document": documents(SIZE),
    "long documents": documents(100, 40, 77),
    "short documents": documents(3, 11, 1),
    "mixed documents": documents(5, 60, 2, 90),
    "later queries": documents(200, 100)[120:],
    "window": window(20),
    "whole documents": documents(70, 50) | documents(70, 50).mT,
    "holes": torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) < 0.1,
    "nothing": torch.zeros(SIZE, SIZE, dtype=torch.bool),
    "two rows": torch.stack([documents(100, 40), documents(30, 90)])[:, None],
    "padding": torch.arange(SIZE) < torch.tensor([200, 280])[:, None, None, None],
    "one padding": (torch.arange(SIZE) < 200)[None],
    "one value for all keys": (torch.arange(SIZE) % 3 > 0)[:, None],
    "of no dimension but keys": torch.arange(SIZE) > 9,
}


def shown(block: Block, mask: Tensor, whole: Tensor) -> Tensor:
    """Counts how often a block computes each pair of a mask."""
    (row, count), (column, width) = block.rows, block.columns
    total = torch.zeros(whole.shape, dtype=torch.int64)
    cut = block.cut(mask)
    if cut is None:
        cut = torch.ones(count, width, dtype=torch.bool)
        cut = cut.tril() if block.kind == "causal" else cut
    total[..., row : row + count, column : column + width] += cut
    return total


@pytest.mark.parametrize("name", MASKS)
def test_every_visible_pair_is_computed_once(name: str) -> None:
    mask = MASKS[name]
    rows = mask.shape[-2] if mask.dim() > 1 and mask.shape[-2] > 1 else SIZE
    whole = mask.expand(*mask.shape[:-2], rows, SIZE)
    blocks = visible(mask, rows, SIZE)
    counts = sum((shown(block, mask, whole) for block in blocks), torch.zeros(whole.shape).long())
    assert torch.equal(counts, whole.long())


@pytest.mark.parametrize("name", ["one document", "long documents"])
def test_long_documents_need_no_mask(name: str) -> None:
    assert {block.kind for block in visible(MASKS[name], SIZE, SIZE)} == {"causal"}


def test_a_document_that_began_on_another_device_is_whole_and_causal() -> None:
    blocks = visible(MASKS["later queries"], SIZE - 120, SIZE)
    assert blocks == [
        Block((0, 80), (0, 120), "full"),
        Block((0, 80), (120, 80), "causal"),
        Block((80, 100), (200, 100), "causal"),
    ]


@pytest.mark.parametrize("name", ["short documents", "mixed documents", "window"])
def test_blocks_compute_little_else(name: str) -> None:
    """At most 128 keys more for each query."""
    blocks = visible(MASKS[name], SIZE, SIZE)
    pairs = sum(block.work for block in blocks)
    assert pairs <= int(MASKS[name].sum()) + 128 * SIZE
    assert len(blocks) <= 2 * SIZE / 32
