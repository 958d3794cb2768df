"""Trains on several ranks and on one device, and compares the two."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Captured
from autopar.ir.fusion import choose
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.pins import PinFunction, data_parallel, fsdp, megatron, megatron_sp
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support import models

Batch = dict[str, Tensor]
LEARNING_RATE, STEPS = 1e-3, 10


class WithLoss(nn.Module):
    """A model of transformers and the cross entropy of its logits, in the model's own dtype.

    The models' own losses convert the logits to float32; float64 would be good to 1e-7 only.
    """

    def __init__(self, model: nn.Module, shift: int) -> None:
        super().__init__()
        self.model, self.shift = model, shift

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.shift:
            logits, labels = logits[:, : -self.shift], labels[:, self.shift :]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Language(WithLoss):
    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return self.loss(logits, labels)


class Vision(WithLoss):
    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(pixel_values=pixel_values).logits, labels)


class Norm(nn.Module):
    """Llama's norm as it is written, but for the conversion to float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def make(name: str, dtype: torch.dtype, dropout: float) -> tuple[nn.Module, Batch]:
    """A small model that returns its loss, and a batch; the same at every call."""
    torch.manual_seed(0)
    model, batch = models.MODELS[name](**({"dropout": dropout} if dropout else {}))
    for module in list(model.modules()):
        for child, norm in module.named_children():
            if type(norm).__name__ == "LlamaRMSNorm":
                setattr(module, child, Norm(norm.weight, norm.variance_epsilon))
    whole = Vision(model, 0) if name == "vit" else Language(model, int(name != "bert"))
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return whole.to(dtype), batch


