"""Means and mean losses as sums over counts: the same in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph_text import parse_graph
from autopar.passes.loss.means import lower_means
from autopar.passes.verify import verify
from tests.support.graphs import assert_equal_runs, captured_double, checked, ops


@pytest.mark.parametrize(
    "mean",
    ["aten.mean(%x) : f64[]", "aten.mean.dim(%x, (0, -1)) : f64[3]",
     "aten.mean.dim(%x, None, True) : f64[1, 1, 1]",
     "aten.mean.dim(%x, (1,), dtype=f32) : f32[2, 4]"],
)  # fmt: skip
def test_means_are_sums_over_counts(mean: str) -> None:
    text = f"graph 'g'\n%x = param('x') : f64[2, 3, 4] grad\n%m = {mean} grad\noutput 'm' = %m"
    if "dtype=f32" in mean:  # rounding of float32 is not what is tested
        after = verify(lower_means(parse_graph(text)))
    else:
        after = checked(lower_means, text)
    assert [op.split(".")[1] for op in ops(after)] == ["sum", "div"]


def test_float16_means_stay() -> None:
    text = "graph 'g'\n%x = input('x') : f16[4]\n%m = aten.mean(%x) : f16[]\noutput 'm' = %m"
    assert ops(lower_means(parse_graph(text))) == ["aten.mean"]


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda x, y, label: F.cross_entropy(x, label),
    "all kept": lambda x, y, label: F.cross_entropy(x, label.clamp(min=0)),
    "another label ignored": lambda x, y, label: F.cross_entropy(
        x, label.clamp(min=0), ignore_index=1
    ),
    "smoothed": lambda x, y, label: F.cross_entropy(x, label, label_smoothing=0.1),
    "with places": lambda x, y, label: F.cross_entropy(x.view(2, 5, 3), label[:6].view(2, 3)),
    "probabilities": lambda x, y, label: F.cross_entropy(x, y.softmax(-1)),
    "one sample": lambda x, y, label: F.cross_entropy(x[0], label[0]),
    "weighted": lambda x, y, label: F.cross_entropy(x, label, y[0].exp()),
    "weighted and smoothed": lambda x, y, label: F.cross_entropy(
        x, label, y[0].exp(), label_smoothing=0.1
    ),
    "weighted, with places": lambda x, y, label: F.nll_loss(
        x.view(2, 5, 3, 1), label.clamp(min=0).view(2, 3, 1), y[0].exp(), ignore_index=2
    ),
    "nll": lambda x, y, label: F.nll_loss(x.log_softmax(-1), label),
    "nll with places": lambda x, y, label: F.nll_loss(x.view(2, 5, 3, 1), label[:6].view(2, 3, 1)),
    "mse": lambda x, y, label: F.mse_loss(x, y),
    "l1": lambda x, y, label: F.l1_loss(x, y),
    "smooth l1": lambda x, y, label: F.smooth_l1_loss(x, y, beta=0.3),
    "huber": lambda x, y, label: F.huber_loss(x, y, delta=0.3),
    "binary": lambda x, y, label: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary with logits": lambda x, y, label: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=y[0].exp()
    ),
    "kl": lambda x, y, label: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True),
}  # fmt: skip


class Loss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.x, self.name = nn.Parameter(torch.randn(6, 5)), name

    def forward(self, y: Tensor, label: Tensor) -> Tensor:
        return LOSSES[self.name](self.x, y, label)


@pytest.mark.filterwarnings("ignore:reduction")  # of kl_div, whose mean is not per sample
@pytest.mark.parametrize("name", LOSSES)
def test_mean_losses_are_sums_over_counts(name: str) -> None:
    torch.manual_seed(0)
    label = torch.tensor([0, -100, 2, 1, -100, 1])
    graph, values = captured_double(Loss(name), {"y": torch.randn(6, 5), "label": label})
    after = verify(lower_means(graph))
    assert after[after.outputs[0][1]].op == "aten.div.Tensor"
    assert_equal_runs(graph, after, values)


@pytest.mark.parametrize(
    "loss",
    ["aten.cross_entropy_loss(%x, %p, %w)", "aten.cross_entropy_loss(%x, %y, None, 2)",
     "aten.cross_entropy_loss(%x, %y, reduction=2)"],
)  # fmt: skip
def test_summed_losses_and_weighted_ones_of_probabilities_stay(loss: str) -> None:
    text = f"""
graph 'g'
%x = param('x') : f64[4, 3] grad
%y = input('y') : i64[4]
%p = input('p') : f64[4, 3]
%w = input('w') : f64[3]
%l = {loss} : f64[] grad
output 'l' = %l
"""
    assert ops(checked(lower_means, text)) == ["aten.cross_entropy_loss"]
