"""`autopar.mixture` outside autopar, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import CaptureError, GraphError


def operands() -> list[torch.Tensor]:
    draw = torch.manual_seed(0)
    x, weights = torch.randn(7, 4, generator=draw), torch.rand(7, 2, generator=draw)
    up, down = torch.randn(3, 5, 4, generator=draw), torch.randn(3, 4, 5, generator=draw)
    return [x, torch.randint(0, 3, (7, 2), generator=draw), weights, up, down]


def test_it_is_the_sum_over_experts_and_differentiable() -> None:
    x, ids, weights, up, down = (
        t.double().requires_grad_() if t.is_floating_point() else t for t in operands()
    )
    gate = torch.randn_like(up).requires_grad_()
    text = "mul(sub(up, 1), clamp(mul(gate, 2.0), -1.5, None))"
    found = autopar.mixture(x, ids, weights, up, down, gate=gate, activation=text)
    rows = []
    for token, chosen in enumerate(ids.tolist()):
        parts = [
            weights[token, i]
            * down[e].mv((up[e].mv(x[token]) - 1) * (2 * gate[e].mv(x[token])).clamp(min=-1.5))
            for i, e in enumerate(chosen)
        ]
        rows.append(torch.stack(parts).sum(0))
    wanted = torch.stack(rows)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    leaves, cotangent = (x, weights, up, down, gate), torch.linspace(0, 1, 28).view(7, 4).double()
    ours, theirs = (torch.autograd.grad(y, leaves, cotangent) for y in (found, wanted))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_shapes_that_do_not_fit(place: int) -> None:
    given = operands()
    given[place] = given[place][..., :-1]
    with pytest.raises(CaptureError, match="do not fit"):
        autopar.mixture(*given)


@pytest.mark.parametrize(
    "text", ["", "swish", "__import__('os')", "mul(gate, down)", "up.sum()", "silu(up", "1" * 2000]
)
def test_activations_that_cannot_be_read(text: str) -> None:
    with pytest.raises(GraphError, match="activation"):
        autopar.mixture(*operands(), activation=text)
