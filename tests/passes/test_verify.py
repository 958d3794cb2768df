"""Every invariant is violated once, and the error names it."""

from __future__ import annotations

import pytest

from autopar.errors import GraphError
from autopar.ir.graph_text import parse_graph
from autopar.passes.verify import CHECKS, verify

GOOD = """\
graph 'good'
%x = input('x') : f32[4]
%w0 = param('0.w') : f32[4] grad
%w1 = param('1.w') : f32[4] grad
%s0 = autopar.share(%x) : f32[4]  # layers.0 | model.py:3 | x = x * w
%y0 = aten.mul.Tensor(%s0, %w0) : f32[4] grad saved(%s0, %w0)
%s1 = autopar.share(%y0) : f32[4]
%y1 = aten.mul.Tensor(%s1, %w1) : f32[4] grad saved(%s1, %w1)
%v = aten.view(%y1, (2, 2)) : f32[2, 2] grad alias(%y1)
%loss = aten.sum(%v) : f32[] grad
output 'loss' = %loss
loss %loss
repeat carried(%x -> %y0)
  block %w0 %s0 %y0
  block %w1 %s1 %y1
"""

BREAKS = {
    "names_are_unique": [("%v", "%1v"), ("%w1", "%w0")],
    "leaves_come_first": [
        ("%v = aten.view(%y1, (2, 2))", "%v = input('v')"),
        ("param('1.w')", "param(1)"),
    ],
    "references_are_defined": [("sum(%v)", "sum(%u)"), ("sum(%v)", "sum(%loss)")],
    "results_exist": [("'loss' = %loss", "'loss' = %lost"), ("\nloss %loss", "\nloss %lost")],
    "loss_is_a_scalar": [(": f32[] grad", ": f32[1] grad"), (": f32[] grad", ": i64[]")],
    "storage_is_known": [("alias(%y1)", "alias(%u)"), ("saved(%s0, %w0)", "saved(%s1)")],
    "gradients_have_a_cause": [
        ("share(%x) : f32[4]", "share(%x) : f32[4] grad"),
        ("f32[2, 2] grad", "i64[2, 2] grad"),
    ],
    "repeats_are_disjoint": [
        ("  block %w1 %s1 %y1\n", ""),
        ("%w1 %s1 %y1", "%w1 %s1 %y0"),
        ("%w1 %s1 %y1", "%w1 %s1 %y2"),
    ],
    "blocks_are_aligned": [
        ("%w1 %s1 %y1", "%w1 %s1"),
        ("%w1 %s1 %y1", "%s1 %w1 %y1"),
        ("%s1, %w1) :", "%s1, %w1, 2) :"),
        ("%y1 = aten.mul", "%y1 = aten.add"),
    ],
    "carried_values_exist": [("%x -> %y0", "%x -> %y1"), ("%x -> %y0", "%s1 -> %y0")],
    "blocks_read_alike": [
        ("Tensor(%s1, %w1)", "Tensor(%w1, %s1)"),
        ("Tensor(%s1, %w1)", "Tensor(%s1, %w0)"),
        ("carried(%x -> %y0)", "carried()"),
    ],
    "blocks_are_closed": [
        ("sum(%v)", "sum(%v, %s0)"),
        ("output 'loss' = %loss", "output 'loss' = %y0"),
        ("autopar.share", "aten.clone"),
    ],
}


def test_a_good_graph_is_returned_itself() -> None:
    graph = parse_graph(GOOD)
    assert verify(graph) is graph


def test_every_check_has_a_way_to_break() -> None:
    elsewhere = {"writes_name_buffers"}  # test_a_buffer_is_written_once
    assert {check.__name__ for check in CHECKS} == set(BREAKS) | elsewhere


WRITTEN = """graph 'written'
%b = buffer('b') : f32[4]
%c = aten.neg(%b) : f32[4]
%d = autopar.write(%b, %c) : f32[4]
output 'c' = %c
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("buffer('b')", "input('b')"),
        ("%c = aten.neg(%b) : f32[4]", "%c = aten.neg(%b) : f64[4]"),
        ("output", "%e = autopar.write(%b, %c) : f32[4]\noutput"),
    ],
)
def test_a_buffer_is_written_once(old: str, new: str) -> None:
    verify(parse_graph(WRITTEN))
    with pytest.raises(GraphError, match="writes_name_buffers"):
        verify(parse_graph(WRITTEN.replace(old, new)))


@pytest.mark.parametrize(
    ("check", "old", "new"), [(check, *pair) for check, pairs in BREAKS.items() for pair in pairs]
)
def test_a_broken_invariant_is_named(check: str, old: str, new: str) -> None:
    assert old in GOOD
    with pytest.raises(GraphError, match=check):
        verify(parse_graph(GOOD.replace(old, new)))


def test_the_users_line_is_named() -> None:
    text = GOOD.replace("share(%x) : f32[4]", "share(%x) : f32[4] grad")
    with pytest.raises(GraphError, match="%s0") as caught:
        verify(parse_graph(text))
    assert caught.value.where == "layers.0 | model.py:3 | x = x * w"
