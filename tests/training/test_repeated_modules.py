"""Blocks between transposes and modules that are called several times, trained and simulated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost.model import AnalyticModel
from autopar.intra_op.work.kernel_work import works
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import Settings, run, tasks
from tests.support.ranks import run_ranks

STEPS, TOLERANCE = 2, 1e-9
MESHES = (
    "cpu[1GFLOP/s 64GiB 1GB/s]: x=4 @10GB/s 1us",
    "cpu[1GFLOP/s 64GiB 1GB/s]: x=2 @10GB/s 1us, y=2 @10GB/s 1us",
)
sgd = partial(torch.optim.SGD, lr=0.1)


class Depthwise(nn.Module):
    """A block of ConvNeXt (arXiv:2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.scale = nn.Linear(4 * width, width), nn.Parameter(torch.ones(width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Runs of blocks with transposes, norms and convolutions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 2, 2), nn.Sequential(*map(Depthwise, [8] * 2))
        self.norm, self.down = nn.LayerNorm(8), nn.Conv2d(8, 16, 2, 2)
        self.second, self.head = nn.Sequential(*map(Depthwise, [16] * 3)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        x = self.down(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return torch.logsumexp(self.head(self.second(x).mean((-2, -1))), -1).mean()


class Universal(nn.Module):
    """One layer applied several times (arXiv:1807.03819), also inside other blocks."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.inside = nn.Linear(8, 8), nn.LayerNorm(8), inside
        self.own, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).unflatten(1, (-1, 8))
        for own in self.own:
            x = x + torch.tanh(self.layer(self.norm(own(x) if self.inside else x)))
        return torch.logsumexp(self.head(x), -1).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnext": ConvNeXt,
    "universal": partial(Universal, inside=False),
    "shared inside blocks": partial(Universal, inside=True),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)


def whole(name: str) -> list[Tensor]:
    model, x = make(name)
    updates, losses = sgd(model.parameters()), []
    for _ in range(STEPS):
        updates.zero_grad()
        losses.append(model(x))
        losses[-1].backward()
        updates.step()
    return [*losses, *model.state_dict().values()]


def sharded(name: str, mesh: str) -> list[Tensor]:
    model, x = make(name)
    program = autopar.compile(model, mesh, optimizer=sgd, example_inputs={"x": x})
    return [*(program.step(x=x) for _ in range(STEPS)), *program.state_dict().values()]


Case = tuple[str, str]
QUICK: list[Case] = [
    ("convnext", MESHES[1]),
    ("shared inside blocks", MESHES[1]),
]
OTHERS = [(name, mesh) for name in MODELS for mesh in MESHES if (name, mesh) not in QUICK]


def on_rank(cases: list[Case]) -> list[list[Tensor]]:
    return [sharded(*case) for case in cases]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_training(cases: list[Case]) -> None:
    for found in run_ranks(on_rank, cases):
        for (name, mesh), tensors in zip(cases, found, strict=True):
            for mine, its in zip(tensors, whole(name), strict=True):
                torch.testing.assert_close(
                    mine, its, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name} on {mesh}"
                )


@pytest.mark.parametrize("name", MODELS)
def test_simulation(name: str) -> None:
    model, x = make(name)
    mesh = Mesh.parse(MESHES[0])
    graph = capture_graph(model, (), {"x": x}, Options(), Trace(None)).graph
    plan = make_plan(graph, mesh, Options(), Trace(None))
    prices = AnalyticModel(mesh)
    made = tasks(graph, plan, works(graph, plan, Options().table), prices, Settings())
    assert run(made, prices, 1.0).seconds > 0
