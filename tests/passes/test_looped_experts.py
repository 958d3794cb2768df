"""Loops over lists of experts: one mixture in the graph, with the model's own values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.operators.interpret import run
from autopar.operators.mixture import MIXTURE
from autopar.passes.normalise import prepare
from tests.support.expert_loops import (
    CHOICES,
    MIXTURES,
    OTHERS,
    WIDTH,
    Gated,
    Layers,
    Loop,
    Normed,
    Plain,
    mistral,
)


def mixtures_of(model: nn.Module, tokens: int = 12) -> int:
    """Counts mixtures; checks that the graph computes the model's values and gradients."""
    model = model.double()
    torch.manual_seed(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    x = torch.randn(tokens, WIDTH, dtype=torch.float64)
    captured = capture(model, (x,))
    graph = prepare(captured.graph)
    model(x).backward()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    run(graph, {**leaves, **captured.buffers, "x": x})["loss"].backward()
    for name, parameter in model.named_parameters():
        mine, its = (p.new_zeros(()) if p.grad is None else p.grad
                     for p in (leaves[name], parameter))  # fmt: skip
        torch.testing.assert_close(*torch.broadcast_tensors(mine, its), rtol=1e-10, atol=1e-12)
    return sum(node.op == MIXTURE for node in graph.nodes)


def expected(name: str) -> int:
    return CHOICES if name == "each_slot" else 1


# One of each kind of spelling: masks, tables of positions, capacities, sums over all experts.
QUICK = (
    "mixtral", "deepseek", "sparse_gates", "each_slot", "scattered", "within_capacity",
    "unique_ids", "counted", "summed_stack", "identity",
)  # fmt: skip


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(MIXTURES), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_loop_is_one_mixture(names: tuple[str, ...]) -> None:
    """Two tokens leave an expert without rows."""
    for number, name in enumerate(names):
        expert = (Plain, Gated)[number % 2]
        assert mixtures_of(Loop(MIXTURES[name], expert), tokens=2) == expected(name), name


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_a_loop_of_either_experts_is_one_mixture(name: str) -> None:
    for expert in (Plain, Gated):
        assert mixtures_of(Loop(MIXTURES[name], expert)) == expected(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_left_alone(name: str) -> None:
    assert mixtures_of(Loop(OTHERS[name])) == 0


def test_other_experts_run_on_all_tokens() -> None:
    assert mixtures_of(Loop(mistral, Normed), tokens=2) == 0


def test_blocks_with_shared_experts_and_residuals() -> None:
    assert mixtures_of(Layers(MIXTURES["sparse_gates"])) == 2
