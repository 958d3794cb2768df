"""Known optima of captured models, with prices computed by the cost model's functions.

Figures are those of real clusters, and models are on the meta device, so nothing is computed.
Communication is counted by running the generated source on tensors without memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.capture.capture import capture
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError
from autopar.intra_op.build import Built, build, layouts
from autopar.intra_op.polish import polish
from autopar.intra_op.problem import evaluate, frugal
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from autopar.runtime.module_loader import load
from autopar.stage_plan import StagePlan
from tests.runtime.test_sent import Ledger, priced
from tests.support.models import mlp, squared_error

NODE = Mesh.parse("H100: gpu=8")
# Devices share cards in pairs. A batch of eight leaves eight of sixteen to tensor parallelism.
PODS = Mesh.parse("H100: node=2 @25GB/s, gpu=8")


@dataclass(frozen=True)
class Best:
    """The optimum of a graph, as a problem and as a plan."""

    graph: Graph
    built: Built
    plan: StagePlan
    objective: float

    def __getitem__(self, name: str) -> str:
        """The line of the plan for the only node of that name or operator."""
        (found,) = (n.name for n in self.graph.folded if name in (n.name, n.op))
        return str(self.plan.nodes[found])

    def lines(self, op: str) -> list[str]:
        return [str(self.plan.nodes[n.name]) for n in self.graph.folded if n.op == op]

    def sent(self) -> list[Collective]:
        """The collectives of one step, by running the source on the meta device."""
        mesh = self.plan.mesh
        program = load(emit(self.graph, self.plan, AnalyticModel(mesh).collective), "<meta>")
        ledger = Ledger(mesh)
        ledger.device = torch.device("meta")
        dtypes = {"f32": torch.float32, "i64": torch.int64}
        p = {
            q.key: torch.empty(
                q.layout.local_shape(q.shape, mesh), dtype=dtypes[q.dtype], device="meta"
            ).requires_grad_(q.trainable)
            for q in program.parameters()
        }
        batch = {
            leaf.target: torch.empty(leaf.type.shape, dtype=dtypes[leaf.type.dtype], device="meta")
            for leaf in self.graph.leaves("input")
        }
        torch.autograd.backward(program.forward(ledger, p, batch)[program.LOSS])
        return ledger.calls


def graph_of(model: nn.Module, batch: dict[str, Tensor], loss_fn: Any = None) -> Graph:
    return prepare(capture(model, (), batch, loss_fn=loss_fn).graph)


def best(
    graph: Graph, mesh: Mesh, limit: float | None = None, pins: dict[str, str] | None = None
) -> Best:
    """Returns the optimum, checked by code that the solver does not use."""
    built = build(graph, mesh, AnalyticModel(mesh), rules(), memory_limit=limit, pins=pins)
    solution = solve(built.problem, gap=0.0)
    judged = evaluate(built.problem, solution)
    assert judged.feasible
    assert judged.cost == pytest.approx(solution.objective, rel=1e-9, abs=0.0)
    choice = polish(built, solution.choice)
    polished = evaluate(built.problem, choice)
    assert polished.cost == pytest.approx(judged.cost, rel=1e-9, abs=0.0)
    assert polished.feasible
    figures = built.figures(choice)
    assert figures.step_seconds == pytest.approx(solution.objective, rel=1e-9, abs=0.0)
    assert figures.peak_bytes == pytest.approx(polished.peak, rel=1e-9, abs=0.0)
    plan = StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice), predicted=figures)
    return Best(graph, built, plan, solution.objective)


def perceptron(sizes: tuple[int, ...], batch: int) -> Graph:
    with torch.device("meta"):
        model, inputs = mlp(sizes, batch)
    return graph_of(model, inputs, squared_error)


def seconds(mesh: Mesh, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
    return AnalyticModel(mesh).collective(Collective(kind, axes, nbytes))


def wire(call: Collective) -> float:
    """Bytes that each device sends in a ring."""
    n = math.prod(PODS.axis_size(axis) for axis in call.axes)
    times = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}
    return call.nbytes * times.get(call.kind, (n - 1) / n)


def test_a_big_batch_is_split_at_the_price_of_one_all_reduce_a_parameter() -> None:
    batch = 1 << 17
    found = best(perceptron((256, 512, 512, 256), batch), NODE)
    for line in [*found.lines("aten.linear"), *found.lines("aten.gelu")]:
        assert line.startswith(f"[{batch}@gpu, ")
        assert f"-> [{batch}@gpu, " in line
    parameters = found.graph.leaves("param")
    assert len(parameters) == 6
    expected = [seconds(NODE, "all_reduce", ("gpu",), leaf.type.nbytes) for leaf in parameters]
    predicted = found.plan.predicted
    assert predicted.parameter_seconds == pytest.approx(math.fsum(expected), rel=1e-9, abs=0.0)
    # Besides, the loss is summed, a number of four bytes.
    loss = seconds(NODE, "all_reduce", ("gpu",), 4)
    assert predicted.reshard_seconds == pytest.approx(loss, rel=1e-9, abs=0.0)


def test_what_data_parallelism_saves_is_what_it_computes_less() -> None:
    """Eight times the batch on eight devices takes as long as one on one, but for the sums."""
    one = best(perceptron((256, 512, 512, 256), 1 << 14), Mesh.parse("H100: gpu=1"))
    eight = best(perceptron((256, 512, 512, 256), 1 << 17), NODE)
    assert one.plan.predicted.reshard_seconds == one.plan.predicted.parameter_seconds == 0
    computing = eight.plan.predicted.compute_seconds
    assert computing == pytest.approx(one.objective, rel=1e-9, abs=0.0)


def test_big_weights_are_split_by_columns_then_rows_at_one_all_reduce_a_pair() -> None:
    batch, width, inner = 64, 8192, 32768
    found = best(perceptron((width, inner, width, inner, width), batch), NODE)
    columns, rows = found.lines("aten.linear")[::2], found.lines("aten.linear")[1::2]
    assert len(columns) == len(rows) == 2
    for line in columns:
        assert f"[{inner}@gpu, {width}]; [{inner}@gpu] -> [{batch}, {inner}@gpu]" in line
    for line in rows:
        assert line.startswith(f"[{batch}, {inner}@gpu]; [{width}, {inner}@gpu]")
        assert line.endswith(f"-> [{batch}, {width}] +sum(gpu)")
    assert found.plan.predicted.parameter_seconds == 0
    # Forwards one sum for each pair; backwards one where the pair's input has a gradient. Between
    # the pairs it may be a reduce_scatter and an all_gather, which take as long as an all_reduce.
    kinds = Counter(call.kind for call in found.sent())
    assert kinds["all_reduce"] + kinds["reduce_scatter"] == 3
    assert kinds["all_gather"] == kinds["reduce_scatter"]
    expected = 3 * seconds(NODE, "all_reduce", ("gpu",), batch * width * 4)
    predicted = found.plan.predicted
    assert predicted.reshard_seconds == pytest.approx(expected, rel=1e-9, abs=0.0)


def test_a_small_model_on_quick_devices_is_not_split_at_all() -> None:
    found = best(perceptron((16, 32, 8), 8), NODE)
    assert found.plan.predicted.compute_seconds == found.objective
    assert found.sent() == []


def test_the_optimum_is_that_of_all_choices() -> None:
    for mesh in ("H100: gpu=8", "toy[100GFLOP/s 1GiB 1GB/s]: gpu=2 @1GB/s 100ns"):
        graph = perceptron((16, 8), 4096)
        found = best(graph, Mesh.parse(mesh))
        every = solve(found.built.problem, "brute_force")
        assert found.objective == pytest.approx(every.objective, rel=1e-9, abs=0.0)


def test_less_memory_gives_another_plan_that_keeps_to_it_and_is_no_faster() -> None:
    graph = perceptron((256, 512, 512, 256), 1 << 17)
    free = best(graph, NODE)
    # The most frugal choices do not all go together: the solver tells what is attainable.
    below = sum(frugal(free.built.problem.nodes)[1].values())
    with pytest.raises(InfeasibleError) as refused:
        best(graph, NODE, limit=below)
    said = re.search(r"least attainable peak: ([\d.e+]+) bytes", refused.value.why)
    assert said is not None
    least = 1.00001 * float(said[1])
    assert least >= below
    peak, before = free.plan.predicted.peak_bytes, free
    for share in (0.5, 0.25, 0.05):
        limit = least + share * (peak - least)
        tight = best(graph, NODE, limit=limit)
        assert tight.plan.predicted.peak_bytes <= limit
        assert tight.plan.nodes != free.plan.nodes
        assert tight.objective >= before.objective * (1 - 1e-12)
        before = tight
    # Parameters are no longer whole on every device.
    stored = [tight.plan.nodes[leaf.name].results[0][1] for leaf in graph.leaves("param")]
    assert any(layout.sharded_axes for layout in stored)
    with pytest.raises(InfeasibleError):
        best(graph, NODE, limit=0.99 * least)


@pytest.fixture(scope="module")
def transformer() -> Graph:
    config = GPT2Config(
        vocab_size=16384, n_positions=4096, n_embd=6144, n_layer=4, n_head=48, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = GPT2LMHeadModel(config), torch.zeros(8, 4096, dtype=torch.int64)
    return graph_of(model, {"input_ids": tokens, "labels": tokens})


def test_between_nodes_only_gradients_of_parameters_travel(transformer: Graph) -> None:
    """Tensor parallelism within a node, data parallelism across: Megatron-LM's advice (2104.04473).

    The slow axis splits the batch alone, and what crosses it is each device's own part of every
    parameter's gradient, once. Within a node activations travel, which are larger, but smaller than
    the gradients of whole weights: of narrow blocks most weights would be whole.
    """
    found = best(transformer, PODS)
    for node in transformer.folded:
        for shape, layout in found.plan.nodes[node.name].results:
            over = [dim for dim, axes in enumerate(layout.dims) if "node" in axes]
            rows = shape[:1] in ((8,), (8 * 4096,))  # of the batch, or of its tokens
            assert over == [] or (over == [0] and rows and node.op != "param"), node.name
    for line in found.lines("aten.scaled_dot_product_attention"):
        assert line.endswith("-> [8@node, 48@gpu, 4096, 128]")
    calls = found.sent()
    total = math.fsum(AnalyticModel(PODS).collective(call) for call in calls)
    predicted = priced(transformer, found.plan, AnalyticModel(PODS))
    assert total == pytest.approx(predicted, rel=1e-9, abs=0.0)
    nbytes = {axis: sum(wire(c) for c in calls if axis in c.axes) for axis in PODS.names}
    assert nbytes["node"] < nbytes["gpu"] / 2
    slow = [call for call in calls if "node" in call.axes and call.nbytes > 8]
    assert {call.kind for call in slow} == {"all_reduce"}
    parameters = transformer.leaves("param")
    assert len(slow) == len(parameters)
    assert sum(call.nbytes for call in slow) <= sum(leaf.type.nbytes for leaf in parameters)


def test_the_axes_the_wrong_way_round_are_slower(transformer: Graph) -> None:
    found = best(transformer, PODS)
    block = "transformer.h.*."
    across = {
        f"{block}mlp.c_fc.weight": "[6144, 24576@node]",
        f"{block}mlp.c_proj.weight": "[24576@node, 6144]",
    }
    within = {name: text.replace("node", "gpu") for name, text in across.items()}
    assert best(transformer, PODS, pins=within).objective == pytest.approx(
        found.objective, rel=1e-9, abs=0.0
    )
    assert best(transformer, PODS, pins=across).objective > found.objective
