"""Precisions as values: their text, refusals, and bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.cli import main
from autopar.cost.model import AnalyticModel
from autopar.errors import PlanMismatchError, PrecisionError, ProgramError
from autopar.intra_op.states import StateChoice
from autopar.intra_op.storage_choices import stored_traffic
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.update import ADAMW
from autopar.plan import Plan
from autopar.runtime.folder import OpenProgram
from autopar.runtime.update.groups import grouped, options_of
from tests.support.mixed import GROUPS, net, no_decay

MESH = Mesh.parse("H100: node=8, gpu=8")
TEXTS = ["", "bf16", "f16", "bf16 communication=bf16", "f32 master=f64 communication=f64"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_back(text: str) -> None:
    assert str(Precision.read(text)) == text
    assert Precision.read(Precision.read(text)) == Precision.read(text)


def test_names_of_one_precision_are_equal() -> None:
    assert Precision.read("fp16") == Precision.read("float16") == Precision("f16")
    assert Precision.read("fp32") == Precision.read(None) == Precision("float32") == Precision()


@pytest.mark.parametrize("text", ["bf15", "bf16 master=bf15", "bf16 communication", "bf16 x=f32"])
def test_what_is_no_precision_is_refused(text: str) -> None:
    with pytest.raises(PrecisionError):
        Precision.read(text)


def test_a_master_is_no_narrower_than_what_is_made_of_it() -> None:
    with pytest.raises(PrecisionError, match="the master is f16"):
        Precision("f32", master="f16")


# Optimizer state in bytes an element: master and AdamW's two moments. P, OS of PaRO's table 2.
@pytest.mark.parametrize(
    ("state", "parameter", "optimizer"),
    [("ddp", 2, 12), ("zero1", 2, 12 / 64), ("zero3", 2 / 64, 12 / 64), ("mics", 2 / 8, 12 / 8)],
)
def test_bytes_of_states(state: str, parameter: float, optimizer: float) -> None:
    tensor = TensorType("bf16", (64, 128))
    used = Layout(((), ()), varying=MESH.names)
    storage = StateChoice.read(state, MESH).storages(used, tensor, MESH)[0]
    traffic = stored_traffic(
        tensor,
        True,
        storage,
        MESH,
        AnalyticModel(MESH),
        ADAMW.rules[0],
        precision=Precision("bf16"),
    )
    cost = traffic.cost(4, waits=True)
    assert cost.nbytes["leaf"] == pytest.approx((parameter + optimizer) * tensor.numel)
    rows, columns = storage.grads.local_shape(tensor.shape, MESH)
    assert cost.nbytes["accumulated"] == 4 * rows * columns


@pytest.mark.parametrize(("sent", "size"), [("f32", 4), ("bf16", 2), ("f64", 8)])
def test_gradients_are_sent_in_their_own_dtype(sent: str, size: int) -> None:
    tensor = TensorType("bf16", (64, 128))
    used = Layout(((), ()), varying=MESH.names)
    storage = StateChoice.read("zero3", MESH).storages(used, tensor, MESH)[0]
    precision = Precision("bf16", communication=sent)
    bytes_of = {
        hop.call.kind: hop.call.nbytes for hop in storage.hops(tensor, MESH, 1, True, precision)
    }
    assert bytes_of == {"all_gather": 2 * tensor.numel // 64, "reduce_scatter": size * tensor.numel}


class Mixed(nn.Module):
    """Takes floats, and has a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.cell.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x) * self.scale


def test_a_model_is_traced_as_if_it_were_cast() -> None:
    model = Mixed()
    before = dict(model.named_parameters())
    graph = capture(
        model, (torch.zeros(2, 4),), loss_fn=lambda y, target: (y - target).square().mean(),
        kwargs={"target": torch.zeros(2, 4)}, precision=Precision("bf16"),
    ).graph  # fmt: skip
    kinds = {leaf.target: leaf.type.dtype for leaf in graph.nodes if leaf.is_leaf}
    assert kinds == {
        "cell.weight": "bf16", "cell.bias": "bf16", "scale": "f32", "x": "f32", "target": "f32",
    }  # fmt: skip
    assert {n.type.dtype for n in graph.nodes if n.op == "aten.linear"} == {"bf16"}
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    trained = {leaf.target: leaf.requires_grad for leaf in graph.leaves("param")}
    assert trained == {"cell.weight": True, "cell.bias": False}


