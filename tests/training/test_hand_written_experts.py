"""Mixtures that are written as loops over modules train on several ranks as they do on one."""

from __future__ import annotations

import importlib
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Captured
from autopar.operators.mixture import MIXTURE
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support import expert_loops
from tests.support.expert_loops import (
    MIXTURES,
    WIDTH,
    Gated,
    Layers,
    Loop,
    Plain,
    mistral,
)
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks
from tests.training.test_expert_parallel import WAYS, only
from tests.training.test_families import STEPS, TOLERANCE, Run, sgd

TOKENS = 8
Jobs = dict[tuple[str, str], Captured]  # body and way -> the captured model


def dropped(model: Loop, x: Tensor) -> Tensor:
    """Dropout of what experts read and of what they give, with the masks of one process."""
    return F.dropout(mistral(model, F.dropout(x, 0.2)), 0.3)


BODIES = {**MIXTURES, "dropped": dropped}


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Two blocks in float64, the same at every call; all tokens choose the same two experts.

    These are the first ones, and of "identity" the first one and the one that gives tokens back.
    """
    torch.manual_seed(0)
    model = Layers(BODIES[name], (Plain, Gated)[len(name) % 2]).double()
    chosen = [0, expert_loops.EXPERTS - 1] if name == "identity" else [0, 1]
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("router.bias"):
                parameter.zero_()[chosen] = 9.0
    return model, {"x": torch.randn(TOKENS, WIDTH, dtype=torch.float64)}


def train_whole(name: str) -> Run:
    """On one device, by the loop itself."""
    model, batch = make(name)
    torch.manual_seed(1)
    losses = train_plainly(lambda: model(**batch), sgd(model.parameters()), STEPS)
    return Run(losses, dict(model.state_dict()))


def train(jobs: Jobs, experts: int) -> dict[tuple[str, str], Run]:
    """The runs of this rank."""
    expert_loops.EXPERTS = experts
    compiler = importlib.import_module("autopar.session.compiler")
    runs = {}
    for (name, way), captured in jobs.items():
        model, batch = make(name)
        with patch.object(compiler, "capture_parts", lambda *_, c=captured: c), only(way):
            program = autopar.compile(model, WAYS[way][0], optimizer=sgd, example_inputs=batch)
        torch.manual_seed(1)
        losses = [program.step(**batch).item() for _ in range(STEPS)]
        runs[name, way] = Run(losses, program.state_dict(), program.source)
    return runs


def check(pairs: list[tuple[str, str]], count: int) -> None:
    jobs = {}
    for name, way in pairs:
        model, batch = make(name)
        captured = capture_graph(model, (), batch, Options(), Trace(None))
        assert any(node.op == MIXTURE for node in captured.graph.nodes), name
        jobs[name, way] = captured
    ranks = run_ranks(train, jobs, expert_loops.EXPERTS, count=count)
    for name, way in pairs:
        whole = train_whole(name)
        runs = [rank[name, way] for rank in ranks]
        assert max(max(run.errors(whole)) for run in runs) <= TOLERANCE, (name, way)
        assert "over=" in runs[0].source or "direct" in way, (name, way)


def test_ranks_without_a_token_and_dropout() -> None:
    check([("dropped", "pair")], 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "pair"])
def test_every_loop_on_four_ranks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five experts: as many as ranks or more, and unevenly split."""
    monkeypatch.setattr(expert_loops, "EXPERTS", 5)
    check([(name, way) for name in BODIES], 4)
