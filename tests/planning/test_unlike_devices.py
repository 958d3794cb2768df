"""Pipelines on unlike devices: stages, memory, files, messages, refusals, and training.

Equal splits, prices of messages by hand, and one process are what they are compared with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.errors import CalibrationError, InfeasibleError, MeshError, PlanError
from autopar.inter_op.submeshes import place_stages, submeshes
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.borders import Messages
from autopar.planning.pipelines.stages import Devices, even_ends, plan_stages
from autopar.planning.trace import Trace
from tests.support import models
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

FAST, SLOW = (f"{name}: gpu=2" for name in ("H100", "V100"))
CLUSTER = Mesh.parse(f"{FAST} + {SLOW}")


@pytest.fixture(scope="module")
def searched() -> Plan:
    model, batch = models.gpt2(2)
    return autopar.plan(model, CLUSTER, example_inputs=batch, stages="auto", global_batch=8)


def test_every_stage_lies_on_one_kind_of_device(searched: Plan) -> None:
    assert {stage.mesh.device for stage in searched.stages} == {"H100", "V100"}
    for stage in searched.stages:
        (start,) = stage.starts
        assert (stage.mesh.device == "H100") == (start < 2)
    assert Plan.from_toml(searched.to_toml()) == searched


@pytest.mark.slow
def test_no_equal_split_is_faster(searched: Plan) -> None:
    """Stages of equal time on one device, as on equal devices, on either part first."""
    groups = [Devices(part, 2 * number) for number, part in enumerate(CLUSTER.parts)]
    for order, count in (((0, 1), 4), ((1, 0), 4), ((0, 1), 8)):
        model, batch = models.gpt2(2, batch=8)
        captured = capture_call(Call.of(model, batch), Options(), Trace(None), count)
        ends = even_ends(captured.graph, 2, CLUSTER.parts[0], Options())
        equal = plan_stages(
            captured.graph, ends, [groups[at] for at in order], CLUSTER, count, "1f1b",
            Options(), Trace(None),
        )  # fmt: skip
        assert searched.predicted.step_seconds <= equal.predicted.step_seconds


@pytest.mark.slow
def test_the_smaller_memory_binds_its_own_stages_only() -> None:
    """A part with little memory gets the layers that it can hold; without any, nothing fits."""
    model, batch = models.gpt2(4)
    plenty, little = "big[100GFLOP/s 64GiB 100GB/s]: x=1", "small[100GFLOP/s {}]: y=1"
    peaks = {}
    for size in ("64GiB", "0.8MB"):
        mesh = f"{plenty} + {little.format(size + ' 100GB/s')}"
        plan = autopar.plan(model, mesh, example_inputs=batch, stages="auto", global_batch=8)
        for stage in plan.stages:
            assert stage.predicted.peak_bytes <= device(stage.mesh).memory
        peaks[size] = max(s.predicted.peak_bytes for s in plan.stages if s.mesh.device == "small")
    assert peaks["0.8MB"] < peaks["64GiB"]
    with pytest.raises(InfeasibleError, match="several kinds of devices"):
        autopar.plan(
            model, f"{plenty} + {little.format('1KB 100GB/s')}", example_inputs=batch,
            stages="auto", global_batch=8,
        )  # fmt: skip


def test_messages_between_parts_go_at_the_pace_of_the_slower_side() -> None:
    mesh = Mesh.parse("H100: node=2, gpu=8 + A100-80: node=2 @10GB/s 30us, gpu=8 + V100: gpu=8")
    messages = Messages(mesh, lambda part: AnalyticModel(part, in_step=True))
    nbytes = 2**26
    a100, v100 = (device(part) for part in mesh.parts[1:])
    given = 30e-6 + nbytes / (10e9 * a100.inter_efficiency)
    assert messages.between(0, 16, nbytes) == pytest.approx(given, rel=0.05)
    # Inside V100's host links are fast, but a message from another part arrives over its network.
    own = v100.inter_latency + nbytes / (v100.nic_bandwidth * v100.inter_efficiency)
    assert messages.between(32, 0, nbytes) >= 0.95 * own
    inside, outside = messages.between(0, 1, nbytes), messages.between(0, 8, nbytes)
    assert inside == messages.along(0, "gpu", nbytes)
    assert outside == messages.along(0, "node", nbytes)
    assert inside < outside


def test_stages_of_a_part_start_at_its_ranks() -> None:
    parts = {(one.part, str(one)): one for one in submeshes(Mesh.parse(f"{FAST} + V100: gpu=4"))}
    stages = [parts[1, "1x2"], parts[1, "1x2"], parts[0, "1x1"], parts[0, "1x1"]]
    assert place_stages(Mesh.parse(f"{FAST} + V100: gpu=4"), stages) == (2, 4, 0, 1)


def test_what_would_span_both_parts_is_refused(searched: Plan, tmp_path: Path) -> None:
    model, batch = models.gpt2(1)
    for options in ({}, {"stages": 2, "microbatches": 4}, {"memory": "1GiB"}):
        with pytest.raises(MeshError, match="cannot span the devices of H100: gpu=2 \\+ V100"):
            autopar.plan(model, CLUSTER, example_inputs=batch, **options)
    with pytest.raises(CalibrationError, match="does not price"):
        autopar.plan(
            model, CLUSTER, example_inputs=batch, stages="auto", calibration=tmp_path / "c.json"
        )
    wide = replace(searched.stages[0], mesh=Mesh.parse("H100: gpu=4"), end="", starts=(0,))
    with pytest.raises(PlanError, match="collectives of stage 0 would span two parts"):
        Plan.from_toml(replace(searched, stages=(wide,)).to_toml())


def train(mesh: str) -> tuple[list[float], list[str]]:
    """Losses of a program whose stages were searched for on unlike devices."""
    model, batch = _perceptron()
    program = autopar.compile(
        model, mesh, loss_fn=models.squared_error, example_inputs=batch, stages="auto",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    losses = [program.step(**batch).item() for _ in range(3)]
    return losses, [stage.mesh.device for stage in program.plan.stages]


def _perceptron() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = models.mlp((64, 256, 256, 64), batch=16)
    return model.double(), {"x": batch["x"].double()}


def test_stages_on_unlike_devices_train_as_one_process() -> None:
    model, batch = _perceptron()
    updates = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train_plainly(lambda: models.squared_error(model(**batch), **batch), updates, 3)
    mesh = "slow[1GFLOP/s 64GiB 1GB/s]: x=1 + fast[2GFLOP/s 64GiB 1GB/s]: y=2"
    for found, devices in run_ranks(train, mesh, count=3):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        assert set(devices) == {"slow", "fast"}
