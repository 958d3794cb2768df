"""Graph values: references, users and folding."""

from __future__ import annotations

import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Node, Ref, Repeat
from autopar.ir.tensor import TensorType

T = (TensorType("f32", (2, 2)),)


def chain(count: int) -> Graph:
    """x -> share -> linear(share, w_i), `count` times."""
    leaves = [Node("x", "input", ("x",), (), T)]
    leaves += [Node(f"w{i}", "param", (f"layers.{i}.weight",), (), T) for i in range(count)]
    body, at, iterations = [], "x", []
    for i in range(count):
        body.append(Node(f"s{i}", "autopar.share", (Ref(at),), (), T))
        body.append(Node(f"y{i}", "aten.linear", (Ref(f"s{i}"), Ref(f"w{i}")), (), T))
        iterations.append((f"w{i}", f"s{i}", f"y{i}"))
        at = f"y{i}"
    repeat = Repeat(tuple(iterations), (("x", "y0"),))
    return Graph("chain", (*leaves, *body), (("out", at),), None, (repeat,))


def test_folding_keeps_one_block_and_counts_the_rest() -> None:
    graph = chain(5)
    assert [node.name for node in graph.folded] == ["x", "w0", "s0", "y0"]
    assert graph.multiplicity == {"x": 1, "w0": 5, "s0": 5, "y0": 5}
    assert sum(graph.multiplicity.values()) == len(graph.nodes)
    assert graph.template["w3"] == "w0"


def test_users_and_references() -> None:
    graph = chain(2)
    assert graph.users["y0"] == ("s1",)
    node = graph["y1"]
    assert node.inputs == ("s1", "w1")
    assert node.map_refs(lambda name: Ref(name + "_")).inputs == ("s1_", "w1_")


def test_unknown_names_are_named() -> None:
    with pytest.raises(GraphError, match="%nothing"):
        chain(1)["nothing"]
    with pytest.raises(GraphError, match="not a leaf"):
        _ = chain(1)["s0"].target
