"""Plans that choose algorithms of collectives: printed, priced, explained and run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.cost.calibration import Calibration, Exchange, Timing
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel
from autopar.cost.network import Network
from autopar.cost.programs.choice import choose
from autopar.cost.programs.simulated_seconds import MessageCosts, simulated_seconds
from autopar.errors import (
    CalibrationError,
    CollectiveError,
    MeshError,
    OptionError,
    PlanMismatchError,
)
from autopar.explain.moves import moves
from autopar.ir.chosen_algorithms import (
    LIBRARY_ONLY,
    Algorithm,
    ChosenAlgorithms,
    ChosenRow,
)
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.lower.lowered_text import format_lowered, parse_lowered
from autopar.lower.program import lower
from autopar.pins import data_parallel
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.ranks.shared import Peers
from tests.support.ranks import run_ranks

MESH = "cpu[10GFLOP/s 1GiB 5GB/s]: node=2 @1GB/s 5us, gpu=2 @10GB/s 1us"
ROWS = [
    f"{kind} over {axes} from 0: {name}"
    for axes in ("node", "gpu", "node, gpu")
    for kind, name in (
        ("all_reduce", "2d_torus/2"),
        ("all_gather", "ho_ring"),
        ("reduce_scatter", "halving_doubling"),
        ("all_to_all", "two_level"),
    )
]
BATCH = {"input": torch.arange(128.0, dtype=torch.float64).reshape(16, 8).sin()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()


def loss(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.arange(16) % 8)


def train(pins: str, state: str | None) -> tuple[list[float], str, list[str]]:
    given = {"0.weight": pins} if pins else data_parallel()
    session = autopar.compile(
        model(), MESH, example_inputs=BATCH, loss_fn=loss, collectives=ROWS, pins=given, state=state
    )
    losses = [session.step(**BATCH).item() for _ in range(3)]
    return losses, session.source, [event.kind for event in Peers.here().recorder.events]


@pytest.mark.parametrize(
    ("pins", "state", "said"),
    [
        ("[32@node@gpu, 8]", None, 'by="'),
        ("", "zero3", "COLLECTIVES"),
    ],
)
def test_it_trains_as_one_process_does(pins: str, state: str | None, said: str) -> None:
    plain = copy.deepcopy(model())
    optimizer, losses = torch.optim.AdamW(plain.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(plain(**BATCH))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    for trained, source, kinds in run_ranks(train, pins, state):
        torch.testing.assert_close(trained, losses, rtol=1e-12, atol=0)
        assert said in source
        assert any(" by " in kind for kind in kinds), kinds


def planned(**options: object) -> autopar.Plan:
    return autopar.plan(model(), MESH, example_inputs=BATCH, loss_fn=loss, **options)  # type: ignore[arg-type]


def test_nothing_changes_unless_it_is_asked_for() -> None:
    plan = planned()
    assert plan.stage.collectives == LIBRARY_ONLY
    assert "collectives" not in plan.to_toml()


def test_the_cheapest_ones_are_in_the_plan_and_no_dearer() -> None:
    plan, auto = planned(), planned(collectives="auto")
    assert auto.stage.collectives
    assert autopar.Plan.from_toml(auto.to_toml()) == auto
    assert auto.predicted.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9)


def test_what_is_printed_is_what_is_told_and_priced() -> None:
    options = Options(collectives=ChosenAlgorithms.parse(ROWS), loss_fn=loss)
    options = Options(**{**vars(options), "pins": {"0.weight": "[32@node@gpu, 8]"}})
    graph = capture_graph(model(), (), BATCH, options, Trace(None)).graph
    plan = make_plan(graph, Mesh.parse(MESH), options, Trace(None))
    prices = AnalyticModel(plan.mesh)
    prices.chosen = plan.collectives
    lowered = lower(graph, plan, prices.collective)
    text = format_lowered(lowered, graph)
    assert "-by " in text
    assert parse_lowered(text, graph) == lowered
    kinds = [call.kind for move in moves(graph, plan, prices.collective) for call in move.calls]
    assert kinds
    assert all(" by " in kind for kind in kinds)


def test_a_named_call_is_played_and_others_are_the_library_s() -> None:
    mesh = Mesh.parse("cpu: node=2 @1GB/s 5us, gpu=4 @10GB/s 1us")
    model, plain = AnalyticModel(mesh), AnalyticModel(mesh)
    call = Collective("all_reduce", ("node", "gpu"), 3 << 20)
    named = Collective(call.kind, call.axes, call.nbytes, 0, "2d_torus")
    levels = model.network.levels(call.axes)
    pace = MessageCosts.of(model.device, levels)
    by = Algorithm("2d_torus", 1, (2, 4))
    assert model.collective(named) == simulated_seconds(call.kind, by, levels, call.nbytes, pace)
    model.chosen = ChosenAlgorithms(
        (ChosenRow("all_reduce", ("gpu", "node"), 1 << 20, "2d_torus"),)
    )
    assert model.collective(call) == plain.collective(named) != plain.collective(call)
    small = Collective("all_reduce", ("node", "gpu"), 1 << 10)
    assert model.collective(small) == plain.collective(small)
    assert model.collective(named).__class__ is float
    assert named.title == "all_reduce by 2d_torus"


def test_between_two_sizes_a_price_is_close_to_the_played_one() -> None:
    from autopar.cost.programs.message_simulation import flow_of, simulate_messages

    mesh = Mesh.parse("cpu: node=2 @1GB/s 5us, gpu=4 @10GB/s 1us")
    model = AnalyticModel(mesh)
    levels = model.network.levels(("node", "gpu"))
    pace = MessageCosts.of(model.device, levels)
    for name in ("flat_ring", "2d_torus", "h_ring", "halving_doubling"):
        for nbytes in (100, 5000, 70_000, 3_000_000, 1 << 33):
            flow = flow_of("all_reduce", name, (2, 4))
            exact = simulate_messages(flow, levels, nbytes, pace.adding, pace.base).seconds
            found = simulated_seconds("all_reduce", Algorithm(name), levels, nbytes, pace)
            assert found == pytest.approx(exact, rel=0.02)


def test_the_choice_is_the_cheapest_of_all_at_its_size() -> None:
    mesh = Mesh.parse("cpu: node=2 @1GB/s 50us, gpu=4 @10GB/s 1us")
    model = AnalyticModel(mesh)
    rows = choose(Network(mesh, model.device), model.collective)
    assert rows
    for kind in ("all_reduce", "all_gather"):
        for nbytes in (1 << 10, 1 << 16, 1 << 24):
            call = Collective(kind, ("node", "gpu"), nbytes)
            best = model.collective(rows.named(call))
            for name in ("flat_ring", "2d_torus", "h_ring", "ho_ring", "halving_doubling"):
                other = Collective(kind, call.axes, nbytes, 0, name)
                assert best <= model.collective(other) * 1.02
            assert best <= model.collective(call)


def test_rows_are_text_that_reads_back() -> None:
    rows = ChosenAlgorithms.parse(["all_reduce over node, gpu from 65536: h_ring/4 over 2x8"])
    assert ChosenAlgorithms.parse(rows.texts) == rows
    assert rows.by("all_reduce", ("gpu", "node"), 65536) == "h_ring/4 over 2x8"
    assert rows.by("all_reduce", ("gpu", "node"), 65535) == ""
    assert rows.by("all_gather", ("gpu", "node"), 1 << 30) == ""
    assert Algorithm.parse("h_ring/4 over 2x8") == Algorithm("h_ring", 4, (2, 8))
    rows.check(Mesh.parse("cpu: node=2, gpu=8"))
    for text in ("h_ring/0", "h_ring over 2x", "", "a b", "h_ring over 0x2"):
        with pytest.raises(CollectiveError, match="cannot read"):
            Algorithm.parse(text)
    with pytest.raises(CollectiveError, match="cannot read"):
        ChosenAlgorithms.parse(["all_reduce by 2d_torus"])
    with pytest.raises(CollectiveError, match="16"):
        rows.check(Mesh.parse("cpu: node=2, gpu=4"))
    with pytest.raises(MeshError, match="node"):
        rows.check(Mesh.parse("cpu: gpu=16"))


def test_what_makes_no_sense_is_refused_before_planning() -> None:
    with pytest.raises(CollectiveError, match="cannot read"):
        planned(collectives=["all_reduce by 2d_torus"])
    with pytest.raises(CollectiveError, match="telepathy"):
        planned(collectives=["all_reduce over node, gpu from 0: telepathy"])
    with pytest.raises(OptionError):
        planned(collectives="fastest")
    with pytest.raises(OptionError):
        planned(collectives=3)
    with pytest.raises(PlanMismatchError, match="algorithms"):
        autopar.compile(model(), "cpu: gpu=1", plan=planned(), collectives="auto")


def measured(factors: dict[str, tuple[float, float]]) -> MeasuredModel:
    """A calibration in which calls take (seconds, seconds a byte), by algorithm."""
    exchanges = [
        Exchange("all_reduce", ("node", "gpu"), float(n), Timing(first + each * n, 0.0), by)
        for by, (first, each) in factors.items()
        for n in (1 << 10, 1 << 14, 1 << 18, 1 << 22)
    ]
    mesh = Mesh.parse("cpu: node=2, gpu=2")
    made = Calibration(mesh, "2", "2026-01-31", exchanges=tuple(exchanges))
    assert Calibration.from_toml(made.to_toml()) == made
    return MeasuredModel(mesh, made)


def test_measured_algorithms_are_chosen_by_what_they_took_beside_the_library() -> None:
    prices = measured(
        {
            "": (5e-3, 3e-9),  # as programs call it, after work
            "library": (2e-3, 3e-9),
            "h_ring": (1e-3, 4e-9),
            "2d_torus/4": (4e-3, 1e-9),
            "flat_ring": (9e-3, 9e-9),
        }
    )
    network = Network(prices.analytic.mesh, prices.device)
    rows = choose(network, prices.collective, prices.compared)
    assert {row.kind for row in rows.rows} == {"all_reduce"}  # nothing else was measured
    for nbytes, best in ((1 << 10, "h_ring"), (1 << 18, "h_ring"), (1 << 22, "2d_torus/4")):
        assert rows.by("all_reduce", ("node", "gpu"), nbytes) == best
    # The wait that programs have before a call stays.
    call = Collective("all_reduce", ("node", "gpu"), 1 << 22)
    gain = prices.collective(call) - prices.collective(rows.named(call))
    assert gain == pytest.approx(2e-9 * (1 << 22) - 2e-3)


def test_the_library_stays_where_nothing_measured_is_faster() -> None:
    prices = measured({"library": (2e-3, 1e-9), "h_ring": (2e-3, 0.99e-9)})
    assert not choose(
        Network(prices.analytic.mesh, prices.device), prices.collective, prices.compared
    )
    alone = measured({"": (2e-3, 1e-9), "h_ring": (1e-6, 1e-12)})  # beside nothing
    assert not choose(Network(alone.analytic.mesh, alone.device), alone.collective, alone.compared)


def test_a_calibration_that_names_no_algorithm_is_refused() -> None:
    text = measured({"h_ring": (1e-3, 1e-9)}).calibration.to_toml()
    with pytest.raises(CalibrationError, match="cannot read the algorithm"):
        Calibration.from_toml(text.replace("h_ring", "h ring!"))
