"""Refuses features that do not work with asynchronous schedules, and gives the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from autopar.errors import ProgramError
from autopar.ir.action import Action
from autopar.runtime.generated import Generated
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.pipeline.sums import names_sums
from autopar.runtime.update.owners import Owners
from autopar.runtime.update.update import Training

ZERO = 'pass state="ddp" or state="zero1"'


def refuse_what_cannot_stream(
    modules: Sequence[Generated],
    placement: Placement,
    training: Training,
    tied: Mapping[str, Collection[tuple[int, int]]],
    owners: Sequence[Owners] = (),
) -> None:
    """Refuses stages that cannot be updated while microbatches are in flight.

    Args:
        modules: loaded programs of the stages.
        placement: ranks and rows of the stages.
        training: how the local parameters are updated.
        tied: keys of parameters that several stages share, with the sharing stages.
        owners: updates that ranks do for one another.

    Raises:
        ProgramError: a feature is not supported; names it.
    """
    for name, holders in tied.items():
        stages = " and ".join(str(stage) for stage, _ in sorted(holders))
        added = {a.stage for row in placement.rows for a in row if name in a.names}
        if {stage for stage, _ in holders} != added:
            _refuse(
                f"the parameter {name!r}, which is held by the stages {stages}",
                "its rows do not add up the gradients of its copies, which would part",
                "plan again, untie it, or cut the model so that one stage holds it",
            )
        if training.clip_norm is not None:
            _refuse(
                f"clip_norm beside the parameter {name!r}, which is held by the stages {stages}",
                "each stage scales its gradients by a norm of its own, and its copies would part",
                "leave clip_norm out, untie it, or cut the model so that one stage holds it",
            )
    for held in {frozenset((a.stage, a.copy) for a in row) for row in placement.rows}:
        if len(held) > 1:
            _refuse(
                f"the stages {sorted(stage for stage, _ in held)} share their ranks",
                "one optimizer would update both where one of them is due",
                "give every stage ranks of its own",
            )
    if training.on_nonfinite == "skip":
        _refuse(
            'on_nonfinite="skip"',
            "a stage updates its weights before the others know whether a step is finite",
            'pass on_nonfinite="raise", which says so a step later, or "continue"',
        )
    if any(each.items for each in owners):
        _refuse(
            "an optimizer that updates whole parameters",
            "ranks update them for one another, and stages are updated at different times",
            "use an elementwise optimizer (SGD, Adam, AdamW, Lion, ...), or a schedule that "
            "flushes",
        )
    for module in modules:
        _refuse_module(module, placement)
    for action in (action for row in placement.rows for action in row):
        if names_sums(action):
            _refuse_strangers(modules[action.stage], action)
            _refuse_sums(modules[action.stage])


def _refuse_module(module: Generated, placement: Placement) -> None:
    if module.precision.scaled:
        _refuse(
            "float16",
            "the scale of the loss follows from what all stages decide on a step together",
            'train in "bf16"',
        )
    if module.host_state:
        _refuse(
            "optimizer state in host memory",
            "it comes to the device for one update of everything at the end of a step",
            'leave offload="optimizer" out',
        )
    if module.fused_update:
        _refuse(
            "the kernel of AdamW's step",
            "it takes the gradients of a whole step from one buffer",
            'leave "adamw" out of `fuse`',
        )
    for parameter in module.parameters:
        storage = parameter.storage
        if storage.held.dims != storage.used.dims or storage.kept.dims != storage.used.dims:
            _refuse(
                f"the parameter {parameter.name!r}, which is gathered for every use (ZeRO-3)",
                "older versions would have to be gathered, too, and are held whole",
                ZERO,
            )
        split = storage.updated.dims != storage.held.dims
        if split and placement.adjustment.decay and parameter.trainable:
            _refuse(
                f"the parameter {parameter.name!r}, whose optimizer state is split (ZeRO)",
                "a corrected backward needs the velocity of all of it on every device",
                'pass state="ddp", or pipemare correction=0',
            )


def _refuse_strangers(module: Generated, action: Action) -> None:
    """Refuses sums of parameters, or over axes, that a stage does not have."""
    keys = {parameter.key for parameter in module.parameters if parameter.trainable}
    strange = [
        *(f"parameter {name!r}" for name in action.names if name not in keys),
        *(f"axis {axis!r}" for axis in action.axes if axis not in module.mesh.names),
    ]
    for what in strange:
        why = f"stage {action.stage} trains no such parameter, or its mesh has no such axis"
        _refuse(f"{action}, which names the {what}", why, "correct the row, or plan again")


def _refuse_sums(module: Generated) -> None:
    """Refuses gradient sums that cannot overlap with the next steps."""
    for parameter in module.parameters:
        storage = parameter.storage
        hops = storage.hops(
            parameter.type, module.mesh, trained=parameter.trainable, precision=parameter.precision
        )
        plain = all((hop.call.kind, hop.call.compression) == ("all_reduce", "") for hop in hops)
        if not plain or parameter.has_master:
            _refuse(
                f"the parameter {parameter.name!r} where sums of gradients arrive steps later",
                "its gradient is not summed by one all_reduce in the dtype of the update",
                'pass state="ddp", and no precision',
            )


def _refuse(what: str, why: str, todo: str) -> NoReturn:
    raise ProgramError(f"an asynchronous schedule does not support {what}", why=why, todo=todo)
