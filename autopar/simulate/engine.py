"""Runs tasks on streams: a fluid simulation that advances to the next completion.

Every stream, one for computing and one for each set of mesh axes, runs its tasks in their order, as
CUDA streams and NCCL communicators do. Tasks that run at the same time share the device:

- while a kernel and a collective overlap, both take `slowdown` times as long: they share
  memory bandwidth, cache and multiprocessors;
- a copy to the host or back, on a separate stream each way, counts like a collective;
- n collectives on the same links get an n-th of their bandwidth each.

With a host, its one thread issues all tasks in program order, and none begins before it is issued:
a device whose kernels are short waits for its host. It never waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from autopar.cost.host_copies import HostCopy
from autopar.cost.kernel_tables import Host
from autopar.cost.model import Work
from autopar.errors import SimulationError
from autopar.ir.collective import Collective
from autopar.simulate.task import COMPUTE, Task
from autopar.simulate.timeline import Memory, Span, Timeline


class Prices(Protocol):
    """Prices that the engine needs, in seconds for a device that does nothing else."""

    def compute(self, work: Work) -> float:
        """Seconds of one kernel."""
        ...

    def collective(self, call: Collective, /) -> float:
        """Seconds of one collective."""
        ...

    def host(self, copy: HostCopy) -> float:
        """Seconds of one copy to or from host memory."""
        ...

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        """Names of the links that a collective keeps busy."""
        ...


def run(
    tasks: Sequence[Task], model: Prices, slowdown: float, host: Host | None = None
) -> Timeline:
    """Start, end and memory of each task.

    Args:
        tasks: tasks of one device, those of each stream in their order.
        model: prices.
        slowdown: factor by which kernels and collectives slow down while they overlap, at least 1;
            a figure of the device.
        host: seconds in which the host issues tasks; by default all are issued at the start.

    Raises:
        SimulationError: a task waits for one that does not exist or, through others, for itself; a
            buffer is allocated twice or freed before it exists; `slowdown` is less than 1.
    """
    if not slowdown >= 1:
        raise SimulationError(
            f"a slowdown of {slowdown}",
            why="what overlaps takes at least as long as what does not",
            todo="give a number of 1 or more",
        )
    return _Engine(tuple(tasks), model, slowdown, host).run()


def issue_seconds(task: Task, host: Host) -> float:
    """Returns the seconds in which a host issues a task; copies count as kernels."""
    if isinstance(task.what, Collective):
        return host.collective
    each = {"forward": host.operator, "backward": host.autograd, "optimizer": host.optimizer}
    return each[task.phase] * (1 if isinstance(task.what, HostCopy) else len(task.what))


def issued_seconds(tasks: Sequence[Task], host: Host | None) -> dict[str, float]:
    """Returns the seconds in which a host issues the tasks of each phase of a step."""
    found = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    if host is not None:
        for task in tasks:
            found[task.phase] += issue_seconds(task, host)
    return found


@dataclass(slots=True)
class _Running:
    position: int
    left: float  # seconds at full speed
    links: tuple[str, ...]


class _Engine:
    def __init__(
        self, tasks: tuple[Task, ...], model: Prices, slowdown: float, host: Host | None
    ) -> None:
        self.tasks, self.model, self.slowdown = tasks, model, slowdown
        # When each task has been issued, and which is the next one; without a host all are.
        times = () if host is None else (issue_seconds(task, host) for task in tasks)
        self.issued, self.next = tuple(accumulate(times)), 0 if host else len(tasks)
        self.now = 0.0
        self.queues: dict[str, deque[int]] = {}
        self.readers: list[list[int]] = [[] for _ in tasks]
        self.waits = [0] * len(tasks)
        self.running: dict[str, _Running] = {}
        self.start, self.end = [0.0] * len(tasks), [0.0] * len(tasks)
        self.exposed = [0.0] * len(tasks)
        self.done = 0
        self.prices: dict[int, tuple[float, tuple[str, ...]]] = {}
        self.memory = Memory()
        for position, task in enumerate(tasks):
            self.queues.setdefault(task.stream, deque()).append(position)
            for other in set(task.after):
                self._check(position, other)
                self.readers[other].append(position)
                self.waits[position] += 1

    def _check(self, position: int, other: int) -> None:
        name = self.tasks[position].name
        if other == position:
            raise SimulationError(
                f"task {name!r} waits for itself",
                why=f"after = {self.tasks[position].after} and it is task {position}",
            )
        if not 0 <= other < len(self.tasks):
            raise SimulationError(
                f"task {name!r} waits for task {other}",
                why=f"the tasks are numbered from 0 to {len(self.tasks) - 1}",
            )

    def run(self) -> Timeline:
        for stream in self.queues:
            self._begin(stream)
        self._issue()
        while self.running or self.next < len(self.tasks):
            self._advance()
        if self.done < len(self.tasks):
            self._deadlock()
        spans = tuple(map(Span, self.tasks, self.start, self.end, self.exposed))
        return Timeline(spans, self.now, self.memory.finish())

    def _begin(self, stream: str) -> None:
        """Starts the next task of a stream if it may run; tasks that take no time end at once."""
        streams = [stream]
        while streams:
            queue = self.queues[streams[-1]]
            late = not queue or queue[0] >= self.next
            if streams[-1] in self.running or late or self.waits[queue[0]]:
                streams.pop()
                continue
            position = queue.popleft()
            task = self.tasks[position]
            self.start[position] = self.now
            self.memory.add(self.now, position, task)
            seconds, links = self._price(task.what)
            seconds *= task.share
            if seconds > 0:
                self.running[task.stream] = _Running(position, seconds, links)
            else:
                streams += self._finish(position)

    def _price(
        self, what: tuple[Work, ...] | Collective | HostCopy
    ) -> tuple[float, tuple[str, ...]]:
        """Seconds at full speed, and the links it keeps busy; equal blocks share one object."""
        if id(what) not in self.prices:
            if isinstance(what, Collective):
                self.prices[id(what)] = self.model.collective(what), self.model.resources(what)
            elif isinstance(what, HostCopy):
                self.prices[id(what)] = self.model.host(what), ()
            else:
                self.prices[id(what)] = sum(map(self.model.compute, what)), ()
        return self.prices[id(what)]

    def _finish(self, position: int) -> list[str]:
        """Ends a task; returns the streams that may continue."""
        task = self.tasks[position]
        self.end[position] = self.now
        self.memory.remove(self.now, task)
        self.done += 1
        freed = [task.stream]
        for reader in self.readers[position]:
            self.waits[reader] -= 1
            if not self.waits[reader]:
                freed.append(self.tasks[reader].stream)
        return freed

    def _issue(self) -> None:
        """Begins the tasks that have been issued by now and wait for nothing else."""
        while self.next < len(self.tasks) and self.issued[self.next] <= self.now:
            self.next += 1
            self._begin(self.tasks[self.next - 1].stream)

    def _advance(self) -> None:
        """Advances to the next completion, or to the time at which the next task is issued."""
        if len(self.running) == 1 and self.next == len(self.tasks):
            self._end_alone()
            return
        rates = self._rates()
        ends = {stream: task.left / rates[stream] for stream, task in self.running.items()}
        passed = min(ends.values(), default=math.inf)
        if self.next < len(self.tasks) and self.issued[self.next] <= self.now + passed:
            passed = self.issued[self.next] - self.now
            self.now = self.issued[self.next]
        else:
            self.now += passed
        if COMPUTE not in self.running:
            for task in self.running.values():
                self.exposed[task.position] += passed / len(self.running)
        ended = []
        for stream, task in list(self.running.items()):
            # Tasks that end within a rounding error end now.
            if ends[stream] <= passed * (1 + 1e-12):
                del self.running[stream]
                ended.append(task.position)
            else:
                task.left -= passed * rates[stream]
        for position in ended:
            for stream in self._finish(position):
                self._begin(stream)
        self._issue()

    def _end_alone(self) -> None:
        """Advances to the end of the only running task, which has the device to itself."""
        stream, task = self.running.popitem()
        self.now += task.left
        if stream != COMPUTE:
            self.exposed[task.position] += task.left
        for freed in self._finish(task.position):
            self._begin(freed)

    def _rates(self) -> dict[str, float]:
        """Returns the speed of each running task, 1 if it has the device to itself."""
        if len(self.running) == 1:
            return dict.fromkeys(self.running, 1.0)
        busy: dict[str, int] = {}
        for task in self.running.values():
            for link in task.links:
                busy[link] = busy.get(link, 0) + 1
        both = 1 / self.slowdown if COMPUTE in self.running else 1.0
        return {
            stream: both / max((busy[link] for link in task.links), default=1)
            for stream, task in self.running.items()
        }

    def _deadlock(self) -> None:
        heads = [queue[0] for queue in self.queues.values() if queue]
        position = min(heads)
        task = self.tasks[position]
        ended = {p for p in task.after if self._ended(p)}
        missing = [self.tasks[p].name for p in task.after if p not in ended]
        raise SimulationError(
            f"{len(self.tasks) - self.done} of {len(self.tasks)} tasks never begin",
            where=f"task {task.name!r} on stream {task.stream!r}",
            why=f"it waits for {', '.join(map(repr, missing[:3]))}, which wait for it",
            todo="let every task wait for earlier ones only",
        )

    def _ended(self, position: int) -> bool:
        return position not in self.queues[self.tasks[position].stream]
