"""Attention with sinks that a model writes out becomes one operator that computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.operators.attention.sequence_forms import SINKS
from autopar.operators.interpret import run
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace

HEADS, LENGTH, WIDTH = 4, 6, 3


class Sinks(nn.Module):
    """Attention as transformers writes it for gpt-oss, or otherwise.

    Args:
        mask: "causal", "window", "padding", "" or "bias".
        way: "shifted" by the maximum, "plain", "scaled" sinks, or "kept" columns of the sinks.
    """

    def __init__(self, mask: str, way: str) -> None:
        super().__init__()
        self.mask, self.way = mask, way
        self.sinks = nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH, dtype=torch.float64))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        scores = query @ key.transpose(2, 3) * 0.5
        at = torch.arange(LENGTH)
        shown = at <= at[:, None]
        if self.mask == "window":
            shown = shown & (at[:, None] - at < 3)
        if self.mask == "padding":
            shown = (at < lengths[:, None])[:, None, None]
        if self.mask == "bias":
            scores = scores + self.bias
        elif self.mask:
            least = torch.finfo(scores.dtype).min
            scores = scores + torch.where(shown, torch.zeros((), dtype=scores.dtype), least)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
        columns = torch.cat([scores, sinks], dim=-1)
        if self.way == "shifted":
            columns = columns - columns.max(dim=-1, keepdim=True).values
        probs = torch.softmax(columns, dim=-1)
        weights = probs[..., 1:] if self.way == "kept" else probs[..., :-1]
        return (weights @ value).sum()


def traced(mask: str, way: str) -> tuple[bool, Tensor, Tensor]:
    """Returns whether the operator was found, and the graph's result and the model's."""
    torch.manual_seed(0)
    model = Sinks(mask, way)
    batch = {
        name: torch.randn(2, HEADS, LENGTH, WIDTH, dtype=torch.float64)
        for name in ("query", "key", "value")
    } | {"lengths": torch.tensor([6, 2])}
    graph = capture_graph(model, (), batch, Options(), Trace(None)).graph
    values = {node.target: batch[node.target] for node in graph.nodes if node.op == "input"}
    (result,) = run(graph, {**values, **dict(model.named_parameters())}).values()
    return any(node.op == SINKS for node in graph.nodes), result, model(**batch)


@pytest.mark.parametrize("mask", ["causal", "window", "padding", ""])
@pytest.mark.parametrize("way", ["shifted", "plain"])
def test_it_is_found(mask: str, way: str) -> None:
    found, result, expected = traced(mask, way)
    assert found
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mask", "way"), [("bias", "shifted"), ("causal", "kept")])
def test_other_attention_is_left_alone(mask: str, way: str) -> None:
    found, result, expected = traced(mask, way)
    assert not found
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
