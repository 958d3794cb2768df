"""Published plans as pins, to compare with and to start from.

    program = autopar.compile(model, mesh, pins=autopar.pins.megatron("gpu"))

Each function returns a value for `pins=` that determines which layouts to fix for a given model and
mesh, along the mesh axes that it is given. These values combine with one another and with pins by
name:

    pins=[autopar.pins.data_parallel("node"), autopar.pins.megatron("gpu"), {"lm_head.weight": ...}]

If a published plan does not fit the model, planning raises a PinError that says what is missing.
"""

from autopar.intra_op.pins.literature import (
    AlexNetSplit,
    DataParallel,
    FullyShardedDataParallel,
    GShard,
    Megatron,
)
from autopar.intra_op.pins.pin_functions import PinContext, PinFunction, PinsLike

__all__ = [
    "PinContext",
    "PinFunction",
    "PinsLike",
    "alexnet_split",
    "data_parallel",
    "form",
    "fsdp",
    "gshard",
    "megatron",
    "megatron_sp",
]


def data_parallel(*axes: str) -> DataParallel:
    """Splits the batch along `axes`, by default along all; parameters are used whole.

    They are also stored whole, unless `state=` says otherwise.
    """
    return DataParallel(axes)


def fsdp(*axes: str) -> FullyShardedDataParallel:
    """Splits the batch along `axes`, by default along all; stores parameters in shards.

    They are used whole.
    """
    return FullyShardedDataParallel(axes)


def megatron(axis: str) -> Megatron:
    """Splits pairs of linears in a residual stream along `axis`; the stream is replicated."""
    return Megatron(axis)


def megatron_sp(axis: str) -> Megatron:
    """Does the same as `megatron`, with the residual stream split by positions along `axis`."""
    return Megatron(axis, sequence=True)


def form(name: str, form: str) -> dict[str, str]:
    """Runs the operators called `name`, or in modules of that name, in a form.

    Args:
        name: a pattern over modules and nodes, "*.self_attn".
        form: "gathered", "ring", "ring zigzag", "ulysses" or "ulysses ring" of attention, "2d",
            "2.5d" or "3d" of linears and matrix products, "dispatch direct" of mixtures, or another
            form of an operator; "plain" for the operator without a form.
    """
    return {name: f"by {form}"}


def gshard(axis: str) -> GShard:
    """Splits experts along `axis`, with data parallelism along it everywhere else."""
    return GShard(axis)


def alexnet_split(axis: str) -> AlexNetSplit:
    """Splits fully connected layers by outputs along `axis`, with data-parallel convolutions."""
    return AlexNetSplit(axis)
