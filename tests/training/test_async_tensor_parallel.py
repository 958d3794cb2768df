"""Collectives of tensor parallelism that overlap with linears: trained, priced, and left out."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

import autopar
from autopar.capture.capture import Captured
from autopar.cli import main
from autopar.cli.explain import explained
from autopar.codegen.emit import emit
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.cost.network import near
from autopar.explain.moves import moves
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.ir.fusion import ASYNC, Fuse, choose
from autopar.ir.fusion.async_tensor_parallel import overlapped_step
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.recompute import Recompute, run_names
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout, TensorType
from autopar.pins import data_parallel, megatron_sp
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.communication import communicator as collectives
from autopar.simulate import Settings, run, tasks
from autopar.stage_plan import StagePlan
from tests.runtime.communication.test_async_linear import Called, with_torch_s_operators
from tests.support.parity import Batch, Run, make, optimizer, train_plainly
from tests.support.ranks import run_ranks

PAIR, FOUR = "H100: gpu=2", "H100: gpu=4"
STEPS = 4
HEAD = {"gpt2": 1, "llama": 1}  # gathers before the head, which is split by words
CALLS = ("mesh.all_gather_linear(", "mesh.linear_reduce_scatter(")


def small(name: str, rows: int = 2) -> tuple[torch.nn.Module, Batch]:
    model, batch = make(name, torch.float64, 0.0)
    return model, {key: tensor[:rows] for key, tensor in batch.items()}


@cache
def captured(name: str) -> Captured:
    model, batch = small(name)
    return capture_graph(model, (), batch, Options(), Trace(None))


def planned(name: str, mesh: str, fuse: Fuse = (ASYNC,), **options: object) -> StagePlan:
    said = Options(fuse=choose(fuse), pins=megatron_sp("gpu"), **options)  # type: ignore[arg-type]
    return make_plan(captured(name).graph, Mesh.parse(mesh), said, Trace(None))


def source(name: str, plan: StagePlan) -> str:
    return emit(captured(name).graph, plan, AnalyticModel(plan.mesh).collective)


def varying(plan: StagePlan) -> StagePlan:
    """The plan with the biases behind reduce_scatters used as partial gradients need them."""
    nodes = dict(plan.nodes)
    for name in [name for name in nodes if name.endswith("c_proj_bias_share")]:
        (shape, layout), entry = nodes[name].results[0], nodes[name]
        nodes[name] = replace(entry, results=((shape, replace(layout, varying=("gpu",))),))
    assert nodes != plan.nodes
    return replace(plan, nodes=nodes)


@dataclass(frozen=True)
class Case:
    """A program: its model, mesh and what else `compile` is told."""

    name: str
    mesh: str = PAIR
    how: dict[str, str] = field(default_factory=dict)
    varied: bool = False  # see `varying`

    @property
    def given(self) -> dict[str, object]:
        """Arguments of `compile`."""
        if self.varied:
            return {"plan": Plan.of(varying(planned(self.name, self.mesh)))}
        pins = [data_parallel("data")] * ("data" in self.mesh) + [megatron_sp("gpu")]
        return {"pins": pins, "fuse": [ASYNC], **self.how}

    def trained(self, found: Captured) -> list[tuple[Run, dict[str, int]]]:
        """Returns this rank's runs, without and with torch's operators, and numbers of calls."""
        called, runs = Called(), []
        library = with_torch_s_operators(called)
        compiler = importlib.import_module("autopar.session.compiler")
        for direct in (False, True):
            model, batch = small(self.name)
            with (
                patch.object(compiler, "capture_parts", lambda *_: found),
                patch.object(collectives, "reach_one_another", lambda group, direct=direct: direct),
            ):
                program = autopar.compile(
                    model,
                    self.mesh,
                    optimizer=optimizer,
                    example_inputs=batch,
                    **self.given,  # type: ignore[arg-type]
                )
                losses = [program.step(**batch).item() for _ in range(STEPS)]
            runs.append((Run(losses, program.state_dict(), 0, program.source), dict(called)))
        del library
        return runs


# Weights are gathered for use and again for the backward, whose blocks run once more.
AGAIN = {"state": "zero3, gathered again", "recompute": "full"}
CASES = [
    pytest.param(Case("gpt2", varied=True), marks=pytest.mark.slow),
    pytest.param(Case("llama"), marks=pytest.mark.slow),
    Case("gpt2"),
    pytest.param(Case("gpt2", how={"backend": "aot_eager"}), marks=pytest.mark.slow),
    pytest.param(Case("llama", "H100: data=2, gpu=2", AGAIN), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_one_device(case: Case) -> None:
    model, batch = small(case.name)
    losses = train_plainly(lambda: model(**batch), optimizer(model.parameters()), STEPS)
    whole = Run(losses, model.state_dict(), 0)
    count = Mesh.parse(case.mesh).size
    for (apart, before), (beside, called) in run_ranks(
        case.trained, captured(case.name), count=count
    ):
        assert max(apart.error(whole), beside.error(whole)) <= 1e-9
        assert before == {}
        # Before attention and the perceptron, and behind them.
        assert [apart.source.count(call) for call in CALLS] == [2 + HEAD[case.name], 2]
        # Two blocks, two of each, each the other's backward; forwards again if they are computed
        # again.
        again = 2 * 2 * ("recompute" in case.how)
        each = STEPS * (2 * (2 + 2) + HEAD[case.name] + again)
        assert called == {"gather": each, "scatter": each}


def test_it_is_on_where_it_is_named() -> None:
    assert ASYNC not in choose(True)
    assert ASYNC not in choose({"gelu": False})
    assert choose([ASYNC]) == choose({ASYNC: True} | dict.fromkeys(choose(True), False)) == (ASYNC,)


def test_the_command_line_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.toml")
    model = ["plan", "gpt2", "--layers", "2", "--seq", "64", "--mesh", PAIR, "-o", path]
    words = ["--pins", "megatron_sp:gpu", "--fuse-also", ASYNC]
    shown = [CliRunner().invoke(main, given) for given in ([*model, *words], ["explain", path])]
    assert all(ASYNC in result.stdout for result in shown), shown[0].output
    assert Plan.load(path).fuse == (ASYNC,)


@pytest.mark.parametrize(("name", "text", "devices"), [("gpt2", FOUR, 4), ("llama", PAIR, 2)])
def test_what_is_hidden_is_its_closed_form(name: str, text: str, devices: int) -> None:
    """(1 - 1/n) (2 - s) min(products, collective) of each, by the moves that a plan lists."""
    graph, mesh = captured(name).graph, Mesh.parse(text)
    on = planned(name, text)
    off = replace(on, fuse=())
    prices, slowdown = AnalyticModel(mesh, in_step=True), device(mesh).slowdown
    kernels = works(graph, on, table())
    expected, count = 0.0, 0
    for move in moves(graph, on, prices.collective):
        reader = graph[move.reader] if move.reader else None
        if reader is None or move.parameter or move.inside:
            continue
        if reader.op == "autopar.share":
            linears = [graph[name] for name in graph.users[reader.name]]
        else:
            linears = [node for node in (reader, graph[move.value]) if node.op == "aten.linear"]
        kinds = [call.kind for call in move.calls]
        if kinds not in (["all_gather", "reduce_scatter"], ["reduce_scatter", "all_gather"]):
            continue
        if not linears or any(node.op != "aten.linear" for node in linears):
            continue
        count += move.times
        for call, side in zip(move.calls, ("forward", "backward"), strict=True):
            # Of a backward the first is the product for the gradient of what is multiplied.
            taken = [getattr(kernels[node.name], side)[:1] for node in linears]
            products = sum(prices.compute(work) for each in taken for work in each)
            shorter = min(products, call.seconds)
            expected += move.times * (1 - 1 / devices) * (2 - slowdown) * shorter
    assert count == 9  # two blocks of four, and the head
    entry = on.fused[ASYNC]
    assert entry.count == count
    assert entry.seconds == pytest.approx(expected)
    # What the solver minimised is what is explained; without, that is so much more.
    steps = [explained(graph, plan, 1e12).step for plan in (on, off)]
    assert steps[0] == pytest.approx(on.predicted.step_seconds)
    assert steps[1] - steps[0] == pytest.approx(expected)
    # Played task by task it is as much, where nothing else overlaps.
    settings = Settings(accelerator=True)
    played = [
        run(tasks(graph, plan, kernels, prices, settings), prices, slowdown) for plan in (on, off)
    ]
    assert played[1].seconds - played[0].seconds == pytest.approx(expected)
    assert played[0].products == pytest.approx(played[1].products)
    again = Plan.from_toml(Plan.of(on).to_toml())
    assert again.stage.fused == on.fused
    assert again.fuse == (ASYNC,)


def test_the_planner_takes_what_is_hidden_into_account() -> None:
    """Megatron's plan leaves no other choice here, so that both differ by what is hidden."""
    on, off = planned("llama", PAIR), planned("llama", PAIR, ())
    hidden = on.fused[ASYNC].seconds
    assert hidden > 0
    assert on.predicted.step_seconds == pytest.approx(off.predicted.step_seconds - hidden)
    held = replace(off, fuse=(ASYNC,))
    graph = captured("llama").graph
    assert explained(graph, on, 1e12).step == pytest.approx(explained(graph, held, 1e12).step)


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("H100: node=2, gpu=8", {"gpu"}),
        ("H100: gpu=16", set()),  # two nodes
        ("H100: gpu=2, data=8", {"data"}),  # gpu goes from node to node
        ("chip[400TFLOP/s 64GiB 1.6TB/s]: gpu=2", set()),  # whose links are not NVLink
        ("cpu: gpu=2", set()),
    ],
)
def test_axes_over_which_devices_read_one_another_s_memory(mesh: str, axes: set[str]) -> None:
    parsed = Mesh.parse(mesh)
    assert near(parsed, device(parsed)) == axes


