"""Clocks for problems that all processes of a mesh run at once; `measure.py` lists the problems."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import median, quantiles

import torch
from torch import Tensor

from autopar.cost.calibration import Timing
from autopar.runtime.communication.group import Group

BEHIND = 5e-3  # seconds of work before a collective, longer than a process's time slice
_MOST_RUNS = 1000  # of a problem between two checks of the clock


class Bench:
    """Times problems that all processes of a mesh run at once.

    Args:
        group: all processes.
        device: device of this process.
        runs: number of runs of each problem.
        seconds: least duration of a run; shorter problems are repeated in it.
    """

    def __init__(self, group: Group, device: torch.device, runs: int, seconds: float) -> None:
        self.group, self.device, self.runs, self.seconds = group, device, runs, seconds

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Returns each value's maximum over the processes."""
        times = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(value) for value in self.group.maximum(times)]

    def __call__(self, call: Callable[[], Sequence[float]]) -> list[Timing]:
        """Returns the times of the parts of a problem.

        Args:
            call: runs the problem once and returns the clock before, between and after its parts;
                all processes run it equally often.
        """
        count, samples = self._count(call), []
        for _ in range(self.runs):
            self.slowest([0.0])  # all processes start together
            total: list[float] = []
            for _ in range(count):
                marks = call()
                parts = [after - before for before, after in itertools.pairwise(marks)]
                total = [a + b for a, b in zip(total or [0.0] * len(parts), parts, strict=True)]
            samples.append(self.slowest([part / count for part in total]))
        return [timing(part) for part in zip(*samples, strict=True)]

    def alone(self, call: Callable[[], object]) -> Timing:
        """Returns the time of a problem in one part."""

        def marked() -> tuple[float, float]:
            before = self.clock()
            call()
            return before, self.clock()

        return self(marked)[0]

    def behind(self, call: Callable[[], object]) -> Timing:
        """Returns the extra time of work that is followed by a joint call.

        Processes that share processors take turns and do not arrive at once. The result is at least
        the time that the last one to arrive spends in the call.
        """
        count, samples = self._count(call), []
        for _ in range(self.runs):
            self.slowest([0.0])
            began = self.clock()
            for _ in range(count):
                self._work()
            alone = self.clock() - began
            self.slowest([0.0])
            began, inside = self.clock(), 0.0
            for _ in range(count):
                self._work()
                before = self.clock()
                call()
                inside += self.clock() - before
            both = self.clock() - began
            alone, both, inside = self.slowest([alone, both, -inside])
            samples.append(max(both - alone, -inside) / count)
        return timing(samples)

    def operator(
        self,
        inputs: Sequence[tuple[Tensor, ...]],
        run: Callable[..., Tensor],
    ) -> list[Timing]:
        """Returns the times of one operator, forwards and backwards, run on each of `inputs`."""
        wanted = [x.requires_grad_() for xs in inputs for x in xs if x.is_floating_point()]
        results = [run(*xs) for xs in inputs]
        gradients = [torch.ones_like(result) for result in results]
        del results

        def call() -> tuple[float, ...]:
            marks = [self.clock()]
            results = [run(*xs) for xs in inputs]
            marks.append(self.clock())
            torch.autograd.grad(results, wanted, gradients)
            return (*marks, self.clock())

        return [Timing(t.seconds / len(inputs), t.spread) for t in self(call)]

    def clock(self) -> float:
        """Returns seconds, after all launched work has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _count(self, call: Callable[[], object]) -> int:
        """Returns the repetitions of a problem that take `seconds`, the same on all processes.

        A single run is not representative: if processes share processors, it may wait for its turn,
        and runs that end before all have had a turn measure too short.
        """
        call()
        count = 1
        while count < _MOST_RUNS:
            began = self.clock()
            for _ in range(count):
                call()
            if self.slowest([began - self.clock()])[0] <= -self.seconds:  # of the fastest process
                break
            count *= 2
        return count

    @cached_property
    def _work(self) -> Callable[[], None]:
        """Returns work that takes BEHIND seconds while all processes do it."""
        x, w = torch.randn(128, 256, device=self.device), torch.randn(256, 256, device=self.device)
        once = self.alone(lambda: torch.tanh(x @ w)).seconds
        count = max(round(BEHIND / once), 1)

        def work() -> None:
            for _ in range(count):
                torch.tanh(x @ w)

        return work


def timing(samples: Sequence[float]) -> Timing:
    """Returns the median, and half the interquartile range relative to it."""
    if len(samples) < 2:
        return Timing(median(samples), 0.0)
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return Timing(middle, (high - low) / 2 / middle)
