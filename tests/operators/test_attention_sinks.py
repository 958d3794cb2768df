"""Attention with sinks: the whole operator and its forms against a softmax written out.

The reference is transformers' computation for gpt-oss: the sink is one more column of the scores,
whose weight is dropped after the softmax.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.intra_op.proofs.thread_ranks import ThreadDevice, on_all_devices
from autopar.ir.mesh import Mesh
from autopar.operators.attention.sink_attention import sink_attention
from tests.operators.test_attention_forms import Shape, draw

LENGTH = 150  # more than the queries of a block of a mask
SHAPES = {
    "causal": Shape((4, 2), (19, 19), (4, 3), "causal"),
    "window": Shape((4, 4), (LENGTH, LENGTH), (4, 4), "window"),
    "documents": Shape((4, 1), (LENGTH, LENGTH), (4, 4), "documents"),
    "padding": Shape((4, 4), (19, 19), (4, 4), "padding"),
    "cross": Shape((4, 2), (9, 20)),
    "one query": Shape((4, 2), (1, 20), (4, 4), "padding"),
}
FORMS = ("gathered", "ring", "zigzag", "balanced", "ulysses")


def drawn(shape: Shape) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Operands with sinks; the mask, in which one query sees nothing; and the gradient."""
    tensors, mask, given = draw(shape)
    generator = torch.Generator().manual_seed(3)
    sinks = torch.randn(shape.heads[0], dtype=torch.float64, generator=generator)
    if shape.mask == "documents":
        assert mask is not None
        mask[7] = False
    return [*tensors, sinks], mask, given


def written_out(shape: Shape) -> list[Tensor]:
    """The result and the gradients of queries, keys, values and sinks."""
    tensors, mask, given = drawn(shape)
    query, key, value, sinks = (x.requires_grad_() for x in tensors)
    keys, values = (x.repeat_interleave(shape.heads[0] // x.shape[1], 1) for x in (key, value))
    scores = query @ keys.mT * query.shape[-1] ** -0.5
    if shape.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=scores.dtype)
        scores = scores + hidden.masked_fill(~mask, torch.finfo(scores.dtype).min)
    columns = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    columns = columns - columns.max(-1, keepdim=True).values
    out = columns.softmax(-1)[..., :-1] @ values
    return [out.detach(), *torch.autograd.grad(out, [query, key, value, sinks], given)]


def options(shape: Shape) -> dict[str, Any]:
    return {"is_causal": shape.causal, "enable_gqa": shape.heads[0] != shape.heads[1]}


@pytest.mark.parametrize("name", SHAPES)
def test_the_whole_operator(name: str) -> None:
    shape = SHAPES[name]
    tensors, mask, given = drawn(shape)
    *operands, sinks = (x.requires_grad_() for x in tensors)
    out = sink_attention(*operands, mask, sinks=sinks, **options(shape))
    found = [out.detach(), *torch.autograd.grad(out, [*operands, sinks], given)]
    for one, expected in zip(found, written_out(shape), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


def on_device(device: ThreadDevice, form: str, shape: Shape) -> list[Tensor]:
    """This device's parts of the result and gradients; the last is a summand."""
    tensors, mask, given = drawn(shape)
    own = [device.group("x").own(x.shape[-2]) for x in tensors[:3]]
    inputs = [
        x.narrow(-2, *run).clone().requires_grad_() for x, run in zip(tensors, own, strict=False)
    ]
    sinks = tensors[3].clone().requires_grad_()
    if mask is not None and mask.shape[-2] > 1 and form != "ulysses":
        mask = mask.narrow(-2, *own[0]).clone()
    masks = [] if mask is None else [mask]
    run = getattr(device, f"sink_{form}_attention")
    out = run(*inputs, *masks, axis="x", size=shape.lengths, sinks=sinks, **options(shape))
    return [
        out.detach(),
        *torch.autograd.grad(out, [*inputs, sinks], given.narrow(-2, *own[0])),
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_forms(count: int) -> None:
    for name, shape in SHAPES.items():
        if shape.lengths[0] < count:
            continue
        expected = written_out(shape)
        for form in FORMS:
            if form == "zigzag" and not shape.causal:
                continue
            if form == "balanced" and shape.mask not in ("window", "documents"):
                continue
            parts = on_all_devices(
                Mesh.parse(f"cpu: x={count}"),
                lambda rank, device, form=form, shape=shape: on_device(device, form, shape),
            )
            for place, known in enumerate(expected):
                pieces = [part[place] for part in parts]
                found = torch.stack(pieces).sum(0) if place == 4 else torch.cat(pieces, -2)
                label = f"{form} of {name} on {count}, {place}"
                torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-9, msg=label)
