"""Sharded dropout and attention against torch's own on the whole tensors, from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.random import Random, synchronised
from tests.support.ranks import run_ranks

MESH = Mesh.parse("cpu: data=2, tensor=2")

DROPOUTS = (
    "[4, 6, 8]",
    "[4@data, 6, 8]",
    "[4@data, 6, 8@tensor]",
    "[4, 6, 8@tensor@data]",
    "[4@tensor, 6, 8] +sum(data)",
    "[4, 6@data, 8] -sum(tensor)",
    "[4@tensor, 6, 8] +sum(data)",
)
CALLS = 3


@dataclass(frozen=True)
class Attention:
    """A case: the layout of the weights [batch, heads, queries, keys], and what else is asked."""

    layout: str
    key_heads: int = 4
    causal: bool = False
    mask: str = ""
    p: float = 0.3
    scale: float | None = None
    dtype: torch.dtype = torch.float64


ATTENTIONS = (
    Attention("[2, 4, 6, 6]"),
    Attention("[2@data, 4, 6, 6]", causal=True),
    Attention("[2@data, 4@tensor, 6, 6]", key_heads=2, causal=True),
    Attention("[2@data, 4@tensor, 6, 10]", mask="add", scale=0.3),
    Attention("[2, 4@tensor@data, 6, 6]", mask="bool"),
    Attention("[2@data, 4, 6@tensor, 6]", key_heads=1, causal=True),
    Attention("[2@data, 4, 6@tensor, 10]", causal=True, p=0.0),
    Attention("[2@data, 4@tensor, 6, 10]", mask="bool", key_heads=2),
    Attention("[2@data, 4@tensor, 6, 6]", p=0.0, key_heads=2, causal=True),
    Attention("[2@data, 4, 6, 6] -sum(tensor)", p=1.0),
    Attention("[2@data, 4@tensor, 6, 6]", dtype=torch.bfloat16),
)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


def whole_dropouts() -> list[Tensor]:
    """Outputs and input gradients of unsharded calls in a row."""
    found = []
    for number in range(CALLS * len(DROPOUTS)):
        x = numbers(number, 4, 6, 8)
        y = F.dropout(x, 0.4)
        found += [y.detach(), *torch.autograd.grad(y, x, numbers(99 + number, 4, 6, 8))]
    return found


def arranged(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x with its dimensions laid out in memory in another order."""
    back = [order.index(d) for d in range(len(order))]
    return x.permute(order).contiguous().permute(back)


def sharded_dropouts(comm: Communicator, order: tuple[int, ...]) -> list[Tensor]:
    found = []
    random = Random(comm)
    for number in range(CALLS * len(DROPOUTS)):
        text = DROPOUTS[number % len(DROPOUTS)]
        shape, layout = Layout.parse(text)
        x = part(comm, numbers(number, 4, 6, 8), layout).requires_grad_()
        y = random.dropout(arranged(x, order), 0.4, text)
        into = Layout(layout.dims, layout.varying)
        (gradient,) = torch.autograd.grad(y, x, part(comm, numbers(99 + number, 4, 6, 8), into))
        found.append(comm.unshard(y, layout, shape))
        found.append(comm.unshard(gradient, into, shape))
    return found


def part(comm: Communicator, full: Tensor, layout: Layout) -> Tensor:
    """A rank's part; what is owed a sum is shared unequally between the ranks."""
    local = comm.shard(full, Layout(layout.dims))
    for axis in layout.partial:
        local = local * (0.25 if comm.coordinate[axis] == 0 else 0.75)
    return local


def operands(case: Attention) -> tuple[list[Tensor], Tensor | None, Layout]:
    """Whole q, k, v and mask as a model makes them: heads moved forward from the width."""
    (batch, heads, queries, keys), layout = Layout.parse(case.layout)
    shapes = ((queries, heads, 8), (keys, case.key_heads, 8), (keys, case.key_heads, 5))
    made = [numbers(n, batch, *shape, dtype=case.dtype) for n, shape in enumerate(shapes)]
    mask: Tensor | None = None
    if case.mask == "add":
        mask = numbers(7, batch, 1, queries, keys)
    elif case.mask == "bool":
        mask = numbers(8, batch, 1, queries, keys) > 0.2
        mask[0, :, 1] = False  # a query that sees no key
    return made, mask, layout


def whole_attention(case: Attention) -> list[Tensor]:
    made, mask, _ = operands(case)
    q, k, v = (t.transpose(1, 2) for t in made)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, case.p, case.causal, scale=case.scale, enable_gqa=True
    )
    over = [*made] + ([mask] if case.mask == "add" and mask is not None else [])
    return [y.detach(), *torch.autograd.grad(y, over, numbers(9, *y.shape, dtype=case.dtype))]


