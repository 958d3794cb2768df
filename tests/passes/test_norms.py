"""Batch norms written out compute what torch's do, and let devices share the work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.cost.model import AnalyticModel
from autopar.intra_op.build import build, layouts
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.operators.interpret import run
from autopar.passes.normalise import prepare
from autopar.passes.norms import lower_batch_norms
from autopar.passes.verify import verify
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.graphs import assert_equal_runs, captured_double, leaf_values
from tests.support.models import conv_net

LEAVES = """
graph 'g'
%x = param('x') : f64[4, 6, 5] grad
%w = param('w') : f64[6] grad
%b = param('b') : f64[6] grad
%m = buffer('m') : f64[6]
%v = buffer('v') : f64[6]
"""
CALLS = {
    "all": "%x, %w, %b, %m, %v, True, 0.1, 1e-05",
    "no affine": "%x, None, None, %m, %v, True, 0.25, 0.001",
    "no bias": "%x, %w, None, %m, %v, True, 0.1, 1e-05",
}
TRACKING = """
%all = aten._native_batch_norm_legit_functional({}) : {}, f64[6], f64[6], f64[6], f64[6] grad
%y = getitem(%all, 0) : {} grad
%mean = getitem(%all, 3) : f64[6]
%variance = getitem(%all, 4) : f64[6]
%m_write = autopar.write(%m, %mean) : f64[6]
%v_write = autopar.write(%v, %variance) : f64[6]
output 'y' = %y
"""
X = "f64[4, 6, 5]"
PLAIN = f"""{LEAVES}
%y = aten.batch_norm(%x, %w, %b, {{}}, 0.1, 1e-05, True) : {X} grad
output 'y' = %y
"""


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_it_computes_the_same_and_tracks_the_same(call: str) -> None:
    before = parse_graph(LEAVES + TRACKING.format(call, X, X))
    after = verify(lower_batch_norms(verify(before)))
    assert not any("norm" in node.op for node in after.nodes)
    assert_equal_runs(before, after, leaf_values(before, 0))


def test_one_that_tracks_nothing_computes_the_same() -> None:
    before = parse_graph(PLAIN.format("None, None, True"))
    after = verify(lower_batch_norms(verify(before)))
    assert "aten.batch_norm" not in {node.op for node in after.nodes}
    assert_equal_runs(before, after, leaf_values(before, 0))


def test_in_evaluation_it_stays() -> None:
    graph = parse_graph(PLAIN.format("%m, %v, False"))
    assert lower_batch_norms(graph) == graph


def test_half_precision_takes_its_statistics_in_float32() -> None:
    before = parse_graph(PLAIN.format("None, None, True").replace("f64", "bf16"))
    after = verify(lower_batch_norms(before))
    values = {k: v.to(torch.bfloat16) for k, v in leaf_values(before, 0).items()}
    expected, found = (
        run(graph, {k: v.clone() for k, v in values.items()})["y"] for graph in (before, after)
    )
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    centred = next(node for node in after.nodes if node.op == "aten.sub.Tensor")
    assert centred.type.dtype == "f32"


def test_devices_share_the_work() -> None:
    """Of convolutions and norms; a norm that stays one operator stays whole."""
    model, batch = conv_net(batch=64)
    graph = prepare(captured_double(model, batch)[0])
    mesh = Mesh.parse("toy[1GFLOP/s 64GiB 1GB/s]: gpu=4 @10GB/s 1us")
    built = build(graph, mesh, AnalyticModel(mesh), rules())
    plan = layouts(built, graph, solve(built.problem).choice)
    large = [node for node in graph.nodes if node.type.shape == (64, 8, 8, 8)]
    assert len(large) > 10
    for node in large:
        assert plan[node.name].results[0][1].sharded_axes == ("gpu",), node


def test_sync_batch_norm_of_torch_is_the_same() -> None:
    """torch.nn.SyncBatchNorm in one process is a batch norm."""
    torch.manual_seed(0)
    model = nn.SyncBatchNorm(6).double()
    graph, values = captured_double(model, {"input": torch.randn(4, 6, 5)})
    assert "aten._native_batch_norm_legit_functional" in {node.op for node in graph.nodes}
    assert_equal_runs(graph, prepare(graph), values)


def test_a_planned_norm_is_sums_over_parts_of_the_batch() -> None:
    """A variance in one operator would need its whole batch on every device."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        x = torch.zeros(8, 3, 5, 5)
    captured = capture_graph(model, (x,), {}, Options(), Trace(None))
    assert "aten.var_mean.correction" not in {node.op for node in captured.graph.nodes}
    sums = [node for node in captured.graph.nodes if node.op == "aten.sum.dim_IntList"]
    assert len(sums) == 2  # of the values and of their squares
