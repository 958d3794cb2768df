"""A simulation of stale weights in one process, the reference for asynchronous pipelines.

The simulation shares no code with autopar: the layers' backwards are written out by hand, a
microbatch after the other, and every one of them is told by a closed form on which version of each
stage's weights its forward and its backward run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import Devices, equal_parts, plan_stages
from autopar.planning.trace import Trace

WIDTH, BATCH, STEPS = 6, 8, 10
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.2),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.8),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02),
}


class Net(nn.Module):
    """Layers of a linear map and a tanh, one for each stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def made(stages: int) -> tuple[Net, list[dict[str, Tensor]]]:
    """The model and its batches; the same at every call."""
    torch.manual_seed(0)
    model = Net(stages).double()
    batches = [
        {name: torch.randn(BATCH, WIDTH, dtype=torch.float64) for name in "xy"}
        for _ in range(STEPS)
    ]
    return model, batches


@dataclass(frozen=True)
class Method:
    """A method, as its paper has it.

    Attributes:
        schedule: what it is called, with options.
        microbatches: of a batch.
        every: microbatches in an update, 0 for all.
        forward, backward: (stage, stages, microbatch) -> the version that it runs on, where the
            pipeline does not stop.
        annealed, decay, flushed: of PipeMare.
        late: how many steps later a loss is told.
    """

    schedule: str
    microbatches: int
    every: int
    forward: Callable[[int, int, int], int]
    backward: Callable[[int, int, int], int]
    annealed: int = 0
    decay: float = 0.0
    flushed: int = 0
    late: int = 1

    @property
    def taken(self) -> int:
        """Microbatches whose gradients an update takes."""
        return self.every or self.microbatches