def sharded_attention(comm: Communicator, case: Attention) -> list[Tensor]:
    """What `whole_attention` returns, computed in parts; the gradients' sums are made up here."""
    made, mask, layout = operands(case)
    batch, heads, queries, _ = layout.dims
    of_keys = heads if case.key_heads > 1 else ()
    layouts = [Layout((batch, queries, heads, ()))] + [Layout((batch, (), of_keys, ()))] * 2
    leaves = [comm.shard(t, at).requires_grad_() for t, at in zip(made, layouts, strict=True)]
    held = mask
    if mask is not None:
        layouts.append(Layout((batch, (), queries, ())))
        held = comm.shard(mask, layouts[3])
        if case.mask == "add":
            leaves.append(held.requires_grad_())
    q, k, v = (t.transpose(1, 2) for t in leaves[:3])
    y = Random(comm).attention(
        q, k, v, held, case.p, is_causal=case.causal, scale=case.scale, layout=case.layout
    )
    into = Layout((batch, heads, queries, ()))
    full = numbers(9, *(Layout.parse(case.layout)[0][:3]), 5, dtype=case.dtype)
    gradients = torch.autograd.grad(y, leaves, comm.shard(full, into))
    found = [comm.unshard(y, into, tuple(full.shape))]
    wholes = [*made, mask] if mask is not None else made
    for gradient, at, whole in zip(gradients, layouts, wholes, strict=False):
        owed = tuple(axis for axis in layout.sharded_axes if axis not in at.sharded_axes)
        found.append(comm.unshard(gradient, Layout(at.dims, owed), tuple(whole.shape)))
    return found


ORDERS = ((0, 1, 2), (1, 0, 2), (2, 0, 1))


def on_rank() -> dict[str, Any]:
    comm = Communicator(MESH)
    random = Random(comm)
    found: dict[str, Any] = {"dropout": [], "attention": []}
    torch.manual_seed(comm.rank)
    for order in ORDERS:
        with synchronised(comm):
            found["dropout"].append(sharded_dropouts(comm, order))
    torch.manual_seed(100)
    for case in ATTENTIONS:
        found["attention"].append(sharded_attention(comm, case))
    found["state"] = torch.get_rng_state()

    layout = Layout.parse("[4@data, 8]")[1]
    draws = []
    for _ in range(2):
        with random.of_shard(torch.device("cpu"), layout):
            draws.append(torch.rand(8))
    found["own"] = draws
    found["after"] = torch.rand(8)
    x = torch.ones(4, 8)
    found["untouched"] = random.dropout(x, 0.0, "[4, 8]") is x
    found["errors"] = errors(random, x)
    return found


def errors(random: Random, x: Tensor) -> dict[str, str]:
    q = torch.ones(2, 4, 6, 8)
    calls: dict[str, Callable[[], Tensor]] = {
        "shape": lambda: random.dropout(x, 0.1, "[4@data, 8]"),
        "axis twice": lambda: random.dropout(x, 0.1, "[8@data, 16@data]"),
        "uneven": lambda: random.dropout(x, 0.1, "[4, 1@data]"),
        "keys": lambda: random.attention(q, q, q, p=0.1, layout="[2, 4, 6, 12@data]"),
        "owed": lambda: random.attention(q, q, q, p=0.1, layout="[2, 4, 6, 6] +sum(data)"),
        "weights": lambda: random.attention(q, q, q, layout="[2, 8, 6, 6]"),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(LayoutError) as caught:
            call()
        found[name] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_rank)


def test_dropout_is_that_of_the_whole_tensor_call_after_call(ranks: list[dict[str, Any]]) -> None:
    """However the parts lie in memory, which depends on what was sent before."""
    torch.manual_seed(0)
    for number in range(len(ORDERS)):
        for place, expected in enumerate(whole_dropouts()):
            for found in ranks:
                torch.testing.assert_close(
                    found["dropout"][number][place], expected, rtol=0, atol=1e-15
                )


@pytest.mark.parametrize("number", range(len(ATTENTIONS)))
def test_attention_is_that_of_the_whole_tensors(ranks: list[dict[str, Any]], number: int) -> None:
    torch.manual_seed(100)
    for case in ATTENTIONS[: number + 1]:
        expected = whole_attention(case)
    exact = ATTENTIONS[number].dtype == torch.float64
    for found in ranks:
        for got, want in zip(found["attention"][number], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12 if exact else 1.6e-2)


def test_generators_advance_as_in_one_process(ranks: list[dict[str, Any]]) -> None:
    torch.manual_seed(100)
    for case in ATTENTIONS:
        whole_attention(case)
    for found in ranks:
        assert torch.equal(found["state"], torch.get_rng_state())


def test_masks_of_shards_differ_and_those_of_replicas_agree(ranks: list[dict[str, Any]]) -> None:
    first, second = zip(*(found["own"] for found in ranks), strict=True)
    for draws in (first, second):
        same = [[torch.equal(a, b) for b in draws] for a in draws]
        on = [
            [MESH.coordinate(a)["data"] == MESH.coordinate(b)["data"] for b in range(4)]
            for a in range(4)
        ]
        assert same == on
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(found["after"], ranks[0]["after"]) for found in ranks)


def test_nothing_is_drawn_without_dropout(ranks: list[dict[str, Any]]) -> None:
    assert all(found["untouched"] for found in ranks)


def test_layouts_that_do_not_fit_are_refused(ranks: list[dict[str, Any]]) -> None:
    errors = ranks[0]["errors"]
    assert "this rank's part is [2, 8]" in errors["shape"]
    assert "softmax runs over the keys" in errors["keys"]
    assert "softmax runs over the keys" in errors["owed"]
    assert "[2, 4, 6, 6]" in errors["weights"]
