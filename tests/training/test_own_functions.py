"""The user's own torch.autograd.Functions: carried with their backward, split where proved."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.capture import capture
from autopar.errors import CaptureError, ProgramError
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.operators.own_functions import find
from autopar.stage_plan import StagePlan
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

MESH = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
OWN = "function.tests.training.test_own_functions"


class Steep(torch.autograd.Function):
    """A sigmoid whose gradient is twice its derivative; elementwise both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sigmoid())
        return x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 2 * gradient * y * (1 - y)


class Scaled(torch.autograd.Function):
    """x scale, and where x is positive; the gradient of the scale is a sum, thrice what it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, scale)
        ctx.power = power
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * scale**power, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, scale = ctx.saved_tensors
        slope = None
        if ctx.needs_input_grad[2]:
            slope = (gradient * x * 3 * ctx.power * scale ** (ctx.power - 1)).sum((0, 1))
        return gradient * scale**ctx.power, None, slope


class Normed(torch.autograd.Function):
    """Rows over their largest element, with the gradient of a plain identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)


class Clipped(torch.autograd.Function):
    """Looks elementwise on small numbers; the gradient is over the norm of all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm().clamp(min=1e6)


class PerRow(torch.autograd.Function):
    """Divides the gradient by the number of rows, which a part has fewer of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[0]


steep: Callable[[Tensor], Tensor] = Steep.apply  # bound before anything is captured


class Model(nn.Module):
    """Two linears with a Function between them, in equal blocks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scales = nn.ParameterList(torch.linspace(0.5, 1, 16) for _ in range(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + self.function(layer(x), scale)
        return x.square().mean()


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    y, positive = Scaled.apply(x, 2, scale)
    return y * positive


def checkpointed(x: Tensor, scale: Tensor) -> Tensor:
    return checkpoint(lambda y: (y * scale).tanh(), x, use_reentrant=True)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "steep": lambda x, scale: steep(x) * scale,
    "scaled": scaled,
    "normed": lambda x, scale: Normed.apply(x * scale),
    "clipped": lambda x, scale: Clipped.apply(x * scale),
    "per row": lambda x, scale: PerRow.apply(x * scale),
    "no gradient of the scale": lambda x, scale: scaled(x, scale.detach()),
    "without gradients": lambda x, scale: x * torch.no_grad()(steep)(scale),
    "reentrant checkpoint": checkpointed,
}
# The dimensions (batch, row, width) that stay whole, and Functions that cannot be split at all.
SPECS = {
    "steep": "'a b c -> a b c'",
    "scaled": "'a b c, c -> a b c, a b c'",
    "normed": "'a b c! -> a b d!'",
    "clipped": "",
    "per row": "'a! b c -> d! b c'",
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Model(FUNCTIONS[name]).double()
    return model, torch.randn(8, 4, 16, dtype=torch.float64)


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def unsharded(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, x = made(name)
    losses = train_plainly(lambda: model(x), descent(model.parameters()), 3)
    return losses, model.state_dict()


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: (name, MESH, {}) for name in FUNCTIONS},
    "data parallel": ("scaled", "cpu: x=4", {"pins": autopar.pins.data_parallel("x")}),
    "fsdp": ("scaled", MESH, {"pins": autopar.pins.fsdp("data")}),
    "stages": ("steep", "cpu: x=4", {"stages": 2, "microbatches": 2}),
    "recomputed": ("scaled", "cpu: x=4", {"recompute": "full"}),
}
QUICK = ("scaled", "clipped")


def sharded(cases: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Three steps of every case on this rank."""
    results = []
    for name, mesh, options in map(CASES.__getitem__, cases):
        model, x = made(name)
        program = autopar.compile(model, mesh, optimizer=descent, **options)
        results.append(([program.step(x).item() for _ in range(3)], program.state_dict()))
    return results


