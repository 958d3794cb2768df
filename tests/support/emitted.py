"""Models whose programs several tests inspect: captured, planned and emitted once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture.capture import Captured, capture
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import prepare
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.parameters.pieces import Parameter
from autopar.stage_plan import StagePlan
from tests.support import models

FAST = "H100: a=2, b=2"
# A slow device with quick links: even small models are worth splitting.
SLOW = "toy[2TFLOP/s 1GiB 20GB/s]: a=2 @5GB/s 1us, b=2 @20GB/s 100ns"
ONE = "cpu: x=1"


@dataclass(frozen=True)
class Case:
    """A model in float64, its batch and its graph."""

    model: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    graph: Graph

    @cached_property
    def plans(self) -> dict[str, StagePlan]:
        return {}

    def plan(self, mesh: str) -> StagePlan:
        if mesh not in self.plans:
            self.plans[mesh] = make_plan(self.graph, Mesh.parse(mesh), Options(), Trace(None))
        return self.plans[mesh]

    def source(self, mesh: str) -> str:
        return emit(self.graph, self.plan(mesh), AnalyticModel(Mesh.parse(mesh)).collective)


def case_of(model: nn.Module, batch: dict[str, Tensor]) -> Case:
    model = model.double()
    batch = pytree.tree_map(lambda v: v.double() if v.is_floating_point() else v, batch)
    captured = capture(model, (), batch)
    return Case(model, batch, captured, prepare(captured.graph))


@cache
def family(name: str) -> Case:
    torch.manual_seed(0)
    return case_of(*models.MODELS[name](layers=3))


def local_values(case: Case, table: list[Parameter], mesh: Mesh) -> dict[str, Tensor]:
    """The first device's part of every parameter and buffer, by key."""
    whole = {**dict(case.model.named_parameters()), **case.captured.buffers}
    values = {}
    for parameter in table:
        value = whole[parameter.name].detach()
        if parameter.piece is not None:
            piece = parameter.piece
            value = value.narrow(piece.dim, piece.start, piece.length)
        shape = parameter.layout.local_shape(tuple(value.shape), mesh)
        for dim, length in enumerate(shape):
            value = value.narrow(dim, 0, length)
        values[parameter.key] = value.clone().requires_grad_(parameter.trainable)
    return values
