"""Generated programs communicate what was priced."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.explain.moves import moves
from autopar.intra_op.build import build, layouts
from autopar.intra_op.rules import rules
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import Resharder
from autopar.ir.storage import Hop
from autopar.ir.tensor import Layout
from autopar.operators.sharded_operators import Axes, ShardedOperators
from autopar.runtime.module_loader import load
from autopar.runtime.parameters.pieces import Parameter
from autopar.stage_plan import StagePlan
from tests.intra_op.test_folding import random_choice
from tests.support import models
from tests.support.emitted import SLOW, Case, family, local_values


class Peers:
    """The devices that hold the parts of a dimension, of which only the first is there."""

    def __init__(self, ledger: Ledger, axes: tuple[str, ...]) -> None:
        self.ledger, self.axes = ledger, axes
        self.size = math.prod(ledger.mesh.axis_size(axis) for axis in axes)

    @property
    def index(self) -> int:
        return 0

    def blocks(self, extent: int) -> list[tuple[int, int]]:
        found = [(0, extent)]
        for parts in map(self.ledger.mesh.axis_size, self.axes):
            inner = list[tuple[int, int]]()
            for start, whole in found:
                for at in range(parts):  # the first ones are the longest
                    length = whole // parts + (at < whole % parts)
                    inner.append((start, length))
                    start += length
            found = inner
        return found

    def order_of_blocks(self) -> Sequence[int]:
        return range(self.size)

    def deal(
        self, sent: Sequence[Sequence[Tensor]], takes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        every = [x for row in sent for x in row]
        receivers = sum(any(x.numel() for x in row) for row in sent)
        kind = "send" if receivers == 1 else "all_to_all"
        self.ledger.calls.append(Collective(kind, self.axes, sum(x.nbytes for x in every)))
        return lambda: [every[0].new_zeros(count if at else 0) for at, count in enumerate(takes)]

    def stack(self, x: Tensor) -> Callable[[], Tensor]:
        self.ledger.calls.append(Collective("all_gather", self.axes, x.nbytes))
        return lambda: torch.stack([x] * self.size)

    def sum_parts(self, x: Tensor) -> Tensor:
        self.ledger.calls.append(Collective("reduce_scatter", self.axes, x.nbytes))
        return x[0] * self.size

    def own(self, extent: int) -> tuple[int, int]:
        return 0, self.ledger.part(extent, self.axes)

    def reduce(self, x: Tensor) -> Tensor:
        self.ledger.calls.append(Collective("all_reduce", self.axes, x.nbytes))
        return x * self.size

    def maximum(self, x: Tensor) -> Tensor:
        self.ledger.calls.append(Collective("all_reduce", self.axes, x.nbytes))
        return x

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for border in (before, after):
            if border.numel():
                self.ledger.calls.append(Collective("send", self.axes, border.nbytes))
        return None, before  # the first device has nobody before it


class Ledger(ShardedOperators):
    """Stands for the first device of a mesh: shapes as there, and a list of what would be sent.

    It shares nothing with the runtime or the planner but the table in `autopar/ir/collective.py`:
    what each move sends forwards, what backwards, and what becomes of the shape.
    """

    MOVES: ClassVar = {
        "all_reduce": ("all_reduce", None, "same"),
        "to_varying": (None, "all_reduce", "same"),
        "from_varying": (None, None, "same"),
        "to_partial": (None, None, "same"),
        "reduce_scatter": ("reduce_scatter", "all_gather", "cut"),
        "all_gather": ("all_gather", "reduce_scatter", "join"),
        "all_gather_invariant": ("all_gather", None, "join"),
        "slice_invariant": (None, "all_gather", "cut"),
        "slice_varying": (None, None, "cut"),
        "all_to_all": ("all_to_all", "all_to_all", "both"),
    }

    def __init__(self, mesh: Mesh, parameters: Mapping[int, Parameter] | None = None) -> None:
        self.mesh, self.device = mesh, torch.device("cpu")
        self.calls: list[Collective] = []
        self.parameters = parameters or {}  # by the id of what is held of them
        self.together: list[Hop] = []  # what several parameters send at once

    def use(self, x: Tensor, parameter: Parameter) -> Tensor:
        """A parameter as operators use it; its gradient takes the way that its table tells."""
        hops = parameter.storage.hops(parameter.type, self.mesh, trained=parameter.trainable)
        self.together += [hop for hop in hops if hop.when == "forward"]
        out = x
        for dim, size in enumerate(parameter.storage.used.local_shape(parameter.shape, self.mesh)):
            out = torch.cat([out] * (-(-size // out.shape[dim])), dim).narrow(dim, 0, size)
        out = out.clone()
        if out.requires_grad:
            later = [hop for hop in hops if hop.when != "forward"]
            out.register_hook(lambda grad: self.together.extend(later))
        return out

    def part(self, size: int, axis: Any) -> int:
        """The first device's part, which is the longest."""
        for name in (axis,) if isinstance(axis, str) else axis:
            size = -(-size // self.mesh.axis_size(name))
        return size

    def group(self, axes: Axes) -> Peers:
        return Peers(self, (axes,) if isinstance(axes, str) else axes)

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        if op not in self.MOVES:
            return super().__getattr__(op)
        forward, backward, shape = self.MOVES[op]

        def move(
            x: Tensor,
            *,
            axis: Any,
            dim: int = 0,
            to_dim: int | None = None,
            size: int | None = None,
        ) -> Tensor:
            axes = (axis,) if isinstance(axis, str) else axis
            parameter = self.parameters.get(id(x))
            if parameter is not None and parameter.storage.moves:
                return self.use(x, parameter)
            if forward is not None:
                self.calls.append(Collective(forward, axes, x.nbytes))
            count = 1
            for name in axes:
                count *= self.mesh.axis_size(name)
            out = torch.cat([x] * count, dim) if shape in ("join", "both") else x.clone()
            out = out if size is None else out.narrow(dim, 0, size)
            cut = {"cut": dim, "both": to_dim}.get(shape)
            if cut is not None:
                out = out.narrow(cut, 0, self.part(out.shape[cut], axes))
            if backward is not None and out.requires_grad:
                kind = backward
                out.register_hook(
                    lambda grad: self.calls.append(Collective(kind, axes, grad.nbytes))
                )
            return out

        return move


def sent(case: Case, source: str, mesh: Mesh) -> tuple[list[Collective], list[Hop]]:
    """The collectives of one training step of a program, as it runs, and those of parameters."""
    program = load(source, "<ledger>")
    table = program.parameters()
    values = local_values(case, table, mesh)
    ledger = Ledger(mesh, {id(values[one.key]): one for one in table})
    outputs = program.forward(ledger, values, case.captured.inputs.flatten((), case.batch))
    torch.autograd.backward(outputs[program.LOSS])
    return ledger.calls, ledger.together


def seconds(
    sent: tuple[list[Collective], list[Hop]], plan: StagePlan, model: AnalyticModel
) -> float:
    """What all of them take."""
    calls, together = sent
    return sum(map(model.collective, calls)) + sum(
        hop.seconds(model.collective, plan.bucket) for hop in together
    )


def priced(graph: Graph, plan: StagePlan, model: AnalyticModel) -> float:
    """Seconds of communication that the plan predicts, that of the loss included."""
    assert graph.loss is not None
    loss, made = graph[graph.loss], plan.nodes[graph.loss].results[0][1]
    ending = Resharder(plan.mesh, model.collective).cost(loss.type, made, Layout.replicated(0))
    causes = ("parameter_seconds", "reshard_seconds", "exchange_seconds")
    return sum(getattr(plan.predicted, cause) for cause in causes) + ending


@pytest.mark.parametrize("name", models.MODELS)
def test_what_is_sent_is_what_was_priced(name: str) -> None:
    case, mesh = family(name), Mesh.parse(SLOW)
    plan, model = case.plan(SLOW), AnalyticModel(mesh)
    calls = sent(case, emit(case.graph, plan, model.collective), mesh)
    assert sum(map(len, calls)) > 20
    total = seconds(calls, plan, model)
    once = priced(case.graph, plan, model) - twice(case.graph, plan, model)
    assert total == pytest.approx(once, rel=1e-9, abs=0.0)


def twice(graph: Graph, plan: StagePlan, model: AnalyticModel) -> float:
    """What the price holds for further readers that want a value in one layout: it is sent once."""
    found: dict[tuple[str, str, int], float] = {}
    more = 0.0
    for move in moves(graph, plan, model.collective):
        key = (move.value, move.after, move.times)
        if not move.inside and not move.parameter:
            more += move.seconds if key in found else 0.0
            found[key] = move.seconds
    return more


@pytest.mark.parametrize("name", models.MODELS)
def test_no_plan_sends_more_than_was_priced(name: str) -> None:
    """Two readers that want one layout are served by one resharding; the price may hold two."""
    case, mesh, generator = family(name), Mesh.parse(SLOW), random.Random(0)
    model = AnalyticModel(mesh)
    built = build(case.graph, mesh, model, rules())
    for _ in range(2):
        choice = random_choice(built.problem, generator)
        made = layouts(built, case.graph, choice)
        plan = StagePlan(fingerprint(case.graph), mesh, made, predicted=built.figures(choice))
        calls = sent(case, emit(case.graph, plan, model.collective), mesh)
        total, price = seconds(calls, plan, model), priced(case.graph, plan, model)
        assert 0.9 * price <= total <= price * (1 + 1e-9)
