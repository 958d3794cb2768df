"""Products with parameters become linears, and fused projections are split: the same in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.passes.linear import lower_linears
from autopar.passes.projections import split_fused
from autopar.passes.simplify import drop_identities, lower_splits
from autopar.passes.verify import verify
from tests.support.graphs import assert_equal_runs, captured_double, checked, ops

CONV1D = """
graph 'g'
%w = param('w') : f64[6, 4] grad
%b = param('b') : f64[4] grad
%x = input('x') : f64[2, 3, 6]
%flat = aten.reshape(%x, (6, 6)) : f64[6, 6]
%y = aten.addmm(%b, %flat, %w) : f64[6, 4] grad
%z = aten.reshape(%y, {shape}) : f64[{sizes}] grad
output 'z' = %z
"""


def test_conv1d_becomes_a_linear_that_keeps_its_batch() -> None:
    after = checked(lower_linears, CONV1D.format(shape="(2, 3, 4)", sizes="2, 3, 4"))
    assert ops(after) == ["aten.transpose.int", "aten.linear"]
    assert after[dict(after.outputs)["z"]].inputs[0] == "x"


def test_other_reshapes_around_a_product_stay() -> None:
    after = checked(lower_linears, CONV1D.format(shape="(3, 2, 4)", sizes="3, 2, 4"))
    assert ops(after) == ["aten.reshape", "aten.transpose.int", "aten.linear", "aten.reshape"]


def test_products_with_parameters_become_linears() -> None:
    after = checked(
        lower_linears,
        """
graph 'g'
%w = param('w') : f64[6, 4] grad
%v = param('v') : f64[4, 6] grad
%x = input('x') : f64[2, 3, 6]
%m = input('m') : f64[3, 6]
%n = input('n') : f64[6, 4]
%vt = aten.transpose.int(%v, 0, 1) : f64[6, 4] grad
%a = aten.matmul(%x, %w) : f64[2, 3, 4] grad
%b = aten.matmul(%x, %vt) : f64[2, 3, 4] grad
%c = aten.mm(%m, %w) : f64[3, 4] grad
%d = aten.mm(%m, %n) : f64[3, 4]
%e = aten.addmm(%d, %m, %w) : f64[3, 4] grad
%f = aten.addmm(%d, %m, %w, beta=2) : f64[3, 4] grad
output 'a' = %a
output 'b' = %b
output 'c' = %c
output 'd' = %d
output 'e' = %e
output 'f' = %f
""",
    )
    made = {name: after[node].op for name, node in after.outputs}
    assert made == {
        "a": "aten.linear", "b": "aten.linear", "c": "aten.linear",
        "d": "aten.mm", "e": "aten.addmm", "f": "aten.addmm",
    }  # fmt: skip
    assert after[dict(after.outputs)["b"]].inputs == ("x", "v")


FUSED = """
graph 'g'
%w = param('w') : f64[{weight}] grad
%b = param('b') : f64[9] grad
%x = input('x') : f64[2, 4]
{transpose}
%y = aten.linear(%x, {read}, %b) : f64[2, 9] grad
%q = aten.slice.Tensor(%y, 1, 0, {cut}) : f64[2, {cut}] grad
%k = aten.slice.Tensor(%y, 1, 5, 7) : f64[2, 2] grad
%v = aten.slice.Tensor(%y, 1, 7, 9) : f64[2, 2] grad
output 'q' = %q
output 'k' = %k
output 'v' = %v
"""
TRANSPOSE = "%t = aten.transpose.int(%w, 0, 1) : f64[9, 4] grad"


@pytest.mark.parametrize(
    ("weight", "transpose", "read", "dim"),
    [("9, 4", "", "%w", 0), ("4, 9", TRANSPOSE, "%t", 1)],
)
def test_a_fused_projection_is_split(weight: str, transpose: str, read: str, dim: int) -> None:
    text = FUSED.format(weight=weight, transpose=transpose, read=read, cut=5)
    after = checked(split_fused, text)
    assert "aten.slice.Tensor" not in ops(after)
    assert ops(after).count("aten.linear") == 3
    pieces = [dict(node.kwargs) for node in after.leaves("param") if node.target == "w"]
    assert pieces == [
        {"dim": dim, "start": start, "length": length} for start, length in ((0, 5), (5, 2), (7, 2))
    ]


@pytest.mark.parametrize(
    "change",
    [
        (
            "aten.slice.Tensor(%y, 1, 0, 5) : f64[2, 5]",
            "aten.slice.Tensor(%y, 1, 0, 4) : f64[2, 4]",
        ),
        (
            "aten.slice.Tensor(%y, 1, 0, 5) : f64[2, 5]",
            "aten.slice.Tensor(%y, 1, 0, 6) : f64[2, 6]",
        ),
        ("output 'q' = %q", "output 'q' = %q\noutput 'y' = %y"),
        ("output 'q' = %q", "output 'q' = %q\noutput 'w' = %w"),
        ("output 'q'", "%r = aten.neg(%b) : f64[9] grad\noutput 'r' = %r\noutput 'q'"),
        ("output 'q'", "%r = aten.neg(%y) : f64[2, 9] grad\noutput 'r' = %r\noutput 'q'"),
        ("%q = aten.slice.Tensor(%y, 1, 0, 5) : f64[2, 5] grad\n", ""),
    ],
)
def test_a_projection_with_another_reader_or_a_gap_stays_fused(change: tuple[str, str]) -> None:
    text = FUSED.format(weight="9, 4", transpose="", read="%w", cut=5)
    assert change[0] in text
    text = text.replace(*change)
    if "%q =" not in text:
        text = text.replace("output 'q' = %q\n", "")
    lines = sorted(text.strip().splitlines()[1:], key=lambda line: line.startswith("output"))
    before = "\n".join(["graph 'g'", *lines])
    assert ops(checked(split_fused, before)).count("aten.linear") == 1


PACKED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "by axis": (lambda y: y.reshape(2, 3, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0), 3),
    "by moved axis": (
        lambda y: (
            y.unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous().unbind(0)
        ),
        3,
    ),
    "by heads": (lambda y: y.view(2, 3, 6, 4).transpose(1, 2).split([4, 1, 1], 1), 3),
    "of one head": (lambda y: y[:, None].split([16, 4, 4], -1), 3),
    "inside heads": (lambda y: y.view(2, 3, 2, 3, 4).unbind(3), 1),
    "rotated": (lambda y: y.view(2, 3, 6, 4).chunk(2, -1), 1),
    "of the batch": (lambda y: y.chunk(2, 0), 1),
    "step by step": (lambda y: y.split(1, -1), 1),
}  # fmt: skip


class Packed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.qkv, self.name = nn.Linear(5, 24), name

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.sin() for part in PACKED[self.name][0](self.qkv(x)))


@pytest.mark.parametrize("name", PACKED)
def test_projections_are_split_through_views(name: str) -> None:
    torch.manual_seed(0)
    graph, values = captured_double(Packed(name), {"x": torch.randn(2, 3, 5)})
    after = verify(split_fused(lower_splits(drop_identities(graph))))
    assert ops(after).count("aten.linear") == PACKED[name][1]
    assert_equal_runs(graph, after, values)
