"""Sizes that no axis divides train like unsharded: a prime vocabulary, 6 heads on 4, batch 3."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

# A slow device with quick links: even small models are worth splitting.
CHIP = "toy[1GFLOP/s 64GiB 1GB/s]"
MESHES = {
    3: ("x=3 @10GB/s 1us",),
    4: ("x=4 @10GB/s 1us", "a=2 @10GB/s 1us, b=2 @10GB/s 1us"),
    5: ("x=5 @10GB/s 1us",),
}


@dataclass(frozen=True)
class Shape:
    """One odd transformer; key heads divide the heads."""

    batch: int
    seq: int
    heads: int
    key_heads: int
    width: int
    ffn: int
    vocabulary: int


class Odd(nn.Module):
    """Embedding, attention with grouped heads, a perceptron and a head over the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.heads * shape.width
        self.embed = nn.Embedding(shape.vocabulary, hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, shape.key_heads * shape.width)
        self.value = nn.Linear(hidden, shape.key_heads * shape.width)
        self.out = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, shape.ffn), nn.Linear(shape.ffn, hidden)
        self.head = nn.Linear(hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.shape.width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        grouped = self.shape.heads != self.shape.key_heads
        h = h + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            .transpose(1, 2)
            .flatten(2)
        )
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.cross_entropy(self.head(h).transpose(1, 2), labels)


SHAPES = tuple(
    Shape(batch, seq, heads, key_heads, width, ffn, vocabulary)
    for (batch, seq), (heads, key_heads), (width, ffn, vocabulary) in itertools.product(
        ((7, 11), (3, 13), (1, 17)), ((7, 7), (6, 2), (6, 6)), ((3, 31, 97), (4, 26, 101))
    )
)  # 18 shapes on 4 meshes
OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def made(shape: Shape) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, shape.vocabulary, (2, shape.batch, shape.seq))
    return Odd(shape).double(), {"tokens": tokens, "labels": labels}


def trained_on_rank(shapes: tuple[Shape, ...]) -> list[tuple[list[float], dict[str, Tensor], bool]]:
    """Returns losses, parameters, and whether some value has parts of different lengths."""
    found = []
    for shape, mesh in itertools.product(shapes, MESHES[dist.get_world_size()]):
        model, batch = made(shape)
        program = autopar.compile(model, f"{CHIP}: {mesh}", optimizer=OPTIMIZER)
        losses = [program.step(**batch).item() for _ in range(3)]
        plan = program.plan
        layouts = [pair for node in plan.stage.nodes.values() for pair in node.results]
        uneven = any(not layout.is_even(size, plan.mesh) for size, layout in layouts)
        found.append((losses, program.state_dict(), uneven))
    return found


def trained_alone(
    model: nn.Module, batch: dict[str, Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    losses = train_plainly(lambda: model(**batch), OPTIMIZER(model.parameters()), 3)
    return losses, model.state_dict()


def compare(shapes: tuple[Shape, ...], count: int) -> None:
    first, *others = run_ranks(trained_on_rank, shapes, count=count)
    expected = {shape: trained_alone(*made(shape)) for shape in shapes}
    cases = list(itertools.product(shapes, MESHES[count]))
    for (shape, mesh), (losses, state, _) in zip(cases, first, strict=True):
        alone, parameters = expected[shape]
        assert losses == pytest.approx(alone, rel=1e-9), (shape, mesh)
        for name, value in parameters.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-9, atol=1e-11, msg=f"{name} of {shape} on {mesh}"
            )
    for other in others:
        assert [losses for losses, _, _ in other] == [losses for losses, _, _ in first]
    # The test is of nothing if plans avoid what is uneven.
    assert 2 * sum(uneven for _, _, uneven in first) >= len(first)


@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))])
def test_odd_shapes_train_as_unsharded(count: int) -> None:
    compare(SHAPES[::9], count)


@pytest.mark.slow
@pytest.mark.parametrize("count", sorted(MESHES))
def test_many_odd_shapes_train_as_unsharded(count: int) -> None:
    compare(SHAPES, count)


class Narrow(nn.Module):
    """Equal blocks of perceptrons, three and five wide: no part of a parameter is as another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


NARROW = torch.linspace(-1, 1, 8 * 3, dtype=torch.float64).view(8, 3)


def narrow_on_rank(states: tuple[str, ...]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and final state under each state sharding."""
    results = []
    for state in states:
        program = autopar.compile(
            Narrow().double(), f"{CHIP}: x=2 @100MB/s 100us, y=2 @10GB/s 1us", state=state,
            pins=autopar.pins.data_parallel("x", "y"), optimizer=OPTIMIZER,
        )  # fmt: skip
        losses = [program.step(NARROW).item() for _ in range(3)]
        results.append((losses, program.state_dict()))
        program.close()
    return results


@pytest.mark.parametrize(
    "states",
    [
        ("zero2", "paro-iig over x"),
        pytest.param(("zero1", "zero3"), marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_ranks_fill_buckets_alike_however_uneven_their_parts_are(states: tuple[str, ...]) -> None:
    expected, parameters = trained_alone(Narrow().double(), {"x": NARROW})
    for rank in run_ranks(narrow_on_rank, states, count=4):
        for losses, state in rank:
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(state, parameters, rtol=1e-10, atol=1e-12)
