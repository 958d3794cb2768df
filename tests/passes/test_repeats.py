"""Repeated blocks are recognised exactly where they occur, and run in a loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.ir.graph import Graph, Repeat
from autopar.ir.graph_text import parse_graph
from autopar.operators.interpret import execute
from autopar.passes.normalise import prepare
from autopar.passes.repeats import find_repeats
from autopar.passes.verify import verify
from tests.support.graphs import Values, assert_equal_runs, captured_double, evaluate, leaf_values
from tests.support.models import MODELS, mlp


def run_looped(graph: Graph, values: Values) -> Values:
    """The outputs when every run is a loop over its first block, as a program runs it."""
    leaves = {n.name: values[n.target] for n in graph.nodes if n.is_leaf and not n.kwargs}
    for node in graph.nodes:
        if node.is_leaf and node.kwargs:
            leaves[node.name] = values[node.target].narrow(*(v for _, v in node.kwargs))
    results: dict[str, Any] = dict(leaves)
    inside = {name for repeat in graph.repeats for block in repeat.iterations for name in block}
    first = {repeat.iterations[0][0]: repeat for repeat in graph.repeats}
    starts = {name for repeat in graph.repeats for name in repeat.iterations[0]}
    done: set[int] = set()
    for node in graph.nodes:
        if node.is_leaf:
            continue
        if node.name not in inside:
            results[node.name] = execute(node, results, torch.device("cpu"))
        elif node.name in starts:
            repeat = next(r for r in graph.repeats if node.name in r.iterations[0])
            if id(repeat) not in done:
                done.add(id(repeat))
                results.update(_loop(graph, repeat, leaves, results))
    assert first.keys() <= starts
    return {user: results[name] for user, name in graph.outputs}


def _loop(graph: Graph, repeat: Repeat, leaves: Values, outside: dict[str, Any]) -> dict[str, Any]:
    block = repeat.iterations[0]
    entering = {start: outside[start] for start, _ in repeat.carried}
    for iteration in repeat.iterations:
        local = {**outside, **entering}
        for model, name in zip(block, iteration, strict=True):
            node = graph[model]
            if node.is_leaf:
                local[model] = leaves[name]
            else:
                local[model] = execute(node, local, torch.device("cpu"))
        entering = {start: local[end] for start, end in repeat.carried}
    last = dict(zip(block, repeat.iterations[-1], strict=True))
    return {last[end]: entering[start] for start, end in repeat.carried}


def assert_loops_alike(graph: Graph, values: Values) -> None:
    torch.manual_seed(0)
    looped = run_looped(graph, values)
    for name, value in evaluate(graph, values).items():
        if name.startswith("output "):
            torch.testing.assert_close(
                looped[name.removeprefix("output ")].detach(), value, rtol=1e-12, atol=1e-12
            )


@cache
def prepared(name: str) -> tuple[Graph, Graph, Values]:
    torch.manual_seed(0)
    graph, values = captured_double(*MODELS[name](layers=4))
    return graph, prepare(graph), values


@pytest.mark.parametrize("name", MODELS)
def test_prepared_models_compute_the_same(name: str) -> None:
    before, after, values = prepared(name)
    assert_equal_runs(before, after, values)
    assert_loops_alike(after, values)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_models_are_one_run(name: str) -> None:
    _, graph, _ = prepared(name)
    (repeat,) = graph.repeats
    assert repeat.count == 4
    assert len(repeat.carried) == 1
    operators = sum(not node.is_leaf for node in graph.nodes)
    folded = sum(not graph[name].is_leaf for block in repeat.iterations for name in block)
    assert folded > 0.8 * operators
    for number, block in enumerate(repeat.iterations):
        targets = {graph[name].target for name in block if graph[name].is_leaf}
        assert all(f".{number}." in target for target in targets)


def folded(model: nn.Module, batch: Values) -> Graph:
    """The prepared graph of a model, proved to compute the same when looped."""
    torch.manual_seed(0)
    before, values = captured_double(model, batch)
    after = prepare(before)
    assert_equal_runs(before, after, values)
    assert_loops_alike(after, values)
    return after


def counts(graph: Graph) -> list[tuple[int, int]]:
    """For each run the number of blocks and of carried values."""
    return [(repeat.count, len(repeat.carried)) for repeat in graph.repeats]


class Layer(nn.Module):
    """A residual layer that reads its input twice."""

    def __init__(self, width: int = 8, act: Any = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, width), nn.Linear(width, width), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    """Layers in a row; what else happens is up to `kind`."""

    def __init__(self, layers: list[nn.Module], kind: str = "") -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(layers), kind
        self.scale, self.common = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        if self.kind != "plain":
            x = x * self.scale
        states, start = [], x
        for layer in self.layers:
            states.append(x)
            x = layer(x)
            if self.kind == "from the start":
                x = x + start
            if self.kind == "shared parameter":
                x = x * self.common
            if self.kind == "from two before" and len(states) > 1:
                x = x + states[-2]
        if self.kind == "outputs":
            return x, *states[1:]
        if self.kind == "last state":
            return x, states[-1]
        if self.kind == "ends twice":
            return x.sin() + x.cos(), x
        if self.kind == "mirrored":
            for state in reversed(states):
                x = x + state
        return x


X = {"x": torch.randn(4, 8)}


def layers(count: int = 4, **keywords: Any) -> list[nn.Module]:
    return [Layer(**keywords) for _ in range(count)]


def test_a_stack_is_folded() -> None:
    assert counts(folded(Stack(layers()), X)) == [(4, 1)]


def test_a_first_block_without_gradient_of_its_input_is_left_out() -> None:
    assert counts(folded(Stack(layers(), "plain"), X)) == [(3, 1)]


def test_a_carried_value_with_one_reader_gets_a_share() -> None:
    """Four times gelu and linear, after a first linear of another width."""
    graph = folded(*mlp((8, 16, 16, 16, 16, 16)))
    assert counts(graph) == [(4, 1)]
    ((start, _),) = graph.repeats[0].carried
    assert [graph[name].op for name in graph.users[start]] == ["autopar.share"]


@pytest.mark.parametrize("kind", ["shared parameter", "from the start", "ends twice"])
def test_what_all_blocks_read_stays_outside(kind: str) -> None:
    assert counts(folded(Stack(layers(), kind), X)) == [(4, 1)]


@pytest.mark.parametrize("kind", ["outputs", "mirrored"])
def test_blocks_that_others_look_into_are_not_folded(kind: str) -> None:
    graph = folded(Stack(layers(), kind), X)
    assert counts(graph) == []


def test_the_last_block_is_left_out_if_more_leaves_it() -> None:
    graph = folded(Stack(layers(), "last state"), X)
    assert counts(graph) == [(3, 1)]


def test_a_value_that_is_read_two_layers_later_makes_pairs_of_layers() -> None:
    graph = folded(Stack(layers(7), "from two before"), X)
    assert counts(graph) == [(3, 2)]


def test_different_layers_are_not_folded() -> None:
    assert counts(folded(Stack([Layer(), Layer(act=F.relu)]), X)) == []


def test_alternating_layers_are_folded_in_pairs() -> None:
    pairs = [Layer(act=act) for _ in range(3) for act in (F.gelu, F.relu)]
    graph = folded(Stack(pairs), X)
    assert counts(graph) == [(3, 1)]


def test_several_runs_are_found_in_order() -> None:
    stack = [*layers(3), nn.LayerNorm(8), *layers(4, act=F.relu)]
    graph = folded(Stack(stack), X)
    assert counts(graph) == [(3, 1), (4, 1)]


def test_layers_that_are_one_module_share_parameters_outside() -> None:
    graph = folded(Stack([Layer()] * 4), X)
    assert counts(graph) == [(4, 1)]
    inside = {name for block in graph.repeats[0].iterations for name in block}
    assert not any(graph[name].is_leaf for name in inside)
    for leaf in graph.leaves("param"):
        (share,) = graph.users[leaf.name] or (None,)
        assert share is None or share not in inside


def test_a_layer_with_a_tied_parameter_splits_the_run() -> None:
    stack = layers(9)
    stack[4].up.weight = stack[0].down.weight  # type: ignore[union-attr, assignment]
    found = counts(folded(Stack(stack), X))
    assert found == [(3, 1), (4, 1)]


@st.composite
def block_graphs(draw: st.DrawFn) -> tuple[Graph, int]:
    """A random block, repeated: `x = start; for _ in range(n): x = block(x)`; and its operators."""
    carried, count = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    size = draw(st.integers(carried, 7))
    reads = [("carried", c) for c in range(carried)] + [("own", 0), ("own", 1), ("all", 0)]
    body = []
    for place in range(size):
        choices = reads + [("inner", k) for k in range(place)]
        body.append((draw(st.sampled_from(choices)), draw(st.sampled_from(choices))))
    # Every carried value is read, and one parameter, so that the block is one.
    body += [(("carried", c), ("inner", draw(st.integers(0, size - 1)))) for c in range(carried)]
    body.append((("own", 0), ("inner", len(body) - 1)))
    ops = [draw(st.sampled_from(("aten.add.Tensor", "aten.mul.Tensor"))) for _ in body]
    ends = draw(st.permutations(range(len(body))))[:carried]
    head = ["graph 'random'", "%all = param('all') : f64[3] grad"]
    lines = ["%i = aten.sin(%all) : f64[3] grad"]
    for c in range(carried):
        head.append(f"%s{c} = param('s{c}') : f64[3] grad")
        lines.append(f"%h{c} = aten.sin(%s{c}) : f64[3] grad")
    entering = [f"h{c}" for c in range(carried)]
    for number in range(count):
        head += [f"%p{number}_{k} = param('{number}.{k}') : f64[3] grad" for k in range(2)]
        named = {"own": f"p{number}_", "inner": f"v{number}_"}
        for place, (op, pair) in enumerate(zip(ops, body, strict=True)):
            a, b = (
                entering[k] if kind == "carried" else "i" if kind == "all" else f"{named[kind]}{k}"
                for kind, k in pair
            )
            lines.append(f"%v{number}_{place} = {op}(%{a}, %{b}) : f64[3] grad")
        entering = [f"v{number}_{end}" for end in ends]
    lines += [f"%out{c} = aten.tanh(%{name}) : f64[3] grad" for c, name in enumerate(entering)]
    lines += [f"output '{c}' = %out{c}" for c in range(carried)]
    return parse_graph("\n".join([*head, *lines])), count * len(body)


@settings(max_examples=40, deadline=None)
@given(block_graphs())
def test_random_blocks_are_found(case: tuple[Graph, int]) -> None:
    graph, planted = case
    after = verify(find_repeats(verify(graph)))
    names = {name for r in after.repeats for block in r.iterations for name in block}
    assert sum(name in names and not graph[name].is_leaf for name in graph.users) >= planted
    values = leaf_values(graph)
    assert_equal_runs(graph, after, values)
    assert_loops_alike(after, values)
