"""Forms of attention on threads: parity with torch's own, and the calls that they make.

All kinds of masks, and heads as in cross attention and DeepSeek's latent attention, on two to five
devices, whose parts have unequal lengths.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autopar.intra_op.proofs.thread_ranks import ThreadDevice, on_all_devices
from autopar.ir.mesh import Mesh
from autopar.operators.attention.balanced_attention import shares
from autopar.runtime.recompute import keep_products, keeping
from tests.operators.test_attention_forms import SHAPES, Shape, draw, whole

LOWEST = torch.finfo(torch.float64).min
LATENT = Shape((4, 4), (19, 19), (6, 3), "causal")  # widths of keys and values as in MLA
CASES = {
    **SHAPES,
    "latent": LATENT,
    "latent, documents": Shape((4, 4), (19, 19), (6, 3), "documents"),
}
FORMS = ("gathered", "ring", "zigzag", "balanced")


def on_device(
    device: ThreadDevice, form: str, shape: Shape
) -> tuple[list[Tensor], Counter[str], tuple[tuple[int, int], ...]]:
    """This device's parts of the result and of the gradients, and its calls."""
    tensors, mask, given = draw(shape)
    peers: Any = device.group("x")
    own = [peers.own(x.shape[-2]) for x in tensors]
    inputs = [
        x.narrow(-2, *run).clone().requires_grad_() for x, run in zip(tensors, own, strict=True)
    ]
    if mask is not None:
        mask = (mask.narrow(-2, *own[0]) if mask.shape[-2] > 1 else mask).clone()
        inputs += [mask.requires_grad_()] if mask.is_floating_point() else []
    calls = Counter[str]()
    for name in ("deal", "stack", "sum_parts"):
        object.__setattr__(peers, name, _counted(getattr(peers, name), calls, name))
    device.group = lambda axes: peers  # type: ignore[method-assign]
    how = {"is_causal": shape.causal, "enable_gqa": shape.heads[0] != shape.heads[1]}
    masks = [] if mask is None else [mask]
    out = getattr(device, f"{form}_attention")(
        *inputs[:3], *masks, axis="x", size=shape.lengths, **how
    )
    forward = Counter(calls)
    found = torch.autograd.grad(out, inputs, given.narrow(-2, *own[0]))
    calls["forward"] = sum(forward.values())
    return [out.detach(), *found], calls, tuple(own)


def _counted(call: Any, calls: Counter[str], name: str) -> Any:
    def run(*args: Any) -> Any:
        calls[name] += 1
        return call(*args)

    return run


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_parts_are_those_of_the_whole(count: int) -> None:
    for name, shape in CASES.items():
        expected = whole(shape)
        for form in FORMS:
            if form == "zigzag" and not shape.causal:
                continue
            if form == "balanced" and shape.mask not in ("window", "documents"):
                continue
            devices = on_all_devices(
                Mesh.parse(f"cpu: x={count}"),
                lambda rank, device, form=form, shape=shape: on_device(device, form, shape),
            )
            for tensors, calls, own in devices:
                runs = (own[0], own[0], own[1], own[2], own[0])
                for found, known, run in zip(tensors, expected, runs, strict=False):
                    part = known.narrow(-2, *run) if known.shape[-2] > 1 else known
                    label = f"{form} of {name} on {count}"
                    torch.testing.assert_close(found, part, rtol=1e-9, atol=1e-9, msg=label)
                check_calls(form, calls, count)


def check_calls(form: str, calls: Counter[str], n: int) -> None:
    """At most as many as torch's context parallelism makes, see its `_attention.py`.

    Rotated by all_to_all: n - 1 forward and 3 n - 2 in all; gathered: one all_gather forward, one
    and n all_to_all backward. Two devices cannot deal queries out and results back in one call.
    """
    forward, every = calls["forward"], calls.total() - calls["forward"]
    if form == "gathered":
        assert calls["stack"] == 2
        assert calls["sum_parts"] + calls["deal"] <= n
        assert forward == 1
    elif form == "balanced":
        assert calls["stack"] == 1
        assert calls["deal"] == 4
    else:
        assert forward <= (max(n - 1, 2) if form == "zigzag" else n - 1)
        assert every <= 3 * n - (2 if form == "zigzag" else 3)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_sends_blocks_to_devices_that_see_them(causal: bool) -> None:
    """Keys and values of all devices but those before them, twice, and as many gradients once."""
    form, n, length, width = "ring", 4, 20, 6
    shape = Shape((2, 2), (length, length), (2, 4), "causal" if causal else "")

    def on_one(rank: int, device: ThreadDevice) -> int:
        tensors, _, given = draw(shape)
        peers: Any = device.group("x")
        start, count = peers.own(length)
        inputs = [x.narrow(-2, start, count).requires_grad_() for x in tensors]
        sent = [0]
        deal = peers.deal

        def counted(rows: Any, takes: Any) -> Any:
            sent[0] += sum(
                x.numel() for to, row in enumerate(rows) if to != peers.index for x in row
            )
            return deal(rows, takes)

        object.__setattr__(peers, "deal", counted)
        device.group = lambda axes: peers  # type: ignore[method-assign]
        run = getattr(device, f"{form}_attention")
        out = run(*inputs, axis="x", size=(length, length), is_causal=causal)
        torch.autograd.grad(out, inputs, given.narrow(-2, start, count))
        return sent[0]

    devices = on_all_devices(Mesh.parse(f"cpu: x={n}"), on_one)
    block = 2 * 2 * width * length // n  # batch, heads, both widths, positions
    pairs = n * (n - 1) // (2 if causal else 1)
    assert sum(devices) == 3 * pairs * block


