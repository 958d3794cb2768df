"""A placement that grows task by task, for list scheduling."""

from __future__ import annotations

from autopar.errors import InfeasibleError
from autopar.inter_op.placement.placement_problem import PlacementProblem


class Partial:
    """Devices and ends of the tasks placed so far.

    Attributes:
        devices: device of every task; 0 where it has none yet.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.devices, self.ends = [0] * len(problem.tasks), [0.0] * len(problem.tasks)
        self.free, self.room = [0.0] * problem.devices, list(problem.limits)

    def seconds(self, v: int, device: int) -> float:
        """Returns the seconds of a task on a device."""
        return self.problem.tasks[v].seconds[device]

    def allowed(self, v: int) -> list[int]:
        """Returns the devices with room for a task; raises InfeasibleError if there is none."""
        need = self.problem.tasks[v].memory
        devices = [d for d, room in enumerate(self.room) if need <= room]
        if not devices:
            raise InfeasibleError(
                f"no device has enough memory for task {self.problem.tasks[v].name!r}",
                where=f"placement problem {self.problem.name!r}",
                why="list scheduling does not move tasks that it has placed",
                todo="use the exact method, or larger devices",
            )
        return devices

    def start(self, v: int, device: int) -> float:
        """Returns the earliest start of a task on a device, after the device's previous tasks."""
        arrivals = (
            self.ends[t.a] + self.problem.delay(t.nbytes, self.devices[t.a], device)
            for t in self.problem.inputs[v]
        )
        return max(self.free[device], max(arrivals, default=0.0))

    def put(self, v: int, device: int) -> None:
        """Runs a task on a device next."""
        self.ends[v] = self.free[device] = self.start(v, device) + self.seconds(v, device)
        self.devices[v] = device
        self.room[device] -= self.problem.tasks[v].memory
