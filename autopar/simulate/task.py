"""Task: a kernel or collective of a training step, with the buffers that it allocates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.host_copies import HostCopy
from autopar.cost.model import Work
from autopar.ir.collective import Collective

Phase = Literal["forward", "backward", "optimizer"]
# The cause of a collective: gathering parameters, synchronising gradients, resharding activations
# (and their gradients), or communication inside an operator.
Cause = Literal["", "parameter", "gradient", "accumulation", "activation", "exchange"]
COMPUTE = "compute"
HOST = ("to the host", "from the host")


@dataclass(frozen=True)
class Task:
    """One unit of work of a device.

    Attributes:
        name: for people, such as "linear_3" or "all_gather of %h_0_weight".
        node: the graph's node that it belongs to, "" for none.
        phase: of the step.
        stream: "compute", the mesh axes of a collective joined by ",", or one of `HOST`. The tasks
            of a stream run one after another, in order.
        what: kernels that run one after another, one collective, one copy to or from host memory,
            or an empty tuple, which takes no time.
        after: positions, in the tuple of all tasks, of the tasks that must end before.
        allocates: (buffer, bytes) allocated at its start. A buffer's name begins with its kind:
            "activation linear_3".
        frees: buffers freed at its end.
        cause: of a collective.
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


def after_forward(tasks: Sequence[Task]) -> dict[str, float]:
    """Returns the buffers that are alive after the forward, such as "activation linear_3".

    Returns:
        Name -> bytes.
    """
    sizes: dict[str, float] = {}
    for task in tasks:
        if task.phase != "forward":
            break
        sizes |= dict(task.allocates)
        for name in task.frees:
            del sizes[name]
    return sizes


def fixed_bytes(left: Mapping[str, float], trained: Collection[str]) -> float:
    """Returns the bytes after a forward that are parameters, gradients and optimizer state.

    Args:
        left: from `after_forward`.
        trained: the parameters with gradients. If gradients are not accumulated over microbatches,
            they are not allocated yet, and are counted by the bytes of these parameters.
    """
    state = sum(n for name, n in left.items() if name.startswith(("parameter", "optimizer")))
    summed = sum(n for name, n in left.items() if name.startswith("gradient"))
    return state + (summed or sum(left.get(f"parameter {name}", 0.0) for name in trained))


def kept_bytes(left: Mapping[str, float]) -> float:
    """Returns the bytes after a forward that every microbatch in flight needs for itself."""
    once = ("parameter", "optimizer", "gradient")
    return sum(nbytes for name, nbytes in left.items() if not name.startswith(once))
