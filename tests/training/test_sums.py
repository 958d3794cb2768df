"""Sums of activations over devices in a wider dtype than the model's."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import PrecisionError
from autopar.explain.moves import moves
from autopar.ir.collective import SUMS
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.pins import megatron
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.communication.communicator import Communicator
from autopar.stage_plan import StagePlan
from tests.support import models
from tests.support.ranks import run_ranks
from tests.support.state_sharding import recorded

MESH, NARROW, WIDE = "cpu: gpu=4", Precision("bf16"), Precision("bf16", sums="f32")


def model() -> models.Model:
    torch.manual_seed(0)
    return models.MODELS["gpt2"](layers=2)


def spread(count: int, comm: Communicator) -> torch.Tensor:
    """Ones in bf16, and 256 in every fourth element, another one on each device.

    Their sum is 259. In bf16, where 257 is 256, it is less wherever the large term is not the last.
    """
    large = torch.arange(count) % 4 == comm.rank
    return torch.where(large, 256.0, 1.0).to(torch.bfloat16)


def collectives() -> list[list[torch.Tensor]]:
    """What the four give that sum, in bf16 and in float32."""
    comm, found = Communicator(Mesh.parse(MESH)), []
    for widened in ({}, {torch.bfloat16: torch.float32}):
        comm.widened = widened
        x = spread(16, comm)
        made = [comm.all_reduce(x, "gpu"), comm.reduce_scatter(x, 0, "gpu")]
        for move in (comm.to_varying, lambda y, axis: comm.all_gather(y, 0, axis)):
            leaf = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True)
            out = move(leaf, "gpu")
            out.backward(spread(len(out), comm))
            assert leaf.grad is not None
            made.append(leaf.grad)
        found.append(made)
    return found


@pytest.mark.slow
def test_sums_are_made_in_the_wider_dtype() -> None:
    ranks = run_ranks(collectives)
    for number in range(4):
        narrow, wide = (torch.cat([rank[at][number] for rank in ranks]) for at in (0, 1))
        assert narrow.dtype == wide.dtype == torch.bfloat16
        assert bool((wide == 260.0).all())  # 259, in bf16
        assert not bool((narrow == 260.0).all())


def sent(plans: list[StagePlan]) -> tuple[list[int], list[float]]:
    """Of each plan the bytes that are summed in a step, and the loss."""
    nbytes, losses = [], []
    for plan in plans:
        made, batch = model()
        program = autopar.compile(made, MESH, plan=Plan.of(plan), example_inputs=batch)
        with recorded(Mesh.parse(MESH)) as calls:
            losses.append(program.step(**batch).item())
        nbytes.append(sum(size for kind, _, size in calls if kind in SUMS))
    return nbytes, losses


@functools.cache
def planned() -> tuple[Graph, StagePlan, StagePlan]:
    """A graph, and a plan of it with narrow and with wide sums."""
    made, batch = model()
    options = Options(pins=[megatron("gpu")], precision=NARROW)
    graph = capture_graph(made, (), batch, options, Trace(None)).graph
    narrow = make_plan(graph, Mesh.parse(MESH), options, Trace(None))
    return graph, narrow, replace(narrow, precision=WIDE)


def summed(graph: Graph, plan: StagePlan) -> int:
    """Bytes of the sums of activations in bf16, as listed."""
    return sum(
        move.count(call) * call.nbytes
        for move in moves(graph, plan, lambda call: 0.0)
        for call in move.calls
        if not move.parameter and move.before != move.after
        if call.kind in SUMS and graph[move.value].type.dtype == "bf16"
    )


def test_wider_sums_are_priced_as_what_they_send() -> None:
    graph, narrow, wide = planned()
    assert summed(graph, wide) == 2 * summed(graph, narrow) > 0
    assert Precision.read(str(WIDE)) == WIDE != NARROW
    assert Precision.read("bf16 sums=bf16") == NARROW
    with pytest.raises(PrecisionError, match="sums are made in bf16"):
        Precision("f32", communication="f64", sums="bf16")


@pytest.mark.slow
def test_programs_send_wider_sums() -> None:
    graph, narrow, wide = planned()
    for nbytes, losses in run_ranks(sent, [narrow, wide]):
        assert nbytes[1] - nbytes[0] == summed(graph, narrow)
        assert abs(losses[1] - losses[0]) < 2**-7 * losses[0]
