"""What users write into plain models: trained on two ranks as in plain torch, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import autopar
from autopar.capture.capture import capture
from autopar.operators.interpret import run
from tests.support.one_process import close
from tests.support.ranks import run_ranks

ROWS, STEPS = 8, 2
MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: gpu=2 @10GB/s 1us"
SETTINGS: dict[str, dict[str, Any]] = {
    "free": {},
    "zero3": {"pins": autopar.pins.data_parallel("gpu"), "state": "zero3"},
    "stages": {"stages": 2},
}
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@torch.library.custom_op("plainmodels::twist", mutates_args=())
def twist(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The reversed rows times w, and running sums: two outputs that have gradients."""
    return x.flip(-1) * w, x.cumsum(-1)


@twist.register_fake
def _(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _twist_backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    sums = second.flip(-1).cumsum(-1).flip(-1)
    return (first * w).flip(-1) + sums, (first * x.flip(-1)).sum(0)


twist.register_autograd(
    _twist_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Parametrised(nn.Module):
    """Weights that are computed of other parameters, some of which are buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(8, 8))
        self.b = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.c = nn.Linear(8, 8)
        parametrize.register_parametrization(self.c, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).tanh()).tanh())
        return y


class Hooked(nn.Module):
    """Hooks that change what modules take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.register_forward_hook(lambda module, args, out: out * 2)
        self.b.register_forward_pre_hook(
            lambda module, args, keywords: (args, {"input": keywords["input"] + 1}),
            with_kwargs=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(input=self.a(x).tanh())
        return y


class Recurrent(nn.Module):
    """Both directions, projected states, and cells in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 4, bidirectional=True, batch_first=True)
        self.lstm = nn.LSTM(8, 8, proj_size=4, batch_first=True)
        self.cell = nn.GRUCell(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.gru(x.unflatten(1, (4, 2)))
        y, _ = self.lstm(y)
        state = last.flatten(0, 1).new_zeros(len(x), 8)
        for step in y.unbind(1):
            state = self.cell(step, state)
        return state + last.sum()


class Spectral(nn.Module):
    """Real transforms, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * self.filter, n=8, norm="ortho")
        z = torch.complex(y, x) @ self.mix
        return (z.conj() * z).real + z.abs() + z.angle()


class Shared(nn.Module):
    """A weight that is used transposed, and one module on tensors of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 16), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.a(x).tanh(), self.a.weight.T)
        return self.norm(y) + self.norm(torch.stack([x, 2 * y, x * y], 1)).mean(1)


class Contracted(nn.Module):
    """Contractions with repeated indices, and an operator with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bi,ij,bj->b", x, self.a, x)[:, None] + torch.einsum("ii->i", self.a)
        first, second = twist(y + x, self.w)
        return first + second * torch.einsum("ii", self.a)


class Bags(nn.Module):
    """Weighted bags of indices that offsets divide."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(20, 8, mode="sum"), nn.EmbeddingBag(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(3 * len(x)) * 7 % 20
        offsets = torch.arange(0, 3 * len(x), 3)
        y: Tensor = self.sums(ids, offsets, per_sample_weights=x[:, :3].flatten())
        return y + self.means(ids, offsets)


@dataclasses.dataclass
class Output:
    loss: Tensor
    parts: dict[str, Tensor]
    weight: Tensor
    best: Tensor | None = None


class Net(nn.Module):
    """One of the bodies, and outputs of many kinds."""

    def __init__(self, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body, self.head, self.unused = body(), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0, mask: None = None) -> Output:
        z = self.head(self.body(x))
        loss, size = F.mse_loss(z, y), z.abs().mean()
        parts = {"size": size, "positive": z > 0, "count": (z > 0).sum()}
        return Output(loss + scale * size, parts, self.head.weight[:2], z.argmax(-1))


BODIES: dict[str, Callable[[], nn.Module]] = {
    "parametrised": Parametrised,
    "hooked": Hooked,
    "recurrent": Recurrent,
    "spectral": Spectral,
    "shared": Shared,
    "contracted": Contracted,
    "bags": Bags,
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, 8).double(), "y": torch.randn(ROWS, 4).double()}
    return Net(BODIES[name]).double(), {**batch, "scale": 0.5, "mask": None}


def tensors(output: Output) -> Iterator[Tensor]:
    yield from (output.loss, *output.parts.values(), output.weight)
    assert output.best is not None
    yield output.best


def whole(name: str) -> list[Tensor]:
    """The losses, the state and the outputs of an evaluation in plain torch."""
    model, batch = made(name)
    updates, losses = sgd(model.parameters()), []
    for _ in range(STEPS):
        updates.zero_grad()
        losses.append(model(**batch).loss)
        losses[-1].backward()
        updates.step()
    state = [value.clone() for value in model.state_dict().values()]
    return [*losses, *state, *tensors(model.eval()(**batch))]


def sharded(settings: list[str]) -> dict[tuple[str, str], list[Tensor]]:
    found = {}
    for setting in settings:
        for name in BODIES:
            model, batch = made(name)
            with autopar.compile(model, MESH, optimizer=sgd, **SETTINGS[setting]) as session:
                losses = [session.step(**batch) for _ in range(STEPS)]
                state = [*session.state_dict().values()]
                outputs = [*tensors(session.eval_step(**batch).whole())]
            found[name, setting] = [*losses, *state, *outputs]
    return found


@pytest.mark.parametrize("name", ["hooked", "contracted"])
def test_captured_gradients(name: str) -> None:
    model, batch = made(name)
    captured, learned = capture(model, (), batch), dict(model.named_parameters())
    inputs = {key: batch[key] for key in ("x", "y")}
    loss = run(captured.graph, {**learned, **captured.buffers, **inputs})["loss"]
    mine = torch.autograd.grad(loss, learned.values(), allow_unused=True)
    expected = made(name)[0]
    theirs = torch.autograd.grad(
        expected(**batch).loss, list(expected.parameters()), allow_unused=True
    )
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)


@pytest.mark.slow
def test_training() -> None:
    for rank in run_ranks(sharded, [*SETTINGS], count=2):
        for (name, setting), found in rank.items():
            for mine, its in zip(found, whole(name), strict=True):
                close(mine, its.detach(), msg=f"{name}, {setting}")
