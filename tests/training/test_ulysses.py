"""Rows exchanged for heads before attention (Ulysses), rotated and packed by one kernel."""

from __future__ import annotations

import importlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import autopar
from autopar.capture.capture import Captured
from autopar.ir.fusion import PACK, Fuse, choose
from autopar.ir.fusion.packed import packing
from autopar.ir.graph import Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout, TensorType
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.support.parity import Batch, Run, make, optimizer, train_plainly
from tests.support.ranks import run_ranks

MESH, ROWS, BATCH = "cpu[1TFLOP/s 64GiB 1TB/s]: gpu=2 @10GB/s 1us", 16, 2
ATTENTION = "model.model.layers.*.self_attn"
PINS = {
    **{f"{ATTENTION}.{name}": f"[{BATCH}, {ROWS}@gpu, 64]" for name in ("q_proj", "o_proj")},
    **{f"{ATTENTION}.{name}": f"[{BATCH}, {ROWS}@gpu, 32]" for name in ("k_proj", "v_proj")},
    "model.model.embed_tokens": f"[{BATCH}, {ROWS}@gpu, 64]",  # or it would be exchanged, too
    "%scaled_dot_product_attention*": f"[{BATCH}, 4@gpu, {ROWS}, 16]",
}
WAYS: tuple[Fuse, ...] = (True, {PACK: False})
STEPS = 4


def llama() -> tuple[torch.nn.Module, Batch]:
    model, batch = make("llama", torch.float64, 0.0)
    return model, {name: tensor[:BATCH] for name, tensor in batch.items()}


def captured(fuse: Fuse) -> Captured:
    return capture_graph(*pair(), Options(fuse=choose(fuse)), Trace(None))


def pair() -> tuple[torch.nn.Module, tuple[()], Batch]:
    model, batch = llama()
    return model, (), batch


def planned(found: Captured, fuse: Fuse) -> StagePlan:
    return make_plan(
        found.graph, Mesh.parse(MESH), Options(fuse=choose(fuse), pins=PINS), Trace(None)
    )


def trained(found: list[Captured]) -> list[Run]:
    """The runs of this rank, one for each of `WAYS`."""
    compiler = importlib.import_module("autopar.session.compiler")
    runs = []
    for fuse, graph in zip(WAYS, found, strict=True):
        model, batch = llama()
        with patch.object(compiler, "capture_parts", lambda *_, graph=graph: graph):
            program = autopar.compile(
                model, MESH, optimizer=optimizer, example_inputs=batch, pins=PINS, fuse=fuse
            )
        losses = [program.step(**batch).item() for _ in range(STEPS)]
        runs.append(Run(losses, program.state_dict(), 0, program.source))
    return runs


def test_training_is_that_of_one_device_packed_or_not() -> None:
    model, batch = llama()
    losses = train_plainly(lambda: model(**batch), optimizer(model.parameters()), STEPS)
    whole = Run(losses, model.state_dict(), 0)
    ranks = run_ranks(trained, [captured(fuse) for fuse in WAYS], count=2)
    for rank in ranks:
        assert max(run.error(whole) for run in rank) <= 1e-9
    packed, apart = (run.source for run in ranks[0])
    # Queries and keys by the kernel, values and what attention gives by themselves.
    assert packed.count("mesh.rotary_all_to_all(") == 2
    assert packed.count("dim=2, to_dim=1, axis=") == 2
    assert "rotary_all_to_all" not in apart
    assert apart.count("kernels.rotary(") == 2


def test_it_is_in_the_table_and_takes_as_long_as_its_exchange() -> None:
    graph = captured(True)
    packed, apart = planned(graph, True), planned(graph, {PACK: False})
    assert PACK not in apart.fused
    entry = packed.fused[PACK]
    # Two blocks, queries and keys; half of 4 and of 2 heads. A copy reads and writes.
    values = BATCH * ROWS * 16 * (4 + 2) // 2
    assert (entry.count, entry.nbytes) == (4, 2 * 3 * 2 * 8 * values)
    assert entry.seconds > 0
    # The price of an exchange counts no copies, so that it is the packed one's in any case.
    assert packed.predicted.step_seconds == pytest.approx(apart.predicted.step_seconds)
    again = Plan.from_toml(Plan.of(packed).to_toml())
    assert again.stage.fused == packed.fused


@pytest.mark.parametrize(
    ("shape", "given", "wanted", "packs"),
    [
        ((2, 16, 4, 8), "[2, 16@gpu, 4, 8]", "[2, 16, 4@gpu, 8]", True),
        ((2, 16, 4, 8), "[2, 16@gpu, 4, 8]", "[2@gpu, 16, 4, 8]", False),
        ((2, 16, 4, 8), "[2, 16, 4@gpu, 8]", "[2, 16@gpu, 4, 8]", False),
        ((2, 17, 4, 8), "[2, 17@gpu, 4, 8]", "[2, 17, 4@gpu, 8]", False),
        ((2, 16, 5, 8), "[2, 16@gpu, 5, 8]", "[2, 16, 5@gpu, 8]", False),
        ((2, 16, 4, 8), "[2, 16@gpu, 4, 8]", "[2, 16@gpu, 4, 8]", False),
    ],
)
def test_only_equal_parts_of_rows_and_heads_are_packed(
    shape: tuple[int, ...], given: str, wanted: str, packs: bool
) -> None:
    mesh = Mesh.parse("cpu: gpu=2")
    node = Node("r", "kernels.rotary", (Ref("x"),), (), (TensorType("f64", shape),))
    ends = (Layout.parse(text)[1] for text in (given, wanted))
    step = packing(replace(node, requires_grad=True), *ends, Resharder(mesh, lambda c: c.nbytes))
    assert (step is not None) == packs
