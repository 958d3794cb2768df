"""x[mask] with a mask that depends on the batch: sums, means and losses of the selected rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.ranks import run_ranks

Body = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @10GB/s 1us, y=2 @10GB/s 1us"


class Masks(nn.Module):
    """Computes something of what a mask selects."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(8, 8).double(), body

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.body(self.layer(x), x, mask, labels)


def writes(h: Tensor, x: Tensor, m: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z[m] = h[m].tanh()
    z[m] *= 2
    return z.square().mean()


def unsafe(h: Tensor, x: Tensor, m: Tensor, y: Tensor) -> Tensor:
    positive = h > 0.1
    return (h[positive].log() / h[positive]).mean()


def in_a_mode(h: Tensor, x: Tensor, m: Tensor, y: Tensor) -> Tensor:
    with torch.device("cpu"):  # a mode of torch's functions, as that of set_default_device
        first, second = h[m].chunk(2, dim=-1)
        return (first * second.sigmoid()).mean()


def aligned(h: Tensor, x: Tensor, m: Tensor, y: Tensor) -> Tensor:
    """As the losses of transformers' speech models select labels."""
    spoken = m & (torch.arange(6) % 2 == 0)  # at most three, for six frames
    frames = torch.full((8,), 6)
    scores = h.log_softmax(-1).transpose(0, 1)
    labels = (y % 7 + 1).masked_select(spoken)
    return F.ctc_loss(scores, labels, frames, spoken.sum(-1), zero_infinity=True)


BODIES: dict[str, Body] = {
    "sum": lambda h, x, m, y: h[m].sin().sum(),
    "mean of rows": lambda h, x, m, y: h[m].mean(0).square().sum(),
    "along rows": lambda h, x, m, y: torch.log(h[m].softmax(-1)).sum(-1).mean(),
    "two": lambda h, x, m, y: ((h[m] - 2 * x[m]) ** 2).mean(),
    "a column": lambda h, x, m, y: h[..., 0][m].exp().mean(),
    "unsafe elsewhere": unsafe,
    "largest": lambda h, x, m, y: h[m].amax(0).sum() + h[m].logsumexp(0).sum(),
    "rows through a linear": lambda h, x, m, y: F.gelu(F.linear(h[m], x[0, :5])).mean(),
    "square error": lambda h, x, m, y: F.mse_loss(h[m], x[m]),
    "entropy": lambda h, x, m, y: F.cross_entropy(h[m], y[m], label_smoothing=0.1),
    "views of a mask": lambda h, x, m, y: F.cross_entropy(
        h.view(-1, 8)[m.view(-1)], y.view(-1)[m.flatten()]
    ),
    "weighted": lambda h, x, m, y: F.cross_entropy(h[m], y[m], weight=x[0, 0].abs()),
    "each": lambda h, x, m, y: F.cross_entropy(h[m], y[m], reduction="none").square().mean(),
    "logits": lambda h, x, m, y: F.binary_cross_entropy_with_logits(h[m], (x[m] > 0).double()),
    "writes": writes,
    "in a mode": in_a_mode,
    "alignment": aligned,
}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 6, 8, generator=generator, dtype=torch.float64),
        "mask": torch.rand(8, 6, generator=generator) > 0.4,
        "labels": torch.randint(0, 8, (8, 6), generator=generator),
    }


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train() -> dict[str, tuple[list[float], Tensor]]:
    runs = {}
    for name, body in BODIES.items():
        program = autopar.compile(Masks(body), MESH, optimizer=sgd, example_inputs=batch(0))
        losses = [program.step(**batch(seed)).item() for seed in range(3)]
        runs[name] = losses, program.state_dict()["layer.weight"]
    return runs


def test_methods_of_rows_pass_through_modes_of_the_model() -> None:
    model = Masks(in_a_mode)
    captured = capture_graph(model, (), batch(0), Options(), Trace(None))
    assert any(node.op == "aten.sigmoid" for node in captured.graph.nodes)


@pytest.mark.slow
def test_ranks_train_with_as_many_rows_as_a_batch_selects() -> None:
    ranks = run_ranks(train)
    for name, body in BODIES.items():
        model = Masks(body)
        updates, losses = sgd(list(model.parameters())), []
        for seed in range(3):
            updates.zero_grad()
            loss = model(**batch(seed))
            loss.backward()
            updates.step()
            losses.append(loss.item())
        for runs in ranks:
            assert runs[name][0] == pytest.approx(losses, rel=1e-9), name
            torch.testing.assert_close(runs[name][1], model.layer.weight.data, rtol=0, atol=1e-9)


REFUSED: dict[str, Body] = {
    "shape": lambda h, x, m, y: h[m].sum() / h[m].shape[0],
    "several masks": lambda h, x, m, y: (h[m] * x[~m]).sum(),
    "a mask written in between": lambda h, x, m, y: (h[m] * x[m.logical_not_()]).sum(),
    "dropout": lambda h, x, m, y: F.dropout(h[m]).sum(),
    "cumsum": lambda h, x, m, y: h[m].cumsum(0).sum(),
    "another number of dimensions": lambda h, x, m, y: (h[m] * y[m]).sum(),
    "a tensor of as many rows": lambda h, x, m, y: (h[m] * x.flatten(0, 1)).sum(),
    "a product of rows": lambda h, x, m, y: F.linear(h[m], x[m]).sum(),
    "std": lambda h, x, m, y: h[m].std(),
    "rows": lambda h, x, m, y: h[m][0].sum(),
    "cat": lambda h, x, m, y: torch.cat([h[m], x[m]]).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_how_many_there_are_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"x\[mask\]") as raised:
        autopar.compile(Masks(REFUSED[name]), "cpu: x=1", example_inputs=batch(0))
    assert "test_selected.py" in raised.value.where
