"""Layers of graphs: repeated blocks, clusters against all clusterings, bytes at borders."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.capture.capture import capture
from autopar.errors import GraphError
from autopar.inter_op.layers import find_layers
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.stage_graphs import cut
from autopar.passes.normalise import NORMALISING, prepare
from tests.support.families import make
from tests.support.models import Model, gpt2


def graph_of(model: Model) -> Graph:
    return prepare(capture(model[0], (), model[1]).graph)


def flops(graph: Graph) -> dict[str, float]:
    """Roughly: products count their inner dimension, the rest one for each result."""
    found = {}
    for node in graph.nodes:
        if not node.is_leaf and node.op != "autopar.share":
            size = float(sum(math.prod(t.shape) for t in node.types))
            if "linear" in node.op or "conv" in node.op:
                size *= math.prod(graph[node.inputs[1]].type.shape[1:])
            found[node.name] = size
    return found


@pytest.fixture(scope="module")
def gpt() -> Graph:
    return graph_of(gpt2(layers=4))


def test_blocks_are_layers_and_a_heavy_head_is_one_of_its_own(gpt: Graph) -> None:
    layers = find_layers(gpt, flops(gpt))
    assert gpt.repeats[0].count == 4
    assert len(layers) == 5
    first, *middle, head = layers.kinds
    assert len(set(middle)) == 1  # the embedding is light and joins the first block
    assert len({first, middle[0], head}) == 3
    assert sum(layers.weights) == pytest.approx(sum(flops(gpt).values()))
    assert layers.weights[1] == layers.weights[2] == layers.weights[3]
    # One activation of [8, 16, 32] in float32 crosses every border, no mask and no position.
    assert layers.forward == layers.backward == (8 * 16 * 32 * 4,) * 4


def test_a_light_head_joins_and_a_very_heavy_one_is_cut(gpt: Graph) -> None:
    weights = flops(gpt)
    blocks = {name for block in gpt.repeats[0].iterations for name in block}
    tail = [name for name in weights if name not in blocks][-12:]
    light = {name: 0.0 if name in tail else weights[name] for name in weights}
    assert len(find_layers(gpt, light)) == 4
    block = sum(weights.get(name, 0.0) for name in gpt.repeats[0].iterations[0])
    heavy = {name: block / 4 if name in tail else weights[name] for name in weights}
    layers = find_layers(gpt, heavy)
    assert len(layers) > 6
    assert max(layers.weights) <= 1.6 * block


def test_blocks_that_stand_for_more_are_layers_however_heavy_the_rest_is(gpt: Graph) -> None:
    blocks = {name for block in gpt.repeats[0].iterations for name in block}
    heavy = {name: own if name in blocks else 100 * own for name, own in flops(gpt).items()}
    assert sum(heavy[name] for name in blocks if name in heavy) < sum(heavy.values()) / 2
    ends = find_layers(gpt, heavy, by_blocks=True).ends
    last = [
        max(block, key=[n.name for n in gpt.nodes].index) for block in gpt.repeats[0].iterations
    ]
    assert set(last) <= set(ends)
    assert not set(last) <= set(find_layers(gpt, heavy).ends)


def test_many_blocks_stand_together(gpt: Graph) -> None:
    layers = find_layers(gpt, flops(gpt), most=2)
    assert len(layers) == 3
    assert layers.weights[1] == pytest.approx(2 * find_layers(gpt, flops(gpt)).weights[1])


@pytest.mark.parametrize("name", ["resnet", "unet", "t5"])
def test_bytes_are_those_that_cut_stages_send(name: str) -> None:
    """Compares the bytes at a border with those that a stage is sent, for a graph cut in two."""
    model, batch = make(name)
    raw = capture(model, (), batch).graph
    graph = prepare(raw)
    layers = find_layers(graph, flops(graph))
    assert len(layers) > 6
    normal = prepare(raw, passes=NORMALISING)
    for end, forward in zip(layers.ends[:-1], layers.forward, strict=True):
        behind = cut(normal, (end,))[1]
        sent = sum(node.type.nbytes for node in behind.nodes if node.op == "received")
        assert forward <= sent <= forward * 1.3 + 4096, end


def chain(reads: list[list[int]], sizes: list[int]) -> Graph:
    """Operators in a row; each reads others before it, or a parameter if it reads none."""
    lines = ["graph 'chain'", "%w = param('w') : f32[4] grad"]
    for at, (read, size) in enumerate(zip(reads, sizes, strict=True)):
        names = ", ".join(f"%op_{other}" for other in read) or "%w"
        lines.append(f"%op_{at} = test.mix({names}) : f32[{size}] grad")
    return parse_graph("\n".join([*lines, f"output 'out' = %op_{len(reads) - 1}"]) + "\n")


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[float]]:
    size = draw(st.integers(2, 9))
    reads = [[]] + [
        draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True)) for at in range(1, size)
    ]
    sizes = draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=size, max_size=size))
    return reads, sizes, weights


@settings(deadline=None, max_examples=80)
@given(chains(), st.integers(1, 5), st.sampled_from([0.25, 0.5, 1.0]))
def test_a_cluster_has_the_fewest_bytes_of_all_clusterings(
    case: tuple[list[list[int]], list[int], list[float]], count: int, slack: float
) -> None:
    reads, sizes, weights = case
    size, count = len(reads), min(count, len(reads))
    named = {f"op_{at}": weight for at, weight in enumerate(weights)}
    layers = find_layers(chain(reads, sizes), named, count, slack)
    assert len(layers) == count

    def crossing(border: int) -> int:
        behind = {read for later in reads[border:] for read in later}
        return sum(4 * sizes[at] for at in range(border) if at in behind)

    found = tuple(int(end.removeprefix("op_")) + 1 for end in layers.ends)
    assert layers.forward == tuple(crossing(border) for border in found[:-1])
    assert layers.backward == layers.forward

    def heaviest(ends: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) for a, b in zip((0, *ends[:-1]), ends, strict=True))

    every = [(*cuts, size) for cuts in itertools.combinations(range(1, size), count - 1)]
    limit = max((1 + slack) * sum(weights) / count, min(map(heaviest, every)))
    legal = [ends for ends in every if heaviest(ends) <= limit * (1 + 1e-9)]
    assert found in legal
    least = min(sum(map(crossing, ends[:-1])) for ends in legal)
    largest = max(map(crossing, range(1, size)), default=0)
    # Evenness may cost a millionth of the largest border for every layer and squared mean.
    assert sum(layers.forward) <= least + 1e-6 * largest * size**3


def test_fewer_layers_where_one_operator_is_most_of_the_model() -> None:
    reads = [[]] + [[at] for at in range(11)]
    graph = chain(reads, [4] * 12)
    weights = {f"op_{at}": 1000.0 if at == 6 else 1.0 for at in range(12)}
    assert 1 <= len(find_layers(graph, weights)) <= 3
    assert len(find_layers(graph, dict.fromkeys(weights, 1.0))) == 12
    assert len(find_layers(graph, weights, count=3)) == 3


def test_what_cannot_be_cut_is_refused() -> None:
    graph = chain([[], [0]], [4, 4])
    with pytest.raises(GraphError, match="cannot be cut into 3"):
        find_layers(graph, {}, 3)
    empty = Graph("none", graph.leaves("param"), (("w", "w"),))
    with pytest.raises(GraphError, match="no operator"):
        find_layers(empty, {})
