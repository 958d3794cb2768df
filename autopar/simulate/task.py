"""Task: one kernel or collective of a training step, and the buffers that come and go with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.host_copies import HostCopy
from autopar.cost.model import Work
from autopar.ir.collective import Collective

Phase = Literal["forward", "backward", "optimizer"]
# Why something is sent: parameters gathered, gradients synchronised, activations resharded (and
# their gradients), or an operator that asks other devices itself.
Cause = Literal["", "parameter", "gradient", "accumulation", "activation", "exchange"]
COMPUTE = "compute"
HOST = ("to the host", "from the host")


@dataclass(frozen=True)
class Task:
    """One thing that a device does.

    Attributes:
        name: what it is to a person, "linear_3" or "all_gather of %h_0_weight".
        node: the graph's node that it is for, "" for none.
        phase: of the step.
        stream: "compute", the mesh axes that a collective spans, joined by ",", or one of `HOST`.
            The tasks of one stream run in their order, one at a time.
        what: kernels that run one after another, one collective, one copy to or from host memory,
            or nothing that takes time.
        after: positions, in the tuple of all tasks, of those that must have ended before.
        allocates: (buffer, bytes) that it needs from its start on. A buffer's name begins with its
            kind: "activation linear_3".
        frees: buffers that nobody needs after its end.
        cause: of a collective.
        share: the part of `what` that this task is, where it is cut so that others run beside it.
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
    """The buffers that the forward leaves to the backward, "activation linear_3", in bytes."""
    sizes: dict[str, float] = {}
    for task in tasks:
        if task.phase != "forward":
            break
        sizes |= dict(task.allocates)
        for name in task.frees:
            del sizes[name]
    return sizes


def fixed_bytes(left: Mapping[str, float], trained: Collection[str]) -> float:
    """Of what a forward leaves, the bytes of parameters, gradients and optimizer state.

    Args:
        left: see `after_forward`.
        trained: the parameters that have gradients; where gradients are not summed up over
            microbatches they take as much, later.
    """
    state = sum(n for name, n in left.items() if name.startswith(("parameter", "optimizer")))
    summed = sum(n for name, n in left.items() if name.startswith("gradient"))
    return state + (summed or sum(left.get(f"parameter {name}", 0.0) for name in trained))


def kept_bytes(left: Mapping[str, float]) -> float:
    """Of what a forward leaves, the bytes that every microbatch in flight has for itself."""
    once = ("parameter", "optimizer", "gradient")
    return sum(nbytes for name, nbytes in left.items() if not name.startswith(once))
