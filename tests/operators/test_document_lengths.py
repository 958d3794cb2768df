"""Lengths of packed documents: what forms of attention are priced to read is what a mask shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import OptionError
from autopar.ir.graph import Node
from autopar.ir.tensor import part_of
from autopar.operators.attention.document_lengths import BLOCKS, DocumentLengths
from autopar.operators.attention.sequence_forms import ATTENTION, ROWS, busiest_share
from tests.training.test_context_parallel import packed

SIZE = 96
SAMPLES = ("8", "40 8 8", "7 11 96", "200", "1")


def masks(sample: str, rows: int, causal: bool) -> list[Tensor]:
    """The masks of eight batches of packed rows, [rows, queries, keys], from document numbers."""
    lengths, found, at = [int(word) for word in sample.split()], [], 0
    for _ in range(8):
        ids = torch.zeros(rows, SIZE, dtype=torch.int64)
        for row in range(rows):
            filled = number = 0
            while filled < SIZE:
                end = min(SIZE, filled + lengths[at % len(lengths)])
                ids[row, filled:end] = number
                filled, number, at = end, number + 1, at + 1
        mask = ids[:, :, None] == ids[:, None]
        found.append(mask.tril() if causal else mask)
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_ring_computes_in_the_turns_in_which_a_query_sees_a_key(
    sample: str, causal: bool
) -> None:
    for rows, devices in ((1, 2), (2, 4), (1, 5)):
        parts = [slice(start, start + size) for start, size in _parts(devices)]
        total = 0
        for mask in masks(sample, rows, causal):
            total += sum(
                any(
                    bool(mask[:, own, parts[(at - turn) % devices]].any())
                    for at, own in enumerate(parts)
                )
                for turn in range(devices)
            )
        found = DocumentLengths.parse(sample).turns(SIZE, rows, devices, causal)
        assert found == total / 8, (sample, rows, devices)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sample", SAMPLES)
def test_balanced_attention_reads_the_keys_between_the_first_and_the_last_that_are_seen(
    sample: str, causal: bool
) -> None:
    """No division gives less than the mean, and Graham's at most a third more than the best."""
    for rows, devices in ((1, 2), (2, 4)):
        mean = most = 0.0
        for mask in masks(sample, rows, causal):
            works = []
            for start, size in _parts(BLOCKS * devices):
                seen = mask[:, start : start + size].any(0).any(0).nonzero()
                works.append(size * int(seen.max() - seen.min() + 1))
            mean += sum(works) / SIZE**2 / 8
            most += max(sum(works), max(works) * devices) / SIZE**2 / 8
        found = DocumentLengths.parse(sample).balanced(SIZE, rows, devices, causal)
        assert mean <= found * (1 + 1e-12)
        assert found <= 4 / 3 * most


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sample", SAMPLES)
def test_contiguous_parts_read_what_is_seen_or_its_span(sample: str, causal: bool) -> None:
    for rows, devices in ((1, 2), (2, 4)):
        least = most = 0.0
        for mask in masks(sample, rows, causal):
            parts = [mask[:, start : start + size].any(0) for start, size in _parts(devices)]
            least += max(float(part.double().mean()) for part in parts) / 8
            spans = (part.any(0).nonzero() for part in parts)
            most += max(int(span.max() - span.min() + 1) / SIZE for span in spans) / 8
        found = DocumentLengths.parse(sample).contiguous(SIZE, rows, devices, causal)
        assert least * (1 - 1e-12) <= found <= most * (1 + 1e-12), (sample, rows, devices)


@pytest.mark.parametrize("window", [1, 30, 90, 300])
@pytest.mark.parametrize("devices", [1, 2, 5])
def test_the_busiest_device_of_a_window(window: int, devices: int) -> None:
    """The share of visible pairs, and at most one block of queries more for each query."""
    size = 300
    at = torch.arange(size)
    mask = (at[:, None] >= at) & (at[:, None] - at < window)
    node = Node("y", ATTENTION, (), (("seen", float(mask.double().mean())),), ())
    parts = [part_of(size, devices, number) for number in range(devices)]
    busiest = max(float(mask[start : start + count].double().mean()) for start, count in parts)
    found = busiest_share(node, size, devices)
    assert 0.99 * busiest <= found <= busiest + (ROWS + 2) / size


def _parts(count: int) -> list[tuple[int, int]]:
    return [part_of(SIZE, count, at) for at in range(count)]


@pytest.mark.parametrize("text", ["0", "512 -1", "long", "1.5", "1e9", "9" * 20])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="lengths of documents"):
        DocumentLengths.parse(text)


@pytest.mark.slow
def test_plans_are_priced_by_the_documents() -> None:
    """Short documents leave a ring one turn of two or so, and a balanced device fewer keys."""
    model, batch = packed("sdpa")
    for form in ("ring", "balanced"):
        plans = [
            autopar.plan(
                model,
                "cpu[1TFLOP/s 64GiB 1TB/s]: cp=2 @10GB/s 1us",
                example_inputs=batch,
                pins=autopar.pins.form("*.self_attn", form),
                documents=documents,
            )
            for documents in ("16", "1")
        ]
        long, short = (plan.predicted.step_seconds for plan in plans)
        assert short < long, form
        assert plans[1].stage.asked.documents == "1"
