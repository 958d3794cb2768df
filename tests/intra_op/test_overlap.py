"""Overlap of gradients with the backward: the formula, the search, the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, int64, nn, randn, zeros

from autopar.capture.capture import capture
from autopar.cost.device import device
from autopar.cost.model import AnalyticModel, Work
from autopar.cost.overlap import TAKE_TURNS, side_by_side
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import Built, build, layouts
from autopar.intra_op.node_choices import Option
from autopar.intra_op.overlap_objective import ROUNDS, solve_side_by_side
from autopar.intra_op.problem import FORBIDDEN, Choices, Edge, Problem, Solution, evaluate
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.intra_op.work.kernel_work import works
from autopar.ir.collective import Collective
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from autopar.simulate import Settings, run, tasks
from autopar.simulate.settings import OVERLAPS
from autopar.simulate.task import Task
from autopar.stage_plan import StagePlan

OPTION = Option("any", (), (), 1.0)


class Fixed:
    """Prices that are what the items themselves say."""

    def compute(self, work: Work) -> float:
        return work.flops

    def collective(self, call: Collective, /) -> float:
        return float(call.nbytes)

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        return call.axes


@given(st.integers(1, 50), st.integers(1, 50), st.sampled_from([1.0, 1.189, 1.5, 2.0]))
def test_the_formula_is_what_the_engine_does(kernels: int, collectives: int, slow: float) -> None:
    both = (
        Task("kernel", "", "backward", "compute", (Work("k", float(kernels), 0.0, "f32"),)),
        Task("collective", "", "backward", "gpu", Collective("all_reduce", ("gpu",), collectives)),
    )
    expected = run(both, Fixed(), slow).seconds
    assert side_by_side(kernels, collectives, slow) == pytest.approx(expected, rel=1e-12)
    assert side_by_side(kernels, collectives, TAKE_TURNS) == kernels + collectives


@st.composite
def drawn(draw: st.DrawFn) -> Built:
    """Parameters and operators by turns, of which any may hide or be hidden."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heavy = draw(st.sampled_from([0.2, 1.0, 5.0]))
    nodes: list[Choices] = []
    parts: list[dict[str, tuple[float, ...]]] = [{} for _ in range(5)]
    forward, backward, beside, fetched, refetched = parts
    both = draw(st.booleans())  # whether parameters are gathered, too
    for i, size in enumerate(rng.integers(2, 5, 6)):
        cost = rng.uniform(0, 4, size)
        for part in (beside, fetched, refetched)[: 3 if both else 1] if i % 2 else parts[:2]:
            seconds = rng.uniform(0, 10, size) * (heavy if i % 2 else 1.0)
            part[f"n{i}"] = tuple(seconds)
            cost += seconds
        nodes.append(Choices(f"n{i}", ("",) * size, tuple(cost), (0.0,) * size, (0, 1)))
    edges = [
        Edge(a, a + 1, rng.uniform(0, 6, (len(nodes[a].cost), len(nodes[a + 1].cost))))
        for a in range(5)
    ]
    return Built(
        Problem("drawn", tuple(nodes), tuple(edges), None),
        tuple(node.name for node in nodes),
        tuple((OPTION,) * len(node.cost) for node in nodes),
        (),
        MappingProxyType({}),
        backward,
        beside,
        draw(st.sampled_from([1.0, 1.189, 1.6])),
        forward=forward,
        fetched=fetched,
        refetched=refetched,
    )


@given(drawn())
@settings(max_examples=60, deadline=None)
def test_the_least_maximum_is_found_or_the_gap_is_told(built: Built) -> None:
    """Against every combination; where what is found is not the least, the bound is below both."""

    def seconds(choice: tuple[int, ...]) -> float:
        return evaluate(built.problem, choice).cost - built.hidden(choice)

    every = itertools.product(*(range(len(node.cost)) for node in built.problem.nodes))
    least = min(map(seconds, every))
    found = solve_side_by_side(built, lambda problem: solve(problem, "brute_force"))
    assert found.objective == pytest.approx(seconds(found.choice), rel=1e-12)
    assert found.bound <= least * (1 + 1e-9)
    assert least <= found.objective * (1 + 1e-9)


