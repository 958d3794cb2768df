"""Task: a kernel or collective of a training step, with the buffers that it allocates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.cost.host_copies import HostCopy
from autopar.cost.model import Work
from autopar.ir.collective import Collective

Phase = Literal["forward", "backward", "optimizer"]
# The cause of a collective: gathering parameters, in forward and backward or after their update,
# synchronising gradients, resharding activations (and their gradients), or communication inside an
# operator.
Cause = Literal["", "parameter", "update", "gradient", "accumulation", "activation", "exchange"]
_PHASES: tuple[Phase, ...] = get_args(Phase)
COMPUTE = "compute"
HOST = ("to the host", "from the host")
AGAIN = " again"  # ends the names of tasks that recompute a block


@dataclass(frozen=True)
class Task:
    """One unit of work of a device.

    Attributes:
        name: for people, such as "linear_3" or "all_gather of %h_0_weight".
        node: the graph's node that it belongs to, "" for none.
        phase: phase of the step.
        stream: "compute", the mesh axes of a collective joined by ",", or one of `HOST`. The tasks
            of a stream run one after another, in order.
        what: kernels that run one after another, one collective, one copy to or from host memory,
            or an empty tuple, which takes no time.
        after: positions, in the tuple of all tasks, of the tasks that must end before.
        allocates: (buffer, bytes) allocated at its start. A buffer's name begins with its kind:
            "activation linear_3".
        frees: buffers freed at its end.
        cause: cause of a collective.
        share: the fraction of `what` that this task runs, if it is divided to overlap with others.
    """

    name: str
    node: str
    phase: Phase
    stream: str
    what: tuple[Work, ...] | Collective | HostCopy
    after: tuple[int, ...] = ()
    allocates: tuple[tuple[str, float], ...] = ()
    frees: tuple[str, ...] = ()
    cause: Cause = ""
    share: float = 1.0

    @property
    def is_recomputation(self) -> bool:
        """Returns whether a block that the forward has computed is computed again."""
        return self.phase == "backward" and self.name.endswith(AGAIN)


def alive_after(tasks: Sequence[Task], phase: Phase) -> dict[str, float]:
    """Returns the buffers that are alive after a phase, such as "activation linear_3".

    Returns:
        Name -> bytes.
    """
    sizes: dict[str, float] = {}
    phases = _PHASES[: _PHASES.index(phase) + 1]
    for task in tasks:
        if task.phase not in phases:
            break
        sizes |= dict(task.allocates)
        for name in task.frees:
            del sizes[name]
    return sizes


def fixed_bytes(tasks: Sequence[Task]) -> float:
    """Returns the bytes that parameters, optimizer state and gradients take between microbatches.

    If gradients are not accumulated over microbatches, the gradients after a backward count.
    """
    left = alive_after(tasks, "forward")
    state = _bytes(left, "parameter", "optimizer")
    return state + (_bytes(left, "gradient") or _bytes(alive_after(tasks, "backward"), "gradient"))


def _bytes(buffers: Mapping[str, float], *kinds: str) -> float:
    return sum(nbytes for name, nbytes in buffers.items() if name.startswith(kinds))


def kept_bytes(tasks: Sequence[Task]) -> float:
    """Returns the bytes after a forward that every microbatch in flight needs for itself."""
    left = alive_after(tasks, "forward")
    return sum(left.values()) - _bytes(left, "parameter", "optimizer", "gradient")
