"""A backward in two halves gives torch's gradients, and its first half touches no weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.pipeline.split import backward_input

Net = Callable[[Tensor, Tensor, dict[str, Tensor]], list[Tensor]]


def chain(x: Tensor, y: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    for name in "abc":
        x = torch.tanh(F.linear(x, w[name], w["bias"]))
    return [x]


def plain(x: Tensor, y: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    for name in "abc":
        x = torch.tanh(F.linear(x, w[name]))
    return [F.layer_norm(x, (4,), w["scale"], w["bias"])]


def shared(x: Tensor, y: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    x = F.linear(torch.tanh(F.linear(x, w["a"])), w["a"])
    return [F.layer_norm(x + F.linear(x, w["a"] * w["scale"]), (4,), w["scale"], w["bias"])]


def skip(x: Tensor, y: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    first = F.linear(x, w["a"]) * F.linear(y, w["b"])
    return [first, first.sum() + F.linear(first, w["a"]).square().mean()]


def aside(x: Tensor, y: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    """One result hangs on weights only, and is read by another one."""
    table = w["a"] @ w["b"]
    one, two = table.split(2)
    return [one, F.linear(x, table + w["c"]), two * 2]


def unread(x: Tensor, y: Tensor, w: dict[str, Tensor]) -> list[Tensor]:
    return [F.linear(x.detach(), w["a"]) + w["bias"]]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


NETS: dict[str, Net] = {net.__name__: net for net in (chain, plain, shared, skip, aside, unread)}


def values() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = {name: torch.randn(4, 4, dtype=torch.float64) for name in "abc"}
    weights |= {name: torch.randn(4, dtype=torch.float64) for name in ("bias", "scale")}
    return x, y, {name: weight.requires_grad_() for name, weight in weights.items()}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("leaves", ["xy", "x", ""])
def test_both_halves_together(name: str, leaves: str) -> None:
    x, y, weights = values()
    results = NETS[name](x, y, weights)
    seeds = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, seeds)
    wanted = {"x": x.grad, "y": y.grad, **{k: w.grad for k, w in weights.items()}}

    x, y, weights = values()
    results = NETS[name](x, y, weights)
    inputs = [{"x": x, "y": y}[letter] for letter in leaves]
    found, later = backward_input(results, seeds, inputs, list(weights.values()))
    assert all(weight.grad is None for weight in weights.values())
    for letter, gradient in zip(leaves, found, strict=True):
        assert (gradient is None) == (wanted[letter] is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted[letter])
    later.run()
    for key, weight in weights.items():
        assert (weight.grad is None) == (wanted[key] is None), key
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, wanted[key])


def test_nothing_is_computed_twice() -> None:
    """The halves together run as many matrix products as the whole backward."""
    counts = []
    for split in (False, True):
        x, y, weights = values()
        results = plain(x, y, weights)
        with Products() as products:
            if split:
                _, later = backward_input(
                    results, [torch.ones_like(results[0])], [x], [*weights.values()]
                )
                later.run()
            else:
                torch.autograd.backward(results, [torch.ones_like(results[0])])
        counts.append(products.count)
    assert counts == [6, 6]
