"""Models for tests of pins, whose modules have meaningless names."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Graph
from autopar.pins import PinsLike
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support.families import Experts

# So quick that what is computed costs next to nothing: few open things are worth splitting.
LINE = "toy[1TFLOP/s 64GiB 1TB/s]: gpu=4 @10GB/s 1us"
GRID = "toy[1TFLOP/s 64GiB 1TB/s]: node=2 @10GB/s 1us, gpu=2 @10GB/s 1us"
Made = tuple[nn.Module, dict[str, Tensor]]


class Block(nn.Module):
    """Attention and a gated perceptron side by side on one stream, written by hand."""

    def __init__(self, stream: int, heads: int, head: int, inner: int) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.a = nn.LayerNorm(stream)
        self.b, self.c, self.d = (nn.Linear(stream, heads * head, bias=False) for _ in range(3))
        self.e = nn.Linear(heads * head, stream)
        self.f, self.g = nn.Linear(stream, inner), nn.Linear(stream, inner)
        self.h = nn.Linear(inner, stream)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        shape = (*y.shape[:2], self.heads, self.head)
        q, k, v = (layer(y).view(shape).transpose(1, 2) for layer in (self.b, self.c, self.d))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + (self.e(mixed) + self.h(F.silu(self.f(y)) * self.g(y)))


class Tower(nn.Module):
    """Blocks on a stream of tokens; returns the loss of the next word."""

    def __init__(self, words: int, stream: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(words, stream), nn.Linear(stream, words, bias=False)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        x = self.first(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.last(x).flatten(0, 1), target.flatten())


class Mixture(nn.Module):
    """A perceptron of experts on a residual stream."""

    def __init__(self, stream: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(stream)
        self.experts = Experts(stream, 2 * stream, experts=4, capacity=8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))[0]


class Convolutions(nn.Module):
    """Two convolutions and three fully connected layers, as AlexNet has five and three."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.c, self.d, self.e = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 12)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(image)), 2)
        x = F.max_pool2d(F.relu(self.b(x)), 2).flatten(1)
        return F.cross_entropy(self.e(F.relu(self.d(F.relu(self.c(x))))), label)


def tokens(words: int, batch: int, length: int) -> dict[str, Tensor]:
    text, target = torch.randint(0, words, (2, batch, length))
    return {"text": text, "target": target}


def primes() -> Made:
    """Every dimension has a size of its own, and all are prime."""
    return Tower(19, 11, [Block(11, 2, 7, 13) for _ in range(2)]), tokens(19, 3, 5)


def distinct() -> Made:
    """The same with sizes that divide by two."""
    return Tower(34, 22, [Block(22, 4, 6, 26) for _ in range(2)]), tokens(34, 8, 14)


def even() -> Made:
    """The same with sizes that divide by four."""
    return Tower(32, 16, [Block(16, 4, 8, 24) for _ in range(3)]), tokens(32, 8, 12)


def mixture() -> Made:
    return Tower(32, 16, [Mixture(16) for _ in range(3)]), tokens(32, 8, 16)


def convolutions() -> Made:
    batch = {"image": torch.randn(8, 3, 8, 8), "label": torch.randint(0, 12, (8,))}
    return Convolutions(), batch


def perceptron() -> Made:
    """Linears without a residual stream."""
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return Summed(layers), {"x": torch.randn(8, 16)}


class Summed(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).pow(2).sum()


MODELS = {
    made.__name__: made for made in (primes, distinct, even, mixture, convolutions, perceptron)
}


def make(name: str) -> Made:
    """A model in float64 and a batch, the same at every call."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    return model.double().train(), batch


@cache
def graph(name: str) -> Graph:
    """The prepared graph of a model."""
    model, batch = make(name)
    captured = capture_graph(model, (), batch, Options(), Trace(None))
    found: Graph = captured.graph
    return found


def planned(name: str, pins: PinsLike | None, mesh: str = LINE) -> autopar.Plan:
    """The plan of a model under pins."""
    options = Options(pins=pins)
    return autopar.Plan.of(make_plan(graph(name), autopar.Mesh.parse(mesh), options, Trace(None)))
