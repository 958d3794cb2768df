"""Memory of a plan: the problem's bound, the simulated step, limits, and the recorded figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build, layouts
from autopar.intra_op.pins.pin_functions import PinsLike, resolve_pins
from autopar.intra_op.problem import evaluate
from autopar.intra_op.rule_table import table
from autopar.intra_op.solvers import solve
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.update import ADAMW, Update
from autopar.pins import data_parallel, fsdp, megatron, megatron_sp
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.peak import simulated_peak
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan
from tests.support.models import MODELS

PLANS: dict[str, tuple[str, PinsLike]] = {
    "data parallel": ("gpu=4", [data_parallel("gpu")]),
    "whole states": ("gpu=4", [data_parallel("gpu")]),
    "ZeRO-3": ("gpu=4", [fsdp("gpu")]),
    "Megatron": ("gpu=4", [megatron("gpu")]),
    "sequence": ("data=2, tensor=2", [data_parallel("data"), megatron_sp("tensor")]),
    "free": ("data=2, tensor=2", []),
}
WORDS, WIDTH, SEQ = 512, 128, 64
SIZES = {
    "gpt2": {"vocab_size": WORDS, "n_embd": WIDTH, "n_positions": SEQ},
    "llama": {
        "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH,
        "num_key_value_heads": 4, "max_position_embeddings": SEQ,
    },
    "vit": {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_labels": 64},
}  # fmt: skip
# Of the bytes that the problem counts, over those of the simulated step.
EXACT = (0.99, 1.01)
RANGE = (0.93, 1.04)


@cache
def graph_of(name: str, layers: int, batch: int) -> Graph:
    model, inputs = MODELS[name](layers=layers, batch=batch, seq=SEQ, **SIZES[name])
    return capture_graph(model, (), inputs, Options(), Trace(None)).graph


def _in_one_piece(used: Layout, tensor: TensorType, mesh: Mesh) -> Iterator[Storage]:
    """Yields the storage of a parameter that is whole, and all of whose states are."""
    if not used.sharded_axes:
        whole = Layout(used.dims)
        yield Storage(used, whole, whole, whole, whole)


def ratio(name: str, layers: int, batch: int, chip: str, plan: str) -> float:
    graph, (axes, pins) = graph_of(name, layers, batch), PLANS[plan]
    mesh, known = Mesh.parse(f"{chip}: {axes}"), table()
    prices, slowdown = AnalyticModel(mesh), device(mesh).slowdown
    said = resolve_pins(pins, graph, mesh, known)
    allowed_storages = _in_one_piece if plan == "whole states" else None
    given = Assumptions(slowdown=slowdown, allowed_storages=allowed_storages)
    built = build(graph, mesh, prices, known, given, memory_limit=1e15, pins=said)
    choice = solve(built.problem).choice
    made = StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice))
    counted = evaluate(built.problem, choice).peak
    return counted / simulated_peak(graph, made, known, prices)


def within(found: float, plan: str) -> bool:
    low, high = EXACT if plan in ("data parallel", "whole states", "ZeRO-3") else RANGE
    return low <= found <= high


QUICK = [
    ("gpt2", "cpu", "data parallel"),
    ("llama", "H100", "ZeRO-3"),
    ("vit", "cpu", "data parallel"),
    ("vit", "cpu", "whole states"),
    ("vit", "cpu", "Megatron"),
]


@pytest.mark.parametrize(("name", "chip", "plan"), QUICK)
def test_the_problem_counts_the_bytes_of_the_simulated_step(
    name: str, chip: str, plan: str
) -> None:
    """Exactly where no activation changes its layout; the rest is what the range is for."""
    assert within(ratio(name, 2, 8, chip, plan), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", sorted(MODELS.keys() & SIZES.keys()))
def test_the_problem_counts_the_bytes_of_every_plan(name: str, plan: str) -> None:
    for layers, batch in ((2, 8), (6, 8), (6, 64)):
        for chip in ("cpu", "H100"):
            found = ratio(name, layers, batch, chip, plan)
            assert within(found, plan), (layers, batch, chip, found)


MESH = Mesh.parse("H100: gpu=4")


def planned(limit: float, pins: PinsLike = (), state: float = 2.0) -> StagePlan:
    options = Options(memory=limit, pins=pins, update=Update.of_bytes(state))
    return make_plan(graph_of("gpt2", 2, 8), MESH, options, Trace(None))


@pytest.mark.slow
def test_a_limit_above_the_simulated_peak_changes_nothing_and_one_below_is_kept() -> None:
    free = planned(1e12)
    peak = free.predicted.peak_bytes
    graph = graph_of("gpt2", 2, 8)
    assert peak == simulated_peak(graph, free, table(), AnalyticModel(MESH))
    above = planned(1.05 * peak)
    assert above.predicted.step_seconds == pytest.approx(free.predicted.step_seconds)
    below = planned(0.6 * peak)
    assert simulated_peak(graph, below, table(), AnalyticModel(MESH)) <= 0.6 * peak
    assert below.predicted.peak_bytes <= 0.6 * peak
    assert below.predicted.step_seconds > free.predicted.step_seconds


def test_what_does_not_fit_is_told_the_need_of_a_plan_that_does() -> None:
    pins = [data_parallel("gpu")]  # one plan: everything has its layout
    need = planned(1e12, pins).predicted.peak_bytes
    assert planned(1.001 * need, pins).predicted.peak_bytes <= 1.001 * need
    with pytest.raises(InfeasibleError) as refused:
        planned(0.5 * need, pins)
    found = re.search(r"needs (.*?), (.*?) more; largest: %", refused.value.why)
    assert found is not None
    said, more = (parse_quantity(text.replace(" ", ""), "B") for text in found.groups())
    assert said - more == pytest.approx(0.5 * need, rel=0.02)
    # What it names is enough, and by it a plan is found.
    assert planned(1.01 * said, pins).predicted.peak_bytes <= 1.01 * said


def test_a_plan_records_its_limit_and_the_state_of_its_optimizer(tmp_path: Path) -> None:
    made = planned(1e9, state=1.0)
    assert (made.limit, made.update) == (1e9, Update.of_bytes(1.0))
    Plan.of(made).save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml").stage == made
    free = planned(float("inf"))
    assert (free.limit, free.update) == (math.inf, ADAMW)
    more = replace(made, limit=2e9)
    assert Plan.from_toml(Plan.of(more).to_toml()).stage == more != made


def test_by_default_tensors_have_what_the_allocator_leaves() -> None:
    chip = device(MESH)
    assert 0 < chip.fragmentation < 1
    made = make_plan(graph_of("gpt2", 2, 8), MESH, Options(), Trace(None))
    assert made.limit == chip.memory * (1 - chip.fragmentation)
    # On a CPU, where predicted and measured bytes are compared, nothing is set aside.
    cpu = device(Mesh.parse("cpu: gpu=4"))
    assert cpu.usable == cpu.memory
    # A limit that a person gives is of tensors, as it stands.
    assert planned(1e9).limit == 1e9
