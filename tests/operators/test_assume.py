"""Branches that only guard: captured as not taken, and checked whenever the program runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.errors import AssumptionError, CaptureError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.operators.assume import ASSUME
from autopar.operators.interpret import run
from autopar.passes.normalise import prepare
from tests.support.ranks import run_ranks


def raises(x: Tensor) -> Tensor:
    if x.max() > 10:
        message = "too large"
        raise ValueError(message)
    return x * 2


def raises_if_not(x: Tensor) -> Tensor:
    flag = None
    if flag is None and not (x < 10).all():
        raise ValueError
    return x * 2


def asserts(x: Tensor) -> Tensor:
    assert (x < 10).all() and not (x > 100).any(), "too large"  # noqa: PT018
    return x * 2


def raises_otherwise(x: Tensor) -> Tensor:
    if (x < 10).all().item():
        x = x * 2
    else:
        raise ValueError
    return x


def mends(x: Tensor) -> Tensor:
    x = x * 2
    if torch.isinf(x.exp()).any() or torch.isnan(x).any():
        value = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-value, max=value)
    return x


def in_torch(x: Tensor) -> Tensor:
    torch._assert((x < 10).all(), "too large")
    return x * 2


def validates(x: Tensor) -> Tensor:
    scale = 1e3 - x * 100  # negative for large elements
    return -torch.distributions.Normal(x, scale, validate_args=True).log_prob(x.detach() + 1)


def within_torch(x: Tensor) -> Tensor:
    variance = 10 - x  # negative for large elements
    return nn.functional.gaussian_nll_loss(x.tanh(), torch.zeros_like(x), variance) + x


GUARDS = {f.__name__: f for f in (
    raises, raises_if_not, asserts, raises_otherwise, mends, in_torch, validates,
    within_torch,
)}  # fmt: skip


def both_sides(x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line
        x = x * 2
    return x


def returns_early(x: Tensor) -> Tensor:
    if (x > 0).all():  # the line
        return x
    return -x


def chooses(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x  # the line


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.function = function

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
            x = self.function(x * scale)
        return x.square().mean()


def graph_of(name: str, layers: int = 1) -> tuple[nn.Module, Graph, Tensor]:
    torch.manual_seed(0)
    model = Model(GUARDS[name], layers).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    return model, capture(model, (x, torch.tensor(1.0).double())).graph, x


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_is_assumed_and_checked(name: str) -> None:
    model, graph, x = graph_of(name)
    assert parse_graph(format_graph(graph)) == graph
    assert sum(node.op == ASSUME for node in graph.nodes) >= 1
    for scale, fails in ((1.0, False), (1e3, True), (-1.0, False)):
        given = {"x": x, "scale": torch.tensor(scale).double(), **dict(model.named_parameters())}
        if fails:
            with pytest.raises(AssumptionError) as raised:
                run(graph, given)
            assert raised.value.where.startswith("test_assume.py")
        else:
            found = run(graph, given)
            torch.testing.assert_close(found["loss"], model(x, given["scale"]))


def test_a_warning_is_left_out() -> None:
    def warns(x: Tensor) -> Tensor:
        if (x > 1).any():
            warnings.warn("large", stacklevel=1)
        return x * 2

    x = torch.randn(4, 8)
    graph = capture(Model(warns), (x, torch.tensor(1.0))).graph
    assert not any(node.op.startswith("autopar.") for node in graph.nodes)


def test_torch_asks_of_a_mask_only_what_it_may_leave_out() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x, memory = torch.randn(2, 4, 6, 8, dtype=torch.float64).unbind()
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.layer(x, memory, tgt_mask=mask + 0 * x.detach().sum()).square().mean()

    model = Masked()
    captured = capture(model, (x, memory))
    given = {"x": x, "memory": memory, **captured.buffers, **dict(model.named_parameters())}
    found = run(captured.graph, given)
    torch.testing.assert_close(found["loss"], model(x, memory))


@pytest.mark.parametrize("function", [both_sides, returns_early, chooses])
def test_a_choice_between_computations_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="branches on values") as raised:
        capture(Model(function), (torch.randn(4, 8), torch.tensor(1.0)))
    assert "# the line" in raised.value.where


def test_guards_in_blocks_leave_the_blocks_equal() -> None:
    (repeat,) = prepare(graph_of("mends", layers=4)[1]).repeats
    assert repeat.count == 3
    assert sum("check" in name and "share" not in name for name in repeat.iterations[0]) == 2


def trained() -> tuple[list[float], str]:
    model, _, x = graph_of("raises", layers=3)
    program = autopar.compile(model, "cpu: a=2, b=2", optimizer=torch.optim.SGD)
    losses = [program.step(x, torch.tensor(s).double()).item() for s in (1.0, 0.5)]
    try:
        program.step(x, torch.tensor(1e3).double())
    except AssumptionError as error:
        return losses, error.where
    return losses, "nothing was raised"


def test_all_ranks_raise_together() -> None:
    model, _, x = graph_of("raises", layers=3)
    optimizer, losses = torch.optim.SGD(model.parameters()), []
    for scale in (1.0, 0.5):
        optimizer.zero_grad()
        loss = model(x, torch.tensor(scale).double())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, where in run_ranks(trained):
        assert found == pytest.approx(losses, rel=1e-9)
        assert where.startswith("test_assume.py")
