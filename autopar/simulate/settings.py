"""Settings of a simulated step besides graph and plan."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.kernel_tables import Host
from autopar.cost.measured_host import named_host
from autopar.ir.executed.execution import AS_WRITTEN, Execution

OVERLAPS = ("gradient", "parameter", "refetch")


@dataclass(frozen=True)
class Settings:
    """Settings of a step besides graph and plan.

    Attributes:
        update_bytes: temporaries of an update in units of the parameter (AdamW: 2 one parameter at
            a time, 1 for all at once, 0 where a compiler makes one kernel of it).
        at_once: whether one update takes all parameters, as torch's optimizers do on accelerators.
        accelerator: whether operators save for the backward the tensors of accelerator kernels; by
            default those of CPU kernels.
        overlap: collectives that the program does not wait for, of `OVERLAPS`: what comes next to a
            parameter in the backward, which synchronises its gradient; gathering parameters one
            block ahead; gathering them again so. An emitted program waits for none on accelerators,
            on a CPU for all but the second.
        host: seconds in which a host issues the work; by default all is issued at the start.
        optimizer: bytes that an update moves for each parameter; 0 for those of the plan's update.
        in_place: whether gradients are reduced into their own memory, updated parameters gathered
            into theirs, and no tensors of one call are copied into a buffer that is sent.
        adds: whether products add the gradients of weights to those of earlier microbatches.
        ahead: whether updated parameters are gathered beside the next step's forward.
        copies: whether parameters are copied out of messages, and gradients into them.
    """

    update_bytes: float = 2.0
    at_once: bool = False
    accelerator: bool = False
    overlap: frozenset[str] = frozenset()
    host: Host | None = None
    optimizer: float = 0.0
    in_place: bool = False
    adds: bool = False
    ahead: bool = False
    copies: bool = False


def settings_on(
    name: str, execution: Execution = AS_WRITTEN, measured: Host | None = None
) -> Settings:
    """Returns the settings of a kind of device, "cpu" or an accelerator's name.

    On accelerators torch updates all parameters at once, and the program waits neither for
    gradients nor for the parameters of the next block; on the CPU for all but these. A `measured`
    host takes the place of the table's eager one.
    """
    if name.lower() == "cpu":
        return Settings(overlap=frozenset({"parameter"}))
    host = named_host(execution.host, measured)
    overlap = frozenset() if execution.waits else frozenset(OVERLAPS)
    temporaries = 0.0 if execution.compiled == "all" else 1.0
    return Settings(
        temporaries, True, True, overlap, host, execution.optimizer, execution.together,
        execution.adds, execution.ahead and not execution.waits, execution.copies,
    )  # fmt: skip
