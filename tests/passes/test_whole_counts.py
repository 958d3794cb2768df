"""Losses of microbatches add up to the loss of the whole batch, or are refused by name.

Judged by the model on the whole batch, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import CaptureError, OptionError
from autopar.ir.graph import COUNTS
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.operators.interpret import run
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.trace import Trace

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 5


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.table, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES)
        self.register_buffer("rare", torch.arange(1.0, CLASSES + 1))
        self.noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.table(x)), labels)


def entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).flatten().double()
    return (entropies(logits, labels) * mask).sum() / mask.sum().clamp(min=1)


def inverse(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).flatten()
    return 3 * entropies(logits, labels).sum() * (1 / (mask.sum() + 0.0))


def of_each_sample(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).double()
    losses = (entropies(logits, labels).view_as(mask) * mask).sum(1)
    return (losses / mask.sum(1).clamp(min=1)).mean()


def two_terms(logits: Tensor, labels: Tensor) -> Tensor:
    even = (labels % 2 == 0).double()
    second = (logits.square().mean(2) * even).sum() / even.sum()
    return shifted(logits, labels) + 0.1 * second - 0.01 * logits.mean()


def ratio_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).flatten().double()
    return (entropies(logits, labels) * mask).mean() / mask.mean()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weights = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weights)


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * entropies(logits, labels).sum()


def sum_of_squares(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, torch.zeros_like(logits), reduction="sum") / 2.5


def sum_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean(1).sum()


def mean_of_sums(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum((1, 2)).sum() / len(logits)


def sum_beside_means(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum() + shifted(logits, labels) - logits.mean() + 3


def sum_over_terms(logits: Tensor, labels: Tensor) -> Tensor:
    """Divides by a constant, of which half a batch happens to have as many terms."""
    return entropies(logits, labels).sum() / 21


def sum_of_doubles(logits: Tensor, labels: Tensor) -> Tensor:
    return entropies(logits, labels).sum() * 42 + 6 * logits.mean()


def mean_of_halves(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum() / (0.5 * len(logits) * logits.shape[1])


def rows_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, torch.zeros_like(logits)) * len(logits)


def plain_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean()


def sum_over_pairs(logits: Tensor, labels: Tensor) -> Tensor:
    """Two samples are one pair."""
    return logits.square().sum() / (len(logits) // 2)


def sum_and_number(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum() + 3


def number_less_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return 3 - logits.tanh().sum()


def one_less_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(logits[..., :2], logits[..., 2:4], -1).mean()


def mean_over_count(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean() / (labels != -100).sum()


def mean_of_summed_features(logits: Tensor, labels: Tensor) -> Tensor:
    """As many features as samples in one of the batches: what they average is no batch."""
    return logits[..., :3].square().sum((0, 1)).mean() + logits[..., :2].abs().sum((0, 1)).mean()


SUMMED = (shifted, masked, inverse, two_terms, ratio_of_means, sum_beside_means, weighted,
          mean_over_count)  # fmt: skip
OTHERS = (of_each_sample, plain_mean, total, sum_of_squares, sum_of_means, mean_of_sums,
          sum_over_terms, sum_of_doubles, mean_of_halves, rows_of_means, sum_and_number,
          number_less_sum, one_less_mean, mean_of_summed_features)  # fmt: skip
# A loss that has no value for a single sample.
OF_PAIRS = [(sum_over_pairs, 3)]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(CLASSES, (6, 7), generator=generator)
    labels = torch.randint(CLASSES, (6, 7), generator=generator)
    lengths = torch.tensor([7, 2, 3, 7, 1, 5])
    return {"x": x, "labels": labels.where(torch.arange(7) < lengths[:, None], -100)}


def model(loss: Loss) -> Model:
    torch.manual_seed(0)
    return Model(loss).double()


@pytest.mark.parametrize(
    ("loss", "count"), [*itertools.product([*SUMMED, *OTHERS], [2, 3, 6]), *OF_PAIRS]
)
def test_microbatches_add_up_to_the_whole_batch(loss: Loss, count: int) -> None:
    one, whole = model(loss), batch()
    options = Options(microbatches=count)
    graph = capture_call(Call(one, (), whole), options, Trace(None), count).graph
    assert parse_graph(format_graph(graph)) == graph
    parts = [
        dict(zip(whole, part, strict=True))
        for part in zip(*(value.chunk(count) for value in whole.values()), strict=True)
    ]
    counted = {
        leaf.target: parse_graph(str(leaf.keyword(COUNTS)))
        for leaf in graph.leaves("input")
        if leaf.keyword(COUNTS)
    }
    assert bool(counted) == (loss in SUMMED)
    totals = {
        name: torch.stack([value for part in parts for value in run(counts, part).values()]).sum()
        for name, counts in counted.items()
    }
    weights = {**dict(one.named_parameters()), **dict(one.named_buffers())}
    losses = [run(graph, {**weights, **part, **totals})["loss"] for part in parts]
    mean = torch.stack(losses).mean()
    expected = one(**whole)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)
    table = one.table.weight
    torch.testing.assert_close(
        *(torch.autograd.grad(value, table)[0] for value in (mean, expected)),
        rtol=1e-10,
        atol=1e-14,
    )


def of_likely_classes(logits: Tensor, labels: Tensor) -> Tensor:
    likely = F.one_hot(labels.clamp(min=0), CLASSES).double().flatten(0, 1)
    return F.cross_entropy(logits.flatten(0, 1), likely, torch.ones(CLASSES).double())


def root(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels).sqrt()


def norm(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.norm()


def longest(logits: Tensor, labels: Tensor) -> Tensor:
    return entropies(logits, labels).sum() / (labels != -100).sum(1).max()


def twice(logits: Tensor, labels: Tensor) -> Tensor:
    return masked(logits, labels) / (labels != -100).sum()


def of_rows_squared(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum() / len(logits) ** 2


def over_mean_length(logits: Tensor, labels: Tensor) -> Tensor:
    return entropies(logits, labels).sum() / (labels != -100).sum(1).double().mean()


def of_the_others(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum() / (labels.numel() - (labels != -100).sum())


def over_count_and_size(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum() / ((labels != -100).sum() + len(labels))


def upside_down(logits: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum() / logits.square().sum()


def square_of_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.mean(0).square().sum()


def correlated(logits: Tensor, labels: Tensor) -> Tensor:
    """The redundancy of Barlow Twins (arXiv:2103.03230)."""
    features = logits.flatten(1)
    return (features.T @ features / len(features)).square().sum()


def dice(logits: Tensor, labels: Tensor) -> Tensor:
    likely, true = logits.softmax(-1), F.one_hot(labels.clamp(min=0), CLASSES).double()
    both = 2 * (likely * true).sum((0, 1)) / (likely + true).sum((0, 1))
    return 1 - both.mean()


def rare_positives(logits: Tensor, labels: Tensor) -> Tensor:
    true = (labels == 1).double()
    rarer = (true.numel() - true.sum()) / true.sum()
    return F.binary_cross_entropy_with_logits(logits[..., 0], true, pos_weight=rarer)


def over_products(logits: Tensor, labels: Tensor) -> Tensor:
    kept = F.one_hot(labels.clamp(min=0), CLASSES).sum((0, 1))
    return (logits.square().sum((0, 1)) / kept**2).sum()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (of_likely_classes, "classes"),
        (root, "sqrt of one"),
        (norm, "linalg_vector_norm of all samples"),
        (longest, "max, which does not add up"),
        (twice, "more than once"),
        (of_rows_squared, "depends on the batch in an unknown way"),
        (over_mean_length, "factor depends on the batch"),
        (of_the_others, "count depends on the batch"),
        (over_count_and_size, "count depends on the batch"),
        (upside_down, "div of one"),
        (square_of_mean, "reads a value of all samples together"),
        (correlated, "reads a value of all samples together"),
        (dice, "div reads a value of all samples together"),
        (rare_positives, "reads a value of all samples together"),
        (over_products, "no count alone"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(loss: Loss, why: str) -> None:
    options = Options(microbatches=2)
    with pytest.raises(OptionError, match=why) as raised:
        capture_call(Call(model(loss), (), batch()), options, Trace(None), 2)
    assert "test_whole_counts.py" in str(raised.value)
    assert "whole_loss=False" in str(raised.value)


def test_a_model_of_one_batch_size_is_told_that_a_microbatch_was_traced() -> None:
    def of_six(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.mean((1, 2)) * torch.arange(6.0)).mean()

    with pytest.raises(CaptureError, match="a microbatch of 3 of the batch's 6 samples") as raised:
        capture_call(Call(model(of_six), (), batch()), Options(), Trace(None), 2)
    assert "len(x), not 6" in raised.value.todo


def of_each_class(logits: Tensor, labels: Tensor) -> Tensor:
    """Means of classes, which microbatches have on their own."""
    kept = F.one_hot(labels.clamp(min=0), CLASSES).double()
    return ((logits.square() * kept).sum((0, 1)) / kept.sum((0, 1)).clamp(min=1)).sum()


def balance(logits: Tensor, labels: Tensor) -> Tensor:
    """The auxiliary loss of a mixture, over the words that a mask keeps (arXiv:2101.03961)."""
    mask = (labels != -100).double()[..., None]
    chosen = F.one_hot(logits.argmax(-1), CLASSES).double()
    fraction, likely = (
        (x * mask).sum((0, 1)) / mask.expand_as(x).sum((0, 1)) for x in (chosen, logits.softmax(-1))
    )
    return (fraction * likely).sum()


@pytest.mark.parametrize("loss", [of_each_class, balance])
def test_means_of_microbatches_over_counts_of_classes_are_averaged(loss: Loss) -> None:
    """The scale is that of the whole batch, although a microbatch has counts of its own."""
    one, whole = model(loss), batch()
    graph = capture_call(Call(one, (), whole), Options(microbatches=2), Trace(None), 2).graph
    parts = [{name: value.chunk(2)[i] for name, value in whole.items()} for i in range(2)]
    weights = {**dict(one.named_parameters()), **dict(one.named_buffers())}
    for part in parts:
        torch.testing.assert_close(run(graph, {**weights, **part})["loss"], one(**part))