def test_a_model_without_parameters_has_no_precision() -> None:
    with pytest.raises(PrecisionError, match="without floating parameters"):
        capture(nn.ReLU(), (torch.zeros(2),), precision=Precision("bf16"))


def test_plans_say_in_which_precision_they_are() -> None:
    model, batch = net()
    plan = autopar.plan(model, "cpu: gpu=2", example_inputs=batch, precision="bf16")
    assert Plan.from_toml(plan.to_toml()) == plan
    assert plan.precision == Precision("bf16")
    with pytest.raises(PlanMismatchError, match="the plan's precision is bf16"):
        autopar.compile(model, "cpu: gpu=1", plan=plan, precision="fp16")
    one = autopar.compile(model, "cpu: gpu=1", precision="bf16", example_inputs=batch)
    again = autopar.compile(model, "cpu: gpu=1", plan=one.plan, example_inputs=batch)
    assert again.source == one.source
    assert again.step(**batch) == one.step(**batch)


def test_devices_without_the_arithmetic_are_named() -> None:
    model, batch = net()
    with pytest.raises(PrecisionError, match="V100 does not compute in bf16"):
        autopar.plan(model, "V100: gpu=2", example_inputs=batch, precision="bf16")
    autopar.plan(model, "V100: gpu=2", example_inputs=batch, precision="fp16")


def test_groups_are_those_that_one_makes_for_torch() -> None:
    model, _ = net()
    options = options_of(model, autopar.groups(GROUPS))
    found = grouped(list(model.named_parameters()), options)
    wanted = no_decay(model)
    assert [{k: v for k, v in g.items() if k != "params"} for g in found] == [  # type: ignore[union-attr]
        {k: v for k, v in g.items() if k != "params"} for g in wanted
    ]
    for group, other in zip(found, wanted, strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in other["params"]}  # type: ignore[index]


def test_groups_and_averages_that_are_nonsense_are_named() -> None:
    model, _ = net()
    with pytest.raises(ProgramError, match=r"the group '\*.biass' is empty"):
        autopar.compile(model, "cpu: gpu=1", groups=autopar.groups({"*.biass": {"lr": 1.0}}))
    with pytest.raises(ProgramError, match="the groups give 3"):
        autopar.compile(model, "cpu: gpu=1", groups=lambda name, p: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ProgramError, match=r"ema is 1\.5"):
        autopar.compile(model, "cpu: gpu=1", ema=1.5)


def test_a_saved_program_trains_as_it_was_compiled(tmp_path: Path) -> None:
    model, batch = net()
    how = {"precision": "bf16", "groups": autopar.groups(GROUPS), "ema": 0.9}
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    program = autopar.compile(model, "cpu: gpu=1", optimizer=adamw, example_inputs=batch, **how)  # type: ignore[arg-type]
    program.save(tmp_path / "out")
    opened = OpenProgram(tmp_path / "out").executor
    for _ in range(2):
        assert opened.step(batch) == program.step(**batch)
    for average in (False, True):
        found, wanted = opened.state_dict(average), program._ready().state_dict(average)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


FILE = """
from tests.support.mixed import net

def small():
    return net()
"""


def test_the_command_line_plans_and_explains_in_a_precision(tmp_path: Path) -> None:
    source, plan = tmp_path / "model.py", tmp_path / "plan.toml"
    source.write_text(FILE)
    model = f"{source}:small"

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    said = ("--mesh", "H100: gpu=2", "--precision", "bf16", "-o", plan)
    assert run("plan", model, *said).exit_code == 0
    assert Plan.load(plan).precision == Precision("bf16")
    for command in ("explain", "simulate"):
        assert run(command, plan, "--model", model).exit_code == 0
    wrong = run("plan", model, "--mesh", "H100: gpu=2", "--precision", "bf15")
    assert wrong.exit_code == 2
    assert "there is no precision 'bf15'" in wrong.stderr