def test_it_stays_on_such_axes() -> None:
    plan = planned("gpt2", PAIR)
    assert [source("gpt2", plan).count(call) for call in CALLS] == [2 + HEAD["gpt2"], 2]
    for mesh in ("cpu: gpu=2", "H100: gpu=2, data=8"):
        found = source("gpt2", replace(plan, mesh=Mesh.parse(mesh)))
        assert not any(call in found for call in CALLS)


def test_uneven_rows_are_gathered_apart() -> None:
    model, batch = make("llama", torch.float64, 0.0)
    odd = {name: tensor[:2, :15] for name, tensor in batch.items()}
    graph = capture_graph(model, (), odd, Options(), Trace(None)).graph
    said = Options(fuse=(ASYNC,), pins=megatron_sp("gpu"))
    plan = make_plan(graph, Mesh.parse(PAIR), said, Trace(None))
    found = emit(graph, plan, AnalyticModel(plan.mesh).collective)
    assert not any(call in found for call in CALLS)
    assert ASYNC not in plan.fused


def test_products_that_are_kept_are_left_alone() -> None:
    plan = planned("gpt2", PAIR)
    (run_of,) = run_names(captured("gpt2").graph)
    kept = replace(plan, recompute={run_of: Recompute("selective", 1)})
    # Those of the block; the head is in none.
    assert [source("gpt2", kept).count(call) for call in CALLS] == [HEAD["gpt2"], 0]
    again = replace(plan, recompute={run_of: Recompute("full", 1)})
    assert [source("gpt2", again).count(call) for call in CALLS] == [2 + HEAD["gpt2"], 2]


