"""In-place writes in a forward become values, without changing what the model computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.errors import CaptureError
from autopar.ir.rewrite import writes
from autopar.operators.interpret import run
from autopar.passes.verify import verify

Outcome = Tensor | tuple[Tensor, ...]


class Writes(nn.Module):
    """Hands `body` an activation, the input, and itself with a buffer."""

    def __init__(self, body: Callable[[Tensor, Tensor, Writes], Outcome]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(4, 4)), body
        self.register_buffer("state", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Outcome:
        return self.body(x @ self.weight, x, self)


def whole(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    return y.mul_(2).add_(1).relu_()


def a_view_after(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    flat = y.view(-1)
    y.mul_(3)
    return flat * 2


def through_other_views(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    y.diagonal().mul_(2)
    y.t().diagonal(1).copy_(x[0, 1:])
    y.narrow(1, -3, 2).add_(1)
    y.movedim(0, 1)[2].mul_(3)
    return y, y.diagonal(-1)


def through_a_view(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    y.view(2, 8).unsqueeze(1).add_(1)
    return y


def through_slices(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    y[1:, ::2] = x[1:, :2]
    y[0, 3].fill_(2.0)
    return y, y[:, 1]


def shifted(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    moved = y.new_zeros(4, 4)
    moved[:, 1:] = y[:, :-1].clone()
    moved[:, 0] = 5
    return moved


def transposed(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    y.t()[0].zero_()
    y.transpose(0, 1).mul_(x)
    y.unsqueeze(0).permute(2, 0, 1)[1].tanh_()
    return y


def masked(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    y[x > 0] = 3.0
    y.masked_fill_(x < -1, 0.5)
    return y


def another_shape(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    before = y.view(16)
    y.unsqueeze_(0)
    y[0, 1].add_(2)
    return y, before


def narrow_dtype(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    total = torch.zeros(4, 4, dtype=torch.float16)
    total += y
    return total


def no_copy(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    same = torch.dropout(y.contiguous(), 0.0, True)
    same[1:].mul_(2)
    return y + same


def a_copy(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    other = y.t().contiguous()
    other.mul_(2)
    return y + other


def one_of_several_results(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    values, places = y.topk(2)
    values /= values.sum(-1, keepdim=True)
    return values, places


def constant(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    scale += 1
    return y * scale


def the_batch(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    mask = x.detach()
    mask.clamp_(min=0)
    return mask, x + 1


def without_gradients(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    """Autograd does not see these writes: the gradient of the old value becomes the new one's."""
    z = y.sigmoid().clone()
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
        z.clamp_(min=0.4).mul_(2)
    return y * z, z.log()


def buffer(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    before = model.state.sum()
    model.state.mul_(0.9)
    with torch.no_grad():
        model.state += y
    return before, model.state * y


def part_of_a_buffer(y: Tensor, x: Tensor, model: Writes) -> Outcome:
    row = model.state[1]
    with torch.no_grad():
        model.state[1:3, 0] = y[:2, 0]
        row.add_(1)
    return model.state * y, row * 2


BODIES = (
    whole, a_view_after, through_a_view, through_other_views, through_slices, shifted, transposed,
    masked, another_shape,
    narrow_dtype, no_copy, a_copy, one_of_several_results, constant, the_batch, without_gradients,
    buffer, part_of_a_buffer,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_graph_without_writes_computes_what_the_model_with_writes_does(
    body: Callable[[Tensor, Tensor, Writes], Outcome],
) -> None:
    torch.manual_seed(0)
    model, x = Writes(body), torch.randn(4, 4)
    captured = capture(model, (x,))
    graph = verify(captured.graph)
    reference = copy.deepcopy(model)
    buffers = {name: tensor.clone() for name, tensor in captured.buffers.items()}
    for _ in range(2):  # what a step leaves in a buffer shows in the next
        batch, seen = x.clone(), x.clone()
        outputs = tuple(run(graph, {"x": batch, "weight": model.weight, **buffers}).values())
        expected = reference(seen)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(outputs) == len(expected)
        assert all(map(torch.equal, outputs, expected))
        assert torch.equal(buffers["state"], reference.state)
        assert torch.equal(batch, x)  # unlike the model, the graph leaves the batch alone
        for mine, theirs in zip(outputs, expected, strict=True):
            if theirs.requires_grad:
                gradients = (
                    torch.autograd.grad(value.sum(), weight, retain_graph=True)[0]
                    for value, weight in ((mine, model.weight), (theirs, reference.weight))
                )
                torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("body", BODIES)
def test_only_buffers_are_written_and_each_once(
    body: Callable[[Tensor, Tensor, Writes], Outcome],
) -> None:
    graph = capture(Writes(body), (torch.randn(4, 4),)).graph
    assert not any(node.op.split(".")[-1].endswith("_") for node in graph.nodes)
    written = [name for node in graph.nodes for name in writes(node)]
    assert written == [leaf.name for leaf in graph.leaves("buffer") if leaf.name in written]
    assert bool(written) == (body in (buffer, part_of_a_buffer))


def test_a_write_that_reaches_another_leaf_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("front", self.whole[:2])

        def forward(self, x: Tensor) -> Tensor:
            self.whole.add_(x)
            return self.front * 2

    with pytest.raises(CaptureError, match="front"):
        capture(Tied(), (torch.randn(4),))


def test_torch_warns_of_nothing_in_a_recurrent_layer() -> None:
    with warnings.catch_warnings(action="error"):
        capture(nn.GRU(4, 4), (torch.randn(2, 4),), loss_fn=lambda output: output[0].sum())
