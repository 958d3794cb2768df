"""Work that choices, meshes and sweeps share gives what each gives by itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autopar.cost.model import AnalyticModel
from autopar.intra_op.memory.allocations import OperandFacts, amounts, pieces_of
from autopar.intra_op.memory.lifetimes import Role
from autopar.intra_op.node_choices import node_options
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.reduce import flatten
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers._trws import bound, links, lower_bound, sweep, sweeps
from autopar.intra_op.strategy import strategies
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.operators.exchange import exchanged
from tests.intra_op.test_strategy import resolved
from tests.intra_op.test_trees import drawn

RULES = rules()
MESH = Mesh.parse("H100: node=4, gpu=2")
OPERATORS = {
    "linear": ("%y = aten.linear(%a, %b) : f32[8, 16, 24] grad", "f32[8, 16, 32]", "f32[24, 32]"),
    "softmax": ("%y = aten.softmax.int(%a, 2) : f32[8, 16, 32] grad", "f32[8, 16, 32]", "f32[2]"),
    "add": ("%y = aten.add.Tensor(%a, %b) : f32[8, 16, 32] grad", "f32[8, 16, 32]", "f32[32]"),
    "attention": (
        "%y = aten.scaled_dot_product_attention(%a, %b, %b, None, 0.0, True) "
        ": f32[4, 8, 64, 16] grad",
        "f32[4, 8, 64, 16]",
        "f32[4, 8, 64, 16]",
    ),
}


def graph_of(name: str) -> Graph:
    line, one, other = OPERATORS[name]
    return parse_graph(f"""graph 'one'
%a = input('a') : {one} grad
%b = input('b') : {other} grad
{line}
""")


@pytest.mark.parametrize("name", OPERATORS)
def test_choices_priced_together_take_what_each_takes(name: str) -> None:
    graph, model = graph_of(name), AnalyticModel(MESH)
    node = graph["y"]
    options, signature, kernels, sent = Prices(MESH, model).operator(graph, node, RULES, 2.0)
    shared = len({option.split for option in options}) < len(options)
    assert shared == (name == "add")  # only there do sums pass through
    for option, taken, calls in zip(options, kernels, sent, strict=True):
        work = node_work(graph, node, option.operands, option.results, signature, MESH, option.form)
        assert taken[0] == sum(map(model.compute, work.forward))
        assert taken[1] == sum(map(model.compute, work.backward))
        if not option.form:  # what a form hides is not paid
            types = tuple(graph[operand].type for operand in node.inputs)
            alone = exchanged(node, types, option.operands, MESH)
            assert calls == tuple(sum(map(model.collective, side)) for side in alone)


@pytest.mark.parametrize("name", OPERATORS)
def test_choices_allocate_together_what_each_allocates(name: str) -> None:
    graph = graph_of(name)
    node = graph["y"]
    options, _ = node_options(graph, node, MESH, RULES)
    sums = any(option.results[0].partial for option in options)
    assert sums == (name in ("add", "linear"))
    facts = OperandFacts((None,) * len(node.inputs), (False,) * len(node.inputs))
    together = amounts(graph, node, options, facts, MESH, True)
    for at, option in enumerate(options):
        alone = amounts(graph, node, (option,), facts, MESH, True)
        assert {key: nbytes[at] for key, nbytes in together.items()} == {
            key: nbytes for key, (nbytes,) in alone.items()
        }
        owed = alone["value", -1][0] if option.results[0].partial else 0.0
        assert alone["owed", -1] == [owed]


def test_strategies_on_one_mesh_are_not_those_of_another_with_the_same_axes() -> None:
    """Two devices have parts of 6 elements and of 4; six devices have parts of the 6 only."""
    signature = resolved("aten.add.Tensor", [(6, 4), (6, 4)], (6, 4))
    small, large = (
        {str(one) for one in strategies(signature, Mesh.parse(f"cpu: x={size}"))} for size in (2, 6)
    )
    assert small - large == {"...0@x"}
    assert len(large) == len(small) - 1


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_bytes_at_every_point(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points, choices = 30, 4
    keys: list[tuple[Role, int]] = [("value", -1), ("new", 0), ("kept", 1), ("copy", 2)]
    copies = {
        key: np.repeat(draw.integers(0, 3, points // 3), 3).astype(np.float64) for key in keys
    }
    nbytes = {key: draw.integers(0, 2, choices).astype(float).tolist() for key in keys[:3]}
    whole = sum(np.outer(copies[key], nbytes[key]) for key in keys[:3])
    found = np.zeros((points, choices))
    pieces = pieces_of(copies, nbytes)
    for (begin, end), row in pieces:
        found[begin:end] = row
    assert (found == whole).all()
    for ((_, end), one), ((begin, _), other) in pairwise(pieces):
        assert end < begin or (end == begin and one != other)  # as few as possible
    assert pieces_of({}, nbytes) == []


@pytest.mark.parametrize("seed", range(10))
def test_many_sweeps_are_sweeps_one_by_one(seed: int) -> None:
    flat = flatten(drawn(seed, 12, 6, None))
    graph = links(flat)
    apart, together = np.zeros(int(graph.message[-1])), np.zeros(int(graph.message[-1]))
    guess, guesses = np.zeros(flat.nodes, np.int64), np.zeros(flat.nodes, np.int64)
    least, lowest = np.zeros(flat.nodes, np.int64), np.zeros(flat.nodes, np.int64)
    for first, last in ((-1, 7), (0, 4)):
        for k in range(first, last):
            sweep(graph, flat.cost, apart, guess, bool(k % 2))
        sweeps(graph, flat.cost, together, guesses, first, last)
        assert (apart == together).all()
        assert (guess == guesses).all()
        excess = np.zeros(len(flat.cost))
        whole = bound(graph, flat.cost, apart, excess, least)
        assert lower_bound(graph, flat.cost, together, lowest) == whole
        assert (least == lowest).all()
