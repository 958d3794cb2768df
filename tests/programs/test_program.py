"""autopar.compile end to end, on four processes, against the unsharded model in plain torch.

Free communication makes the planner split even these small models. Sums are in float64.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autopar
from autopar.errors import (
    BatchError,
    PlanError,
    PlanMismatchError,
    StateError,
)
from tests.support.models import Mlp, conv_net, gpt2
from tests.support.ranks import run_ranks

GRID = "cpu: data=2 @1TB/s 1ns, tensor=2 @1TB/s 1ns"
LINE = "cpu: gpu=4 @1TB/s 1ns"
SINGLE = "cpu: x=1"
Batch = dict[str, Any]
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)


class Regression(nn.Module):
    """A perceptron that returns its mean squared error; positional arguments read well."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp((16, 32, 32, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), target)


class Nested(nn.Module):
    """Takes and returns containers in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp((16, 32, 8))

    def forward(self, batch: Batch, scale: float = 1.0) -> Batch:
        target, (weight,) = batch["rest"]
        output = self.net(batch["x"])
        loss = (weight * (output - scale * target) ** 2).mean()
        return {"loss": loss, "more": (output, [target + 1])}


def regression(seed: int = 0) -> tuple[nn.Module, list[Batch]]:
    """A model and three batches in float64."""
    torch.manual_seed(seed)
    model = Regression().double()
    return model, [{"x": torch.randn(8, 16).double(), "target": torch.randn(8, 8).double()}] * 3


def cross_entropy(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Returns the loss of the next token, in float64; transformers' own rounds to float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batches_like(batch: Batch, count: int) -> list[Batch]:
    """The batch and others of its shapes: shuffled along the first dimension, floats scaled."""
    order = [torch.randperm(len(next(iter(batch.values())))) for _ in range(count)]
    return [
        {k: v[o] * (1 + n) if v.is_floating_point() else v[o] for k, v in batch.items()}
        for n, o in enumerate(order)
    ]


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    clip_norm: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradient norms of the ordinary training loop."""
    losses, norms = [], []
    for batch in batches:
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        optimizer.step()
        losses.append(loss.detach())
    return losses, norms


def same_state(program: autopar.Session, model: nn.Module) -> None:
    """The program's state_dict is the model's, name by name."""
    expected, found = model.state_dict(), program.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def split_axes(program: autopar.Session) -> set[str]:
    """The mesh axes over which the program holds a parameter in parts."""
    entries = program.plan.stage.nodes
    leaves = [entries[n.name].results[0][1] for n in program.graph.folded if n.op == "param"]
    return {axis for layout in leaves for axis in layout.sharded_axes}


# What the four processes run ----------------------------------------------------------------------


def gpt2_trains_clips_and_restores() -> None:
    torch.manual_seed(0)
    model, batch = gpt2()
    model = model.double()
    model.loss_function = cross_entropy
    start = copy.deepcopy(model.state_dict())
    alone, batches = copy.deepcopy(model), batches_like(batch, 4)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    program = autopar.compile(model, GRID, optimizer=optimizer, clip_norm=0.5)
    losses, norms = train_alone(alone, optimizer(alone.parameters()), batches, clip_norm=0.5)
    assert any(norm > 0.5 for norm in norms)  # else nothing would be clipped
    for number, step in enumerate(batches):
        close(program.step(**step), losses[number])
        close(program.grad_norm, norms[number])
    assert split_axes(program) == {"data", "tensor"}
    same_state(program, alone)
    assert {"transformer.wte.weight", "lm_head.weight"} <= set(program.state_dict())  # one tensor

    output = program(**batch)
    with torch.no_grad():
        expected = alone(**batch)
    assert type(output) is type(expected)
    for name in ("loss", "logits"):
        assert type(output[name]) is Tensor
        assert not output[name].requires_grad
        close(output[name], expected[name])
    # The model itself was neither trained nor moved.
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())

    program.load_state_dict(start)
    with torch.no_grad():
        close(program(**batch).logits, model(**batch).logits)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    pieces = {
        name: distribute_tensor(value, grid, [Shard(0), Replicate()])
        for name, value in alone.state_dict().items()
    }
    program.load_state_dict(pieces)
    close(program(**batch).logits, expected.logits)
    same_state(program, alone)


def optimizers_work_on_shards() -> None:
    kinds = [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    ]  # GPT-2 and the convolutions above train with AdamW and Adam
    for kind in kinds:
        model, batches = regression()
        alone = copy.deepcopy(model)
        program = autopar.compile(model, GRID, optimizer=kind)
        losses, _ = train_alone(alone, kind(alone.parameters()), batches)
        for batch, loss in zip(batches, losses, strict=True):
            close(program.step(**batch), loss)
        assert split_axes(program), kind
        same_state(program, alone)
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.01)
    model, batches = regression()
    alone = copy.deepcopy(model)
    program = autopar.compile(model, GRID, optimizer=adafactor)
    losses, _ = train_alone(alone, adafactor(alone.parameters()), batches)
    for batch, loss in zip(batches, losses, strict=True):
        close(program.step(**batch), loss)
    same_state(program, alone)


def convolutions_keep_running_statistics() -> None:
    torch.manual_seed(0)
    model, batch = conv_net()
    model, batch = model.double(), {**batch, "image": batch["image"].double()}
    alone, batches = copy.deepcopy(model), batches_like(batch, 3)
    program = autopar.compile(model, GRID, optimizer=torch.optim.Adam)
    losses, _ = train_alone(alone, torch.optim.Adam(alone.parameters()), batches)
    for step, loss in zip(batches, losses, strict=True):
        close(program.step(**step), loss)
    assert split_axes(program) == {"data", "tensor"}
    assert int(program.state_dict()["norm1.num_batches_tracked"]) == 3
    same_state(program, alone)


