"""The tasks of a step take the time of all kernels and collectives, one by one."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost.model import AnalyticModel, NodeWork
from autopar.errors import SimulationError
from autopar.explain import moves
from autopar.explain.moves import Move
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.update import Update
from autopar.pins import data_parallel, fsdp, megatron
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import Settings, Task, Timeline, run, tasks
from autopar.simulate.timeline import cause_of
from autopar.stage_plan import StagePlan
from tests.support.memory import measured_step, simulated_levels
from tests.support.work import calls_of

MESH = "A100-80: data=2, tensor=4"
PLANS = {
    "free": [],
    "data": [data_parallel("data", "tensor")],
    "megatron": [data_parallel("data"), megatron("tensor")],
    "zero": [fsdp("data", "tensor")],
}


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Small(nn.Module):
    """Words in, loss out; the words' table is the head's, too."""

    def __init__(self, words: int = 256, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randint(0, 256, (8, 32)) for name in ("ids", "labels")}


@pytest.fixture(scope="module")
def graph() -> Graph:
    captured = capture_graph(Small(), (), batch(), Options(), Trace(None))
    return captured.graph


@pytest.fixture(scope="module")
def plans(graph: Graph) -> dict[str, StagePlan]:
    """Each gradient goes by itself, so that collectives are those that are listed."""
    mesh, nothing = autopar.Mesh.parse(MESH), Trace(None)
    made = {
        name: make_plan(graph, mesh, Options(pins=pins), nothing) for name, pins in PLANS.items()
    }
    return {name: replace(plan, bucket=1) for name, plan in made.items()}


def deepened(graph: Graph, count: int) -> Graph:
    """`graph` with its last block again and again, until there are `count`."""
    (repeat,) = graph.repeats
    *_, before, last = repeat.iterations
    first = repeat.iterations[0]
    ends = [dict(zip(first, block, strict=True)) for block in (before, last)]
    enters, leaves = ([end[name] for _, name in repeat.carried] for end in ends)
    now, blocks = dict(zip(enters, leaves, strict=True)), list(repeat.iterations)
    lead: list[Node] = []
    body: list[Node] = []

    def renamed(node: Node, names: dict[str, str], name: str) -> Node:
        made = node.map_refs(lambda read: Ref(names.get(read, read)))
        saved = tuple(names.get(value, value) for value in node.saved)
        return replace(made, name=name, alias=names.get(str(node.alias), node.alias), saved=saved)

    for number in range(repeat.count, count):
        own = {name: f"{name}_{number}_more" for name in last}
        for name in last:
            made = renamed(graph[name], {**now, **own}, own[name])
            (lead if made.is_leaf else body).append(made)
        blocks.append(tuple(own[name] for name in last))
        now = {enter: own[leave] for enter, leave in zip(enters, leaves, strict=True)}
    final = {leave: now[enter] for enter, leave in zip(enters, leaves, strict=True)}
    place = 1 + max(i for i, node in enumerate(graph.nodes) if node.name in last)
    rest = [renamed(node, final, node.name) for node in graph.nodes[place:]]
    repeats = (replace(repeat, iterations=tuple(blocks)),)
    return replace(graph, nodes=(*lead, *graph.nodes[:place], *body, *rest), repeats=repeats)


def kernels(graph: Graph, plan: StagePlan) -> dict[str, NodeWork]:
    return works(graph, plan, table())


def simulate(
    graph: Graph, plan: StagePlan, **settings: object
) -> tuple[tuple[Task, ...], Timeline]:
    model = AnalyticModel(plan.mesh)
    made = tasks(graph, plan, kernels(graph, plan), model, Settings(**settings))  # type: ignore
    return made, run(made, model, 1.0)


def sent(graph: Graph, plan: StagePlan) -> list[Move]:
    """The moves of a plan. The planner prices them for each reader; readers of one value in one
    layout in one function have it sent once."""
    blocks = {name for repeat in graph.repeats for name in repeat.iterations[0]}
    listed = moves(graph, plan, AnalyticModel(plan.mesh).collective)
    once = {(m.value, m.before, m.after, m.reader in blocks, m.inside): m for m in listed}
    return list(once.values())


def called(graph: Graph, plan: StagePlan) -> list[Collective]:
    """The collectives of a step that waits for its gradients: those of the moves, but that all
    gradients that are summed over the same axes are summed by one."""
    found: list[Collective] = []
    summed: dict[tuple[str, ...], int] = {}
    for move in sent(graph, plan):
        for call in move.calls:
            if move.parameter and call.backward and call.kind == "all_reduce":
                summed[call.axes] = summed.get(call.axes, 0) + move.times * call.nbytes
            else:
                found += [Collective(call.kind, call.axes, call.nbytes)] * move.times
    return found + [Collective("all_reduce", axes, nbytes) for axes, nbytes in summed.items()]


@pytest.mark.parametrize("name", PLANS)
def test_a_step_takes_the_sum_of_its_parts(
    name: str, graph: Graph, plans: dict[str, StagePlan]
) -> None:
    plan = plans[name]
    model = AnalyticModel(plan.mesh)
    _, found = simulate(graph, plan)
    computing = math.fsum(
        graph.multiplicity[name] * model.compute(kernel)
        for name, work in kernels(graph, plan).items()
        for kernel in (*work.forward, *work.backward)
    )
    sending = math.fsum(map(model.collective, called(graph, plan)))
    update = found.phases["optimizer"]
    assert found.computing - update == pytest.approx(computing, rel=1e-9)
    assert found.exposed == pytest.approx(sending, rel=1e-9)
    assert found.seconds == pytest.approx(computing + sending + update, rel=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_collectives_are_those_of_the_plan(
    name: str, graph: Graph, plans: dict[str, StagePlan]
) -> None:
    plan = plans[name]
    made, _ = simulate(graph, plan)
    calls = sorted(str(task.what) for task in made if isinstance(task.what, Collective))
    listed = map(str, called(graph, plan))
    assert calls == sorted(listed)


def test_gradients_beside_the_backward_are_hidden(
    graph: Graph, plans: dict[str, StagePlan]
) -> None:
    plan = replace(plans["data"], bucket=2**16)  # as programs that overlap send them
    _, waits = simulate(graph, plan)
    made, found = simulate(graph, plan, overlap=frozenset({"gradient"}))
    assert found.computing == pytest.approx(waits.computing)
    longest = max(found.computing, found.communication(cause_of)["gradient"][0])
    assert longest <= found.seconds < waits.seconds
    assert found.exposed < waits.exposed
    # The optimizer waits for every one of them.
    first = next(i for i, task in enumerate(made) if task.phase == "optimizer")
    assert found.spans[first].start >= max(span.end for span in found.spans[:first])


def test_parameters_are_gathered_ahead(graph: Graph, plans: dict[str, StagePlan]) -> None:
    _, waits = simulate(graph, plans["zero"])
    _, found = simulate(graph, plans["zero"], overlap=frozenset({"parameter"}))
    exposed = found.communication(cause_of)["parameter"][1]
    assert exposed < waits.communication(cause_of)["parameter"][1]
    assert found.seconds < waits.seconds


def test_a_backward_waits_for_parameters_that_are_gathered_again(graph: Graph) -> None:
    """Over links that are slower than kernels no task frees what has not come."""
    slow = autopar.Mesh.parse("toy[1TFLOP/s 64GiB 1TB/s]: data=2 @10MB/s 1us")
    options = Options(pins=data_parallel(), state="zero3, gathered again", recompute="none")
    plan = make_plan(graph, slow, options, Trace(None))
    _, timeline = simulate(graph, plan, overlap=frozenset({"parameter", "gradient"}))
    came: dict[str, float] = {}
    for span in timeline.spans:
        came |= {name: span.end for name, _ in span.task.allocates}
        assert all(came[name] <= span.end for name in span.task.frees), span.task.name


def test_every_buffer_comes_once_and_goes_once(graph: Graph, plans: dict[str, StagePlan]) -> None:
    for plan in plans.values():
        made, found = simulate(graph, plan)
        came = [name for task in made for name, _ in task.allocates]
        went = [name for task in made for name in task.frees]
        assert len(set(came)) == len(came)
        assert len(set(went)) == len(went)
        left = {name.split()[0] for name in set(came) - set(went)}
        assert left == {"parameter", "gradient", "optimizer", "batch"}
        assert found.memory.peak <= sum(b for task in made for _, b in task.allocates)


def test_gradients_and_state_are_as_large_as_their_parameters(
    graph: Graph, plans: dict[str, StagePlan]
) -> None:
    for plan in plans.values():
        made, _ = simulate(graph, replace(plan, update=Update.of_bytes(3.0)))
        end = {name: size for task in made for name, size in task.allocates}
        for leaf in graph.leaves("param"):
            layout = plan.nodes[graph.template[leaf.name]].results[0][1]
            held = layout.local_bytes(leaf.type, plan.mesh)
            assert end[f"parameter {leaf.name}"] == end[f"gradient {leaf.name}"] == held
            assert end[f"optimizer {leaf.name}"] == 3 * held


def test_one_device_holds_what_is_measured() -> None:
    program = autopar.compile(Small(), "cpu: gpu=1", example_inputs=batch())
    measured = measured_step(program._executor, batch())
    made, found = simulate(program.graph, program.plan.stage)
    assert found.memory.peak == pytest.approx(measured.peak, rel=0.002)
    peaks, ends = simulated_levels(made)
    assert peaks == pytest.approx(measured.peaks(), rel=0.002)
    assert ends == pytest.approx(measured.ends(), rel=0.002)


def test_every_block_more_takes_as_much_more(graph: Graph, plans: dict[str, StagePlan]) -> None:
    for plan in (plans["megatron"], plans["zero"]):
        found = [simulate(deepened(graph, count), plan)[1] for count in (4, 5, 6)]
        for figures in ([t.seconds for t in found], [t.memory.peak for t in found]):
            one, two, three = figures
            assert two - one == pytest.approx(three - two, rel=1e-6)
            assert two > one


def test_gradients_of_one_call_are_whole_until_it_and_parts_of_themselves_behind_it(
    graph: Graph, plans: dict[str, StagePlan]
) -> None:
    plan = replace(plans["zero"], bucket=2**50)
    made, found = simulate(graph, plan, in_place=True)
    places = [at for at, task in enumerate(made) if task.name == "gradients, reduced in place"]
    sizes = {name: nbytes for task in made for name, nbytes in task.allocates}
    whole = sum(node.type.nbytes for node in graph.leaves("param"))
    freed = sum(sizes[name] for at in places for name in made[at - 1].frees)
    parts = sum(nbytes for at in places for _, nbytes in made[at].allocates)
    assert places
    assert freed == whole
    assert parts == whole / plan.mesh.size
    assert max(places) - min(places) == 2 * (len(places) - 1)  # nothing runs between the calls
    assert "communication" not in found.memory.kinds


@pytest.mark.parametrize("state", ["zero2", "zero3, gathered again"])
def test_copies_read_and_write_what_messages_hold(state: str, graph: Graph) -> None:
    mesh = autopar.Mesh.parse("A100-80: data=8")
    plan = make_plan(graph, mesh, Options(pins=[data_parallel("data")], state=state), Trace(None))
    _, plain = simulate(graph, plan)
    made, found = simulate(graph, plan, copies=True)
    calls = [t.what for t in made if isinstance(t.what, Collective) and t.cause != "activation"]
    held = sum(call.nbytes * (mesh.size if call.kind == "all_gather" else 1) for call in calls)
    copied = [t.what for t in made if t.name.startswith("copy of")]
    copies = [work for what in copied if isinstance(what, tuple) for work in what]
    assert {call.kind for call in calls} >= {"all_gather", "reduce_scatter"}
    assert sum(work.nbytes for work in copies) == 2 * held
    assert found.seconds - plain.seconds == pytest.approx(
        sum(map(AnalyticModel(mesh).compute, copies))
    )


def test_simulating_a_deeper_model_takes_calls_by_the_layer(
    graph: Graph, plans: dict[str, StagePlan]
) -> None:
    plan = plans["megatron"]
    model = AnalyticModel(plan.mesh)

    def count(layers: int) -> int:
        deep = deepened(graph, layers)
        work, settings = kernels(deep, plan), Settings(overlap=frozenset({"gradient"}))
        return calls_of(lambda: run(tasks(deep, plan, work, model, settings), model, 1.189))

    count(4)  # prices once
    few, more, most = map(count, (8, 16, 32))
    assert most - more == pytest.approx(2 * (more - few), rel=0.01)


def test_a_trace_holds_every_task_that_takes_time(
    graph: Graph, plans: dict[str, StagePlan]
) -> None:
    _, found = simulate(graph, plans["megatron"])
    events = json.loads(found.to_trace())["traceEvents"]
    ran = [event for event in events if event["ph"] == "X"]
    assert len(ran) == sum(span.seconds > 0 for span in found.spans)
    assert max(event["ts"] + event["dur"] for event in ran) == pytest.approx(found.seconds * 1e6)
    counted = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(counted) == found.memory.peak


def test_what_has_no_step_is_refused(graph: Graph, plans: dict[str, StagePlan]) -> None:
    plan, model = plans["free"], AnalyticModel(autopar.Mesh.parse(MESH))
    with pytest.raises(SimulationError, match="no training step"):
        tasks(replace(graph, loss=None), plan, {}, model)
    with pytest.raises(SimulationError, match="unknown overlap sends"):
        tasks(graph, plan, {}, model, Settings(overlap=frozenset({"sends"})))
