"""Bytes of live tensors in a step, measured and simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.runtime.calls.variant import Variant
from autopar.runtime.executor import Executor
from autopar.runtime.offload.host_streams import Host, OffloadCopy
from autopar.simulate import Task
from benchmarks.alive import Alive


@dataclass
class Measured:
    """One training step: bytes alive after each operator, and the number of operators so far at
    the begin and the end of the forward and at the end of the backward. Until the forward begins
    the gradients of the step before are there still."""

    curve: list[tuple[str, int]] = field(default_factory=list)
    begin: int = 0
    forward: int = 0
    backward: int = 0

    @property
    def peak(self) -> int:
        return max(live for _, live in self.curve)

    def peaks(self) -> tuple[int, int, int]:
        """The peak of forward, backward and optimizer."""
        parts = (
            self.curve[self.begin : self.forward],
            self.curve[self.forward : self.backward],
            self.curve[self.backward :],
        )
        return tuple(max(live for _, live in part) for part in parts)

    def ends(self) -> tuple[int, int, int]:
        """What is alive at the end of forward, backward and step."""
        return tuple(self.curve[at - 1][1] for at in (self.forward, self.backward, 0))


def simulated_levels(tasks: Sequence[Task]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`Measured.peaks()` and `Measured.ends()` of simulated tasks, run in program order."""
    alive: dict[str, float] = {}
    peaks: dict[str, float] = {}
    ends: dict[str, float] = {}
    for task in tasks:
        alive.update(task.allocates)
        peaks[task.phase] = max(peaks.get(task.phase, 0.0), sum(alive.values()))
        for name in task.frees:
            del alive[name]
        ends[task.phase] = sum(alive.values())
    return tuple(peaks.values()), tuple(ends.values())


def measured_step(executor: Executor, batch: Mapping[str, Tensor]) -> Measured:
    """A step of the program, after one that has made the optimizer's state."""
    executor.step(batch)
    forward = executor._forward

    def marked(variant: Variant, inputs: Mapping[str, Tensor], **more: Any) -> dict[str, Tensor]:
        found.begin = len(alive.curve)
        outputs = forward(variant, inputs, **more)
        # The executor goes on with the loss alone.
        loss = {variant.program.loss: outputs[variant.program.loss]}
        del outputs
        alive.curve.append(("end of forward", alive.live))
        found.forward = len(alive.curve)
        return loss

    def update(*given: Any) -> Any:
        alive.curve.append(("end of backward", alive.live))
        found.backward = len(alive.curve)
        return step(*given)

    put, step = Host.put, executor.update.step

    def unseen(host: Host, tensor: Tensor, into: Tensor | None = None) -> OffloadCopy:
        with _disable_current_modes():  # what is in host memory is not on the device
            return put(host, tensor, into)

    with (
        patch.object(Host, "put", unseen),
        Alive(_held(executor, batch)) as alive,
        patch.object(executor, "_forward", marked),
    ):
        found = Measured(alive.curve)
        with patch.object(executor.update, "step", update):
            executor.step(batch)
        alive.curve.append(("end of step", alive.live))
    return found


def _held(executor: Executor, batch: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Parameters, masters, gradients, optimizer state, what messages left out, and the batch."""
    yield from batch.values()
    for weight in executor.weights.all:
        yield from weight.memory.values()
    for tensor in (*executor.tensors, *executor.weights.updated):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    for state in () if executor.update.away else executor.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)