def containers_and_positions() -> None:
    torch.manual_seed(0)
    model = Nested().double()
    x, target, weight = torch.randn(8, 16), torch.randn(8, 8), torch.rand(8, 8)
    batch = {"x": x.double(), "rest": (target.double(), [weight.double()])}
    program = autopar.compile(model, GRID)
    output, expected = program(batch, scale=0.5), model(batch, scale=0.5)
    close(output["loss"], expected["loss"].detach())
    assert isinstance(output["more"], tuple)
    assert isinstance(output["more"][1], list)
    close(output["more"][0], expected["more"][0].detach())
    close(output["more"][1][0], expected["more"][1][0])
    close(program.step(batch, scale=0.5), expected["loss"].detach())
    with pytest.raises(BatchError, match="scale"):
        program.step(batch, scale=0.25)

    model, batches = regression()
    alone = copy.deepcopy(model)
    program = autopar.compile(model, GRID)
    losses, _ = train_alone(alone, torch.optim.AdamW(alone.parameters()), batches)
    x, target = batches[0]["x"], batches[0]["target"]
    close(program.step(x, target), losses[0])
    close(program.step(x, target=target), losses[1])
    close(program.step(target=target, x=x), losses[2])


def losses_from_outside() -> None:
    """A loss_fn gets the output and what it names of the batch; the model gets what it takes."""

    def weighted(output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return (weight * (output - x[:, :8]) ** 2).mean()

    torch.manual_seed(0)
    model = Mlp((16, 32, 8)).double()
    x, target = torch.randn(8, 16).double(), torch.randn(8, 8).double()
    squared = {"x": x, "target": target}
    masked = {"x": x, "weight": torch.rand(8, 8).double()}
    labelled = {"x": x, "target": torch.randint(0, 8, (8,))}
    cases: list[tuple[Any, Batch, Tensor]] = [
        (F.mse_loss, squared, F.mse_loss(model(x), target)),
        (weighted, masked, weighted(model(x), **masked)),
        (nn.CrossEntropyLoss(), labelled, F.cross_entropy(model(x), labelled["target"])),
    ]
    for loss_fn, batch, expected in cases:
        alone = copy.deepcopy(model)
        program = autopar.compile(model, GRID, loss_fn=loss_fn)
        close(program(**batch), model(x).detach())
        close(program.step(**batch), expected.detach())
        optimizer = torch.optim.AdamW(alone.parameters())
        given = {name: item for name, item in batch.items() if name != "x" or loss_fn is weighted}
        loss_fn(alone(x), **given).backward()
        optimizer.step()
        same_state(program, alone)
        with pytest.raises(BatchError, match="does not take this batch"):
            program.step(x=x)


def programs_side_by_side() -> None:
    """One model on two meshes and twice on one mesh; the programs do not meet."""
    model, batches = regression()
    alone = copy.deepcopy(model)
    losses, _ = train_alone(alone, torch.optim.AdamW(alone.parameters()), batches)
    programs = [autopar.compile(model, mesh) for mesh in (LINE, GRID, GRID)]
    for batch, loss in zip(batches, losses, strict=True):
        for program in programs:
            close(program.step(**batch), loss)
    assert split_axes(programs[0]) == {"gpu"}
    assert programs[1].source == programs[2].source
    for program in programs:
        same_state(program, alone)


def meta_model_waits_for_weights() -> None:
    model, batches = regression()
    with torch.device("meta"):
        hollow = Regression().double()
    program = autopar.compile(hollow, GRID, example_inputs=batches[0])
    with pytest.raises(StateError, match="no weights"):
        program.step(**batches[0])
    with pytest.raises(StateError, match=r"missing: net\.layers"):
        program.load_state_dict({})
    program.load_state_dict(model.state_dict())
    losses, _ = train_alone(model, torch.optim.AdamW(model.parameters()), batches)
    for batch, loss in zip(batches, losses, strict=True):
        close(program.step(**batch), loss)


def plans_are_used_as_given(folder: str) -> None:
    model, batches = regression()
    program = autopar.compile(model, GRID, example_inputs=batches[0])
    mine = Path(folder) / f"{dist.get_rank()}.toml"
    program.plan.save(mine)
    plan = autopar.Plan.load(mine)
    again = autopar.compile(model, GRID, plan=plan, example_inputs=batches[0])
    assert again.source == program.source
    with pytest.raises(PlanMismatchError, match="another mesh"):
        autopar.compile(model, LINE, plan=plan, example_inputs=batches[0])

    # A weight of [32, 16] that claims to be split otherwise than its reader wants it.
    text, name = mine.read_text(encoding="utf-8"), "net_layers_0_bias"
    line = next(line for line in text.splitlines() if line.startswith(f"{name}_share "))
    wrong = f'{name}_share = "[32@data] -> [32@tensor]"'
    edited = autopar.Plan.from_toml(text.replace(line, wrong))
    with pytest.raises(PlanError, match=f"{name}_share are not possible") as caught:
        autopar.compile(model, GRID, plan=edited, example_inputs=batches[0])
    assert "its strategies are" in caught.value.why


def training() -> None:
    gpt2_trains_clips_and_restores()
    convolutions_keep_running_statistics()
    optimizers_work_on_shards()


def calling(folder: str) -> None:
    containers_and_positions()
    losses_from_outside()
    programs_side_by_side()
    meta_model_waits_for_weights()
    plans_are_used_as_given(folder)


def test_training_equals_that_of_the_unsharded_model() -> None:
    run_ranks(training)


def test_programs_take_batches_weights_and_plans(tmp_path: Path) -> None:
    run_ranks(calling, str(tmp_path))
