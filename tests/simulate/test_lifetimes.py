"""A buffer is freed by tasks that depend on the one that allocates it, however long tasks take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cost.model import AnalyticModel
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.ir.graph import Graph
from autopar.ir.recompute import PRODUCTS
from autopar.pins import PinContext, data_parallel, fsdp
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.simulate import Task, tasks
from autopar.simulate.settings import settings_on
from tests.support import models

MESH = autopar.Mesh.parse("H100: node=2, gpu=2")
LAYERS = 4


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    model, batch = models.llama(layers=LAYERS)
    return capture_graph(model, (), batch, Options(), Trace(None)).graph


def linears(context: PinContext) -> dict[str, str]:
    """Splits what linears store; norms, which a recomputed block needs first, stay whole."""
    pins = fsdp("node", "gpu")(context)
    whole = data_parallel("node", "gpu")(context)
    return {key: whole[key] if "norm" in key else pin for key, pin in pins.items()}


def early(made: tuple[Task, ...]) -> list[str]:
    """The buffers that a task may free before they are allocated."""
    before: list[int] = []  # of each task, the tasks that end before it begins, as bits
    last: dict[str, int] = {}
    born: dict[str, int] = {}
    wrong = []
    for number, task in enumerate(made):
        direct = {*task.after, *([last[task.stream]] if task.stream in last else [])}
        own = 0
        for other in direct:
            own |= before[other] | 1 << other
        before.append(own)
        last[task.stream] = number
        born |= {name: number for name, _ in task.allocates}
        wrong += [
            f"{name} by {task.name}"
            for name in task.frees
            if not (own | 1 << number) >> born.get(name, number) & 1
        ]
    return wrong


@pytest.mark.parametrize("recompute", ["selective 2", "full 2"])
def test_no_buffer_is_freed_before_it_is_allocated(graph: Graph, recompute: str) -> None:
    options = Options(pins=[linears], recompute=recompute)
    plan = replace(make_plan(graph, MESH, options, Trace(None)), bucket=1)  # no shared gathers
    made = tasks(graph, plan, works(graph, plan, table()), AnalyticModel(MESH), settings_on("H100"))
    assert any(task.is_recomputation for task in made)
    assert not early(made)


def test_kept_results_stay_until_the_backward_of_their_block_is_done(graph: Graph) -> None:
    """As in the runtime: every half of a split backward recomputes the block and needs them."""
    options = Options(pins=[data_parallel("node", "gpu")], recompute=f"selective {LAYERS}")
    plan = make_plan(graph, MESH, options, Trace(None))
    made = tasks(graph, plan, works(graph, plan, table()), AnalyticModel(MESH), settings_on("H100"))
    (repeat,) = graph.repeats
    for block in repeat.iterations:
        own = {name for name in block if not graph[name].is_leaf}
        last = max(n for n, t in enumerate(made) if t.phase == "backward" and t.node in own)
        kept = {f"activation {name}" for name in block if graph[name].op in PRODUCTS}
        freed = {name: n for n, task in enumerate(made) for name in task.frees if name in kept}
        assert len(freed) > 1
        assert min(freed.values()) >= last
