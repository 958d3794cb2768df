"""Every user error raises an error that says what, where, why and what to do next.

Nothing hangs, nothing is trained wrongly, and files are written completely or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.cost.model import AnalyticModel, Work
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    CostError,
    InfeasibleError,
    MeshError,
    PinError,
    PlanError,
    PlanMismatchError,
    ProgramError,
    UnknownDeviceError,
    UnknownOperatorError,
)
from autopar.intra_op.build import build
from autopar.intra_op.rules import rules
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from tests.runtime.ranks.test_failure import boom, run
from tests.support import models
from tests.support.ranks import run_ranks
from tests.support.refusals import BATCH, Net, planned, refused, squared

ONE, FOUR = "cpu: x=1", "cpu: gpu=4 @1TB/s 1ns"


def test_a_mesh_needs_its_processes() -> None:
    error = refused(MeshError, lambda: autopar.compile(Net(), FOUR, example_inputs=BATCH))
    assert "4 devices" in error.what
    assert "process group" in error.why
    assert "torchrun --nproc-per-node 4" in error.todo


def mesh_of_four_on_two() -> str:
    with pytest.raises(MeshError) as caught:
        autopar.compile(Net(), FOUR, example_inputs=BATCH, loss_fn=squared)
    return str(caught.value)


def test_a_mesh_of_another_size_than_the_world_is_refused_on_every_rank() -> None:
    for message in run_ranks(mesh_of_four_on_two, count=2):
        assert "4 devices" in message
        assert "2 processes" in message
        assert "start 4 processes or write a mesh of 2" in message


@pytest.mark.parametrize("call", [planned, lambda mesh: autopar.compile(Net(), mesh)])
def test_an_unknown_device_is_named_with_those_that_are_near(call: Callable[[str], Any]) -> None:
    error = refused(UnknownDeviceError, lambda: call("H1000: gpu=1"))
    assert "'H1000'" in error.what
    assert error.where == "H1000: gpu=1"
    assert "H100" in error.why
    described = re.search(r'"(H1000\[.*\]: gpu=1)"', error.todo)
    assert described is not None
    planned(described[1])  # what it advises works


@pytest.mark.parametrize("text", ["", "H100", "H100:", "H100: gpu", "H100: gpu=0", "H100: gpu=-4",
                                  "H100: gpu=4, gpu=2", "gpu=4", "H100: gpu=4 @fast",
                                  None, 4])  # fmt: skip
def test_what_is_no_mesh_is_refused(text: Any) -> None:
    error = refused(MeshError, lambda: planned(text))
    assert error.todo or error.why


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": torch.randn(4, 16)}, ("f32[4, 16]", "f32[8, 16]")),
        ({"x": torch.randn(8, 16).double()}, ("f64[8, 16]", "f32[8, 16]")),
        ({"x": torch.randn(8, 16, 1)}, ("f32[8, 16, 1]", "f32[8, 16]")),
        ({"x": [0.5]}, ("x is a list", "tensor")),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_nothing_trained(
    batch: dict[str, Any], says: tuple[str, str]
) -> None:
    model = Net((16, 32, 8))
    program = autopar.compile(model, ONE, example_inputs=BATCH, loss_fn=squared)
    before = program.state_dict()
    for call in (program.step, program):
        if call is program and says[0] == "f32[4, 16]":
            assert program(**batch).shape == (4, 8)  # evaluations take any number of rows
            continue
        error = refused(BatchError, partial(call, **batch))
        assert says[0] in error.what
        assert says[1] in error.why
        assert error.todo
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name])
    assert program.step(**BATCH).isfinite()  # it goes on


@pytest.mark.parametrize(
    "optimizer", [torch.optim.LBFGS, torch.optim.SGD([nn.Parameter(torch.ones(1))])]
)
def test_what_makes_no_steps_is_no_optimizer(optimizer: Any) -> None:
    error = refused(ProgramError, lambda: planned(optimizer=optimizer))
    assert "optimizer" in error.what
    assert "returns a torch optimizer" in error.todo


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    error = refused(ProgramError, lambda: planned(trace=tmp_path / "file"))
    assert str(tmp_path / "file") in error.what
    assert (tmp_path / "file").read_text() == "here already"


@pytest.mark.parametrize("batch", [{}, {"y": torch.randn(8, 16)}, {**BATCH, "y": torch.ones(1)}])
def test_arguments_that_the_model_does_not_take_are_refused(batch: dict[str, Any]) -> None:
    error = refused(BatchError, lambda: planned(example_inputs=batch, loss_fn=None))
    assert "does not take" in error.what
    assert error.why
    assert "x" in error.todo


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if h.sum() > 0:  # chooses by value
            h = -h
        return h.square().mean()


def test_a_model_that_cannot_be_traced_is_told_which_line_and_what_to_write() -> None:
    error = refused(CaptureError, lambda: autopar.plan(Chooses(), ONE, example_inputs=BATCH))
    assert "torch.export" in error.what
    assert "test_bad_input.py" in error.where
    assert "# chooses by value" in error.where
    assert error.why
    assert "torch.where" in error.todo


@torch.library.custom_op("autopar_test::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    """The cumulative maximum of the negative: nothing the planner could know."""
    return -torch.cummax(x, 0).values


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


mystery.register_autograd(lambda ctx, grad: -grad)


class Mysterious(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = mystery(F.gelu(self.up(x)))  # the line
        return squared(self.down(h))


def test_an_operator_without_a_rule_is_refused_by_name_and_line() -> None:
    error = refused(
        UnknownOperatorError,
        lambda: autopar.plan(Mysterious(), FOUR, example_inputs=BATCH, unknown_ops="error"),
    )
    assert "autopar_test.mystery" in error.what
    assert "test_bad_input.py" in error.where
    assert "# the line" in error.where
    assert 'unknown_ops="replicate"' in error.todo
    misspelt = refused(UnknownOperatorError, lambda: planned(unknown_ops="replicated"))
    assert '"replicate"' in misspelt.todo


def test_an_operator_without_a_rule_runs_whole_and_is_named() -> None:
    model = Mysterious().double()
    batch = {"x": BATCH["x"].double()}
    graph = prepare(capture(model, (), batch).graph)
    (name,) = (node.name for node in graph.nodes if "mystery" in node.op)
    mesh = Mesh.parse(FOUR)
    built = build(graph, mesh, AnalyticModel(mesh), rules())
    assert built.replicated == (name,)
    made = autopar.plan(model, FOUR, example_inputs=batch)
    assert str(made.stage.nodes[name]) == "[8, 64] -> [8, 64]"
    assert any(layout.sharded_axes for e in made.stage.nodes.values() for _, layout in e.results)
    program = autopar.compile(model, ONE, example_inputs=batch)
    assert "torch.ops.autopar_test.mystery" in program.source
    torch.testing.assert_close(program(**batch), model(**batch).detach(), rtol=1e-12, atol=1e-12)


def test_a_plan_for_something_else_shows_what_differs() -> None:
    made = planned(ONE)

    def compiled(model: nn.Module, mesh: str) -> Any:
        return autopar.compile(model, mesh, plan=made, example_inputs=BATCH, loss_fn=squared)

    compiled(Net(), ONE)
    error = refused(PlanMismatchError, lambda: compiled(Net((16, 32, 8)), ONE))
    assert made.graph in error.why
    assert "layers_2_weight" in error.why
    assert error.todo
    error = refused(PlanMismatchError, lambda: compiled(Net(), "cpu: gpu=1"))
    assert "another mesh" in error.what
    assert "x=1" in error.why
    assert "gpu=1" in error.why
    # Of equal nodes, but other sizes.
    error = refused(PlanMismatchError, lambda: compiled(Net((16, 32, 64, 8)), ONE))
    assert made.graph in error.why


NAMES = "__import__('pathlib').Path('ran').touch()"


@pytest.mark.parametrize(
    "content",
    [
        bytes(range(256)) * 64,
        b"\x00" * 100_000,
        b"\x80\x04\x95\x1a\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x09touch ran\x85R.",
        b"",
        b"version = 1",
        b"a = " + b"[" * 100_000,
        b"a = " + b"{b=" * 20_000,
        b"[" + b"a." * 50_000 + b"a]",
        f"version = {NAMES}".encode(),
        f'version = 1\ngraph = "{NAMES}"\nmesh = "{NAMES}"\n[predicted]\n[layouts]'.encode(),
        f'version=1\ngraph="g"\nmesh="cpu: x=1"\n[predicted]\n[layouts]\nx="{NAMES}"'.encode(),
        f'version=1\ngraph="g"\nmesh="cpu: x=1"\n[predicted]\na="{NAMES}"\n[layouts]'.encode(),
        b"!!python/object/apply:os.system ['touch ran']",
    ],
)
def test_a_damaged_or_hostile_plan_is_named_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    error = refused(PlanError, lambda: autopar.Plan.load(path))
    assert str(path) in str(error)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.toml"]


class Broken:
    """A cost model that is right but for one answer."""

    def __init__(self, mesh: Mesh, kind: str, seconds: float) -> None:
        self.model, self.kind, self.seconds = AnalyticModel(mesh), kind, seconds

    def compute(self, work: Work) -> float:
        return self.seconds if self.kind == "compute" else self.model.compute(work)

    def collective(self, call: Collective, /) -> float:
        return self.seconds if self.kind == call.kind else self.model.collective(call)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return prepare(capture(Net(), (), BATCH, loss_fn=squared).graph)


@pytest.mark.parametrize("seconds", [math.nan, -1e-6, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["compute", "all_reduce", "all_gather", "reduce_scatter"])
def test_a_price_that_is_none_never_gets_into_a_problem(
    graph: Graph, kind: str, seconds: float
) -> None:
    mesh = Mesh.parse(FOUR)
    error = refused(CostError, lambda: build(graph, mesh, Broken(mesh, kind, seconds), rules()))
    assert str(seconds) in error.what
    assert ("Work" if kind == "compute" else kind) in error.what
    assert error.why
    assert error.todo


def test_problems_hold_prices_only(graph: Graph) -> None:
    mesh = Mesh.parse(FOUR)
    problem = build(graph, mesh, AnalyticModel(mesh), rules()).problem
    costs = [c for node in problem.nodes for c in node.cost]
    costs += [float(c) for edge in problem.edges for c in edge.cost.flat]
    assert costs
    assert all(math.isfinite(c) and c >= 0 for c in costs)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"memory": 4096}, InfeasibleError),
        ({"pins": {"nothing": "[8]"}}, PinError),
        ({"mesh": "H1000: gpu=4"}, UnknownDeviceError),
    ],
)
def test_what_was_traced_before_an_error_is_whole(
    options: dict[str, Any], kind: type[AutoparError], tmp_path: Path
) -> None:
    refused(kind, lambda: planned(**options, trace=tmp_path))
    graphs = sorted(tmp_path.glob("*.txt"))
    assert graphs
    for file in graphs:
        assert parse_graph(file.read_text()).nodes
    assert not list(tmp_path.glob("*plan.toml"))
    assert not list(tmp_path.glob("*program.py"))


def fail_inside_a_step(rank: int, folder: Path) -> None:
    """In the second step rank 2 raises in the generated forward; the others wait for it there."""
    torch.manual_seed(0)
    program = autopar.compile(Net(), FOUR, example_inputs=BATCH, loss_fn=squared)
    assert "mesh." in program.source
    executor = program._executor
    assert executor is not None
    forward, calls = executor.program.module.forward, iter(range(10))

    def failing(mesh: Any, p: Any, given: Any) -> Any:
        if rank == 2 and next(calls) == 1:
            boom()
        return forward(mesh, p, given)

    executor.program.module.forward = failing
    for _ in range(5):
        program.step(**BATCH)


def test_one_rank_that_fails_in_a_step_stops_all_and_is_shown(tmp_path: Path) -> None:
    ends = run(fail_inside_a_step, tmp_path, "file")
    for rank, end in enumerate(ends):
        assert end.status != 0
        assert "boom at step 3" in end.stderr
        if rank != 2:
            assert "rank 2 failed: ValueError: boom at step 3" in end.stderr
            assert "in failing" in end.stderr  # its traceback


def test_errors_keep_their_parts_in_one_form() -> None:
    for call in wrong_calls():
        with pytest.raises(AutoparError) as caught:
            call()
        error = caught.value
        assert error.what
        assert not error.what.endswith(".")
        assert error.why or error.todo
        assert str(error).splitlines()[0] == error.what


def wrong_calls() -> Iterator[Callable[[], Any]]:
    yield lambda: planned("H1000: gpu=4")
    yield lambda: planned("gpu:4")
    yield lambda: planned(memory=1)
    yield lambda: planned(pins={"nothing": "[8]"})
    yield lambda: planned(pins={"x": "[9, 9]"})
    yield lambda: planned(pins={"x": "9 by 9"})
    yield lambda: planned(example_inputs={"y": torch.ones(1)})
    yield lambda: planned(unknown_ops="maybe")
    yield lambda: autopar.compile(Net(), FOUR)
    yield lambda: autopar.compile(Net(), ONE).plan
    yield lambda: autopar.Plan.from_toml("version = 1")
    yield lambda: autopar.Plan.load("no such file")


def test_bounds_that_make_no_sense_are_refused() -> None:
    model, batch = models.mlp()
    with pytest.raises(ProgramError, match="clip_norm is -1"):
        autopar.compile(model, "cpu: x=1", clip_norm=-1.0)
    plan = partial(
        autopar.plan, model, "cpu: x=1", example_inputs=batch, loss_fn=models.squared_error
    )
    with pytest.raises(InfeasibleError, match=r"into 1 KiB a device"):
        plan(memory="1KiB")
    with pytest.raises(MeshError, match="quantity 'plenty'"):
        plan(memory="plenty")
    assert plan(memory="64GiB").stage.nodes == plan(memory=64 * 2.0**30).stage.nodes
