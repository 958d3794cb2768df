"""Attention with sinks that a model writes out becomes one operator that computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Node
from autopar.operators.attention.sequence_forms import SINKS
from autopar.operators.interpret import run
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace

HEADS, LENGTH, WIDTH = 4, 6, 3
INF = float("inf")


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def within(lengths: Tensor) -> Tensor:
    return (torch.arange(LENGTH) < lengths[:, None])[:, None, None]


def added(scores: Tensor, hidden: Tensor, value: float) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=scores.dtype).masked_fill(hidden, value)
    return mask + scores


# How scores are masked; of the first ones "causal" is in the name if the operator has no mask.
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "causal, filled": lambda scores, n, bias: scores.masked_fill(~causal(), -INF),
    "causal, filled where zero": lambda scores, n, bias: scores.masked_fill(
        torch.ones(LENGTH, LENGTH).tril() == 0, -INF
    ),
    "causal, chosen": lambda scores, n, bias: torch.where(causal(), scores, -INF),
    "causal, added": lambda scores, n, bias: scores + torch.full((LENGTH, LENGTH), -INF).triu(1),
    "causal, added fill": lambda scores, n, bias: added(scores, ~causal(), -INF),
    "padding, filled": lambda scores, n, bias: scores.masked_fill(~within(n), -INF),
    "padding, chosen": lambda scores, n, bias: torch.where(~within(n), -INF, scores),
    "padding, added": lambda scores, n, bias: added(scores, within(n).logical_not(), -INF),
    "both": lambda scores, n, bias: added(scores, ~within(n), -INF).masked_fill(~causal(), -INF),
    "no key": lambda scores, n, bias: scores.masked_fill(~within(n - 2), -INF),
    "bias": lambda scores, n, bias: scores + bias,
    "bias and causal": lambda scores, n, bias: (scores + bias).masked_fill(~causal(), -INF),
    "a large number": lambda scores, n, bias: added(scores, ~within(n), -10.0),
    "other scores": lambda scores, n, bias: scores.masked_fill(~causal(), 0.0),
}
LEFT = tuple(OTHERS)[10:]


class Sinks(nn.Module):
    """Attention as transformers writes it for gpt-oss, or otherwise.

    Args:
        mask: "causal", "window" or "padding" by the lowest number, or one of `OTHERS`.
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
        if self.mask in OTHERS:
            scores = OTHERS[self.mask](scores, lengths, self.bias)
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


def traced(mask: str, way: str) -> list[Node]:
    """Returns the operators found in the graph, which computes what the model does."""
    torch.manual_seed(0)
    model = Sinks(mask, way)
    batch = {
        name: torch.randn(2, HEADS, LENGTH, WIDTH, dtype=torch.float64)
        for name in ("query", "key", "value")
    } | {"lengths": torch.tensor([6, 2])}
    graph = capture_graph(model, (), batch, Options(), Trace(None)).graph
    values = {node.target: batch[node.target] for node in graph.nodes if node.op == "input"}
    (result,) = run(graph, {**values, **dict(model.named_parameters())}).values()
    torch.testing.assert_close(result, model(**batch), rtol=1e-12, atol=1e-12)
    return [node for node in graph.nodes if node.op == SINKS]


@pytest.mark.parametrize("mask", ["causal", "window", "padding", ""])
@pytest.mark.parametrize("way", ["shifted", "plain"])
def test_it_is_found(mask: str, way: str) -> None:
    assert traced(mask, way)


@pytest.mark.parametrize("mask", [mask for mask in OTHERS if mask not in LEFT])
def test_masks_that_hide_keys_are_found(mask: str) -> None:
    (found,) = traced(mask, "plain")
    assert (len(found.args) == 3 and found.keyword("is_causal") is True) == ("causal" in mask)


@pytest.mark.parametrize(("mask", "way"), [*((mask, "plain") for mask in LEFT), ("causal", "kept")])
def test_other_attention_is_left_alone(mask: str, way: str) -> None:
    assert not traced(mask, way)
