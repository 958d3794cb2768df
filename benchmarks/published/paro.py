"""State shardings: PaRO's memory and volumes, and ZeRO's communication.

Memory is that of 7e9 parameters on 64 devices in groups of 8, K = 12 (PaRO, arXiv 2310.06003,
table 2); volumes are those of 8 groups and 8 microbatches a step (table 3 and figure 5), with the
two rows that contradict the paper's own text and figure corrected. PaRO counts for ZeRO-1 an
all_reduce of whole gradients, as DeepSpeed runs it. All of it is counted, nothing fitted.
"""

from __future__ import annotations

from autopar.intra_op.states import state
from autopar.ir.state_sharding import Groups, StateSharding

PARAMETERS, GROUPS, MICROBATCHES = 7e9, Groups(64, 8), 8
LEVELS = {"ZeRO-1": "NNG", "ZeRO-2": "NGG", "ZeRO-3": "GGG", "MiCS": "III", "ZeRO++": "GGG+I"}


def memory(levels: str) -> dict[str, float]:
    """Decimal GB of parameters, gradients and optimizer state on each device, and their sum."""
    found = StateSharding.parse(levels).memory(PARAMETERS, GROUPS)
    return {
        "P_GB": found["params"] / 1e9,
        "G_GB": found["grads"] / 1e9,
        "OS_GB": found["optimizer"] / 1e9,
        "total_GB": sum(found.values()) / 1e9,
    }


def volume(method: str) -> dict[str, float]:
    """10^12 elements that all devices send in a step between groups and inside them."""
    name = method.removesuffix(" corrected")
    sharding = StateSharding.parse(LEVELS.get(name, name))
    sent = sharding.volume(PARAMETERS, GROUPS, MICROBATCHES, whole_sum=True)
    return {"inter_Telem": sent.inter / 1e12, "intra_Telem": sent.intra / 1e12}


def relative_volume(name: str) -> float:
    """Returns the volume of a sharding in a step of one microbatch, in units of an all_reduce."""
    groups = Groups(GROUPS.devices, GROUPS.devices)
    whole = state("ddp").volume(PARAMETERS, groups)
    sent = state(name).volume(PARAMETERS, groups)
    return (sent.inter + sent.intra) / (whole.inter + whole.intra)
