"""Captures many functions of torch: graphs compute the same, and every operator is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture.capture import capture
from autopar.errors import CaptureError
from autopar.intra_op.rules import rules
from autopar.passes.normalise import prepare
from tests.support.graphs import assert_equal_runs, model_values
from tests.support.versions import BEFORE_2_13

RULES = rules()
Function = Callable[..., Any]


class Applied(nn.Module):
    """A function of x = w * input, f64[4, 6], and of indices i, i64[4, 6] below 4."""

    def __init__(self, function: Function, *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.w = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor, i: Tensor) -> Any:
        return self.function(self.w * x, i, *self.layers)


def writes(x: Tensor, i: Tensor) -> Tensor:
    x = x.clone()
    x[i[0]] = 1.0
    x[:, 1:3] = 2.0
    x[0, 0] = x.sum()
    x[..., ::2] *= 3.0
    x[x > 1] = 0.5
    return x


def broadcast_copy(x: Tensor, i: Tensor) -> Tensor:
    y, z = torch.zeros_like(x), torch.zeros(4, 6, dtype=torch.float32)
    y.copy_(x[0])
    y[1].copy_(x[1])
    return y * z.copy_(x.detach())


def pieces(x: Tensor, i: Tensor) -> Tensor:
    counts = i + 1
    counts.split(2)[0].zero_()
    left, right = counts.chunk(2, dim=1)
    left.mul_(3)
    right.add_(left)
    counts.unbind(1)[-1].fill_(7)
    return x * counts


def drawn(x: Tensor, i: Tensor) -> Tensor:
    noise = torch.empty_like(x).uniform_() + torch.empty_like(x).normal_()
    noise = noise + torch.empty_like(x).bernoulli_(0.5) + torch.empty_like(x).bernoulli_()
    return x * (noise + torch.empty_like(x).exponential_() + torch.randperm(6))


def given_out(x: Tensor, i: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    torch.add(x.detach(), 1.0, out=y)
    return x * y


FUNCTIONS: dict[str, Function] = {
    "kron": lambda x, i: torch.kron(x[:2, :2], x[2:, 2:]),
    "stacks": lambda x, i: [f([x, x]) for f in (torch.hstack, torch.vstack, torch.dstack)],
    "columns": lambda x, i: torch.column_stack([x, x[:, 0]]),
    "diff": lambda x, i: x.diff(dim=1),
    "flips": lambda x, i: x.fliplr() + x.flipud() + x.rot90(2),
    "diagonals": lambda x, i: torch.diag(x[0]) + torch.diagflat(x[1]) + x.diag_embed()[0],
    "diagonal": lambda x, i: x.diagonal() * torch.diag(x),
    "products": lambda x, i: torch.cartesian_prod(x[0], x[1]),
    "inner": lambda x, i: torch.inner(x, x) + torch.tensordot(x, x, dims=([1], [1])),
    "chain": lambda x, i: torch.linalg.multi_dot([x, x.T, x]),
    "cross": lambda x, i: torch.cross(x[:, :3], x[:, 3:], dim=1),
    "determinants": lambda x, i: torch.linalg.det(x @ x.T) + torch.logdet(x @ x.T + 9),
    "solve": lambda x, i: torch.linalg.solve(x @ x.T + torch.eye(4, dtype=x.dtype), x),
    "norms": lambda x, i: torch.linalg.matrix_norm(x) + x.norm() + torch.dist(x, x + 1),
    "distances": lambda x, i: F.pairwise_distance(x, x.flip(0)).sum() + torch.cdist(x, x).sum(),
    "triplet": lambda x, i: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0)),
    "ranking": lambda x, i: F.margin_ranking_loss(x, x.flip(0), x.detach().sign()),
    "cosine": lambda x, i: F.cosine_embedding_loss(x, x.flip(0), torch.ones(4, dtype=x.dtype)),
    "hinge": lambda x, i: F.hinge_embedding_loss(x, x.detach().sign()),
    "poisson": lambda x, i: F.poisson_nll_loss(x, x.detach().abs()),
    "margins": lambda x, i: F.multi_margin_loss(x, i[:, 0]) + F.soft_margin_loss(x, x.detach()),
    "bags": lambda x, i: F.embedding_bag(i, x, mode="sum") + F.embedding_bag(i, x, mode="mean"),
    "largest bag": lambda x, i: F.embedding_bag(i, x, mode="max"),
    "weighed bag": lambda x, i: F.embedding_bag(i, x, per_sample_weights=x, mode="sum"),
    "bag of parts": lambda x, i: F.embedding_bag(i.flatten(), x, torch.arange(0, 24, 3)),
    "uneven bags": lambda x, i: F.embedding_bag(i.flatten(), x, i[0].cumsum(0) - i[0, 0]),
    "padded bag": lambda x, i: F.embedding_bag(i, x, mode="sum", padding_idx=1),
    "scatters": lambda x, i: x.scatter(1, i, x).scatter_add(1, i, x),
    "scatter of maxima": lambda x, i: x.scatter_reduce(1, i, x, "amax"),
    "rows": lambda x, i: x.index_add(0, i[0], x[i[0]]).index_fill(0, i[1], 0.5),
    "put": lambda x, i: x.index_put((i[0],), x[0], accumulate=True),
    "taken": lambda x, i: x.take(i) + x.take_along_dim(i, 1) + x.gather(1, i),
    "sorted": lambda x, i: x.msort() + x.sort(1).values + x.topk(6).values + x.cummax(1).values,
    "statistics": lambda x, i: torch.var_mean(x, dim=1)[0] + x.mode(1)[0],
    "quantiles": lambda x, i: x.quantile(0.5, dim=1),
    "searches": lambda x, i: torch.searchsorted(x.sort(1).values, x),
    "buckets": lambda x, i: torch.bucketize(x, x[0].sort().values),
    "histogram": lambda x, i: torch.histc(x.detach(), 4, -1.0, 1.0),
    "hot": lambda x, i: F.one_hot(i, 4) * x[..., None],
    "grids": lambda x, i: torch.meshgrid(x[0], x[:, 0], indexing="xy"),
    "triangles": lambda x, i: x[:, :4][torch.tril_indices(4, 4).unbind()],
    "spectrum": lambda x, i: torch.view_as_real(torch.fft.rfft(x)) + torch.fft.fft(x).real.sum(),
    "short spectra": lambda x, i: torch.stft(x, 4, return_complex=True, center=False).abs(),
    "turned": lambda x, i: torch.view_as_real(torch.complex(x, x) * torch.polar(x.abs(), x)),
    "shuffles": lambda x, i: F.pixel_shuffle(x.reshape(1, 24, 1, 1), 2) + x.sum(),
    "windows": lambda x, i: F.unfold(x.reshape(1, 2, 3, 4), 2).sum(1) * x.unfold(1, 2, 4)[0, 0, 0],
    "sampled": lambda x, i: F.grid_sample(x.reshape(1, 1, 4, 6), x.reshape(1, 3, 4, 2)),
    "pools": lambda x, i: F.adaptive_avg_pool3d(x.reshape(1, 4, 3, 2), 1) * F.lp_pool1d(x, 2, 2)[0],
    "made like another": lambda x, i: (torch.ones_like(x) * i).sum(0) * x + x.new_zeros(6),
    "like another": lambda x, i: (i > 1).type_as(x).expand_as(x) * x + i.float().view_as(x),
    "gates": lambda x, i: F.glu(x) + F.prelu(x, x[0, :1].detach())[:, :3] + F.celu(x)[:, :3],
    "writes": writes,
    "broadcast copies": broadcast_copy,
    "writes into pieces": pieces,
    "draws": drawn,
    "given out": given_out,
    "attention": lambda x, i, m: m(x[None], x[None], x[None], need_weights=True),
    "lstm": lambda x, i, m: m(x[None])[0],
    "lstm cell": lambda x, i, m: m(x)[0],
    "gru": lambda x, i, m: m(x[None])[0],
    "gru cell": lambda x, i, m: m(x),
    "weight norm": lambda x, i, m: m(x),
    "spectral norm": lambda x, i, m: m(x),
    "bilinear": lambda x, i, m: m(x, x),
    "same size": lambda x, i, m: m(x[:, None]),
    "checkpointed": lambda x, i: checkpoint(lambda y: (y @ y.T).relu(), x, use_reentrant=False),
}  # fmt: skip
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    "lstm": lambda: nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True, proj_size=2),
    "lstm cell": lambda: nn.LSTMCell(6, 4),
    "gru": lambda: nn.GRU(6, 4, 2, batch_first=True),
    "gru cell": lambda: nn.GRUCell(6, 4),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)),
    "bilinear": lambda: nn.Bilinear(6, 6, 4),
    "same size": lambda: nn.Conv1d(1, 2, 3, padding="same"),
}


def applied(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = [LAYERS[name]()] if name in LAYERS else []
    i = torch.stack([torch.randperm(6) % 4 for _ in range(4)])
    i[:2, :4] = torch.stack([torch.randperm(4) for _ in range(2)])  # rows that repeat nothing
    return Applied(FUNCTIONS[name], *layers).double(), {"x": torch.randn(4, 6).double(), "i": i}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_captured_and_known(name: str) -> None:
    if name == "quantiles" and BEFORE_2_13:
        pytest.skip("torch.export cannot trace quantile")
    model, batch = applied(name)
    captured = capture(model, (), batch, known=RULES)
    values = model_values(model, batch, captured)
    graph = prepare(captured.graph)
    assert_equal_runs(captured.graph, graph, values)
    assert {node.op for node in graph.nodes if not node.is_leaf} <= set(RULES)

    whole = capture(model, (), batch)
    assert_equal_runs(whole.graph, graph, model_values(model, batch, whole))
    compare_with_model(model, batch, graph, values)


def compare_with_model(
    model: nn.Module, batch: dict[str, Tensor], graph: Any, values: dict[str, Tensor]
) -> None:
    """Outputs, gradients and buffers are those of the model in plain torch."""
    from tests.support.graphs import evaluate

    found = evaluate(graph, values)
    torch.manual_seed(0)
    result = model(**batch)
    tensors = [result] if isinstance(result, Tensor) else list(result)
    outputs = [value for name, value in found.items() if name.startswith("output ")]
    for mine, its in zip(outputs, tensors, strict=True):
        torch.testing.assert_close(mine, its.detach(), rtol=1e-10, atol=1e-10)
    flowing = [its for its in tensors if its.requires_grad]
    if flowing:
        sum(its.double().square().sum() for its in flowing).backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[f"gradient {name}"], expected, rtol=1e-8, atol=1e-8)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found[f"buffer {name}"], buffer, rtol=1e-10, atol=1e-10)


REFUSED: dict[str, tuple[Function, str]] = {
    "a map of functions": (lambda x, i: torch.vmap(torch.sum)(x), "torch's vmap"),
    "a branch": (lambda x, i: x if x.sum() > 0 else -x, "torch.where"),
    "sparse tensors": (lambda x, i: x * x.detach().to_sparse(), "layout torch.sparse_coo"),
    "an unusual dtype": (lambda x, i: i.to(torch.uint64), "torch.uint64"),
    "a size by values": (lambda x, i: x[x.nonzero()].sum(), "sizes depend on values"),
    "out of another size": (
        lambda x, i: x * torch.add(x.detach(), 1, out=torch.zeros(0, dtype=x.dtype)),
        "resizes",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_a_graph_cannot_say_is_refused(case: tuple[Function, str]) -> None:
    function, message = case
    with pytest.raises(CaptureError, match=message):
        capture(Applied(function), (), applied("diff")[1], known=RULES)