def pipemare(options: str = "", **how: Any) -> Method:
    """PipeMare with four microbatches in an update."""
    n = 4
    return Method(
        f"pipemare {options}".strip(), n, 0,
        lambda s, p, k: max(0, (k - 2 * (p - s - 1) - 1) // n), lambda s, p, k: k // n, **how,
    )  # fmt: skip


METHODS = {
    "pipedream": Method(
        "pipedream", 4, 1,
        lambda s, p, k: max(0, k - (p - 1 - s)), lambda s, p, k: max(0, k - (p - 1 - s)),
    ),
    "few": Method(
        "pipedream", 2, 1,
        lambda s, p, k: max(0, k - (p - 1 - s)), lambda s, p, k: max(0, k - (p - 1 - s)),
    ),
    "vertical": Method(
        "pipedream vertical=1", 4, 1,
        lambda s, p, k: max(0, k - (p - 1)), lambda s, p, k: max(0, k - (p - 1)),
    ),
    "2bw": Method(
        "2bw", 4, 0, lambda s, p, k: max(0, k // 4 - 1), lambda s, p, k: max(0, k // 4 - 1)
    ),
    "bounded": Method(
        "bounded_staleness ahead=2", 4, 0,
        lambda s, p, k: max(0, k // 4 - 2), lambda s, p, k: max(0, k // 4 - 2), late=2,
    ),
    "far ahead": Method(
        "bounded_staleness ahead=3", 2, 0,
        lambda s, p, k: max(0, k // 2 - 3), lambda s, p, k: max(0, k // 2 - 3), late=3,
    ),
    "ampnet": Method("ampnet", 4, 1, lambda s, p, k: max(0, k - (p - 1 - s)), lambda s, p, k: k),
    "ampnet of two": Method(
        "ampnet every=2", 4, 2,
        lambda s, p, k: max(0, k - (p - 1 - s)) // 2, lambda s, p, k: k // 2,
    ),
    "pipemare plain": pipemare("correction=0"),
    "pipemare": pipemare("annealed=6", annealed=6, decay=0.135),
    "pipemare flushed": pipemare("correction=300 flushed=3", decay=0.3, flushed=3),
}  # fmt: skip


@dataclass
class Stage:
    """One stage: all versions of its weight and bias, and what updates the newest."""

    layer: nn.Linear
    optimizer: torch.optim.Optimizer
    versions: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)

    def keep(self) -> None:
        """Remember the newest weights as one more version."""
        self.versions.append((self.layer.weight.detach().clone(), self.layer.bias.detach().clone()))


def simulated(
    method: Method, stages: int, optimizer: str, clip: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all batches, and the weights after the last update."""
    model, batches = made(stages)
    held = [
        Stage(layer, OPTIMIZERS[optimizer](layer.parameters()))  # type: ignore[arg-type]
        for layer in model.layers
    ]
    for stage in held:
        stage.keep()
        stage.velocity = [torch.zeros_like(p) for p in stage.layer.parameters()]
    n, losses = method.microbatches, []
    for step, batch in enumerate(batches):
        total, flushed = 0.0, step < method.flushed
        for number in range(n):
            k = (step - method.flushed) * n + number
            x, y = (batch[name].chunk(n)[number] for name in "xy")
            inputs, outputs = [], []
            for s, stage in enumerate(held):
                version = -1 if flushed else method.flushed + method.forward(s, stages, k)
                weight, bias = stage.versions[version]
                inputs.append(x)
                x = torch.tanh(x @ weight.T + bias)
                outputs.append(x)
            total += float(((x - y) ** 2).mean()) / n
            gradient = 2 * (x - y) / y.numel() / (n if flushed else method.taken)
            for s in reversed(range(stages)):
                stage = held[s]
                version = -1 if flushed else method.flushed + method.backward(s, stages, k)
                weight = stage.versions[version][0]
                if method.decay and not flushed and step > method.flushed:
                    weight = weight - (2 * (stages - s - 1) + 1) / n * stage.velocity[0]
                inner = gradient * (1 - outputs[s] ** 2)
                given = inner.T @ inputs[s], inner.sum(0)
                for parameter, own in zip(stage.layer.parameters(), given, strict=True):
                    parameter.grad = own if parameter.grad is None else parameter.grad + own
                gradient = inner @ weight
            if (number + 1) % (n if flushed else method.taken) == 0:
                update(method, held, None if flushed else step - method.flushed, clip)
        losses.append(total)
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


def update(method: Method, held: list[Stage], number: int | None, clip: float | None) -> None:
    """Update all stages; `number` of the update, None for one of a flushed step.

    Each stage clips by a norm of its own, but in a flushed step all of them by one.
    """
    if clip is not None and number is None:
        nn.utils.clip_grad_norm_([p for stage in held for p in stage.layer.parameters()], clip)
    for s, stage in enumerate(held):
        delay = (2 * (len(held) - s - 1) + 1) / method.microbatches
        rate = 1.0
        if number is not None and number < method.annealed:
            rate = max(delay, 1.0) ** -(1 - number / method.annealed)
        (group,) = stage.optimizer.param_groups
        before = [p.detach().clone() for p in stage.layer.parameters()]
        own, group["lr"] = group["lr"], group["lr"] * rate
        if clip is not None and number is not None:
            nn.utils.clip_grad_norm_(stage.layer.parameters(), clip)
        stage.optimizer.step()
        group["lr"] = own
        stage.optimizer.zero_grad()
        stage.keep()
        if method.decay and number is not None:
            kept = math.exp(math.log(method.decay) / delay)
            for velocity, old, new in zip(
                stage.velocity, before, stage.layer.parameters(), strict=True
            ):
                velocity.mul_(kept).add_((1 - kept) * (new.detach() - old))


def mesh(ranks: int) -> str:
    return f"cpu[1GFLOP/s 64GiB 1GB/s]: gpu={ranks} @10GB/s 1us"


def parts_of(whole: Mesh, sizes: Sequence[int]) -> tuple[Devices, ...]:
    """Stages of so many devices each, one after the other."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    axis = whole.axes[-1]
    return tuple(
        Devices(replace(whole, axes=(replace(axis, size=size),)), start)
        for size, start in zip(sizes, starts, strict=True)
    )


def program_of(method: Method, stages: int, optimizer: str, ranks: int = 1, **how: Any) -> Any:
    """The compiled model, and its batches; `sizes` are numbers of devices, if stages differ."""
    model, batches = made(stages)
    planned = {name: how.pop(name) for name in ("pins", "state") if name in how}
    planned |= {"precision": Precision.read(how.pop("precision", None))}
    options = Options(
        microbatches=method.microbatches, schedule=method.schedule, stages=stages,
        allow="stale gradients", **planned,
    )  # fmt: skip
    call, trace = Call(model, (), batches[0]), Trace(None)
    graph = capture_call(call, options, trace, method.microbatches).graph
    ends = ["tanh", *(f"tanh_{number}" for number in range(1, stages - 1))][: stages - 1]
    whole, sizes = Mesh.parse(how.pop("mesh", mesh(ranks))), how.pop("sizes", ())
    parts = parts_of(whole, sizes) if sizes else equal_parts(whole, stages)
    plan = plan_stages(
        graph, ends, parts, whole, method.microbatches, method.schedule, options, trace
    )
    how |= {"plan": plan, "optimizer": OPTIMIZERS[optimizer], "example_inputs": batches[0]}
    program = autopar.compile(model, str(whole), **how)
    return program, batches
