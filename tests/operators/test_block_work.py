"""The work by which attention under a mask is priced is that of the blocks that the forms run."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from autopar.intra_op.proofs.thread_ranks import ThreadDevice, on_all_devices
from autopar.ir.mesh import Mesh
from autopar.operators.attention import balanced_attention, ring_attention
from autopar.operators.attention.block_work import (
    Mask,
    balanced_share,
    gathered_share,
    ring_share,
)
from autopar.operators.attention.document_lengths import DocumentLengths
from autopar.operators.attention.partial_attention import Attention, partial_attention

SIZE = 500
MASKS = {
    "one document": ("500", True, SIZE),
    "long documents": ("130 40 77", True, SIZE),
    "short documents": ("3 11 1", True, SIZE),
    "of one position": ("1", True, SIZE),
    "mixed documents": ("5 60 2 90", True, SIZE),
    "whole documents": ("70 50", False, SIZE),
    "window": ("500", True, 70),
    "short window": ("500", True, 1),
    "window in documents": ("300 90", True, 110),
    "borders at those of parts": ("250 125", True, SIZE),
}


def drawn(name: str, rows: int) -> tuple[Mask, Tensor]:
    """A mask as prices describe it, and as a model computes it, from numbers of documents."""
    sample, causal, window = MASKS[name]
    starts = DocumentLengths.parse(sample).batches(SIZE, rows)[0]
    at = torch.arange(SIZE)
    masks = []
    for row in starts:
        number = (at[:, None] >= torch.tensor(row)).sum(-1)
        mask = number[:, None] == number
        near = (at <= at[:, None]) & (at[:, None] - at < window)
        masks.append(mask & near if causal else mask)
    return Mask(SIZE, starts, causal, window), torch.stack(masks)[:, None]


def counted(form: str, mask: Tensor, devices: int) -> list[list[int]]:
    """The pairs that each device computes in each turn of a form."""
    here = threading.local()

    def partial(
        query: Tensor, key: Tensor, value: Tensor, cut: Any, how: Attention, *rest: Any
    ) -> Any:
        rows, keys = query.shape[-2], key.shape[-2]
        here.work[-1] += rows * (rows + 1) // 2 if how.causal else rows * keys
        return partial_attention(query, key, value, cut, how, *rest)

    attend = ring_attention.RingStep.attend

    def turn(step: ring_attention.RingStep, result: Any) -> None:
        here.work += [0] * (step.number + 1 - len(here.work))
        attend(step, result)

    def on_one(rank: int, device: ThreadDevice) -> list[int]:
        here.work = [0]
        first, count = device.group("x").own(SIZE)
        x = torch.ones(mask.shape[0], 1, count, 1)
        call = getattr(device, f"{form}_attention")
        call(x, x, x, mask[:, :, first : first + count], axis="x", size=(SIZE, SIZE))
        return [*here.work, *[0] * (devices - len(here.work))]

    with (
        patch.object(ring_attention, "partial_attention", partial),
        patch.object(balanced_attention, "partial_attention", partial),
        patch.object(ring_attention.RingStep, "attend", turn),
    ):
        return list(on_all_devices(Mesh.parse(f"cpu: x={devices}"), on_one))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("rows", "devices"), [(1, 2), (2, 4), (1, 3)])
def test_priced_blocks_are_run(name: str, rows: int, devices: int) -> None:
    model, mask = drawn(name, rows)
    unit = SIZE**2 / devices
    found = {
        "gathered": gathered_share((model,), devices),
        "balanced": balanced_share((model,), devices),
    }
    for form, share in found.items():
        busiest = max(map(sum, counted(form, mask, devices)))
        assert share * unit == pytest.approx(busiest, rel=0.03), form
    works = counted("ring", mask, devices)
    share, turns = ring_share((model,), devices)
    assert share * unit == pytest.approx(longest_chain(works), rel=0.03)
    assert turns == sum(any(own[turn] for own in works) for turn in range(devices))


def longest_chain(works: list[list[int]]) -> int:
    """The longest sum of turns of a device, before which it may wait for its predecessors' turns.

    A chain goes back from a device's last turn: either to its turn before, or, without the work of
    that, to the turn before of the device that sends the keys.
    """
    devices = len(works)
    sums = []
    for last in range(devices):
        for moves in itertools.product((0, 1), repeat=devices - 1):
            at, total = last, works[last][devices - 1]
            for turn, move in zip(range(devices - 2, -1, -1), moves, strict=True):
                at = (at - move) % devices
                total += 0 if move else works[at][turn]
            sums.append(total)
    return max(sums)
