"""Dimensions tied through a graph; if every size is another prime, sizes identify the classes."""

from __future__ import annotations

import math

import pytest

from autopar.intra_op.pins.dim_names import name_dims
from autopar.intra_op.pins.dims import Dims, find_dims
from autopar.intra_op.pins.roles import Roles
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from tests.intra_op.test_pins import graph as gpt2
from tests.support import words
from tests.support.families import FAMILIES
from tests.training.test_families import Jobs

# The batch is merged with the positions before the loss, heads with their features.
PRIMES = {3: "batch", 5: "sequence", 11: "hidden", 2: "heads", 13: "ffn", 19: "vocab"}
MERGED = {15: ["batch", "sequence"], 14: ["heads", "head_dim"], 7: ["head_dim"]}


def named(graph: Graph) -> tuple[Dims, list[str]]:
    """The dimensions of a graph, and the names of their classes without numbers."""
    dims = find_dims(graph, table())
    return dims, [name.split(".")[0] for name in name_dims(Roles(dims))]


def test_every_dimension_has_the_classes_of_its_size() -> None:
    graph = words.graph("primes")
    dims, names = named(graph)
    for node in graph.folded:
        for size, classes in zip(node.type.shape, dims.of(node.name), strict=True):
            expected = MERGED[size] if size in MERGED else [PRIMES[size]]
            assert [names[cls] for cls in classes] == expected, (node.name, size)
    # One class each, but for the features of heads: those of keys and of values are contracted
    # apart, and so are tables of words and the words that the loss tells apart.
    count = {name: names.count(name) for name in names}
    assert count == {**dict.fromkeys(PRIMES.values(), 1), "head_dim": 2, "vocab": 2}


@pytest.mark.parametrize("name", ["even", "mixture", "convolutions", "perceptron"])
def test_a_dimension_is_the_product_of_its_classes(name: str) -> None:
    judge_products(words.graph(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_dimension_is_the_product_of_its_classes_in_all_families(name: str) -> None:
    judge_products(Jobs([name]).captured[name].graph)


def judge_products(graph: Graph) -> None:
    dims = find_dims(graph, {**table()})
    for node in graph.folded:
        for size, classes in zip(node.type.shape, dims.of(node.name), strict=True):
            assert math.prod(dims.sizes[cls] for cls in classes) == size


def test_what_a_block_takes_and_what_it_returns_is_one() -> None:
    dims = find_dims(gpt2(), table())
    ((entry, leaves),) = gpt2().repeats[0].carried
    assert dims.of(entry) == dims.of(leaves)
    last = gpt2().repeats[0].iterations[-1]
    assert dims.of(last[-1]) == dims.of(gpt2().repeats[0].iterations[0][-1])


def test_names_follow_the_use_of_a_dimension() -> None:
    graph = words.graph("convolutions")
    dims, names = named(graph)
    outer = {
        node.target: [names[c] if c is not None else "" for c in dims.outer(node.name)]
        for node in graph.nodes
        if node.is_leaf
    }
    assert outer["image"] == ["batch", "channels", "height", "width"]
    assert outer["a.weight"] == ["channels", "channels", "kernel", "kernel"]
    # What is flattened begins with the channels.
    assert outer["c.weight"] == ["features", "channels"]
    assert outer["e.weight"] == ["classes", "features"]
    dims, names = named(words.graph("mixture"))
    (weight,) = [n for n in words.graph("mixture").folded if n.op == "param" and "into" in n.target]
    assert [names[cls[0]] for cls in dims.of(weight.name)] == ["expert", "hidden", "ffn"]


def test_an_embedding_of_positions_is_no_vocabulary() -> None:
    dims, names = named(gpt2())
    outer = {n.target: dims.outer(n.name) for n in gpt2().nodes if n.op == "param"}
    first = {target: names[classes[0] or 0] for target, classes in outer.items()}
    assert first["transformer.wte.weight"] == "vocab"
    assert first["transformer.wpe.weight"] == "positions"


def test_operators_that_force_a_class_apart_are_listed() -> None:
    text = """
graph 'mixer'
%w = param('w') : f32[6] grad
%x = input('x') : f32[4, 6]
%y = aten.t(%x) : f32[6, 4]
%square = aten.matmul(%x, %y) : f32[4, 4]
%norm = aten.layer_norm(%x, (6,), %w) : f32[4, 6]
output 'y' = %norm
"""
    graph = parse_graph(text.strip() + "\n")
    dims = find_dims(graph, table())
    rows, columns = dims.outer("x")
    found = {(a.cls, a.node, a.why) for a in dims.unsplit}
    assert found == {
        (rows, "square", "stands in two dimensions"),
        (columns, "norm", "needs it whole"),
    }
    assert dims.place("square", rows or 0) is None
    assert dims.place("x", rows or 0) == 0


def test_an_inner_part_of_a_dimension_is_listed_and_splits_evenly_only() -> None:
    dims, names = named(words.graph("even"))
    heads = names.index("heads")
    kept = {names[a.cls] for a in dims.unsplit if a.why == "inside a merged dimension"}
    assert "head_dim" in kept
    assert "heads" not in kept
    assert dims.divides(heads, 2)
    assert not dims.divides(heads, 3)  # it shares a dimension with the features of a head
    assert dims.divides(names.index("ffn"), 5)
    assert not dims.divides(names.index("ffn"), 25)
