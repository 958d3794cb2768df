"""The user's own operators are split with a rule, and run whole without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, RuleError, UnknownOperatorError
from autopar.intra_op.rule_table import table
from autopar.intra_op.rules import rules
from autopar.plan import Plan
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

MESH = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
EXAMPLES = ["f64[4, 6, 8], f64[8]", "f64[2, 3, 4], f64[4]"]
RULE = autopar.rule("userops::gate", "b s h, h -> b s h", examples=EXAMPLES)


@torch.library.custom_op("userops::gate", mutates_args=())
def gate(x: Tensor, scale: Tensor) -> Tensor:
    """x * tanh(scale), which torch knows nothing about."""
    return x * scale.tanh()


@gate.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def gate_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    slope = (1 - scale.tanh() ** 2) * (gradient * x).sum((0, 1))
    return gradient * scale.tanh(), slope


gate.register_autograd(
    gate_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("userops::gpu_only", mutates_args=(), device_types="cuda")
def gpu_only(x: Tensor) -> Tensor:
    """What a kernel of one's own is like."""
    return x * 2


class Gated(nn.Module):
    """Two linears with the operator between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ops.userops.gate(self.up(x), self.scale)
        return (self.down(hidden) - x).square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Gated().double(), torch.randn(8, 4, 16, dtype=torch.float64)


def unsharded() -> tuple[list[float], dict[str, Tensor]]:
    model, x = made()
    losses = train_plainly(lambda: model(x), torch.optim.AdamW(model.parameters()), 3)
    return losses, model.state_dict()


def sharded(own: tuple[autopar.OpRule, ...]) -> tuple[list[float], dict[str, Tensor], str, str]:
    """Three steps on this rank: losses, weights, and the plan and the program as text."""
    model, x = made()
    program = autopar.compile(model, MESH, rules=own)
    losses = [program.step(x).item() for _ in range(3)]
    return losses, program.state_dict(), str(program.plan), program.source


@pytest.mark.parametrize(
    "own",
    [
        pytest.param((RULE,), id="with a rule"),
        pytest.param((), id="without", marks=pytest.mark.slow),
    ],
)
def test_training_is_the_unsharded_one(own: tuple[autopar.OpRule, ...]) -> None:
    losses, weights = unsharded()
    for found_losses, found_weights, text, source in run_ranks(sharded, own):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(found_weights, weights, rtol=1e-9, atol=1e-11)
        assert "torch.ops.userops.gate(" in source
        plan = Plan.from_toml(text)
        layouts = str(plan.stage.nodes["gate"])
        assert ("@" in layouts) == bool(own)
        assert set(plan.stage.replicated) == (set() if own else {"gate"})


def test_what_runs_whole_is_in_the_plan_with_its_price() -> None:
    model, x = made()
    plan = autopar.plan(model, MESH, example_inputs=x)
    assert "[stages.replicated]" in plan.to_toml()
    assert Plan.from_toml(plan.to_toml()) == plan
    (seconds,) = plan.stage.replicated.values()
    # It reads and writes 8 x 4 x 32 doubles, forwards and backwards, at the memory's pace at best.
    assert 0 < seconds < plan.predicted.compute_seconds
    ruled = autopar.plan(model, MESH, example_inputs=x, rules=[RULE])
    assert not ruled.stage.replicated
    assert "[stages.replicated]" not in ruled.to_toml()
    assert ruled.predicted.step_seconds < plan.predicted.step_seconds


@pytest.mark.parametrize("table", ["= 3", "= {gate = 'soon'}", "= {gate = nan}", "= {gate = -1}"])
def test_a_damaged_price_is_named(table: str) -> None:
    model, x = made()
    text = autopar.plan(model, MESH, example_inputs=x, rules=[RULE]).to_toml()
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_toml(
            text.replace("[stages.predicted]", f"replicated {table}\n[stages.predicted]")
        )


def test_a_rule_is_a_value_and_is_not_remembered() -> None:
    assert RULE.op == "userops.gate"
    before = rules()
    model, x = made()
    autopar.plan(model, MESH, example_inputs=x, rules=[RULE])
    assert rules() == before
    with pytest.raises(UnknownOperatorError, match=r"userops\.gate"):
        autopar.plan(model, MESH, example_inputs=x, unknown_ops="error")
    autopar.plan(model, MESH, example_inputs=x, unknown_ops="error", rules=[RULE])


def claim(spec: str, *examples: str, linear: bool = False) -> autopar.OpRule:
    return autopar.rule("userops::gate", spec, linear=linear, examples=examples)


WRONG = {
    "h@x": claim("b s h, k -> b s h", *EXAMPLES),
    "does not fit": claim("b s h, h -> b h s", EXAMPLES[1]),
    "+@x": claim("b s h, h -> b s h", *EXAMPLES, linear=True),
    "no example": claim("b s h, h -> b s h"),
    "cannot run": claim("b s h, h -> b s h", "f64[4], f64[5]"),
    "no operator": autopar.rule("userops::nothing", "b -> b", examples=["f64[4]"]),
    "autopar.rule": "b s h, h -> b s h",
}


@pytest.mark.parametrize(("says", "rule"), WRONG.items())
def test_a_wrong_rule_is_refused_by_name(says: str, rule: Any) -> None:
    model, x = made()
    with pytest.raises(RuleError) as raised:
        autopar.plan(model, MESH, example_inputs=x, rules=[rule])
    assert says in str(raised.value)
    with pytest.raises(RuleError):
        autopar.compile(model, "cpu: x=1", rules=[rule])


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_a_rule_is_proved_in_the_dtype_of_its_examples(dtype: str) -> None:
    example = f"{dtype}[4, 6, 8], {dtype}[8]"
    own = table([autopar.rule("userops::gate", "b s h, h -> b s h", examples=[example])])
    assert own["userops.gate"].examples == (example,)
    with pytest.raises(RuleError, match="wrong"):
        table([claim("b s h, h! -> b s h!", example, linear=True)])


ON_GPU = autopar.rule("userops::gpu_only", "... -> ...", examples=["const f64[4, 6]"])


def test_an_operator_for_gpus_only_cannot_be_proved_without_one() -> None:
    with pytest.raises(RuleError, match=r"cannot run userops\.gpu_only"):
        table([ON_GPU])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_operator_for_gpus_only_is_proved_on_one() -> None:
    assert "userops.gpu_only" in table([ON_GPU], torch.device("cuda"))
    wrong = autopar.rule("userops::gpu_only", "a b -> b a", examples=["const f64[6, 6]"])
    with pytest.raises(RuleError, match="wrong"):
        table([wrong], torch.device("cuda"))


def test_two_rules_for_one_operator_are_refused() -> None:
    model, x = made()
    with pytest.raises(RuleError, match="two rules"):
        autopar.plan(model, MESH, example_inputs=x, rules=[RULE, RULE])


def test_an_own_rule_comes_before_the_one_that_is_there() -> None:
    linear = "f64[2, 4, 6], f64[8, 6], f64[8]"
    whole = autopar.rule("aten::linear", "b! s! k!, n! k!, n! -> b! s! n!", examples=[linear])
    model, x = made()
    plan = autopar.plan(model, MESH, example_inputs=x, rules=[whole])
    assert "@" not in str(plan.stage.nodes["linear"])
    assert "@" in str(autopar.plan(model, MESH, example_inputs=x).stage.nodes["linear"])


class Safe(Gated):
    """With an operator for which there is no rule, but a definition by operators that have one."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.ops.aten._softmax(self.up(x), -1, False)
        return (self.down(weights) - x).square().mean()


def test_an_operator_without_a_rule_is_split_by_its_definition() -> None:
    assert "aten._softmax" not in rules()
    x = torch.randn(8, 4, 16, dtype=torch.float64)
    plan = autopar.plan(Safe().double(), MESH, example_inputs=x, unknown_ops="error")
    assert "@" in str(plan.stage.nodes["_softmax_exp"])
