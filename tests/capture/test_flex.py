"""FlexAttention in a graph computes what torch's own does, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from autopar.capture.capture import capture
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.operators.interpret import run
from autopar.passes.normalise import prepare

ROWS, WIDTH = 12, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 3 + [2] * 7])


class Model(nn.Module):
    """Flexible attention of four heads, with a bias for each head."""

    def __init__(self, masked: Any, scored: Any, keys: int = 4) -> None:
        super().__init__()
        self.masked, self.scored, self.grouped = masked, scored, keys != 4
        self.bias = nn.Parameter(torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        blocks = score = None
        if self.masked is not None:
            masked = self.masked(documents)
            blocks = create_block_mask(masked, 2, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=4)
        if self.scored is not None:
            score = self.scored(self.bias)
        found: Tensor = flex_attention(
            query, key, value, score_mod=score, block_mask=blocks, enable_gqa=self.grouped
        )
        return found


def packed(documents: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (documents[b][i] == documents[b, j]) & (i >= j)


def window(documents: Tensor) -> Callable[..., Tensor]:
    """Sees nothing from the first position."""
    return lambda b, h, i, j: (i > j) & (i - j < 4)


def linear_bias(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + bias[h] * (j - i)


def masked_bias(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: torch.where(i >= j, score - bias[h] * (i - j), -torch.inf)


def twice(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score + bias[h] * score.abs()


def capped(bias: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: torch.where(i >= j, 2 * torch.tanh(score / 2), -torch.inf)


CASES = {
    "documents": (packed, None, 4),
    "window, grouped heads": (window, None, 2),
    "bias by distance": (packed, linear_bias, 4),
    "masked bias, grouped heads": (None, masked_bias, 2),
    "scores read twice": (window, twice, 4),
    "cap, grouped heads": (None, capped, 2),
    "cap and a window": (window, capped, 4),
}


def operands(keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, ROWS, WIDTH, dtype=torch.float64, generator=generator)
        for heads in (4, keys, keys)
    ]


def captured(model: nn.Module, *batch: Tensor) -> Graph:
    return prepare(capture(model, batch, loss_fn=lambda out: out.square().sum()).graph)


def values(model: nn.Module, tensors: list[Tensor]) -> dict[str, Tensor]:
    named = dict(zip(("query", "key", "value"), tensors, strict=True))
    return {**named, "documents": DOCUMENTS, **dict(model.named_parameters())}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(name: str) -> None:
    masked, scored, keys = CASES[name]
    model, tensors = Model(masked, scored, keys), operands(keys)
    graph = captured(model, *tensors, DOCUMENTS)
    found = run(graph, values(model, tensors))
    with torch.no_grad():
        known = model.requires_grad_(False)(*tensors, DOCUMENTS)
    torch.testing.assert_close(found["output"], known, rtol=1e-9, atol=1e-9)
    fused = any(node.op == "aten.scaled_dot_product_attention" for node in graph.nodes)
    assert fused == (scored in (None, linear_bias, masked_bias))


@pytest.mark.parametrize("name", ["window, grouped heads", "bias by distance", "cap and a window"])
def test_gradients_are_those_of_differences(name: str) -> None:
    masked, scored, keys = CASES[name]
    model = Model(masked, scored, keys)
    graph = captured(model, *operands(keys), DOCUMENTS)
    leaves = [x.requires_grad_() for x in operands(keys)] + [model.bias]

    def loss(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        given = {"query": query, "key": key, "value": value, "bias": bias}
        return run(graph, {**given, "documents": DOCUMENTS})["loss"]

    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


def test_masks_of_positions_alone_are_recognised() -> None:
    def causal(documents: Tensor) -> Callable[..., Tensor]:
        return lambda b, h, i, j: i >= j

    graph = captured(Model(causal, None), *operands(4), DOCUMENTS)
    (node,) = (n for n in graph.nodes if n.op == "aten.scaled_dot_product_attention")
    assert node.args[3:6] == (None, 0.0, True)


class Given(nn.Module):
    """Attention under a mask that was made before."""

    def __init__(self, blocks: BlockMask) -> None:
        super().__init__()
        self.blocks, self.weight = blocks, nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        query = x * self.weight
        return flex_attention(query, query, query, block_mask=self.blocks).square().sum()


def test_blocks_that_say_more_than_the_function_are_refused() -> None:
    counts = torch.tensor([[[1, 1, 1]]], dtype=torch.int32)
    order = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    diagonal = BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=4, seq_lengths=(12, 12))
    x = operands(4)[0]
    with pytest.raises(CaptureError, match="do not follow from its mask_mod"):
        capture(Given(diagonal), (x,))
    causal = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 12, 12, device="cpu", BLOCK_SIZE=4
    )
    graph = prepare(capture(Given(causal), (x,)).graph)
    assert any(node.args[3:6] == (None, 0.0, True) for node in graph.nodes)
