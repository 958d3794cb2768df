"""torch.autocast inside a forward: captured programs cast what torch casts, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.capture.decompose import decompose_unknown
from autopar.errors import CaptureError
from autopar.intra_op.rules import rules
from autopar.operators.interpret import run
from autopar.passes.normalise import NORMALISING, prepare
from autopar.passes.verify import verify
from tests.support.ranks import run_ranks

RULES = rules()


class Mixed(nn.Module):
    """Computes something under autocast."""

    def __init__(self, body: Callable[[Mixed, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.p = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.body, self.dtype = body, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            y = self.body(self, x)
        return y.float().square().sum()


def nested(m: Mixed, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.autocast("cpu", enabled=False):
        z = m.b(h.float())
    with torch.autocast("cpu", dtype=torch.float16):
        w = m.b(z)
    return h * z + w


def writes(m: Mixed, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean.lerp_(h.detach().float().mean((0, 1)), 0.5)
    return h.add_(x)


def without_gradients(m: Mixed, x: Tensor) -> Tensor:
    with torch.no_grad():
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            z = m.b(x).mT
        g = torch.einsum("bij,jk->bik", x, m.p)
        m.mean.lerp_(m.norm.weight, 0.3)
        with torch.enable_grad():
            w = m.a(x)
    return (m.a(g) @ z.float())[..., :1] * w + m.mean


BODIES: dict[str, Callable[[Mixed, Tensor], Tensor]] = {
    "linear": lambda m, x: m.a(m.a(x)),
    "product": lambda m, x: x @ m.p,
    "convolution": lambda m, x: m.conv(x),
    "softmax": lambda m, x: torch.softmax(m.a(x), -1),
    "norm": lambda m, x: m.norm(m.a(x)),
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "scaled": lambda m, x: F.scaled_dot_product_attention(m.a(x)[:, None], x[:, None], x[:, None]),
    "encoder": lambda m, x: m.encoder(x),
    "rnn": lambda m, x: m.rnn(x)[0],
    "einsum": lambda m, x: torch.einsum("bij,jk->bik", x, m.p),
    "kron": lambda m, x: torch.kron(m.p, m.p) + x.sum(),
    "loss in float32": lambda m, x: F.poisson_nll_loss(m.a(x), x.abs()),
    "mean square": lambda m, x: F.mse_loss(m.a(x), m.b(x)),
    "entropy": lambda m, x: F.cross_entropy(m.a(x)[:, 0], torch.tensor([1, 2, 3])),
    "logits": lambda m, x: F.binary_cross_entropy_with_logits(m.a(x), (x > 0).float()),
    "prelu": lambda m, x: F.prelu(m.a(x), m.p[0, :1]),
    "widest": lambda m, x: torch.cat([m.a(x), x], 1),
    "nested": nested,
    "writes": writes,
    "without gradients": without_gradients,
}


# torch casts the same operators to either dtype: quick tests cast a few of each kind to the other.
ALSO_F16 = ("linear", "softmax", "without gradients")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in BODIES),
        *(
            pytest.param(name, torch.float16, marks=[pytest.mark.slow] * (name not in ALSO_F16))
            for name in BODIES
        ),
    ],
)
def test_a_graph_casts_what_torch_casts(name: str, dtype: torch.dtype) -> None:
    model, x = Mixed(BODIES[name], dtype), torch.randn(3, 4, 8)
    reference = copy.deepcopy(model)
    captured = capture(model, (x,), known=RULES)
    graph = prepare(verify(decompose_unknown(captured.graph, RULES)), passes=NORMALISING)
    learned = dict(model.named_parameters())
    buffers = {key: value.clone() for key, value in captured.buffers.items()}
    values = {"x": x, **learned, **buffers}
    for _ in range(2):
        expected, loss = reference(x), run(graph, values)["loss"]
        expected.backward()
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (key, value), other in zip(reference.named_parameters(), learned.values(), strict=True):
        flows = value.grad is not None and bool(value.grad.any())
        assert (other.grad is not None and bool(other.grad.any())) == flows, key
        if flows:  # where a weight is used twice, torch adds its gradients up in bfloat16
            scale = float(value.grad.abs().max())
            torch.testing.assert_close(other.grad, value.grad, rtol=0, atol=2e-2 * scale)


def switched_on(m: Mixed, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return m.a(x)  # the line


def test_what_cannot_be_followed_is_refused() -> None:
    model, x = Mixed(lambda m, x: F.bilinear(x, x, m.p[None]), torch.bfloat16), torch.randn(3, 4, 8)
    with pytest.raises(CaptureError, match="bilinear"):
        capture(model, (x,))

    class Around(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(CaptureError, match="switched on inside an autocast block"):
        capture(Around(switched_on, torch.bfloat16), (x,))


def train() -> tuple[list[float], str]:
    model = Mixed(lambda m, x: m.attention(m.a(x), x, m.b(x))[0], torch.bfloat16)
    mesh = "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @10GB/s 1us, y=2 @10GB/s 1us"
    batch = {"x": torch.linspace(-1, 1, 256).reshape(8, 4, 8)}

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    program = autopar.compile(model, mesh, optimizer=sgd, example_inputs=batch)
    losses = [program.step(**batch).item() for _ in range(3)]
    updates = sgd(list(model.parameters()))
    for loss in losses:
        updates.zero_grad()
        own = model(**batch)
        own.backward()
        updates.step()
        assert loss == pytest.approx(own.item(), rel=1e-2)  # bfloat16 has eight bits
    return losses, program.source


@pytest.mark.slow
def test_ranks_train_under_autocast() -> None:
    ranks = run_ranks(train)
    assert all(losses == ranks[0][0] for losses, _ in ranks)
    assert "bf16[" in ranks[0][1]
    assert "@x" in ranks[0][1]
