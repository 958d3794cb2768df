"""Wrapped models and calls that autopar does not support raise errors with a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import autopar
from autopar.capture.capture import capture
from autopar.capture.nonpersistent_buffers import computed
from autopar.errors import BatchError, CaptureError, ProgramError
from autopar.operators.interpret import run
from tests.support.ranks import run_ranks


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def wrapped() -> list[str]:
    """The messages for a model in two wrappers that need a process group."""
    found = []
    for model in (nn.parallel.DistributedDataParallel(Small()), fully_shard(Small())):
        try:
            capture(model, (torch.randn(4, 4),))
        except CaptureError as error:
            found.append(str(error))
    return found


def test_parallel_models_are_refused() -> None:
    (ddp, fsdp), _ = run_ranks(wrapped, count=2)
    assert "DistributedDataParallel" in ddp
    assert ".module" in ddp
    assert "before fully_shard" in fsdp


def test_compiled_and_scripted_models_are_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(CaptureError, match=r"torch\.compile") as raised:
        capture(torch.compile(Small()), (x,))
    assert "._orig_mod" in raised.value.todo
    inside = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), x))
    with pytest.raises(CaptureError, match=r"the module '1' is a"):
        capture(inside, (x,))
    with pytest.raises(CaptureError, match="DataParallel"):
        capture(nn.DataParallel(Small()), (x,))


def test_a_step_without_gradients_is_refused() -> None:
    x = torch.randn(4, 4)
    program = autopar.compile(Small(), "cpu: x=1", example_inputs=x)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off, pytest.raises(ProgramError, match="gradients switched off"):
            program.step(x)
    with torch.no_grad():
        assert program(x).isfinite()
    assert program.step(x).isfinite()


def test_nested_tensors_are_refused() -> None:
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        with pytest.raises(BatchError, match="nested"):
            capture(Small(), (nested,))


def inside(model: Small, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        scale: Tensor = model.layer(x)
    return scale


def outside(model: Small, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        scale: Tensor = model.layer(x)
    return scale


class Scaled(Small):
    def __init__(self, scale: Callable[[Small, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale(self, x)).square().mean()


@pytest.mark.parametrize("scale", [inside, outside])
def test_gradients_switched_off_beside_autocast_stay_off(
    scale: Callable[[Small, Tensor], Tensor],
) -> None:
    model, x = Scaled(scale), torch.randn(4, 4)
    values = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    loss = run(capture(model, (x,)).graph, {"x": x, **values})["loss"]
    found = torch.autograd.grad(loss, list(values.values()))
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    torch.testing.assert_close(found, expected)


class Turned(nn.Module):
    """With a buffer that follows from the configuration, and no state_dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4.0) + 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.angles).square().mean()


class Resets(Turned):
    def reset_buffers(self) -> None:
        self.angles.copy_(torch.arange(4.0) + 1)


class Draws(Turned):
    def reset_parameters(self) -> None:
        self.angles.uniform_()


def test_what_no_state_dict_holds_is_computed_or_asked_for() -> None:
    x, weights = torch.randn(4, 4), Turned().state_dict()
    expected = Turned()
    expected.load_state_dict(weights)
    for kind in (Resets, Turned, Draws):
        with torch.device("meta"):
            model = kind()
        program = autopar.compile(model, "cpu: x=1", example_inputs=x)
        if kind is not Resets:
            with pytest.raises(autopar.errors.StateError, match="angles") as raised:
                program.load_state_dict(weights)
            assert "reset_buffers" in raised.value.todo
        more = {} if kind is Resets else {"angles": torch.arange(4.0) + 1}
        program.load_state_dict({**weights, **more})
        torch.testing.assert_close(program(x), expected(x))


def test_the_models_own_method_computes_frequencies() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16,
    )  # fmt: skip
    name = "model.rotary_emb.inv_freq"
    whole = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = computed(model, {name: model.get_buffer(name)})
    torch.testing.assert_close(found[name], whole.get_buffer(name))


class Recording(nn.Module):
    """A model that installs a hook in its first call, as libraries do to record outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "installed"):
            self.inner.register_forward_hook(lambda module, given, result: result * 2)
            self.installed = True
        return self.inner(x).sum()


def test_a_capture_leaves_no_hooks_behind() -> None:
    model, batch = Recording(), {"x": torch.ones(2, 4)}
    graphs = [capture(model, (), batch).graph for _ in range(3)]
    assert graphs[0] == graphs[1] == graphs[2]
    assert not model.inner._forward_hooks
    assert not hasattr(model, "installed")
