"""Steps that a class of tensors shares are those of each tensor alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import networkx
import pytest

from autopar.ir.collective import Collective, moves
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.resharding import LayoutGraphs, Resharder, Reshardings
from autopar.ir.resharding.step_arrays import StepArrays
from autopar.ir.tensor import Layout, TensorType

MESH = Mesh.parse("H100: a=2, b=3, c=4")
# Extents around the products of axes, where a split becomes possible.
EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 23, 24, 25, 100)


def price(call: Collective) -> float:
    return 1e-6 + call.nbytes * len(call.axes) * 1e-9 * (1 + len(call.kind))


def reachable(tensor: TensorType, grad: bool) -> list[Layout]:
    found = {Layout.replicated(len(tensor.shape)): None}
    waiting = list(found)
    while waiting:
        for step in moves(waiting.pop(), tensor, MESH, grad):
            if step.dst not in found:
                found[step.dst] = None
                waiting.append(step.dst)
    return list(found)


def test_steps_and_prices_are_those_of_the_tensor_alone() -> None:
    draw = random.Random(0)
    shared = Resharder(MESH, price)
    for number in range(24):
        shape = tuple(draw.choice(EXTENTS) for _ in range(draw.randint(0, 2)))
        tensor, grad = TensorType(draw.choice(("f32", "bf16")), shape), draw.random() < 0.7
        layouts = reachable(tensor, grad)
        for layout in draw.sample(layouts, min(6, len(layouts))):
            known = [step for _, step in shared._priced_moves(layout, tensor, grad)]
            assert known == list(moves(layout, tensor, MESH, grad)), (number, tensor, layout)
        ends = draw.sample(layouts, min(4, len(layouts)))
        costs = shared.costs(tensor, ends, ends, grad)
        alone = Resharder(MESH, price)
        pairs = [(i, a, j, b) for i, a in enumerate(ends) for j, b in enumerate(ends)]
        for row, src, column, dst in pairs:
            steps = alone.steps(tensor, src, dst, grad)
            paid = sum(price(call) for step in steps for call in step.collectives)
            assert abs(costs[row, column] - paid) <= 1e-12 * max(paid, 1e-6)


def test_a_price_remembers_its_reshardings() -> None:
    known = Reshardings(MESH, price)
    assert Reshardings.of(MESH, known) is known
    assert known.resharder(Precision()) is known.resharder(Precision())
    other = Mesh.parse("H100: a=2")
    assert Reshardings.of(other, known) is not known
    call = Collective("all_reduce", ("a",), 64)
    assert known(call) == price(call)


def test_meshes_of_other_sizes_share_layouts_but_not_prices() -> None:
    """In any order, also where one mesh has layouts that another has not."""
    draw, graphs = random.Random(1), LayoutGraphs()
    meshes = [Mesh.parse(f"H100: a={a}, b={b}") for a in (1, 2, 4, 8) for b in (2, 3, 8)]
    shared = [Resharder(mesh, price, graphs=graphs) for mesh in meshes]
    tensor, whole = TensorType("bf16", (6, 16)), Layout.replicated(2)
    for _ in range(4):
        for mesh, resharder in draw.sample(list(zip(meshes, shared, strict=True)), len(meshes)):
            alone = Resharder(mesh, price)
            ends = [whole]
            for _ in range(6):
                step = draw.choice(list(moves(draw.choice(ends), tensor, mesh)))
                ends.append(step.dst)
            assert (resharder.costs(tensor, ends, ends) == alone.costs(tensor, ends, ends)).all(), (
                mesh
            )
            for src, dst in zip(ends, reversed(ends), strict=True):
                steps = resharder.steps(tensor, src, dst)
                assert steps == alone.steps(tensor, src, dst), (mesh, src, dst)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("text", ["a=2", "a=3, b=2", "a=2, b=1, c=3", "a=2, b=3, c=2, d=2"])
def test_arrays_hold_the_steps_of_every_layout(text: str, grad: bool) -> None:
    """Also of layouts that a tensor cannot have, from which its steps lead to those it can."""
    mesh, draw = Mesh.parse(f"H100: {text}"), random.Random(len(text))
    for rank in range(4 if len(mesh.axes) < 4 else 2):
        arrays = StepArrays(mesh.names, rank, grad)
        for _ in range(4):
            tensor = TensorType("bf16", tuple(draw.choice(EXTENTS) for _ in range(rank)))
            steps = arrays.priced(tensor, mesh, price)
            for layout, number in arrays.place.items():
                here = slice(*steps.first[number : number + 2])
                known = Counter(zip(steps.target[here], steps.seconds[here], strict=True))
                assert known == Counter(
                    (arrays.place[step.dst], sum(map(price, step.collectives)))
                    for step in moves(layout, tensor, mesh, grad)
                ), (tensor, layout)


def test_prices_of_pairs_are_those_of_dijkstra() -> None:
    """To the last bit, under prices of no pattern, as sums along a path are rounded alike."""
    draw = random.Random(2)
    for text, grad in itertools.product(("a=2, b=3, c=4", "a=2, b=2, c=2, d=3"), (True, False)):
        mesh, prices = Mesh.parse(f"H100: {text}"), dict[Collective, float]()
        tensor = TensorType("bf16", (24, draw.choice(EXTENTS)))

        def drawn(call: Collective, prices: dict[Collective, float] = prices) -> float:
            return prices.setdefault(call, draw.choice((0.0, draw.random())))

        graph, waiting = networkx.DiGraph(), [Layout.replicated(2)]
        graph.add_node(waiting[0])
        while waiting:
            src = waiting.pop()
            for step in moves(src, tensor, mesh, grad):
                if step.dst not in graph:
                    waiting.append(step.dst)
                paid = sum(map(drawn, step.collectives))
                known = graph.get_edge_data(src, step.dst, {"weight": paid})["weight"]
                graph.add_edge(src, step.dst, weight=min(known, paid))
        starts, ends = (draw.sample(list(graph), 20) for _ in range(2))
        resharder = Resharder(mesh, drawn)
        for row, start in zip(resharder.costs(tensor, starts, ends, grad), starts, strict=True):
            found = networkx.single_source_dijkstra_path_length(graph, start)
            assert row.tolist() == [found[end] for end in ends], (text, grad)
            assert [resharder.cost(tensor, start, end, grad) for end in ends] == row.tolist()