class Two(nn.Module):
    """Small enough to try every plan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)).mul(0.5).sum()


@pytest.mark.parametrize(
    ("width", "batch"),
    [(4096, 64), (512, 65536), pytest.param(4096, 16384, marks=pytest.mark.slow)],
)
def test_the_plan_chosen_is_the_one_that_the_simulator_ranks_first(width: int, batch: int) -> None:
    mesh = Mesh.parse("H100: gpu=2")
    graph = prepare(
        capture(Two(width).to("meta"), (), {"x": randn(batch, width, device="meta")}).graph
    )
    model, slowdown = AnalyticModel(mesh), device(mesh).slowdown
    built = build(graph, mesh, model, rules(), Assumptions(slowdown=slowdown))
    settings = Settings(at_once=True, overlap=frozenset(OVERLAPS))

    def simulated(choice: tuple[int, ...]) -> float:
        plan = StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice))
        done = tasks(graph, plan, works(graph, plan, rules()), model, settings)
        trained = [t for t in done if t.phase != "optimizer"]
        return run(trained, model, slowdown).seconds

    chosen = solve_side_by_side(built, lambda problem: solve(problem))
    sizes = [range(len(node.cost)) for node in built.problem.nodes]
    # All that can be among the best: the simulator's ends of streams cost little on top.
    near = [
        choice
        for choice in itertools.product(*sizes)
        if evaluate(built.problem, choice).cost - built.hidden(choice) < 1.5 * chosen.objective
    ]
    assert len(near) > 3
    ranked = sorted(map(simulated, near))
    assert simulated(chosen.choice) == pytest.approx(ranked[0], rel=1e-3)
    assert ranked[-1] > 1.05 * ranked[0]
    # Were nothing beside, the same plan would take longer.
    waiting = replace(built, slowdown=TAKE_TURNS)
    assert waiting.hidden(chosen.choice) == 0.0


class Words(nn.Module):
    """Its table is read first, so that the gradient of it is complete at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(65536, 512)
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.table(tokens)).square().mean()


def test_collectives_of_an_embedding_have_nothing_to_overlap_with() -> None:
    """The best plans with each choice of the table are simulated; none beats the one found."""
    mesh = Mesh.parse("H100: node=2, gpu=4")
    tokens = zeros(128, 256, dtype=int64, device="meta")
    graph = prepare(capture(Words().to("meta"), (), {"tokens": tokens}).graph)
    model, slowdown = AnalyticModel(mesh, in_step=True), device(mesh).slowdown
    built = build(graph, mesh, model, rules(), Assumptions(slowdown=slowdown))
    table = built.names.index("table_weight_share")

    def simulated(kept: Callable[[int], bool]) -> float:
        """Returns the seconds of the best plan in which the table has one of some choices."""
        node = built.problem.nodes[table]
        cost = tuple(c if kept(i) else FORBIDDEN for i, c in enumerate(node.cost))
        nodes = (*built.problem.nodes[:table], replace(node, cost=cost))
        nodes += built.problem.nodes[table + 1 :]
        limited = replace(built, problem=replace(built.problem, nodes=nodes))
        choice = solve_side_by_side(limited, lambda problem: solve(problem)).choice
        plan = StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice))
        kernels = works(graph, plan, rules())
        done = tasks(graph, plan, kernels, model, Settings(overlap=frozenset(OVERLAPS)))
        return run(done, model, slowdown).seconds

    times = [simulated(lambda i, own=own: i == own) for own in range(len(built.options[table]))]
    assert max(times) > 1.5 * min(times)
    assert simulated(lambda i: True) <= min(times) * (1 + 1e-3)
    for hidden in (built.synchronised, built.fetched):
        assert not any(hidden.get("table_weight_share", ()))
        assert not hidden or any(any(seconds) for seconds in hidden.values())


@given(drawn(), st.floats(0.0, 0.1))
@settings(max_examples=40, deadline=None)
def test_an_inexact_solver_is_not_asked_again_about_a_choice_whose_value_it_knows(
    built: Built, gap: float
) -> None:
    """Counts the problems solved by a solver whose bounds prove nothing."""
    asked: list[Solution] = []

    def inexact(problem: Problem) -> Solution:
        asked.append(replace(solve(problem, "brute_force"), bound=-1.0))
        return asked[-1]

    found = solve_side_by_side(built, inexact, gap)
    times = [evaluate(built.problem, s.choice).cost - built.hidden(s.choice) for s in asked]
    assert found.objective == pytest.approx(min(times), rel=1e-12)
    known = [t <= s.objective * (1 + 1e-9) for t, s in zip(times, asked, strict=True)]
    assert not any(known[:-1])
    assert known[-1] or len(asked) == (ROUNDS if built.sides else 1)
