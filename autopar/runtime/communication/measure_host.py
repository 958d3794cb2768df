"""Measures the seconds in which the host issues work to an accelerator, for `cost.measured_host`.

A run issues many calls whose work is as short as can be, and does not wait for it, so that the
host's thread alone takes the time. A run is shorter than the queue of a device, which would
otherwise make the host wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from autopar.cost.calibration import Kernel
from autopar.cost.measured_host import host_kernel
from autopar.runtime.communication.clocks import Bench, timing
from autopar.runtime.communication.group import Group

CALLS = 128  # of a run; CUDA queues about a thousand kernels
ELEMENTS = 16
_FEWER = 8  # times fewer collectives and updates, which are several kernels each


def host_figures(bench: Bench, group: Group) -> list[Kernel]:
    """Returns the figures of the host as points of a calibration.

    Args:
        bench: the benchmark of all processes, on their devices.
        group: the processes that a collective joins.
    """
    return [
        host_kernel(role, timing([_run(bench, prepare, count) for _ in range(bench.runs)]))
        for role, prepare, count in _problems(bench.device, group)
    ]


def _run(bench: Bench, prepare: Callable[[], Callable[[], object]], count: int) -> float:
    """Returns the seconds of one of `count` issues of a run, of the slowest process."""
    call = prepare()
    bench.slowest([0.0])  # all processes start together, with nothing queued
    bench.clock()
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    bench.clock()
    return bench.slowest([seconds / count])[0]


def _problems(
    device: torch.device, group: Group
) -> Iterator[tuple[str, Callable[[], Callable[[], object]], int]]:
    """Yields each role with a function that prepares a run, and the number of issues in a run."""
    x = torch.ones(ELEMENTS, device=device, requires_grad=True)
    sent = torch.ones(ELEMENTS * group.size, device=device)
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6)
    optimizer.step()
    few = CALLS // _FEWER

    def chain() -> torch.Tensor:
        y = x
        for _ in range(CALLS):
            y = torch.tanh(y)
        return y

    def backward() -> Callable[[], object]:
        y, gradient = chain(), torch.ones_like(x)
        return lambda: torch.autograd.grad(y, x, gradient)

    yield "operator", lambda: chain, CALLS
    yield "autograd", backward, CALLS
    yield "collective", lambda: lambda: [group.reduce(sent) for _ in range(few)], few
    yield "optimizer", lambda: lambda: [optimizer.step() for _ in range(few)], few
