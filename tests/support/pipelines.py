"""Trains in stages on several ranks, and on one device with the same microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.ir.graph import COUNTS
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import FINDING, prepare
from autopar.pins import data_parallel, megatron
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import (
    Devices,
    even_ends,
    legal_cuts,
    plan_stages,
    schedule_of,
    stage_graphs,
    weights,
)
from autopar.planning.pipelines.wiring import wiring_of
from autopar.planning.trace import Trace
from autopar.runtime.generated import Generated
from autopar.runtime.module_loader import load
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.update.update import Training
from autopar.session.compiled import Compiled, placement_of, values_of
from tests.support import families, parity

# Slow devices on fast links: even small tensors are worth splitting.
DEVICE = "toy[1GFLOP/s 64GiB 1GB/s]"
STEPS, LEARNING_RATE, MOMENTUM = 5, 0.05, 0.9
Key = tuple[str, int, float, torch.dtype]
WORDS = {"data": data_parallel("gpu"), "tensor": megatron("gpu")}


def mesh(devices: int) -> Mesh:
    """A mesh of one axis."""
    return Mesh.parse(f"{DEVICE}: gpu={devices} @10GB/s 1us")


@dataclass(frozen=True)
class Case:
    """One run of a pipeline.

    Attributes:
        model: of tests/support/families.py.
        schedule: name and options.
        groups: number of devices of each rank of the schedule.
        microbatches: in a step.
        plan: of every stage: "free", "data" or "tensor".
        cut: by "time" or by number of "operators".
        dropout: of GPT-2.
        clip: bound of the gradients' norm.
        dtype: of parameters and activations.
    """

    model: str
    schedule: str = "1f1b"
    groups: tuple[int, ...] = (1, 1, 1, 1)
    microbatches: int = 4
    plan: str = "free"
    cut: str = "time"
    dropout: float = 0.0
    clip: float | None = None
    dtype: torch.dtype = torch.float64

    @property
    def key(self) -> Key:
        """What decides what is captured."""
        return self.model, self.microbatches, self.dropout, self.dtype

    @property
    def devices(self) -> tuple[Devices, ...]:
        """The groups in a row."""
        starts = [sum(self.groups[:at]) for at in range(len(self.groups))]
        return tuple(Devices(mesh(n), at) for n, at in zip(self.groups, starts, strict=True))


@dataclass(frozen=True)
class Run:
    """What a run leaves."""

    losses: list[float]
    state: dict[str, Tensor]
    norm: float | None = None

    def error(self, other: Run) -> float:
        """The largest relative error of a loss, or of a tensor by its norm or that of one step."""
        pairs = zip(self.losses, other.losses, strict=True)
        errors = [abs(mine - its) / abs(its) for mine, its in pairs]
        assert self.state.keys() == other.state.keys()
        for name, its in other.state.items():
            scale = max(float(its.double().norm()), LEARNING_RATE * its.numel() ** 0.5)
            errors.append(float((self.state[name] - its).double().norm()) / scale)
        if self.norm is not None and other.norm is not None:
            errors.append(abs(self.norm - other.norm) / other.norm)
        return max(errors)


def make(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its batch; the same at every call."""
    if case.dropout:
        return parity.make(case.model, case.dtype, case.dropout)
    model, batch = families.make(case.model)
    if case.dtype == torch.float64:
        return model, batch
    inner = model.model if isinstance(model, families.Exact) else model
    small = {k: v.to(case.dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return inner.to(case.dtype), small


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Has no noise where gradients are zero but for rounding, as Adam has."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def ends_of(case: Case, captured: Captured, stages: int) -> tuple[str, ...]:
    """Where the model is cut."""
    if case.cut == "time":
        return even_ends(captured.graph, stages, mesh(1), Options())
    whole = prepare(captured.graph, passes=FINDING)
    names = list(weights(captured.graph, whole, mesh(1), Options())[0])
    legal = legal_cuts(captured.graph, names, {})
    return tuple(names[legal[len(legal) * number // stages]] for number in range(1, stages))


def unsharded(case: Case) -> Run:
    """The run on one device, without autopar: one microbatch after the other."""
    model, batch = make(case)
    updates, losses, norm = optimizer(model.parameters()), [], None
    torch.manual_seed(1)
    for _ in range(STEPS):
        updates.zero_grad()
        total = 0.0
        for number in range(case.microbatches):
            part = {k: v.chunk(case.microbatches)[number] for k, v in batch.items()}
            loss = loss_of(model(**part)) / case.microbatches
            loss.backward()
            total += loss.item()
        if case.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), case.clip))
        updates.step()
        losses.append(total)
    return Run(losses, dict(model.state_dict()), norm)


@dataclass(frozen=True)
class Job:
    """A case, planned and emitted."""

    case: Case
    plan: Plan
    sources: tuple[str, ...]
    placement: Placement


class Jobs:
    """Cases that are captured, planned and emitted once for all ranks."""

    def __init__(self, cases: list[Case]) -> None:
        self.captured: dict[Key, Captured] = {}
        self.jobs = [self._job(case) for case in cases]

    def _job(self, case: Case) -> Job:
        if case.key not in self.captured:
            model, batch = make(case)
            self.captured[case.key] = capture_call(
                Call(model, (), batch), Options(), Trace(None), case.microbatches
            )
        captured = self.captured[case.key]
        options = Options(pins=None if case.plan == "free" else WORDS[case.plan])
        stages = schedule_of(case.schedule, len(case.groups), case.microbatches).stages
        plan = plan_stages(
            captured.graph,
            ends_of(case, captured, stages),
            case.devices,
            mesh(sum(case.groups)),
            case.microbatches,
            case.schedule,
            options,
            Trace(None),
        )
        graphs = stage_graphs(captured.graph, plan.ends, Trace(None))
        meshes = [stage.mesh for stage in plan.stages]
        return Job(
            case,
            plan,
            Compiled.of(captured, plan, Options(), Trace(None)).sources,
            placement_of(plan, wiring_of(graphs, meshes)),
        )

    def train(self) -> list[Run]:
        """The runs of this rank."""
        return [self._train(job) for job in self.jobs]

    def _train(self, job: Job) -> Run:
        captured = self.captured[job.case.key]
        model, batch = make(job.case)
        pipeline = Pipeline(
            [
                Generated.of(load(s, f"<stage {n} of {job.case}>"))
                for n, s in enumerate(job.sources)
            ],
            job.placement,
            {
                leaf.target: str(leaf.type)
                for leaf in captured.graph.leaves("input")
                if leaf.keyword(COUNTS) is None
            },
            torch.device("cpu"),
            values_of(model, captured),
            Training(optimizer, job.case.clip),
            tied={k: v for k, v in captured.parameter_names.items() if k != v},
        )
        torch.manual_seed(1)
        inputs = captured.inputs.flatten((), batch)
        losses = [pipeline.step(inputs).item() for _ in range(STEPS)]
        state = pipeline.state_dict()
        norm = None if pipeline.grad_norm is None else float(pipeline.grad_norm)
        return Run(losses, {k: state[k] for k in model.state_dict()}, norm)
