"""Comparisons of indices with bounds: removed where the answer is known, and only there."""

from __future__ import annotations

from autopar.ir.graph_text import parse_graph
from autopar.passes.known_comparisons import drop_known_comparisons
from tests.support.graphs import checked, ops

KNOWN = """
graph 'g'
%scores = input('scores') : f64[6, 4]
%rows = input('rows') : f64[12, 3]
%t = aten.topk(%scores, 2) : f64[6, 2], i64[6, 2]
%ids = getitem(%t, 1) : i64[6, 2]
%flat = aten.reshape(%ids, (12,)) : i64[12]
%s = aten.sort(%flat) : i64[12], i64[12]
%sorted = getitem(%s, 0) : i64[12]
%beyond = aten.ge.Scalar(%sorted, 4) : bool[12]
%mask = aten.unsqueeze(%beyond, -1) : bool[12, 1]
%kept = aten.masked_fill.Scalar(%rows, %mask, 0.0) : f64[12, 3]
%held = aten.clamp(%sorted, 0, 3) : i64[12]
%inside = aten.logical_not(%mask) : bool[12, 1]
%zero = aten.zeros((12, 3), dtype=f64) : f64[12, 3]
%same = aten.where.self(%inside, %kept, %zero) : f64[12, 3]
output 'same' = %same
output 'held' = %held
"""
OPEN = """
graph 'g'
%scores = input('scores') : f64[6, 4]
%rows = input('rows') : f64[6, 3]
%given = input('given') : i64[6]
%best = aten.argmax(%scores, 1) : i64[6]
%last = aten.ge.Scalar(%best, 3) : bool[6]
%late = aten.unsqueeze(%last, -1) : bool[6, 1]
%a = aten.masked_fill.Scalar(%rows, %late, 0.0) : f64[6, 3]
%high = aten.ge.Scalar(%given, 4) : bool[6]
%hidden = aten.unsqueeze(%high, -1) : bool[6, 1]
%b = aten.masked_fill.Scalar(%a, %hidden, 0.0) : f64[6, 3]
%all = aten.argmax(%scores) : i64[]
%far = aten.ge.Scalar(%all, 4) : bool[]
%c = aten.masked_fill.Scalar(%b, %far, 0.0) : f64[6, 3]
%held = aten.clamp(%best, 0, 2) : i64[6]
output 'c' = %c
output 'held' = %held
"""


def test_masks_of_indices_that_cannot_occur_are_removed() -> None:
    found = checked(drop_known_comparisons, KNOWN)
    assert not {"aten.masked_fill.Scalar", "aten.clamp", "aten.where.self"} & set(ops(found))


def test_masks_that_may_be_true_stay() -> None:
    found = checked(drop_known_comparisons, OPEN)
    assert sorted(ops(found)) == sorted(ops(parse_graph(OPEN)))
