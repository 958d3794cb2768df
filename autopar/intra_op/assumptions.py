"""Assumptions: settings of the training that the strategy problem takes as given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.overlap import TAKE_TURNS
from autopar.intra_op.node_choices import AllowedStorages
from autopar.ir.executed.execution import AS_WRITTEN, Execution
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.recompute import Recompute
from autopar.ir.storage import Storage
from autopar.ir.update import ADAMW, Update


@dataclass(frozen=True)
class Assumptions:
    """Settings of the training of a model.

    Attributes:
        update: how parameters are updated.
        unknown_ops: "replicate" or "error", for operators without a rule.
        slowdown: factor by which kernels and collectives slow down while both run; at 2, overlap
            gains nothing.
        recompute: runs of blocks that recompute their activations in the backward, including the
            resharding between their operators.
        microbatches: number in a step; costs are per microbatch, with its share of costs per step.
        allowed_storages: the storages that a parameter may have, by default all that make sense.
        bucket: bytes of gradients, or of parameters, in one call; 1 for a call for each.
        precision: in which dtypes parameters are updated and gradients sent.
        offload: the tensors that are kept in host memory.
        fused_update: whether the optimizer's step is AdamW's kernel.
        overlapped: whether collectives overlap with the linears around them.
        stored: storage of each parameter, by `leaf_key`, if another program has fixed it.
        execution: how kernels are run; of its settings, only those of parameters count here.
        late_loss: whether the loss is summed over devices later, outside the program.
    """

    update: Update = ADAMW
    unknown_ops: str = "replicate"
    slowdown: float = TAKE_TURNS
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    microbatches: int = 1
    allowed_storages: AllowedStorages | None = None
    bucket: int = 1
    precision: Precision = AS_IS
    offload: Offload = NOTHING
    fused_update: bool = False
    overlapped: bool = False
    stored: Mapping[str, Storage] = field(default_factory=dict)
    execution: Execution = AS_WRITTEN
    late_loss: bool = False


DEFAULT = Assumptions()
