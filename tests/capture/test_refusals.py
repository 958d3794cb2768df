"""Common mistakes in a forward: each is refused at its line, with a remedy."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from autopar.capture.capture import capture
from autopar.errors import CaptureError
from autopar.operators.interpret import run

MISTAKES: dict[str, tuple[type[nn.Module], str]] = {}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.count = 0
        self.seen: list[Tensor] = []
        self.mean = torch.zeros(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def mistake(advice: str) -> Callable[[Callable[[Any, Tensor], Any]], None]:
    """A model with that forward, which is to be refused with `advice`."""

    def add(forward: Callable[[Any, Tensor], Any]) -> None:
        code = forward.__code__
        forward.__code__ = code.replace(co_name="forward")
        MISTAKES[code.co_name] = type(code.co_name, (Base,), {"forward": forward}), advice

    return add


@mistake("torch.where")
def chooses(self: Any, x: Tensor) -> Any:
    if x.mean() > 0:  # the line
        x = -x
    return self.layer(x)


@mistake("torch.where")
def looks_for_nan(self: Any, x: Tensor) -> Any:
    y = self.layer(x)
    return y if torch.isfinite(y).all() else x  # the line


@mistake("fixed number of rounds")
def iterates(self: Any, x: Tensor) -> Any:
    while x.norm() > 1:  # the line
        x = x / 2
    return self.layer(x)


@mistake("known beforehand")
def counts_by_value(self: Any, x: Tensor) -> Any:
    for _ in range(x.argmax()):  # the line
        x = self.layer(x)
    return x


def peak(x: Tensor) -> float:
    return x.max().item()  # the line


@mistake("no .item()")
def takes_a_number_in_a_function(self: Any, x: Tensor) -> Any:
    return self.layer(x) / peak(x)


@mistake("no .item()")
def indexes_a_list(self: Any, x: Tensor) -> Any:
    return [self.layer, F.relu][x.argmax() % 2](x)  # the line


@mistake("torch.library.custom_op")
def uses_numpy(self: Any, x: Tensor) -> Any:
    return self.layer(torch.from_numpy(np.tanh(x.numpy())))  # the line


@mistake("torch.stack")
def makes_a_tensor_of_tensors(self: Any, x: Tensor) -> Any:
    return self.layer(x) * torch.tensor([x[0, 0], 1.0, 2.0, 3.0])  # the line


@mistake("return the value")
def prints(self: Any, x: Tensor) -> Any:
    print("mean", x.mean())  # the line
    return self.layer(x)


@mistake("return the value")
def formats(self: Any, x: Tensor) -> Any:
    if x.ndim != 2 or f"{x.mean():.2f}" == "nan":  # the line
        raise ValueError
    return self.layer(x)


@mistake("torch.where(mask, x, 0)")
def indexes_by_a_mask(self: Any, x: Tensor) -> Any:
    return self.layer(x)[x > 0].std()  # the line


@mistake("torch.where(mask, x, 0)")
def cuts_by_a_value(self: Any, x: Tensor) -> Any:
    length = (x[:, 0] > 0).sum()
    return self.layer(x[:length]).sum()  # the line


@mistake("keeps the size")
def finds_places(self: Any, x: Tensor) -> Any:
    places = x.nonzero()  # the line
    return self.layer(x).sum() + places.sum()


@mistake("pass it as an input")
def sorts_out_repeats(self: Any, x: Tensor) -> Any:
    return self.layer(x).sum() + torch.unique(x.long()).sum()  # the line


@mistake("output_size=n")
def repeats_by_values(self: Any, x: Tensor) -> Any:
    return self.layer(x.repeat_interleave((x[:, 0] > 0).long(), dim=0)).sum()  # the line


@mistake("torch.gather")
def packs_sequences(self: Any, x: Tensor) -> Any:
    rows = nn.utils.rnn.pack_padded_sequence(self.layer(x)[None], x[:1, 0].long(), True)  # the line
    return rows.data.sum()


@mistake("mask the excess")
def makes_as_many_as_a_value(self: Any, x: Tensor) -> Any:
    return self.layer(x).sum() + torch.arange(x.long().max()).sum()  # the line


@mistake('register_buffer("count"')
def counts_its_calls(self: Any, x: Tensor) -> Any:
    self.count += 1  # the line
    return self.layer(x) / self.count


@mistake('register_buffer("seen"')
def keeps_a_list(self: Any, x: Tensor) -> Any:
    self.seen.append(x)  # the line
    return self.layer(x)


@mistake('register_buffer("mean"')
def averages_without_a_buffer(self: Any, x: Tensor) -> Any:
    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # the line
    return self.layer(x - self.mean)


@mistake('register_buffer("steps"')
def gives_a_buffer_another_type(self: Any, x: Tensor) -> Any:
    self.steps = self.steps + 0.5  # the line
    return self.layer(x) / self.steps


@mistake("draw with torch")
def draws_with_python(self: Any, x: Tensor) -> Any:
    return self.layer(x) if random.random() < 0.5 else x  # the line


@mistake("draw with torch")
def draws_with_numpy(self: Any, x: Tensor) -> Any:
    return self.layer(x) * float(np.random.rand())  # the line


@mistake("layerdrop=0.0")
def skips_layers_at_random(self: Any, x: Tensor) -> Any:
    if self.training and torch.rand([]) < 0.1:  # the line
        return x
    return self.layer(x)


@mistake("layerdrop=0.0")
def skips_layers_by_a_number(self: Any, x: Tensor) -> Any:
    return self.layer(x) if torch.rand(1).item() > 0.1 else x  # the line


@mistake("torch.manual_seed")
def draws_from_a_generator(self: Any, x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(0)
    return self.layer(x) + torch.rand(4, 4, generator=generator)  # the line


@mistake("register_autograd")
def puts_a_hook(self: Any, x: Tensor) -> Any:
    y = self.layer(x)
    y.register_hook(lambda gradient: gradient.clamp(-1, 1))  # the line
    return y.sum()


@mistake("return the loss")
def runs_backward(self: Any, x: Tensor) -> Any:
    loss = self.layer(x).sum()
    loss.backward()  # the line
    return loss


@mistake("create_graph=True")
def differentiates_once(self: Any, x: Tensor) -> Any:
    y = self.layer(x).square().sum()
    (gradient,) = torch.autograd.grad(y, self.layer.weight, retain_graph=True)  # the line
    return y + gradient.norm()


@mistake("write this derivative out")
def differentiates_through_a_linear(self: Any, x: Tensor) -> Any:
    y = self.layer(x.requires_grad_(True))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # the line
    return y.mean() + gradient.norm()


@mistake("before compile")
def freezes(self: Any, x: Tensor) -> Any:
    self.layer.requires_grad_(False)  # the line
    y = self.layer(x)
    self.layer.requires_grad_(True)
    return y + self.layer(x)


@mistake(".detach()")
def decays_weights(self: Any, x: Tensor) -> Any:
    self.layer.weight.data.mul_(0.9)  # the line
    return self.layer(x)


@mistake("torch.no_grad()")
def infers(self: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        mean = self.layer(x).mean()  # the line
    return self.layer(x) - mean


@mistake("torch.where")
def uses_cond(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, self.layer, torch.neg, (x,))  # the line


@mistake("Python loop")
def uses_while_loop(self: Any, x: Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64), x
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), start)[1]  # the line


@mistake("batched operators")
def uses_vmap(self: Any, x: Tensor) -> Any:
    return torch.vmap(self.layer)(x)  # the line


@mistake("batched operators")
def uses_torch_func(self: Any, x: Tensor) -> Any:
    return torch.func.grad(lambda y: self.layer(y).sum())(x).sum()  # the line


@mistake("leave collectives out")
def communicates(self: Any, x: Tensor) -> Any:
    y = self.layer(x)
    dist.all_reduce(y)  # the line
    return y


@mistake("with operators of torch")
def has_wrong_sizes(self: Any, x: Tensor) -> Any:
    return self.layer(x) @ torch.zeros(3, 3)  # the line


@mistake("before it is captured")
def converts_a_module(self: Any, x: Tensor) -> Any:
    layer = self.layer.to(torch.bfloat16)  # the line
    return layer(x.to(torch.bfloat16))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_at_its_line_with_what_helps(name: str) -> None:
    kind, advice = MISTAKES[name]
    model, x = kind(), torch.randn(4, 4)
    before = {key: value for key, value in vars(model).items() if key[0] != "_"}
    with pytest.raises(CaptureError) as caught:
        capture(model, (x,))
    error = caught.value
    assert "test_refusals.py:" in error.where
    assert error.where.endswith("# the line"), error.where
    assert advice in error.todo
    assert error.why or error.what != "torch.export cannot trace the model"
    assert {key: value for key, value in vars(model).items() if key[0] != "_"} == before


def test_checkpoints_are_computed() -> None:
    class Checkpointed(Base):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(
                lambda z: self.layer(z).tanh(), self.layer(x), use_reentrant=self.reentrant
            )
            return y.sum()

    assert_steps_agree(Checkpointed(False), steps=1)


def test_layers_are_kept_that_no_random_number_skips() -> None:
    class Keeps(Base):
        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.rand([])
            if not (self.training and drawn < 0.0):
                x = self.layer(x)
            if drawn <= 0.0 or torch.rand_like(x[0, 0]) >= 1.0:
                return x.sum()
            x = self.layer(x).tanh() if drawn > 0.0 else x
            return x.sum() if torch.rand(1) < 1.0 else x.mean()

    assert_steps_agree(Keeps())


def assert_steps_agree(model: nn.Module, steps: int = 3) -> None:
    """Losses, gradients and buffers of some calls, each on what the one before has left."""
    model = model.double()
    batches = [torch.randn(4, 4, dtype=torch.float64) for _ in range(steps)]
    captured = capture(model, (batches[0],))
    buffers = {name: buffer.clone() for name, buffer in captured.buffers.items()}
    reference, learned = copy.deepcopy(model), dict(model.named_parameters())
    for x in batches:
        loss = run(captured.graph, {**learned, **buffers, "x": x})["loss"]
        expected = reference(x)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        mine = torch.autograd.grad(loss, learned.values())
        theirs = torch.autograd.grad(expected, list(reference.parameters()))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
        kept = dict(reference.named_buffers())
        torch.testing.assert_close({name: buffers[name] for name in kept}, kept)


def test_a_buffer_that_is_set_anew_is_written() -> None:
    class Averages(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) * self.scale  # autograd keeps the scale as it is here
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean(0)
            self.steps = self.steps + 1
            return (y.square() / self.steps).sum()

    assert_steps_agree(Averages())


def test_what_every_call_sets_anew_is_left_as_it_was() -> None:
    class Shows(Base):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.layer(x)
            self.last = self.mean.tanh()
            return self.last.sum()

    model = Shows()
    mean = model.mean
    capture(model, (torch.randn(4, 4),))
    assert model.mean is mean
    assert not hasattr(model, "last")
    assert_steps_agree(model, steps=1)


def test_a_gradient_that_is_differentiated_again_is_computed() -> None:
    class Penalty(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).square().sum()
            (gradient,) = torch.autograd.grad(y, self.layer.weight, create_graph=True)
            return y + gradient.square().sum()

    assert_steps_agree(Penalty(), steps=1)


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(CaptureError, match="'weight' has a hook"):
        capture(model, (torch.randn(4, 4),))
