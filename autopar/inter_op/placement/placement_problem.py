"""Tasks with transfers between them, and devices of any speeds and links; simulates placements.

A task runs on one device, without interruption, after all its inputs have arrived. A device runs
one task at a time. A transfer takes its latency and its bytes over the bandwidth between the
devices of its ends, nothing within a device; transfers do not wait for one another. This is the
model of list scheduling: Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task
Scheduling for Heterogeneous Computing" (IEEE TPDS 13, 2002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError, ProblemError


@dataclass(frozen=True)
class Task:
    """An operator or a group: seconds on every device, and bytes that it keeps there."""

    name: str
    seconds: tuple[float, ...]
    memory: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """Bytes that task `b` reads from task `a`, both by index."""

    a: int
    b: int
    nbytes: float


@dataclass(frozen=True)
class Placed:
    """A simulated placement: device and start (seconds) of every task, and the end (seconds)."""

    devices: tuple[int, ...]
    starts: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Tasks, transfers and devices.

    Args:
        name: name in messages.
        tasks, transfers: the graph.
        latency: seconds from device to device, (devices, devices).
        bandwidth: bytes per second from device to device, (devices, devices).
        capacity: bytes of each device; infinite by default.

    Raises:
        ProblemError: the graph has a cycle, or sizes do not agree.
    """

    name: str
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]
    capacity: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        where, count = f"placement problem {self.name!r}", len(self.latency)
        shapes = {self.latency.shape, self.bandwidth.shape, (count, len(self.limits))}
        if shapes != {(count, count)} or any(len(t.seconds) != count for t in self.tasks):
            raise ProblemError("sizes do not agree", where=where, why=f"{count} devices")
        ends = [end for t in self.transfers for end in (t.a, t.b)]
        if ends and not (min(ends) >= 0 and max(ends) < len(self.tasks)):
            raise ProblemError("a transfer names a task that does not exist", where=where)
        try:
            self.order  # noqa: B018
        except CycleError as error:
            raise ProblemError("tasks wait for one another", where=where) from error

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.latency)

    @property
    def limits(self) -> tuple[float, ...]:
        """Bytes of each device."""
        return self.capacity or (math.inf,) * len(self.latency)

    @cached_property
    def inputs(self) -> list[list[Transfer]]:
        """Transfers into every task."""
        into: list[list[Transfer]] = [[] for _ in self.tasks]
        for transfer in self.transfers:
            into[transfer.b].append(transfer)
        return into

    @cached_property
    def outputs(self) -> list[list[Transfer]]:
        """Transfers out of every task."""
        out: list[list[Transfer]] = [[] for _ in self.tasks]
        for transfer in self.transfers:
            out[transfer.a].append(transfer)
        return out

    @cached_property
    def order(self) -> list[int]:
        """Tasks in a topological order."""
        graph = {v: [t.a for t in into] for v, into in enumerate(self.inputs)}
        return list(TopologicalSorter(graph).static_order())

    @cached_property
    def ranks(self) -> list[float]:
        """Upward ranks: mean seconds on the longest way from the start of a task to the end."""
        apart = ~np.eye(self.devices, dtype=bool)
        latency = float(self.latency[apart].mean()) if apart.any() else 0.0
        pace = float((1 / self.bandwidth[apart]).mean()) if apart.any() else 0.0
        ranks = [0.0] * len(self.tasks)
        for v in reversed(self.order):
            after = (latency + pace * t.nbytes + ranks[t.b] for t in self.outputs[v])
            ranks[v] = sum(self.tasks[v].seconds) / self.devices + max(after, default=0.0)
        return ranks

    @cached_property
    def by_rank(self) -> list[int]:
        """Tasks by falling upward rank, which is a topological order."""
        place = {v: k for k, v in enumerate(self.order)}
        return sorted(range(len(self.tasks)), key=lambda v: (-self.ranks[v], place[v]))

    def delay(self, nbytes: float, a: int, b: int) -> float:
        """Returns the seconds of a transfer from device a to device b."""
        return 0.0 if a == b else float(self.latency[a, b] + nbytes / self.bandwidth[a, b])

    def fits(self, devices: Sequence[int]) -> bool:
        """Returns whether the memory of every device suffices for its tasks."""
        held = [0.0] * self.devices
        for task, device in zip(self.tasks, devices, strict=True):
            held[device] += task.memory
        return all(h <= most for h, most in zip(held, self.limits, strict=True))


def simulate_placement(
    problem: PlacementProblem, devices: Sequence[int], order: Sequence[int] | None = None
) -> Placed:
    """Runs every task on its device as early as possible, in an order; by default by rank.

    Raises:
        ProblemError: the order is not topological, or a device does not exist.
        InfeasibleError: the memory of a device does not suffice for its tasks.
    """
    if not problem.fits(devices):
        raise InfeasibleError(
            "the placement does not fit", where=f"placement problem {problem.name!r}",
            todo="use more devices, or larger ones",
        )  # fmt: skip
    free = [0.0] * problem.devices
    starts, ends = [0.0] * len(problem.tasks), [math.nan] * len(problem.tasks)
    for v in problem.by_rank if order is None else order:
        here, ready = devices[v], 0.0
        for t in problem.inputs[v]:
            ready = max(ready, ends[t.a] + problem.delay(t.nbytes, devices[t.a], here))
            if math.isnan(ends[t.a]):
                raise ProblemError("an order runs a task before its inputs")
        starts[v] = max(ready, free[here])
        ends[v] = free[here] = starts[v] + problem.tasks[v].seconds[here]
    return Placed(tuple(devices), tuple(starts), max(ends, default=0.0))
