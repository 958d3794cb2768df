"""Measures the steps of a session, for callbacks.

Nothing is measured without a callback: reading a loss waits for the device.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from autopar.cost.device import device
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.model_flops import model_flops
from autopar.planning.stored import graphs_of
from autopar.runtime.ranks.processes import accelerator
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.trained import Program
from autopar.session.compiled import Compiled


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one step on this rank.

    Attributes:
        step: its number in this process, from 1.
        loss: as `Session.step` returns it.
        grad_norm: norm of the gradients before clipping; None if nothing needed it.
        seconds: from the call of `step` until its loss is known.
        samples, tokens: of the whole batch, on all ranks; tokens are the elements of its first
            two-dimensional integer input, or the samples if there is none.
        model_flops: FLOPs of matrix products in the step, without recomputation; see
            `intra_op/work/model_flops.py`.
        utilisation: the model FLOPs utilisation, a fraction of the devices' peak.
        memory: peak bytes in tensors of an accelerator since the last step, or the peak resident
            bytes of the process on a CPU.
        exposed_seconds: time in which this rank only waited for others; None on accelerators, where
            the host does not wait (profile a step there).
    """

    step: int
    loss: float
    grad_norm: float | None
    seconds: float
    samples: int
    tokens: int
    model_flops: float
    utilisation: float
    memory: int
    exposed_seconds: float | None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch by seconds of the step."""
        return self.tokens / self.seconds

    @property
    def figures(self) -> dict[str, float]:
        """All figures that there are, by name, for loggers."""
        found = {**vars(self), "tokens_per_second": self.tokens_per_second}
        return {k: v for k, v in found.items() if v is not None and k != "step"}


class Callback(Protocol):
    """Receives the figures of steps; see `autopar.callbacks`."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Is called after every step."""

    def close(self) -> None:
        """Is called when the session is closed."""


class Metered:
    """The part of a session that calls callbacks."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        self._steps = 0
        self._costs: dict[int, _Cost] = {}

    def add_callback(self, callback: Callback) -> None:
        """Calls `callback` after every step of this rank; ranks may have different ones.

        Args:
            callback: receives a `StepMetrics`. An error that it raises ends the step.
        """
        self._callbacks.append(callback)

    @contextmanager
    def _metered(
        self, program: Program, compiled: Compiled, inputs: Mapping[str, Tensor]
    ) -> Iterator[list[Tensor]]:
        """Yields a list for the step's loss, and calls the callbacks."""
        losses: list[Tensor] = []
        if not self._callbacks:
            yield losses
            return
        chip = accelerator()
        if chip is not None:
            torch.cuda.reset_peak_memory_stats(chip)
        recorder, cost = Peers.here().recorder, self._cost(compiled)
        waited, begun = recorder.waited.seconds, time.perf_counter()
        yield losses
        loss = float(losses[0])
        seconds, self._steps = time.perf_counter() - begun, self._steps + 1
        norm, samples, tokens = program.grad_norm, *_sizes(inputs, program.part.world)
        metrics = StepMetrics(
            step=self._steps,
            loss=loss,
            grad_norm=None if norm is None else float(norm),
            seconds=seconds,
            samples=samples,
            tokens=tokens,
            model_flops=cost.flops,
            utilisation=cost.seconds / seconds,
            memory=_memory(chip),
            exposed_seconds=None if chip else recorder.waited.seconds - waited,
        )
        for callback in self._callbacks:
            callback.on_step(metrics)

    def _cost(self, compiled: Compiled) -> _Cost:
        known = self._costs.get(id(compiled))
        if known is None or known.compiled is not compiled:
            known = self._costs[id(compiled)] = _Cost(compiled)
        return known

    def _close_callbacks(self) -> None:
        for callback in self._callbacks:
            callback.close()
        self._callbacks = []


@dataclass(frozen=True)
class _Cost:
    """The model's FLOPs in a step of a program."""

    compiled: Compiled

    @cached_property
    def _by_dtype(self) -> dict[str, float]:
        plan, known = self.compiled.plan.inner, table()
        found: dict[str, float] = {}
        for graph, stage in zip(
            graphs_of(self.compiled.captured.graph, plan), plan.stages, strict=True
        ):
            for dtype, flops in model_flops(graph, stage, known).items():
                found[dtype] = found.get(dtype, 0.0) + flops
        replicas = self.compiled.plan.mesh.size // plan.mesh.size
        count = replicas * (plan.microbatches if plan.is_pipeline else 1)
        return {dtype: flops * count for dtype, flops in found.items()}

    @property
    def flops(self) -> float:
        """FLOPs of the step on all devices."""
        return sum(self._by_dtype.values())

    @property
    def seconds(self) -> float:
        """The least seconds in which all devices could compute them at their peak."""
        chips = [(device(part), part.size) for part in self.compiled.plan.mesh.parts]
        return sum(
            flops / sum(size * chip.rate(dtype, True) for chip, size in chips)
            for dtype, flops in self._by_dtype.items()
        )


def _sizes(inputs: Mapping[str, Tensor], parts: int) -> tuple[int, int]:
    """Returns the numbers of samples and of tokens in the whole batch."""
    rows = next((len(value) for value in inputs.values() if value.dim()), 1)
    tokens = next(
        (v.numel() for v in inputs.values() if v.dim() > 1 and not v.is_floating_point()), rows
    )
    return rows * parts, tokens * parts


def _memory(chip: torch.device | None) -> int:
    if chip is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(chip)
