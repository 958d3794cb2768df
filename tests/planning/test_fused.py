"""A kernel's price is below that of the operators that it replaces, in plan and simulator."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.intra_op.work.kernel_work import works
from autopar.ir.fusion import UPDATE, switches
from autopar.ir.graph import PREFIX, Graph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import run, settings_on, tasks
from autopar.stage_plan import StagePlan
from tests.support.mixed import used_whole

GPUS = Mesh.parse("H100: gpu=4")
WIDTH, WORDS, ROWS = 256, 4096, (8, 512)


class Model(nn.Module):
    """A norm, a gate, and the loss of a last linear, of which the model gives the logits too."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.table = nn.Embedding(words, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        h = x + self.mix(x)
        y = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        h = h + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


def planned(
    fuse: tuple[str, ...], words: int = WORDS, **how: Any
) -> tuple[Graph, StagePlan, float, float]:
    """The graph and its plan, and the seconds and bytes of the simulated step."""
    with torch.device("meta"):
        model = Model(words)
    ids = torch.zeros(ROWS, dtype=torch.int64, device="meta")
    options = Options(fuse=fuse, **how)
    graph = capture_graph(model, (ids, ids), {}, options, Trace(None)).graph
    plan = make_plan(graph, GPUS, options, Trace(None))
    prices = AnalyticModel(GPUS)
    done = tasks(graph, plan, works(graph, plan, options.table), prices, settings_on("H100"))
    played = run(done, prices, 1.0)
    return graph, plan, played.seconds, played.memory.peak


@pytest.fixture(scope="module")
def both() -> tuple[Graph, StagePlan]:
    plain, _, seconds, peak = planned(())
    graph, plan, fused_seconds, fused_peak = planned(switches())
    assert not any(node.op.startswith(PREFIX) for node in plain.nodes)
    assert fused_seconds < seconds
    assert fused_peak < peak  # neither logits nor their gradients are there at once
    return graph, plan


def test_a_plan_says_what_was_fused_and_what_it_saves(
    both: tuple[Graph, StagePlan],
) -> None:
    _, plan = both
    assert set(plan.fused) == {"add_rms_norm", "swiglu", "linear_cross_entropy", "adamw_"}
    # One pass is what it would be otherwise, too.
    assert plan.fused["adamw_"].nbytes == pytest.approx(0.0)
    for name in ("add_rms_norm", "swiglu"):
        entry = plan.fused[name]
        assert entry.count == 1
        assert entry.nbytes > 0
        assert entry.seconds > 0
        assert "test_fused.py:" in entry.first
    assert Plan.from_toml(Plan.of(plan).to_toml()).stage == plan


def test_the_optimizers_kernel_rounds_masters_and_needs_no_temporaries() -> None:
    how = {
        "precision": Precision.read("bf16"),
        "pins": [used_whole],
        "state": "ddp",
        "words": 1 << 16,
    }
    graph, plan, seconds, peak = planned((UPDATE,), **how)
    _, plain, plain_seconds, plain_peak = planned((), **how)
    assert plan.fuses_update
    assert not plain.fuses_update
    assert not plain.fused
    elements = sum(leaf.type.numel for leaf in graph.leaves("param"))
    assert plan.fused["adamw_"].nbytes == 4 * elements  # masters are not read once more
    # Gradients of the two matrices as large as the vocabulary are full buckets of their own.
    assert 2 <= plan.fused["adamw_"].count <= -(-4 * elements // plan.bucket)
    assert plan.fused["adamw_"].seconds > 0
    assert seconds < plain_seconds
    assert peak <= plain_peak
    prices = AnalyticModel(GPUS).collective
    assert "FUSED_UPDATE = True" in emit(graph, plan, prices)
    assert "FUSED_UPDATE" not in emit(graph, plain, prices)


def test_programs_leave_out_what_nobody_asks_for(
    both: tuple[Graph, StagePlan],
) -> None:
    graph, plan = both
    source = emit(graph, plan, AnalyticModel(GPUS).collective)
    body = source.partition("def forward(mesh, p, batch, outputs=True):")[2]
    step, _, aside = body.partition("if not outputs:")
    assert "kernels.linear_cross_entropy(" in step
    assert "head" in aside
    assert "ASIDE = True" in source
    assert re.search(r"from autopar.runtime.api import .*kernels", source)
