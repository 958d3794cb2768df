"""Trains under a state sharding and on one device, and counts what every rank sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.pins import PinFunction, data_parallel, megatron
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.plan_model import plan_evenly
from autopar.planning.trace import Trace
from autopar.runtime import runtime, torch_private
from autopar.runtime.communication.refetch import Refetch
from autopar.runtime.update.observation import observed
from autopar.session import compiler
from tests.support import parity

MESH = "toy[1TFLOP/s 64GiB 1TB/s]: node=2 @1GB/s 10us, gpu=2 @10GB/s 1us"
Calls = list[tuple[str, tuple[str, ...], int]]  # kind, axes, and the bytes that a rank brings
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Two residual blocks between an embedding and a head that is tied to it."""

    def __init__(self, width: int = 8, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def tiny() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch of 16 samples, in float64; the same at every call."""
    torch.manual_seed(0)
    model = Tiny().double()
    tokens = torch.randint(0, 12, (16, 4))
    return model, {"tokens": tokens, "labels": (tokens + 1) % 12}


def gpt2(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 with tied embeddings, and 16 samples."""
    return _family("gpt2", dtype)


def llama(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Tensor]]:
    """Llama with shared keys and values, and 16 samples."""
    return _family("llama", dtype)


def _family(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = parity.make(name, dtype, 0.0)
    return model, {name: torch.cat([value, value.flip(1)]) for name, value in batch.items()}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        state: as users write it.
        microbatches: in a step.
        tensor: whether the last axis is one of tensor parallelism.
        optimizer: makes the optimizer.
        make: makes model and batch.
        stages: of a pipeline.
        again: whether parameters that are held in parts are gathered again for the backward.
        recompute, offload: as users write them.
        steps: of training.
        ahead: whether parameters are on their way again while the block before computes.
        precision: as users write it.
    """

    state: str
    microbatches: int = 1
    tensor: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]] = tiny
    stages: int = 1
    again: bool = False
    recompute: str = "none"
    offload: str = "none"
    steps: int = 3
    ahead: bool = False
    precision: str = ""

    def captured(self, precision: Precision) -> tuple[Any, ...]:
        """What cases with one captured graph have in common."""
        return self.make, self.microbatches, precision.compute, observed(self.optimizer).mixes

    @property
    def pins(self) -> list[PinFunction]:
        """Returns the pins of data parallelism, with Megatron's if requested."""
        return [data_parallel("node"), megatron("gpu")] if self.tensor else [data_parallel()]


@dataclass(frozen=True)
class Run:
    """What a run leaves: losses, norms of the gradients, and the state_dict."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]

    def error(self, other: Run) -> float:
        """The largest relative error."""
        pairs = [*zip(self.losses, other.losses, strict=True)]
        pairs += zip(self.norms, other.norms, strict=True)
        errors = [abs(a - b) / abs(b) for a, b in pairs]
        assert self.state.keys() == other.state.keys()
        for name, value in other.state.items():
            scale = max(float(value.norm()), 1e-2 * value.numel() ** 0.5)
            errors.append(float((self.state[name] - value).norm()) / scale)
        return max(errors)


def unsharded(case: Case) -> Run:
    """Plain torch, with gradient accumulation and clipping."""
    model, batch = case.make()
    optimizer, losses, norms = case.optimizer(model.parameters()), [], []
    for _ in range(case.steps):
        optimizer.zero_grad()
        parts = zip(*(value.chunk(case.microbatches) for value in batch.values()), strict=True)
        found = []
        for part in parts:
            loss = model(**dict(zip(batch, part, strict=True))) / case.microbatches
            loss.backward()
            found.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(sum(found))
    return Run(losses, norms, dict(model.state_dict()))


@contextmanager
def recorded(mesh: Mesh) -> Iterator[Calls]:
    """Lists the collectives that this rank begins: kind, axes and the bytes that it brings."""
    calls: Calls = []

    def axes(group: Any) -> tuple[str, ...]:
        members = tuple(torch.distributed.get_process_group_ranks(group))
        every = [n for size in range(1, 3) for n in _combinations(mesh.names, size)]
        return next(names for names in every if members in mesh.groups(names))

    def watching(kind: str, place: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, group: Any = None, **more: Any) -> Any:
            calls.append((kind, axes(group), args[place].nbytes))
            return call(*args, group=group, **more)

        return watched

    with (
        patch.object(
            torch_private,
            "all_gather_single",
            watching("all_gather", 1, torch_private.all_gather_single),
        ),
        patch.object(
            torch_private,
            "reduce_scatter_single",
            watching("reduce_scatter", 1, torch_private.reduce_scatter_single),
        ),
        patch.object(
            torch.distributed, "all_reduce", watching("all_reduce", 0, torch.distributed.all_reduce)
        ),
        patch.object(
            torch.distributed,
            "all_to_all_single",
            watching("all_to_all", 1, torch.distributed.all_to_all_single),
        ),
    ):
        yield calls


def _combinations(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [(a,) for a in names] if size == 1 else [tuple(names)]


class Jobs:
    """Cases that are captured and planned once for all ranks."""

    def __init__(self, cases: Sequence[Case], mesh: str = MESH) -> None:
        self.cases, self.mesh = list(cases), mesh
        self.captured: dict[Any, Any] = {}
        self.plans = [self._plan(case) for case in cases]

    def _plan(self, case: Case) -> Any:
        options = Options(
            stages=case.stages,
            microbatches=case.microbatches,
            pins=case.pins,
            state=f"{case.state}, gathered again" if case.again else case.state,
            recompute=case.recompute,
            offload=case.offload,
            update=observed(case.optimizer),
            precision=Precision.read(case.precision),
        )
        key = case.captured(options.precision)
        if key not in _captures:
            model, batch = case.make()
            _captures[key] = capture_call(
                Call(model, (), batch), options, Trace(None), case.microbatches
            )
        captured = self.captured[key] = _captures[key]
        return plan_evenly(captured.graph, Mesh.parse(self.mesh), options, Trace(None))

    def program(self, number: int) -> tuple[autopar.Session, dict[str, Tensor]]:
        """The program of a case on this rank, and its batch."""
        case, plan = self.cases[number], self.plans[number]
        key = case.captured(plan.precision)
        captured = self.captured[key]
        model, batch = case.make()
        with (
            patch.object(compiler, "capture_parts", lambda *_: captured),
            patch.object(runtime, "Refetch", lambda comm, ahead: Refetch(comm, case.ahead)),
        ):
            program = autopar.compile(
                model,
                self.mesh,
                optimizer=case.optimizer,
                plan=plan,
                example_inputs=batch,
                clip_norm=0.5,
            )
        return program, batch

    def train(self) -> list[tuple[Run, Calls]]:
        """Each case's run on this rank, and what the last step sends."""
        found = []
        for number, case in enumerate(self.cases):
            program, batch = self.program(number)
            losses, norms = [], []
            for _ in range(case.steps):
                with recorded(Mesh.parse(self.mesh)) as calls:
                    losses.append(program.step(**batch).item())
                assert program.grad_norm is not None
                norms.append(program.grad_norm.item())
            found.append((Run(losses, norms, program.state_dict()), calls))
        return found


_captures: dict[Any, Any] = {}
