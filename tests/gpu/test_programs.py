"""Programs on one GPU, compared with plain torch on the same GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import autopar
from tests.programs import test_generation as generation
from tests.support import models
from tests.support.chips import CHIP, MESH
from tests.support.families import FAMILIES, make

STEPS, TOLERANCE = 4, 1e-9
Batch = dict[str, Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def moved(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(CHIP) if isinstance(leaf, Tensor) else leaf, batch)


def plainly(
    model: nn.Module, batch: Batch, optimizer: Optimizer, clip: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain torch on the device of the tests."""
    model, batch = model.to(CHIP), moved(batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    updates, losses = optimizer(trained), []
    for _ in range(STEPS):
        updates.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        updates.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def ours(
    model: nn.Module, batch: Batch, optimizer: Optimizer, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The same of a program; the model and the batch stay on the CPU."""
    program = autopar.compile(model, MESH, optimizer=optimizer, example_inputs=batch, **options)
    with program:
        losses = [program.step(**batch).item() for _ in range(STEPS)]
        state = program.state_dict()
        assert next(iter(program.optimizer.param_groups))["params"][0].device.type == CHIP.type
    return losses, {name: value.cpu() for name, value in state.items()}


def apart(
    mine: tuple[list[float], dict[str, Tensor]], its: tuple[list[float], dict[str, Tensor]]
) -> float:
    """The largest relative error of a loss or of a tensor."""
    errors = [abs(a - b) / abs(b) for a, b in zip(mine[0], its[0], strict=True)]
    assert mine[1].keys() == its[1].keys()
    for name, wanted in its[1].items():
        scale = max(float(wanted.double().norm()), 0.05 * wanted.numel() ** 0.5)
        errors.append(float((mine[1][name].double() - wanted.double()).norm()) / scale)
    return max(errors)


# Their forward passes make tensors on the CPU, whichever device they are on.
ON_THE_CPU = {"likelihoods"}


def without_dropout(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """The model without random numbers, which differ between programs on a GPU."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(module, name, 0.0)
    return model, batch


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - ON_THE_CPU))
def test_every_family_trains_as_plain_torch(name: str) -> None:
    found = ours(*without_dropout(*make(name)), sgd)
    wanted = plainly(*without_dropout(*make(name.removesuffix("_grouped"))), sgd)
    assert apart(found, wanted) < TOLERANCE


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offloaded_optimizer": {"offload": "optimizer"},
    "offloaded_activations": {"offload": "activations 2"},
    "clipped": {"clip_norm": 0.5},
    "accumulated": {"accumulate": 2},
    "averaged": {"ema": 0.9},
    "inductor": {"backend": "inductor"},
    "zero3": {"state": "zero3"},
    "microbatches": {"stages": 1, "microbatches": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_trains_as_plain_torch(name: str) -> None:
    options = OPTIONS[name]
    found = ours(*make("gpt2"), adamw, **options)
    wanted = plainly(*make("gpt2"), adamw, options.get("clip_norm"))
    assert apart(found, wanted) < TOLERANCE


def single(name: str) -> tuple[nn.Module, Batch]:
    """A model in float32, in which kernels are."""
    torch.manual_seed(0)
    return models.MODELS[name]()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_fused_programs_train_as_plain_torch_within_float32(name: str) -> None:
    found = ours(*single(name), adamw, fuse=True)
    wanted = plainly(*single(name), adamw)
    assert apart(found, wanted) < 1e-4


@pytest.mark.parametrize("options", [{"fuse": ["adamw"]}, {"fuse": True}])
def test_a_graph_gives_the_losses_of_the_steps_that_it_captured(options: dict[str, Any]) -> None:
    if CHIP.type != "cuda":
        pytest.skip("a CUDA graph needs a GPU")
    model, batch = single("llama")
    results = []
    for graph in (False, True):
        program = autopar.compile(
            copy.deepcopy(model), MESH, optimizer=adamw, example_inputs=batch, cuda_graph=graph,
            **options,
        )  # fmt: skip
        losses = []
        for step in range(8):
            turned = {name: value.roll(step, 0) for name, value in batch.items()}
            losses.append(program.step(**turned).item())
        results.append((losses, program.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert value.equal(results[1][1][name]), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_as_autocast_does(precision: str) -> None:
    model, batch = single("gpt2")
    losses = ours(copy.deepcopy(model), batch, adamw, precision=precision)[0]
    wanted = plainly(model, batch, adamw)[0]
    assert losses == pytest.approx(wanted, rel=2e-2)
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_a_gpu_goes_on_to_the_bit(tmp_path: Path) -> None:
    model, batch = make("gpt2")
    whole = autopar.compile(model, MESH, optimizer=adamw, example_inputs=batch)
    for _ in range(2):
        whole.step(**batch)
    whole.save_checkpoint(tmp_path / "two")
    wanted = [whole.step(**batch).item() for _ in range(2)]
    again = autopar.compile(make("gpt2")[0], MESH, optimizer=adamw, example_inputs=batch)
    again.load_checkpoint(tmp_path / "two")
    assert [again.step(**batch).item() for _ in range(2)] == wanted


@pytest.mark.parametrize("name", generation.MODELS)
def test_generation_gives_the_tokens_of_transformers(name: str) -> None:
    model = generation.made(name)
    with autopar.compile(copy.deepcopy(model), MESH) as program:
        found = [
            program.generate(**generation.prompts()),
            program.generate(**generation.prompts(), **generation.ENDS),
        ]
    model = model.to(CHIP)
    on_chip = {
        k: v.to(CHIP) if isinstance(v, Tensor) else v for k, v in generation.prompts().items()
    }
    for ends, tokens in zip(({}, generation.ENDS), found, strict=True):
        wanted = model.generate(**on_chip, **ends)  # type: ignore[operator]
        assert tokens.cpu().equal(wanted.cpu())


def test_evaluation_gives_the_loss_of_the_model() -> None:
    model, batch = make("gpt2")
    program = autopar.compile(copy.deepcopy(model), MESH, optimizer=adamw, example_inputs=batch)
    found = program.eval_step(**batch).loss
    with torch.no_grad():
        wanted = model.eval().to(CHIP)(**moved(batch))
    wanted = wanted if isinstance(wanted, Tensor) else wanted["loss"]
    assert found is not None
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
