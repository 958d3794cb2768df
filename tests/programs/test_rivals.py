"""Known weaknesses of other planners: needing a GPU or a process group, failing at a second call.

Planning needs neither device nor process, leaves the model unchanged, and leaves nothing behind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.support import models
from tests.support.ranks import run_ranks

PODS = "H100: node=2, gpu=8"
ONE = "cpu: x=1"
# Links that cost nothing: everything that can be is split.
PAIR = "cpu: gpu=2 @1TB/s 1ns"
SLOW = "toy[2TFLOP/s 1GiB 20GB/s]: gpu=4 @20GB/s 100ns"


def split(plan: autopar.Plan) -> set[str]:
    """The mesh axes over which anything is split."""
    entries = plan.stage.nodes.values()
    return {axis for e in entries for _, layout in e.results for axis in layout.sharded_axes}


def test_a_cluster_is_planned_without_gpu_or_process_group() -> None:
    with torch.device("meta"):  # nor are there any weights
        model, _ = models.gpt2(layers=3)
    _, batch = models.gpt2(batch=16)
    made = autopar.plan(model, PODS, example_inputs=batch)
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()
    assert (made.mesh.device, made.mesh.names, made.mesh.shape) == ("H100", ("node", "gpu"), (2, 8))
    assert made.predicted.step_seconds > 0
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
def test_plans_in_one_process_do_not_disturb_one_another() -> None:
    model, batch = models.llama()
    meshes = (SLOW, ONE, "toy[2TFLOP/s 1GiB 20GB/s]: a=2 @5GB/s 1us, gpu=2 @20GB/s 100ns", SLOW)
    plans = [autopar.plan(model, mesh, example_inputs=batch) for mesh in meshes]
    assert plans[0] == plans[3]
    texts = [made.without_solver().to_toml() for made in (plans[0], plans[3])]
    assert texts[0] == texts[1]
    assert [split(made) for made in plans] == [{"gpu"}, set(), {"a", "gpu"}, {"gpu"}]
    assert len({made.graph for made in plans}) == 1


def test_one_model_is_compiled_twice_into_programs_of_their_own() -> None:
    model, batch = models.gpt2()
    before = copy.deepcopy(model.state_dict())
    programs = [autopar.compile(model, ONE, optimizer=sgd) for _ in range(2)]
    alone = copy.deepcopy(model)
    optimizer = sgd(alone.parameters())
    for _ in range(2):
        loss = programs[0].step(**batch)
        expected = alone(**batch).loss
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    # The second begins where the model is, not where the first has come to.
    first = programs[1].step(**batch)
    torch.testing.assert_close(first, model(**batch).loss.detach(), rtol=1e-5, atol=1e-6)
    assert programs[0].source == programs[1].source
    assert_equal(model.state_dict(), before)
    # The original trains on by itself.
    assert model(**batch).loss.requires_grad


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_convolutional_model_with_batch_norm_is_planned_and_trains() -> None:
    torch.manual_seed(0)
    model, batch = models.conv_net(batch=32)
    made = autopar.plan(model, SLOW, example_inputs=batch)
    assert split(made) == {"gpu"}
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    program = autopar.compile(model, ONE, optimizer=sgd, example_inputs=batch)
    alone = copy.deepcopy(model)
    optimizer = sgd(alone.parameters())
    for _ in range(3):
        expected = alone(**batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        loss = program.step(**batch)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    found = program.state_dict()
    assert {name for name in found if "running" in name}
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_a_device_that_nobody_knows_is_described_in_the_mesh_text() -> None:
    model, batch = models.gpt2()
    text = "Chip-9[400TFLOP/s 64GiB 1.6TB/s]: pod=2 @25GB/s 5us, chip=2 @200GB/s 1us"
    made = autopar.plan(model, text, example_inputs=batch)
    assert made.mesh.device == "Chip-9"
    read = autopar.Plan.from_toml(made.to_toml())
    assert read == made
    assert read.mesh.description is not None
    # A slower chip of the same name takes longer.
    slower = autopar.plan(model, text.replace("1.6TB/s", "0.4TB/s"), example_inputs=batch)
    assert slower.predicted.compute_seconds > made.predicted.compute_seconds


class Several(nn.Module):
    """Returns a loss, a split activation in a container, and something that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.gelu(self.up(x))
        y = self.down(h)
        return {"loss": y.square().mean(), "states": (h, [y]), "best": y.argmax(-1)}


def outputs_of_two(state: dict[str, Tensor], x: Tensor) -> dict[str, Any]:
    model = Several().double()
    model.load_state_dict(state)
    program = autopar.compile(model, PAIR, example_inputs=(x,))
    found = program(x)
    tensors = [found["loss"], found["states"][0], found["states"][1][0], found["best"]]
    assert all(type(tensor) is Tensor for tensor in tensors)
    return {"found": found, "split": split(program.plan), "source": program.source}


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_outputs_come_back_as_the_model_s_own_whole_tensors(start: str) -> None:
    torch.manual_seed(0)
    model, x = Several().double(), torch.randn(8, 16).double()
    expected = model(x)
    ranks = run_ranks(outputs_of_two, model.state_dict(), x, count=2, start=start)
    for result in ranks:
        assert result["source"] == ranks[0]["source"]
        assert result["split"] == {"gpu"}
        found = result["found"]
        assert list(found) == list(expected)
        assert isinstance(found["states"], tuple)
        assert isinstance(found["states"][1], list)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_planning_leaves_the_model_and_the_process_as_they_were(training: bool) -> None:
    model, batch = models.bert(dropout=0.1)
    model.train(training)
    model.register_forward_hook(lambda *_: None)
    kept = copy.deepcopy(model.state_dict())
    given = {name: value.clone() for name, value in batch.items()}
    parts = [*model.parameters(), *model.buffers()]
    facts = state_of(model)
    torch.manual_seed(5)
    drawn, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    autopar.plan(model, SLOW, example_inputs=batch)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad_mode, dtype)
    assert torch.get_num_threads() == threads
    after = [*model.parameters(), *model.buffers()]
    assert len(after) == len(parts)
    assert all(one is other for one, other in zip(after, parts, strict=True))
    assert_equal(model.state_dict(), kept)
    assert_equal(batch, given)
    assert state_of(model) == facts


def state_of(model: nn.Module) -> list[Any]:
    """What could have been left in the modules and their parameters."""
    modules = [
        (name, type(m), m.training, m.forward.__qualname__, sorted(vars(m)), hooks_of(m))
        for name, m in model.named_modules()
    ]
    parameters = [
        (name, p.requires_grad, p.grad, p._version, p.is_leaf, p._backward_hooks)
        for name, p in model.named_parameters()
    ]
    return [modules, parameters]


def hooks_of(module: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}
