"""Passes against their input graph: the same outputs, gradients and buffers in float64."""

from __future__ import annotations

import torch

from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.rewrite import eliminate_dead
from autopar.passes.normalise import PASSES, prepare
from autopar.passes.shares import insert_shares
from tests.support.graphs import assert_equal_runs, captured_double, checked
from tests.support.models import conv_net, gpt2


def test_prepare_computes_the_same() -> None:
    torch.manual_seed(0)
    graph, values = captured_double(*conv_net())
    assert_equal_runs(graph, prepare(graph), values)


def test_what_is_prepared_is_not_prepared_further() -> None:
    torch.manual_seed(0)
    for build in (conv_net, gpt2):
        once = prepare(captured_double(*build())[0])
        assert prepare(once) == once


def test_every_pass_is_traced_in_order() -> None:
    graph = parse_graph("graph 'g'\n%x = input('x') : f32[2]\noutput 'x' = %x\n")
    seen: list[tuple[str, Graph]] = []
    result = prepare(graph, lambda name, made: seen.append((name, made)))
    assert [name for name, _ in seen] == [step.__name__ for step in PASSES]
    assert seen[-1][1] == result


def test_dead_operators_go_and_writes_stay() -> None:
    after = checked(
        eliminate_dead,
        """
graph 'g'
%w = param('w') : f64[3] grad
%n = buffer('n') : i64[]
%m = buffer('m') : f64[3]
%v = buffer('v') : f64[3]
%x = input('x') : f64[2, 3]
%unread = input('unread') : f64[1]
%dead = aten.mul.Tensor(%w, 2) : f64[3] grad
%deader = aten.neg(%dead) : f64[3] grad
%both = aten.__and__.Tensor(%n, %n) : i64[]
%one = aten.add.Tensor(%n, 0) : i64[]
%step = autopar.write(%n, %one) : i64[]
%idle = aten.batch_norm(%x, None, None, %m, %v, False, 0.1, 1e-05, False) : f64[2, 3]
%y = aten.relu(%x) : f64[2, 3]
output 'y' = %y
""",
    )
    assert [node.name for node in after.nodes] == [
        "w", "n", "m", "v", "x", "unread", "one", "step", "y"
    ]  # fmt: skip


def test_shares_stand_between_values_and_readers() -> None:
    after = checked(
        insert_shares,
        """
graph 'g'
%w = param('w') : f64[3] grad
%u = param('u') : f64[3] grad
%n = buffer('n') : f64[3]
%x = input('x') : f64[3]
%z = input('z') : f64[3]
%a = aten.mul.Tensor(%x, %z) : f64[3]
%b = aten.mul.Tensor(%a, %w) : f64[3] grad
%c = aten.add.Tensor(%b, %b) : f64[3] grad
%d = aten.add.Tensor(%b, %x) : f64[3] grad
%e = autopar.write(%n, %x) : f64[3]
%f = aten.mul.Tensor(%n, %d) : f64[3] grad
output 'b' = %b
output 'c' = %c
output 'f' = %f
""",
    )
    assert [f"{node.name} = {', '.join(node.inputs)}" for node in after.nodes if node.inputs] == [
        "x_share = x",
        "a = x_share, z",
        "w_share = w",
        "b = a, w_share",
        "b_share = b",
        "c = b_share, b_share",
        "d = b_share, x_share",
        "e = n, x_share",
        "f = n, d",
    ]
    share = after["b_share"]
    assert (share.op, share.alias, share.requires_grad) == ("autopar.share", "b", True)
    assert dict(after.outputs)["b"] == "b"
