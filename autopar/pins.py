"""The user's own word: plans of the literature, to compare with and to start from.

    program = autopar.compile(model, mesh, pins=autopar.pins.megatron("gpu"))

Each function returns a value for `pins=` that works out, for the model and mesh it meets, which
layouts it fixes. They speak of the mesh axes they are given, and combine with one another and with
pins by name:

    pins=[autopar.pins.data_parallel("node"), autopar.pins.megatron("gpu"), {"lm_head.weight": ...}]

A plan that does not fit the model is refused, when that is planned, with a PinError that says what
was looked for.
"""

from autopar.intra_op.pins.literature import (
    AlexNetSplit,
    DataParallel,
    FullyShardedDataParallel,
    GShard,
    Megatron,
)
from autopar.intra_op.pins.wordings import PinsLike, Subject, Word

__all__ = [
    "PinsLike",
    "Subject",
    "Word",
    "alexnet_split",
    "data_parallel",
    "fsdp",
    "gshard",
    "megatron",
    "megatron_sp",
]


def data_parallel(*axes: str) -> DataParallel:
    """The batch split along `axes`, by default along all; parameters used whole.

    They are stored whole too, unless `state=` says how.
    """
    return DataParallel(axes)


def fsdp(*axes: str) -> FullyShardedDataParallel:
    """The batch split along `axes`, by default all; parameters stored in parts, used whole."""
    return FullyShardedDataParallel(axes)


def megatron(axis: str) -> Megatron:
    """Pairs of linears in a residual stream split between them along `axis`; the stream whole."""
    return Megatron(axis)


def megatron_sp(axis: str) -> Megatron:
    """The same with the residual stream split by positions along `axis`."""
    return Megatron(axis, sequence=True)


def gshard(axis: str) -> GShard:
    """Experts split along `axis`, everything else data-parallel along it."""
    return GShard(axis)


def alexnet_split(axis: str) -> AlexNetSplit:
    """Convolutions data-parallel along `axis`, fully connected layers split by outputs."""
    return AlexNetSplit(axis)