@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param([*CASES.keys() - set(QUICK)], marks=pytest.mark.slow)],
    ids=["quick", "all"],
)
def test_training_is_the_unsharded_one(cases: list[str]) -> None:
    for results in run_ranks(sharded, cases):
        for case, (found, state) in zip(cases, results, strict=True):
            losses, weights = unsharded(CASES[case][0])
            assert found == pytest.approx(losses, rel=1e-9), case
            torch.testing.assert_close(state, weights, rtol=1e-9, atol=1e-11)


def planned(name: str) -> tuple[StagePlan, str]:
    model, x = made(name)
    with tempfile.TemporaryDirectory() as folder:
        plan = autopar.plan(model, MESH, example_inputs=x, trace=folder)
        return plan.stage, next(Path(folder).glob("*decompose_unknown.txt")).read_text()


@pytest.mark.parametrize(("name", "spec"), SPECS.items())
def test_a_dimension_is_split_where_both_witnesses_agree(name: str, spec: str) -> None:
    plan, graph = planned(name)
    head = graph.partition("autopar.function(")[2].partition("')")[0]
    assert (spec in head) if spec else ("autopar.function" not in graph)
    assert parse_graph(graph) == parse_graph(format_graph(parse_graph(graph)))
    assert bool(plan.replicated) == (not spec)
    assert not spec or any("@" in str(plan.nodes[n]) for n in plan.nodes if "function" in n)


def test_a_rule_of_the_users_comes_first() -> None:
    model, x = made("clipped")
    own = autopar.rule(Steep, "... -> ...", examples=["f64[4, 6]"])
    assert own.op == f"{OWN}:Steep"
    plan = autopar.plan(made("steep")[0], MESH, example_inputs=x, rules=[own], unknown_ops="error")
    assert any("function" in node for node in plan.stage.nodes)
    assert not plan.stage.replicated
    wrong = autopar.rule(PerRow, "... -> ...", examples=["f64[4, 6]"])
    with pytest.raises(autopar.errors.RuleError, match="wrong"):
        autopar.plan(model, MESH, example_inputs=x, rules=[wrong])
    with pytest.raises(autopar.errors.UnknownOperatorError, match="Clipped"):
        autopar.plan(model, MESH, example_inputs=x, unknown_ops="error")


def test_the_source_calls_it_by_name() -> None:
    model, x = made("steep")
    program = autopar.compile(model, "cpu: x=1", example_inputs=x)
    assert f'functions["{__name__}:Steep"].apply(' in program.source
    with pytest.raises(ProgramError, match="there is no") as raised:
        find(f"{__name__}:Gone")
    assert "importable where the program runs" in str(raised.value)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class NoisyBackwards(Steep):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x.max().item()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def local(x: Tensor) -> Tensor:
    class Local(Steep):
        pass

    y: Tensor = Local.apply(x)
    return y


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "random": (Noisy.apply, "draws random numbers"),
    "random backwards": (NoisyBackwards.apply, "draws random numbers"),
    "in place": (lambda x: Writes.apply(x * 1), "in place"),
    "values": (Reads.apply, "cannot run without values"),
    "a module": (lambda x: Takes.apply(x, nn.Identity()), "takes a Identity"),
    "no name": (local, "at the top of a module"),
}


@pytest.mark.parametrize(("function", "says"), REFUSED.values(), ids=REFUSED)
def test_what_an_operator_cannot_do_is_refused(
    function: Callable[[Tensor], Tensor], says: str
) -> None:
    model = Model(lambda x, scale: function(x * scale)).double()
    with pytest.raises(CaptureError, match=says) as raised:
        capture(model, (torch.randn(4, 16, dtype=torch.float64),))
    assert "test_own_functions.py" in raised.value.where


def test_a_gradient_through_one_inside_forward_is_refused() -> None:
    def penalty(x: Tensor, scale: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(steep(x * scale).sum(), x, create_graph=True)
        return slope

    with pytest.raises(CaptureError, match=r"inside forward|Function"):
        capture(Model(penalty).double(), (torch.randn(4, 16, dtype=torch.float64),))
