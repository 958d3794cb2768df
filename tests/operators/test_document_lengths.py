"""Lengths of packed documents, and the share of keys that the busiest device of a window reads."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import OptionError
from autopar.ir.graph import Node
from autopar.ir.tensor import part_of
from autopar.operators.attention.document_lengths import DocumentLengths
from autopar.operators.attention.sequence_forms import ATTENTION, ROWS, busiest_share
from tests.training.test_context_parallel import packed


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
