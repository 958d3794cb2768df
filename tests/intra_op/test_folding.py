"""Folding is exact: the problem of one block of each run prices the whole, unfolded graph.

A block's function returns its carried values in one layout, after the last block too. In the
unfolded graph this is a share after the last block, tied to the choice of the shares before the
blocks. With it, the two problems must agree to the last byte and second on any choice, and in their
optima.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.cost.model import AnalyticModel
from autopar.intra_op.build import Built, build
from autopar.intra_op.problem import FORBIDDEN, Edge, Problem, evaluate, frugal
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from tests.support import models

# A slow device with quick links: even small models are worth splitting.
LINE = "toy[2TFLOP/s 1GiB 20GB/s]: gpu=4 @20GB/s 100ns"
GRID = "toy[2TFLOP/s 1GiB 20GB/s]: a=2 @5GB/s 1us, b=2 @20GB/s 100ns"


class Residual(nn.Module):
    def __init__(self, width: int, act: Any = F.gelu, last: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.last = act, last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(self.act(self.up(x))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, layers: list[Residual], width: int, kind: str) -> None:
        super().__init__()
        self.stem, self.layers, self.kind = nn.Linear(width, width), nn.ModuleList(layers), kind

    def forward(self, x: Tensor) -> Tensor:
        x = start = F.relu(self.stem(x))
        before = x.sin()
        for number, layer in enumerate(self.layers):
            if self.kind == "two carried":
                x, before = layer(x) + before, x.cos()
            elif self.kind == "in pairs":  # of which the first layer's value is read in both
                x, before = layer(x) + before, x
            elif self.kind == "read back" and number >= 3:
                start = x if number == 3 else start
                x = layer(x) * start
            else:
                x = layer(x)
        return (x * before).mean()


def stack(kind: str, width: int = 64, batch: int = 256) -> models.Model:
    if kind == "relu last":  # what leaves a block is saved in that block and in the next
        layers = [Residual(width, last=F.relu) for _ in range(4)]
    elif kind in ("two runs", "read back"):  # what leaves one run enters the other
        layers = [Residual(width, act) for act in (F.gelu, F.relu) for _ in range(3)]
    else:
        layers = [Residual(width) for _ in range(4)]
    return Stack(layers, width, kind), {"x": torch.randn(batch, width)}


@cache
def graph_of(name: str) -> Graph:
    model, batch = models.MODELS[name](layers=4) if name in models.MODELS else stack(name)
    return prepare(capture(model, (), batch).graph)


@dataclass(frozen=True)
class Pair:
    """The problem of a folded graph, that of the unfolded one, and the graph of the latter."""

    folded: Built
    unfolded: Built
    graph: Graph

    def expand(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """The same layouts in every block."""
        made = dict(zip(self.folded.names, choice, strict=True))
        held = {f"{value}_held": share for value, share in held_by(self.graph).items()}
        model = {**self.graph.template, **held}
        return tuple(made[model[name]] for name in self.unfolded.names)


def held_by(graph: Graph) -> dict[str, str]:
    """Value that leaves a run -> the share that reads it in the first block."""
    found = {}
    for repeat in graph.repeats:
        last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
        for entry, leaves in repeat.carried:
            (share,) = (n for n in graph.users[entry] if n in repeat.iterations[0])
            found[last[leaves]] = share
    return found


def unfold(graph: Graph) -> Graph:
    """`graph` without repeats, with a share behind each run."""
    shares = held_by(graph)
    inside = {
        name: set(repeat.iterations[-1])
        for repeat in graph.repeats
        for name in repeat.iterations[-1]
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        held = {value: f"{value}_held" for value in shares if node.name not in inside[value]}
        saved = tuple(held.get(name, name) for name in node.saved)
        refs = {name: Ref(held.get(name, name)) for name in node.inputs}
        read = node.map_refs(refs.__getitem__)
        nodes.append(replace(read, saved=saved))
        if node.name in shares:
            nodes.append(
                replace(
                    node, name=f"{node.name}_held", op="autopar.share", args=(Ref(node.name),),
                    kwargs=(), alias=node.name, saved=(), saved_types=(),
                )
            )  # fmt: skip
    return replace(graph, nodes=tuple(nodes), repeats=())


def pair(name: str, text: str, limit: float | None = None) -> Pair:
    graph, mesh = graph_of(name), Mesh.parse(text)
    model = AnalyticModel(mesh)
    folded = build(graph, mesh, model, rules(), memory_limit=limit)
    flat = build(unfold(graph), mesh, model, rules(), memory_limit=limit)
    at = {name: index for index, name in enumerate(flat.names)}
    ties = []
    for value, share in held_by(graph).items():
        a, b = at[share], at[f"{value}_held"]
        assert flat.options[a] == flat.options[b]
        tie = np.where(np.eye(len(flat.options[a])), 0.0, FORBIDDEN)
        ties.append(Edge(a, b, tie))
    tied = replace(flat.problem, edges=(*flat.problem.edges, *ties))
    return Pair(folded, replace(flat, problem=tied), graph)


def random_choice(problem: Problem, generator: random.Random) -> tuple[int, ...]:
    """A choice that nothing forbids: the best under random prices of the nodes' own."""
    price = max(float(edge.cost[edge.cost < FORBIDDEN].max()) for edge in problem.edges)
    nodes = [
        replace(n, cost=tuple(c + 10 * price * generator.random() for c in n.cost))
        for n in problem.nodes
    ]
    return solve(replace(problem, nodes=tuple(nodes)), "greedy").choice