@dataclass(frozen=True)
class Case:
    """One sharded run.

    `plan` is "free" for the optimum, or what the plans of `autopar.pins` force: "data", "tensor",
    "sequence" or "zero". The mesh's last axis is the one for tensors.
    """

    mesh: str
    plan: str = "free"
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    fuse: bool = False
    backend: str = "eager"

    @property
    def key(self) -> tuple[torch.dtype, float, bool]:
        """What cases with one captured graph have in common."""
        return self.dtype, self.dropout, self.fuse

    @property
    def text(self) -> str:
        """The mesh's text.

        Slow devices on fast links, where even small tensors are worth splitting; under a plan that
        is forced quick ones, where what it leaves open is not.
        """
        axes = (f"{axis} @10GB/s 1us" for axis in self.mesh.split(", "))
        device = "1GFLOP/s 64GiB 1GB/s" if self.plan == "free" else "1TFLOP/s 64GiB 1TB/s"
        return f"cpu[{device}]: {', '.join(axes)}"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that have more than one device."""
        return tuple(axis.name for axis in Mesh.parse(self.text).axes if axis.size > 1)

    @property
    def pins(self) -> list[PinFunction]:
        """What forces the plan."""
        *batch, tensor = self.axes
        if self.plan in ("data", "zero"):
            return [(data_parallel if self.plan == "data" else fsdp)(*self.axes)]
        beside = [data_parallel(*batch)] if batch else []
        return [*beside, (megatron_sp if self.plan == "sequence" else megatron)(tensor)]


@dataclass(frozen=True)
class Run:
    """What a run leaves: the loss of every step, the state_dict, and the program's source.

    `held` counts the elements of the parameters that this rank trained.
    """

    losses: list[float]
    state: dict[str, Tensor]
    held: int
    source: str = ""

    def error(self, other: Run) -> float:
        """The largest relative error of a loss or of a tensor of the state.

        A tensor's error is relative to its norm, or to the norm of one optimizer step if that is
        larger: what starts at zero and has no gradient (the bias of attention's keys) has no norm.
        """
        pairs = zip(self.losses, other.losses, strict=True)
        errors = [abs(mine - its) / abs(its) for mine, its in pairs]
        assert self.state.keys() == other.state.keys()
        for name, its in other.state.items():
            if its.is_floating_point():
                scale = max(float(its.norm()), LEARNING_RATE * its.numel() ** 0.5)
                errors.append(float((self.state[name] - its).norm()) / scale)
            else:
                assert torch.equal(self.state[name], its), name
        return max(errors)


def optimizer(
    parameters: Iterable[nn.Parameter], dtype: torch.dtype = torch.float64
) -> torch.optim.Optimizer:
    """AdamW; in float32 with a larger epsilon.

    Where a gradient vanishes (as that of the bias of attention's keys does) float32 makes one of
    1e-10 by rounding, which AdamW then divides by its own size. With the default epsilon of 1e-8
    even the unsharded float32 run is 1e-4 off the float64 run in such a tensor.
    """
    epsilon = 1e-4 if dtype == torch.float32 else 1e-8
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=epsilon)


def train_plainly(
    compute_loss: Callable[[], Tensor], updates: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Returns the losses of steps in plain torch."""
    losses = []
    for _ in range(steps):
        updates.zero_grad()
        loss = compute_loss()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    return losses


def unsharded(name: str, dtype: torch.dtype, dropout: float) -> Run:
    """The run on one device, without autopar."""
    model, batch = make(name, dtype, dropout)
    torch.manual_seed(1)
    losses = train_plainly(lambda: model(**batch), optimizer(model.parameters(), dtype), STEPS)
    held = sum(parameter.numel() for parameter in model.parameters())
    return Run(losses, dict(model.state_dict()), held)


class Sharded:
    """The cases of one model, captured and planned once for all ranks.

    Plans that nothing forces are left to the ranks, which must come to the same one.
    """

    def __init__(self, name: str, cases: list[Case]) -> None:
        self.name, self.cases = name, cases
        self.captured: dict[tuple[torch.dtype, float, bool], Captured] = {}
        self.plans = [self._plan(case) for case in cases]

    def _plan(self, case: Case) -> autopar.Plan | None:
        key, nothing = case.key, Trace(None)
        patterns = choose(case.fuse)
        if key not in self.captured:
            model, batch = make(self.name, case.dtype, case.dropout)
            captured = capture_graph(model, (), batch, Options(fuse=patterns), nothing)
            self.captured[key] = captured
        if case.plan == "free":
            return None
        graph, mesh = self.captured[key].graph, autopar.Mesh.parse(case.text)
        state = "ddp" if case.plan == "data" else None
        options = Options(pins=case.pins, state=state, fuse=patterns)
        return autopar.Plan.of(make_plan(graph, mesh, options, nothing))

    def graph(self, case: Case) -> Graph:
        return self.captured[case.key].graph

    def train(self) -> list[Run]:
        """The runs of this rank."""
        compiler = importlib.import_module("autopar.session.compiler")
        models = {key: make(self.name, *key[:2]) for key in self.captured}
        runs = []
        for case, plan in zip(self.cases, self.plans, strict=True):
            key = case.key
            captured = self.captured[key]
            with patch.object(compiler, "capture_parts", lambda *_, found=captured: found):
                runs.append(_train(case, plan, *models[key]))
        for key, (model, _) in models.items():
            untouched = make(self.name, *key[:2])[0].state_dict()
            assert all(torch.equal(untouched[k], v) for k, v in model.state_dict().items())
        return runs


def _train(case: Case, plan: autopar.Plan | None, model: nn.Module, batch: Batch) -> Run:
    program = autopar.compile(
        model,
        case.text,
        optimizer=partial(optimizer, dtype=case.dtype),
        example_inputs=batch,
        plan=plan,
        fuse=case.fuse,
        backend=case.backend,
    )
    torch.manual_seed(1)
    losses = [program.step(**batch).item() for _ in range(STEPS)]
    held = sum(p.numel() for group in program.optimizer.param_groups for p in group["params"])
    return Run(losses, program.state_dict(), held, program.source)
