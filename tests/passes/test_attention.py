"""Masks and heads of attention: the same outputs and gradients in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph_text import parse_graph
from autopar.passes.masks.attention_masks import causal_masks, group_heads, simplify_masks
from autopar.passes.simplify import drop_identities
from autopar.passes.verify import verify
from tests.support.graphs import assert_equal_runs, captured_double, checked, ops

LOWEST = torch.finfo(torch.float64).min
MASKS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "lower triangle": (lambda: torch.ones(6, 6, dtype=torch.bool).tril(), "causal"),
    "with heads": (lambda: torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), "causal"),
    "of comparisons": (lambda: torch.arange(6)[None, :] <= torch.arange(6)[:, None], "causal"),
    "added": (lambda: torch.full((6, 6), float("-inf")).triu(1), "causal"),
    "lowest value": (lambda: torch.full((6, 6), LOWEST, dtype=torch.float64).triu(1), "causal"),
    "all": (lambda: torch.ones(1, 1, 1, 6, dtype=torch.bool), "full"),
    "zeros added": (lambda: torch.zeros(6, 6), "full"),
    "strict triangle": (lambda: torch.ones(6, 6, dtype=torch.bool).tril(1), ""),
    "window": (lambda: torch.ones(6, 6, dtype=torch.bool).tril().triu(-2), ""),
    "bias": (lambda: torch.ones(6, 6).tril(), ""),
    "differs between samples": (
        lambda: (torch.arange(6)[None, :] <= torch.arange(6)[:, None])
        & (torch.arange(2)[:, None, None, None] < 1), "",
    ),
    "by chance": (lambda: torch.rand(6, 6) < 2, ""),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, mask: Callable[[], Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.q, self.mask, self.dtype = nn.Parameter(torch.randn(2, 2, 6, 4)), mask, dtype

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            mask = self.mask()
            mask = mask.to(self.dtype) if mask.is_floating_point() else mask
            x = F.scaled_dot_product_attention(self.q, x, x, mask)
        return x


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognised(name: str) -> None:
    torch.manual_seed(0)
    mask, expected = MASKS[name]
    graph, values = captured_double(Attention(mask), {"x": torch.randn(2, 2, 6, 4)})
    after = verify(causal_masks(verify(drop_identities(graph))))
    nodes = [node for node in after.nodes if node.op == "aten.scaled_dot_product_attention"]
    assert len(nodes) == 2
    for node in nodes:
        found = (
            ("causal" if (*node.args, *[None] * 6)[5] else "full") if len(node.inputs) < 4 else ""
        )
        assert found == expected
    if name != "by chance":
        assert_equal_runs(graph, after, values)


def test_masks_of_inputs_and_buffers_stay() -> None:
    text = """
graph 'g'
%b = buffer('b') : bool[4, 4]
%q = input('q') : f64[1, 1, 4, 2]
%m = input('m') : bool[4, 4]
%mask = aten.logical_or(%m, %b) : bool[4, 4]
%a = aten.scaled_dot_product_attention(%q, %q, %q, %mask) : f64[1, 1, 4, 2]
%b2 = aten.scaled_dot_product_attention(%q, %q, %q, %b) : f64[1, 1, 4, 2]
output 'a' = %a
output 'b' = %b2
"""
    before = parse_graph(text)
    assert causal_masks(before) == before


PADDING = """
graph 'g'
%x = input('x') : bool[2, 3]
%i = aten.arange(2) : i64[2]
%row = aten.reshape(%i, (2, 1, 1)) : i64[2, 1, 1]
%column = aten.arange(3) : i64[3]
%seen = {index}
%ones = aten.new_ones(%row, (), dtype=bool) : bool[]
%mask = aten.__and__.Tensor({ones}, %seen) : bool[2, 1, 3]
output 'mask' = %mask
"""


def test_a_look_up_of_everything_is_a_reshape() -> None:
    index = "aten.index.Tensor(%x, (%row, %column)) : bool[2, 1, 3]"
    after = checked(simplify_masks, PADDING.format(index=index, ones="%ones"))
    assert ops(after) == ["aten.reshape"]
    after = checked(simplify_masks, PADDING.format(index=index, ones="%seen"))
    assert ops(after) == ["aten.reshape", "aten.__and__.Tensor"]


@pytest.mark.parametrize(
    "index",
    [
        "aten.index.Tensor(%x, (%row, %back)) : bool[2, 1, 3]",
        "aten.index.Tensor(%x, (%row, %part)) : bool[2, 1, 3]",
        "aten.index.Tensor(%wide, (%row, %column)) : bool[2, 1, 3]",
        "aten.index.Tensor(%turned, (%column, %row)) : bool[2, 1, 3]",
    ],
)
def test_other_look_ups_stay(index: str) -> None:
    text = PADDING.format(index=index, ones="%seen").replace(
        "%seen =",
        """%back = aten.flip(%column, (0,)) : i64[3]
%part = aten.zeros_like(%column) : i64[3]
%wide = aten.cat((%x, %x), 1) : bool[2, 6]
%turned = aten.transpose.int(%x, 0, 1) : bool[3, 2]
%seen =""",
    )
    assert "aten.index.Tensor" in ops(checked(simplify_masks, text))


@pytest.mark.parametrize("size", ["1, 3", "2, 1, 3"])
def test_and_with_what_is_true_everywhere_goes(size: str) -> None:
    after = checked(
        simplify_masks,
        f"""
graph 'g'
%x = input('x') : bool[{size}]
%ones = aten.ones((2, 1, 1), dtype=bool) : bool[2, 1, 1]
%mixed = aten.tril(%ones, -1) : bool[2, 1, 1]
%a = aten.logical_and(%x, %ones) : bool[2, 1, 3]
%b = aten.logical_and(%mixed, %x) : bool[2, 1, 3]
output 'a' = %a
output 'b' = %b
""",
    )
    assert ops(after).count("aten.logical_and") == 1
    assert after[dict(after.outputs)["b"]].op == "aten.logical_and"


class Grouped(nn.Module):
    def __init__(self, spread: str) -> None:
        super().__init__()
        self.q, self.spread = nn.Parameter(torch.randn(2, 6, 5, 4)), spread

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        if self.spread == "rows":
            k, v = (t[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4) for t in (k, v))
        elif self.spread == "interleave":
            k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, -3)
        elif self.spread == "tiles":
            k, v = (t[:, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4) for t in (k, v))
        elif self.spread == "queries broadcast":
            k, v = (t[:, :1].repeat_interleave(6, 1) for t in (k, v))
            return F.scaled_dot_product_attention(self.q[:, :1], k, v)
        else:
            k, v = k.repeat_interleave(3, 1), v[:, :1].expand(2, 6, 5, 4)
        return F.scaled_dot_product_attention(self.q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("spread", "grouped"),
    [
        ("rows", True),
        ("interleave", True),
        ("tiles", False),
        ("keys only", False),
        ("queries broadcast", False),
    ],
)
def test_repeated_heads_are_read_unrepeated(spread: str, grouped: bool) -> None:
    torch.manual_seed(0)
    batch = {"k": torch.randn(2, 2, 5, 4), "v": torch.randn(2, 2, 5, 4)}
    graph, values = captured_double(Grouped(spread), batch)
    after = verify(group_heads(drop_identities(graph)))
    assert (ops(after) == ["aten.scaled_dot_product_attention"]) == grouped
    assert_equal_runs(graph, after, values)
