"""Forms of attention on gloo ranks: values, gradients and calls, against torch in one process.

One start of ranks runs all cases. The reference is torch's own attention on whole tensors; nothing
is shared with it but the drawing of the operands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.runtime.communication.communicator import Communicator
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Shape:
    """Sizes of attention: heads of queries and of keys, lengths, widths; and what is masked."""

    heads: tuple[int, int] = (6, 6)
    lengths: tuple[int, int] = (17, 17)
    widths: tuple[int, int] = (4, 4)
    mask: str = ""

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


SHAPES = {
    "causal, uneven": Shape(mask="causal"),
    "even": Shape(lengths=(16, 16)),
    "grouped, values of other width": Shape((6, 2), widths=(4, 3), mask="causal"),
    "one head of keys": Shape((4, 1), mask="causal"),
    "window": Shape(mask="window"),
    "documents": Shape((6, 2), mask="documents"),
    "padding": Shape(mask="padding"),
    "additive": Shape((6, 3), mask="additive"),
    "cross": Shape((6, 2), (9, 20)),
    "cross, causal": Shape(lengths=(9, 20), mask="causal"),
}
FORMS = ("gathered", "ring", "zigzag", "ulysses")


def draw(shape: Shape) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Queries, keys and values; the mask; and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    (many, few), (rows, keys), (width, values) = shape.heads, shape.lengths, shape.widths
    tensors = [normal(2, many, rows, width), normal(2, few, keys, width)]
    tensors.append(normal(2, few, keys, values))
    at, to = torch.arange(rows)[:, None], torch.arange(keys)[None]
    document = torch.tensor([0] * 5 + [1] * (keys - 11) + [2] * 6)
    masks = {
        "window": (to <= at) & (at - to < 5),
        "documents": (document[at.flatten()][:, None] == document) & (to <= at),
        "padding": (torch.arange(keys) < torch.tensor([keys - 6, keys])[:, None])[:, None, None],
        "additive": normal(1, many, rows, keys),
    }
    return tensors, masks.get(shape.mask), normal(2, many, rows, values)


def whole(shape: Shape) -> list[Tensor]:
    """The result, and the gradients of queries, keys, values and of an additive mask."""
    tensors, mask, given = draw(shape)
    inputs = [x.requires_grad_() for x in tensors]
    if mask is not None and mask.is_floating_point():
        inputs.append(mask.requires_grad_())
    grouped = shape.heads[0] != shape.heads[1]
    out = F.scaled_dot_product_attention(*tensors, mask, is_causal=shape.causal, enable_gqa=grouped)
    return [out.detach(), *torch.autograd.grad(out, inputs, given)]


def on_rank(
    mesh: str, cases: list[tuple[str, str, Any]]
) -> list[tuple[list[Tensor], Counter[str]]]:
    """Each case's results put together again, and the calls that it made forwards and backwards."""
    comm = Communicator(Mesh.parse(mesh))
    return [part(comm, form, SHAPES[name], axis) for form, name, axis in cases]


def part(
    comm: Communicator, form: str, shape: Shape, axis: Any
) -> tuple[list[Tensor], Counter[str]]:
    tensors, mask, given = draw(shape)
    group = comm.group(axis)
    own = [group.own(x.shape[-2]) for x in tensors]
    inputs = [
        x.narrow(-2, *run).clone().requires_grad_() for x, run in zip(tensors, own, strict=True)
    ]
    rows = mask is not None and mask.shape[-2] > 1 and not form.startswith("ulysses")
    if mask is not None:
        mask = mask.narrow(-2, *own[0]).clone() if rows else mask
        mask = mask.requires_grad_(mask.is_floating_point())
    how = {"is_causal": shape.causal, "enable_gqa": shape.heads[0] != shape.heads[1]}
    masks = [] if mask is None else [mask]
    events = Counter[str]()
    recorder, begin = group.calls.recorder, group.calls.recorder.begin

    def counted(channel: str, ranks: Any, kind: str, *rest: Any) -> Any:
        events[f"{stage} {kind}"] += 1
        return begin(channel, ranks, kind, *rest)

    recorder.begin = counted  # type: ignore[method-assign]
    stage = "forward"
    run = getattr(comm, f"{form}_attention")
    out = run(*inputs, *masks, axis=axis, size=shape.lengths, **how)
    stage = "backward"
    additive = mask is not None and mask.requires_grad
    found = torch.autograd.grad(
        out, [*inputs, *([mask] if additive else [])], given.narrow(-2, *own[0])
    )
    recorder.begin = begin  # type: ignore[method-assign]
    extents = (shape.lengths[0], shape.lengths[0], shape.lengths[1], shape.lengths[1])
    parts = [
        group.gather(x, 2, extent)
        for x, extent in zip((out.detach(), *found), extents, strict=False)
    ]
    if additive:
        parts.append(
            group.gather(found[3], 2, shape.lengths[0]) if rows else group.reduce(found[3])
        )
    return parts, events


def cases(count: int) -> list[tuple[str, list[tuple[str, str, Any]]]]:
    """Meshes, and for each the forms, shapes and axes."""
    if count != 4:
        every = [(form, name, "x") for form in FORMS for name in SHAPES if fits(form, name, count)]
        return [(f"cpu: x={count}", every)]
    line = [(form, name, "x") for form in FORMS for name in SHAPES if fits(form, name, 4)]
    turned = [("ring", "causal, uneven", ("y", "x")), ("ring", "even", ("x", "y"))]
    turned += [("gathered", "causal, uneven", ("x", "y")), ("zigzag", "causal, uneven", ("y", "x"))]
    grid = [("ulysses_ring", name, ("y", "x")) for name in SHAPES]
    return [("cpu: x=4", line), ("cpu: y=2, x=2", [*grid, *turned])]


def fits(form: str, name: str, count: int) -> bool:
    shape = SHAPES[name]
    enough = form != "ulysses" or shape.heads[0] >= count
    return enough and (form != "zigzag" or shape.causal)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_compute_what_the_whole_does(count: int) -> None:
    known = {name: whole(shape) for name, shape in SHAPES.items()}
    for mesh, each in cases(count):
        ranks = run_ranks(on_rank, mesh, each, count=count)
        for place, (form, name, axis) in enumerate(each):
            for rank in ranks:
                parts, calls = rank[place]
                label = f"{form} of {name} over {axis} of {mesh}"
                for found, expected in zip(parts, known[name], strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=label)
                check_calls(form, calls, count, label)


def check_calls(form: str, calls: Counter[str], n: int, label: str) -> None:
    """At most the calls of torch's context parallelism; two devices need a second one in zigzag.

    torch rotates keys by n - 1 calls of all_to_all forwards and 3 n - 2 in all, or gathers them by
    one all_gather in each direction and n calls of all_to_all.
    """
    forward = sum(count for kind, count in calls.items() if kind.startswith("forward"))
    every = sum(calls.values())
    if form == "ring":  # torch's sends the gradients of the first turn, too
        assert forward == n - 1, label
        assert every == 3 * n - 3, label
    elif form == "zigzag":
        assert forward == max(n - 1, 2), label
        assert every <= 3 * n - 2, label
    elif form == "gathered":
        assert calls == Counter(
            {"forward all_gather": 1, "backward all_gather": 1, "backward all_to_all": 1}
        ), label
    elif form == "ulysses_ring":  # two exchanges each way, and a ring of two
        assert (forward, every) == (2 + 1, 4 + 1 + 2), label
    elif form == "ulysses":
        assert calls == Counter({"forward all_to_all": 2, "backward all_to_all": 2}), label