def test_the_zigzag_order_sends_bytes_where_dtypes_differ() -> None:
    """In bfloat16, keys and their gradients in float32 travel in one call."""
    shape = Shape((4, 2), (21, 21), mask="causal")
    expected = whole(shape)

    def on_one(rank: int, device: ThreadDevice) -> list[Tensor]:
        tensors, _, given = draw(shape)
        peers = device.group("x")
        start, count = peers.own(21)
        inputs = [x.narrow(-2, start, count).bfloat16().requires_grad_() for x in tensors]
        out = device.zigzag_attention(
            *inputs, axis="x", size=(21, 21), is_causal=True, enable_gqa=True
        )
        own = given.narrow(-2, start, count).bfloat16()
        return [out.detach(), *torch.autograd.grad(out, inputs, own)]

    parts = on_all_devices(Mesh.parse("cpu: x=5"), on_one)
    for place, known in enumerate(expected):
        found = torch.cat([part[place] for part in parts], -2)
        assert found.dtype == torch.bfloat16
        error = (found.double() - known).norm() / known.norm()
        assert error < 0.02


@pytest.mark.parametrize("count", [2, 4, 8])
def test_documents_are_balanced_by_what_they_see(count: int) -> None:
    """One long document and many short ones: a contiguous division leaves most to one device."""
    lengths = [512, *[32] * 16]
    spans = [
        (start, start + at + 1)
        for start, size in zip(itertools.accumulate([0, *lengths]), lengths, strict=False)
        for at in range(size)
    ]
    seen = [high - low for low, high in spans]
    dealt = [
        sum(seen[at] for start, size in runs for at in range(start, start + size))
        for runs in shares(spans, count)
    ]
    assert sum(dealt) == sum(seen)
    size = len(seen) // count
    contiguous = [sum(seen[at * size : (at + 1) * size]) for at in range(count)]
    mean = sum(seen) / count
    assert max(contiguous) > 1.4 * mean
    assert max(dealt) < 1.15 * mean


# What an additive mask hides keys by, and what it adds where it hides them twice.
HIDDEN = {
    "lowest": (LOWEST, 2 * LOWEST),
    "1e4": (-1e4, -3e4),
    "1e9": (-1e9, -1e9),
    "10": (-10.0, 7.0),
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("form", ["gathered", "ring"])
def test_a_query_without_keys_weights_all_alike(form: str, hidden: str) -> None:
    """As a softmax written out does; torch's fused kernel has other gradients there."""
    tensors, _, given = draw(Shape((2, 2)))
    once, twice = HIDDEN[hidden]
    mask = torch.zeros(17, 17, dtype=torch.float64)
    mask[3:5] = mask[:, 9:] = once
    mask[4, ::3] = twice
    query, key, value = (x.requires_grad_() for x in tensors)
    out = (query @ key.mT / query.shape[-1] ** 0.5 + mask).softmax(-1) @ value
    expected = [out.detach(), *torch.autograd.grad(out, tensors, given)]

    def on_one(rank: int, device: ThreadDevice) -> list[Tensor]:
        run = device.group("x").own(17)
        inputs = [x.detach().narrow(-2, *run).requires_grad_() for x in tensors]
        attend = getattr(device, f"{form}_attention")
        out = attend(*inputs, mask.narrow(0, *run), axis="x", size=(17, 17))
        return [out.detach(), *torch.autograd.grad(out, inputs, given.narrow(-2, *run))]

    parts = on_all_devices(Mesh.parse("cpu: x=3"), on_one)
    for place, known in enumerate(expected):
        found = torch.cat([part[place] for part in parts], -2)
        torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["ring", "zigzag", "gathered"])
@pytest.mark.parametrize("kept", [(True, False), (False, True), ()])
def test_a_form_counts_as_one_product_of_a_recomputed_block(
    form: str, kept: tuple[bool, ...]
) -> None:
    """A ring calls one kernel in each turn, all of which are kept, or none; () keeps everything.

    Parts are merged in place, which must not change what was kept.
    """
    tensors, _, given = draw(Shape((2, 2), (16, 16)))
    query, key, value = (x.requires_grad_() for x in tensors)
    weight = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = F.linear(F.scaled_dot_product_attention(query, key, value, is_causal=True), weight)
    expected = [out.detach(), *torch.autograd.grad(out, [query, key, value], given)]

    def on_one(rank: int, device: ThreadDevice) -> list[Tensor]:
        run = device.group("x").own(16)
        inputs = [x.detach().narrow(-2, *run).requires_grad_() for x in tensors]

        def block(*operands: Tensor) -> Tensor:
            attend = getattr(device, f"{form}_attention")
            return F.linear(attend(*operands, axis="x", size=(16, 16), is_causal=True), weight)

        context = keeping(*kept, mesh=device) if kept else keep_products
        out = checkpoint(block, *inputs, use_reentrant=False, context_fn=context)
        return [out.detach(), *torch.autograd.grad(out, inputs, given.narrow(-2, *run))]

    parts = on_all_devices(Mesh.parse("cpu: x=4"), on_one)
    for place, known in enumerate(expected):
        found = torch.cat([part[place] for part in parts], -2)
        torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-9)
