"""Written-out masks of real size are recognised without computing gigabytes."""

from __future__ import annotations

import resource
from itertools import islice, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.ir.graph_text import parse_graph
from autopar.operators.attention.sequence_forms import ATTENTION, seen
from autopar.passes.masks.attention_masks import causal_masks
from autopar.passes.normalise import prepare
from tests.support import models


def test_a_causal_mask_of_a_big_batch_is_judged_in_little_memory() -> None:
    # 256 x 2048 x 2048 booleans are one GiB, and the mask is an `and` of several of that size.
    model, batch = models.llama(layers=1, batch=256, seq=2048)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = prepare(capture(model, (), batch).graph)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    attention = [n for n in graph.nodes if n.op == "aten.scaled_dot_product_attention"]
    assert [len(node.inputs) for node in attention] == [3]
    assert [node.args[5] for node in attention] == [True]
    assert grown < 2**19, "kilobytes"


HEAD = """graph 'mask'
%q = input('q') : f32[1, 2, {n}, 4] grad
%i = aten.arange({n}) : i64[{n}]
%row = aten.reshape(%i, (1, 1, {n}, 1)) : i64[1, 1, {n}, 1]
%column = aten.reshape(%i, (1, 1, 1, {n})) : i64[1, 1, 1, {n}]
%later = aten.add.Scalar(%row, 1) : i64[1, 1, {n}, 1]
%third = aten.floor_divide(%row, 3) : i64[1, 1, {n}, 1]
%column_third = aten.floor_divide(%column, 3) : i64[1, 1, 1, {n}]
%all = aten.ge.Scalar(%row, 0) : bool[1, 1, {n}, 1]
{lines}
%y = aten.scaled_dot_product_attention(%q, %q, %q, %m) : f32[1, 2, {n}, 4] grad
output 'y' = %y
"""
TERMS = {
    f"aten.{name}.Tensor(%{left}, %{right})": (name, left, right)
    for name in ("le", "lt", "ge", "gt", "eq")
    for left, right in (
        ("row", "column"),
        ("column", "row"),
        ("column", "later"),
        ("third", "column_third"),
    )
}


def dense(term: str, n: int) -> torch.Tensor:
    name, left, right = TERMS[term]
    row, column = torch.arange(n)[:, None], torch.arange(n)[None]
    values = {
        "row": row, "column": column, "later": row + 1, "third": row // 3,
        "column_third": column // 3,
    }  # fmt: skip
    return getattr(torch, name)(values[left], values[right])


def recognised(terms: tuple[str, ...], n: int) -> str:
    """How attention is masked: "full", "causal" or "mask"."""
    kind = f"bool[1, 1, {n}, {n}]"
    lines = [f"%m{at} = {term} : {kind}" for at, term in enumerate(terms)]
    lines.append(f"%m = aten.__and__.Tensor(%m0, %{'m1' if len(terms) > 1 else 'all'}) : {kind}")
    (node,) = causal_masks(parse_graph(HEAD.format(n=n, lines="\n".join(lines)))).nodes[-1:]
    if len(node.inputs) == 4:
        return "mask"
    return "causal" if node.args[5:6] == (True,) else "full"


def test_masks_of_numbers_are_what_they_are_as_a_whole() -> None:
    n = 7
    for terms in (*((t,) for t in TERMS), *islice(product(TERMS, repeat=2), 0, None, 13)):
        mask = torch.stack([dense(term, n) for term in terms]).all(0)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        kind = "full" if mask.all() else "causal" if torch.equal(mask, causal) else "mask"
        assert recognised(terms, n) == kind, terms


@pytest.mark.parametrize(
    ("terms", "kind"),
    [
        (("aten.le.Tensor(%column, %row)",), "causal"),
        (("aten.ge.Tensor(%row, %column)", "aten.lt.Tensor(%column, %later)"), "causal"),
        (("aten.lt.Tensor(%column, %row)",), "mask"),
        (("aten.le.Tensor(%column, %row)", "aten.eq.Tensor(%third, %column_third)"), "mask"),
    ],
)
def test_a_mask_of_a_million_positions_is_recognised(terms: tuple[str, ...], kind: str) -> None:
    assert recognised(terms, 2**20) == kind


class Seen(nn.Module):
    """Attention under masks of a window, written in two ways, and of documents in a packed row."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 12)

    def masks(self, positions: Tensor) -> list[Tensor]:
        at = torch.arange(positions.shape[1])
        key, query = at[None], at[:, None]
        document = (positions == 0).cumsum(-1)
        same = document[:, None, :, None] == document[:, None, None, :]
        earlier = positions[:, None, None, :] <= positions[:, None, :, None]
        return [
            (key <= query) & (query - key < 5),
            (key <= query) & (key > query - 5),
            (key <= query) & same,
            earlier & same,
            same,
        ]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query, key, value = (h.unsqueeze(1) for h in self.into(x).chunk(3, -1))
        outs = [F.scaled_dot_product_attention(query, key, value, m) for m in self.masks(positions)]
        return torch.stack(outs).square().mean()


def test_prices_know_which_share_of_keys_a_mask_leaves() -> None:
    model = Seen()
    positions = torch.cat([torch.arange(n) for n in (9, 14, 17)])[None]
    graph = prepare(capture(model, (torch.ones(1, 40, 4), positions)).graph)
    found = [seen(node) for node in graph.nodes if node.op == ATTENTION]
    shares = [float(mask.double().mean()) for mask in model.masks(positions)]
    assert found[:2] == pytest.approx(shares[:2])
    assert found[2:] == pytest.approx([41 / 80, 41 / 80, 1.0])  # what holds for any documents
    assert all(bound >= share for bound, share in zip(found, shares, strict=True))