@pytest.mark.parametrize(
    ("shape", "src", "dst", "wide", "beside"),
    [
        ((2, 16, 8), "[2, 16@gpu, 8]", "[2, 16, 8] -sum(gpu)", "", True),
        ((16, 2, 8), "[16@gpu, 2, 8]", "[16, 2, 8] -sum(gpu)", "", True),
        ((2, 16, 8), "[2, 16@gpu, 8]", "[2, 16, 8] -sum(gpu)", "f32", False),  # sums made in f32
        ((2, 15, 8), "[2, 15@gpu, 8]", "[2, 15, 8] -sum(gpu)", "", False),
        ((2, 16, 8), "[2, 16, 8@gpu]", "[2, 16, 8] -sum(gpu)", "", False),  # what is multiplied
        ((2, 16, 8), "[2, 16@gpu, 8]", "[2, 16, 8]", "", False),  # its gradient is not summed
        ((2, 16, 8), "[2, 16@gpu, 8]", "[2, 16, 8@gpu]", "", False),
        ((2, 16, 8), "[2, 16@data, 8]", "[2, 16, 8] -sum(data)", "", False),  # another axis
    ],
)
def test_only_equal_parts_of_rows_are_gathered_beside_linears(
    shape: tuple[int, ...], src: str, dst: str, wide: str, beside: bool
) -> None:
    mesh, tensor = Mesh.parse("H100: data=2, gpu=2"), TensorType("bf16", shape)
    resharder = Resharder(mesh, lambda call: call.nbytes, {"bf16": wide} if wide else {})
    value = Node("x", "aten.gelu", (), (), (tensor,), requires_grad=True)
    steps = resharder.steps(tensor, Layout.parse(src)[1], Layout.parse(dst)[1])
    found = overlapped_step("all_gather", value, steps, {"gpu"}, resharder)
    assert (found is not None) == beside