STACKS = ["plain", "relu last", "two runs", "read back", "two carried", "in pairs"]
CASES = [(name, LINE) for name in ("gpt2", "llama", *STACKS)] + [(name, GRID) for name in STACKS]
paired = cache(pair)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_every_choice_costs_and_holds_the_same(name: str, mesh: str) -> None:
    """Nothing is left out or counted twice, at random choices, most of which reshard everywhere."""
    both, generator = paired(name, mesh), random.Random(0)
    for _ in range(10):
        choice = random_choice(both.folded.problem, generator)
        folded = evaluate(both.folded.problem, choice)
        unfolded = evaluate(both.unfolded.problem, both.expand(choice))
        assert math.isfinite(folded.cost)
        assert folded.cost == pytest.approx(unfolded.cost, rel=1e-12, abs=0.0)
        held, flat = both.folded.figures(choice), both.unfolded.figures(both.expand(choice))
        for name in ("parameter_bytes", "activation_bytes"):
            assert getattr(held, name) == pytest.approx(getattr(flat, name), rel=1e-12, abs=0.0)
        # One function for all blocks keeps its variables until it returns; one for each holds what
        # enters it and what leaves it in layouts of their own.
        carried = sum(
            both.graph[value].type.nbytes
            for repeat in both.graph.repeats
            for pair in repeat.carried
            for value in pair
        )
        assert folded.peak <= unfolded.peak * (1 + 1e-12) + carried


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_the_optimum_is_that_of_the_whole_graph(name: str, mesh: str) -> None:
    both = paired(name, mesh)
    folded, whole = (solve(p.problem, gap=0.0) for p in (both.folded, both.unfolded))
    assert folded.bound == pytest.approx(folded.objective, rel=1e-9, abs=0.0)
    assert whole.bound == pytest.approx(whole.objective, rel=1e-9, abs=0.0)
    assert folded.objective == pytest.approx(whole.objective, rel=1e-9, abs=0.0)
    judged = evaluate(both.unfolded.problem, both.expand(folded.choice))
    assert judged.cost == pytest.approx(whole.objective, rel=1e-9, abs=0.0)
    # The plan is no trivial one: something is split.
    options = zip(both.folded.options, folded.choice, strict=True)
    assert any(made[index].results[0].sharded_axes for made, index in options)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_within_a_limit_it_is_feasible_and_between_its_bounds(name: str, mesh: str) -> None:
    """Different blocks may share the memory out more finely than equal ones, never the reverse."""
    free = paired(name, mesh)
    loose = solve(free.folded.problem, gap=0.0)
    least = sum(frugal(free.folded.problem.nodes)[1].values())
    peak = evaluate(free.folded.problem, loose).peak
    limit = peak - 0.3 * (peak - least)
    folded = replace(free.folded.problem, memory_limit=limit)
    tight = solve(folded, gap=1e-3)
    assert evaluate(folded, tight).peak <= limit < peak
    # One function for all blocks keeps its variables until it returns.
    more = evaluate(free.unfolded.problem, free.expand(tight.choice)).peak
    assert more >= evaluate(folded, tight).peak
    whole = replace(free.unfolded.problem, memory_limit=more * (1 + 1e-12))
    split = solve(whole, gap=1e-3)
    judged = evaluate(whole, free.expand(tight.choice))
    assert judged.feasible
    assert judged.cost == pytest.approx(tight.objective, rel=1e-12, abs=0.0)
    assert split.bound <= tight.objective * (1 + 1e-9)
    assert tight.objective >= loose.objective * (1 - 1e-12)


def test_the_stacks_are_folded_as_meant() -> None:
    runs = {name: [(r.count, len(r.carried)) for r in graph_of(name).repeats] for name in STACKS}
    assert runs == {
        "plain": [(4, 1)],
        "relu last": [(4, 1)],
        "two runs": [(3, 1), (3, 1)],
        "read back": [(3, 1), (3, 1)],
        "two carried": [(4, 2)],
        "in pairs": [(2, 2)],
    }
