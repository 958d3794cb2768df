"""The saved state of a program: its parameters and buffers, and the optimizer's state of them.

A program describes its state as a list of `LocalTensor`; this file gets information about meshes
and stages only from this list.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import CheckpointError
from autopar.ir.tensor import Layout
from autopar.runtime.checkpoint.boxes import Box, box_of
from autopar.runtime.checkpoint.index import Index, Stored
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.values import DTYPES, decode, encode
from autopar.runtime.parameters.pieces import Parameter, State
from autopar.runtime.parameters.shards import Weight, Weights
from autopar.runtime.update.owners import OwnedWeight
from autopar.runtime.update.update import Update

# Options of how an optimizer computes: the program that loads a checkpoint keeps its own.
_MANNER = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or buffer on this rank; for one with a master, the master it is rounded from.

    Attributes:
        parameter: its description, with its layout.
        state: the state that it belongs to.
        tensor: this rank's part.
        updated: the tensor that the optimizer updates; None if it is not trained.
        first: whether this rank's stage saves it; another stage of a pipeline may have a copy.
        average: the average of `updated`, if there is one.
        dealt: set if one rank updates the parameter for all.
        weight: set if compressed reductions keep residuals of it.
    """

    parameter: Parameter
    state: State
    tensor: Tensor
    updated: Tensor | None = None
    first: bool = True
    average: Tensor | None = None
    dealt: OwnedWeight | None = None
    weight: Weight | None = None

    @property
    def name(self) -> str:
        """Name in the state_dict."""
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor of the state_dict."""
        return self.state.shapes[self.name]

    @property
    def box(self) -> Box:
        """Box of `tensor` in the whole tensor."""
        return self._box(self.parameter.layout)

    @property
    def updated_box(self) -> Box:
        """Box of `updated` in the whole tensor."""
        return self._box(self.parameter.storage.updated)

    @property
    def stepped(self) -> Tensor | None:
        """The tensor that the optimizer has: `updated`, or on its owner the whole parameter."""
        whole = None if self.dealt is None else self.dealt.whole
        return self.updated if whole is None else whole

    @property
    def state_box(self) -> Box:
        """Box of the optimizer's state in the whole tensor."""
        whole = self.dealt is not None and self.dealt.rule.keeps_whole
        return Box.whole(self.shape) if whole else self.updated_box

    @property
    def stateless(self) -> bool:
        """Returns whether another rank has the optimizer's state of it, whole."""
        return self.dealt is not None and self.dealt.rule.keeps_whole and self.dealt.whole is None

    def _box(self, layout: Layout) -> Box:
        comm, piece = self.state.comm, self.parameter.piece
        return box_of(layout, self.parameter.shape, comm.mesh, comm.coordinate, piece)


def held_of(
    state: State,
    tensors: Sequence[Tensor],
    weights: Weights,
    update: Update,
    first: Collection[str] | None = None,
) -> list[LocalTensor]:
    """Returns this rank's part of a state.

    Args:
        state: state of the program.
        tensors: this rank's tensor of each parameter and buffer.
        weights: the same, with the tensors that the optimizer updates.
        update: update of these parameters.
        first: names that are saved from here, None for all.
    """
    dealt = {key: item for each in update.owners for key, item in each.items.items()}
    return [
        LocalTensor(
            parameter.master if parameter.has_master else parameter,
            state,
            weights.masters.get(id(own), own) if parameter.has_master else tensor,
            own if own.requires_grad else None,
            first is None or parameter.name in first,
            update.averages.get(id(own)),
            dealt.get(id(own)),
            weight if any(hop.residual for hop in weight.hops) else None,
        )
        for parameter, tensor, own, weight in zip(
            state.parameters, tensors, weights.updated, weights.all, strict=True
        )
    ]


# Saving ------------------------------------------------------------------------------------------


def check_finite(optimizer: Optimizer, held: Sequence[LocalTensor]) -> None:
    """Refuses to save a state from which training cannot continue.

    Raises:
        CheckpointError: a trained parameter or its average is not finite; names it and the
            optimizer's step.
    """
    for h in held:
        for what, tensor in (("", h.tensor), ("the average of ", h.average)):
            own = h.stepped
            if own is None or tensor is None or torch.isfinite(tensor).all():
                continue
            step = optimizer.state.get(own, {}).get("step")
            when = "" if step is None else f" after step {int(step)}"
            raise CheckpointError(
                f"{what}{h.name} is not finite{when}",
                why="the loss or a gradient overflowed; training from it would stay that way",
                todo="start from an earlier checkpoint with a lower rate or clip_norm=..., or pass "
                "allow_nonfinite=True to save it anyway",
            )


def groups_of(
    optimizer: Optimizer, held: Sequence[LocalTensor]
) -> Iterator[tuple[dict[str, Any], list[tuple[LocalTensor, Tensor]]]]:
    """Yields every group of an optimizer with its tensors, and the parameters they belong to."""
    known = {id(h.stepped): h for h in held if h.stepped is not None}
    for group in optimizer.param_groups:
        yield group, [(known[id(t)], t) for t in group["params"] if id(t) in known]


def optimizer_parts(
    optimizer: Optimizer, held: Sequence[LocalTensor]
) -> tuple[list[Part], dict[str, Any]]:
    """Returns the tensors of an optimizer's state on this rank, and the rest of it as JSON.

    Raises:
        CheckpointError: something cannot be saved; names it.
    """
    parts: list[Part] = []
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, members in groups_of(optimizer, held):
        options = {k: v for k, v in group.items() if k not in _MANNER}
        names = list(dict.fromkeys(h.name for h, _ in members))
        groups.append({"options": encode(options, "an optimizer group"), "parameters": names})
        for h, tensor in members:
            for key, value in optimizer.state.get(tensor, {}).items() if h.first else ():
                where = f"{key!r} of the optimizer's state of {h.name}"
                if not isinstance(key, str) or "." in key:
                    raise CheckpointError(f"{where} cannot be saved", why="it is not a plain name")
                if isinstance(value, Tensor):
                    parts.append(_state_part(h, key, value, where))
                else:
                    values.setdefault(h.name, {})[key] = encode(value, where)
    return parts, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def _state_part(h: LocalTensor, key: str, value: Tensor, where: str) -> Part:
    """Returns a tensor of the optimizer's state, shaped like its parameter or one for all of it."""
    name, box, shape = f"optimizer.{h.name}.{key}", h.state_box, tuple(value.shape)
    value = value if shape else value.clone()  # counts may be shared
    if shape == box.sizes:
        return Part(name, value, box, h.shape)
    if shape == () or box == Box.whole(h.shape):
        return Part(name, value, Box.whole(shape), shape)
    raise CheckpointError(
        f"{where} cannot be saved",
        why=f"its shape is {list(shape)}, that of the parameter's part {list(box.sizes)}",
        todo="pin the parameter whole, or use an elementwise optimizer",
    )


# Loading -----------------------------------------------------------------------------------------


def check_optimizer(
    optimizer: Optimizer, held: Sequence[LocalTensor], record: Mapping[str, Any]
) -> None:
    """Compares an optimizer with that of a checkpoint, as far as this rank sees it.

    Raises:
        CheckpointError: another kind, or parameters of one group that had different ones.
    """
    kind = type(optimizer).__name__
    if record["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint is of {record['kind']}, the program trains with {kind}",
            todo="train with the same optimizer, or load the weights only: load_weights(folder)",
        )
    for _ in _options(optimizer, held, record):
        pass


def _options(
    optimizer: Optimizer, held: Sequence[LocalTensor], record: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields every group that the checkpoint contains, with its saved options.

    A group is identified by its parameters, or by its number if it has none on this rank.
    """
    known = {name: group for group in record["groups"] for name in group["parameters"]}
    numbered = len(record["groups"]) == len(optimizer.param_groups)
    for number, (group, members) in enumerate(groups_of(optimizer, held)):
        group_of = {
            json.dumps(known[h.name]["options"]): h.name for h, _ in members if h.name in known
        }
        if len(group_of) > 1:
            raise CheckpointError(
                "the optimizer's groups differ from those of the checkpoint",
                why=f"{' and '.join(group_of.values())} had different options",
                todo="restore the groups, or load the weights only",
            )
        if not members and numbered:
            group_of = {json.dumps(record["groups"][number]["options"]): ""}
        for text in group_of:
            options = decode(json.loads(text))
            if not isinstance(options, dict) or any(key in options for key in _MANNER):
                raise CheckpointError("the checkpoint's options of the optimizer are not a mapping")
            yield group, options


def room_for(
    h: LocalTensor,
    updated: Tensor,
    key: str,
    stored: Stored,
    dtype: torch.dtype,
    group: Mapping[str, Any],
    old: Any,
) -> Part:
    """Returns the destination of this rank's part of one tensor of the optimizer's state.

    Args:
        h: the parameter.
        updated: the tensor of it that the optimizer updates.
        key, stored: name of the state tensor, and its description in the checkpoint.
        dtype: the parameter's dtype in the checkpoint; state of the same dtype follows the
            program's.
        group: the parameter's group.
        old: the optimizer's present value, which is overwritten if it fits.

    Raises:
        CheckpointError: this plan splits the parameter, but the tensor has another shape.
    """
    like = stored.shape == h.shape and not (key == "step" and h.shape == ())
    box = h.state_box if like else Box.whole(stored.shape)
    if not like and stored.shape and h.state_box != Box.whole(h.shape):
        raise CheckpointError(
            f"{key!r} of the optimizer's state of {h.name} cannot be loaded",
            why=f"its shape is {list(stored.shape)}, and this plan splits the parameter, whose "
            f"shape is {list(h.shape)}",
            todo="pin the parameter whole",
        )
    # As torch's optimizers do: counts are on the host, unless the device counts.
    on_device = stored.shape or like or group.get("capturable") or group.get("fused")
    own = DTYPES[stored.dtype]
    kind = updated.dtype if own == dtype and like else own
    device = updated.device if on_device else torch.device("cpu")
    wanted = (box.sizes, kind, device)
    fits = isinstance(old, Tensor) and (tuple(old.shape), old.dtype, old.device) == wanted
    fits = fits and bool(box.sizes)  # counts may be shared
    tensor = old if fits else torch.empty(box.sizes, dtype=kind, device=device)
    return Part(f"optimizer.{h.name}.{key}", tensor, box, stored.shape)


class OptimizerState:
    """An optimizer's state in a checkpoint, to be read and then given to the optimizer.

    Args:
        optimizer: the optimizer of this rank.
        held: the parameters that it updates.
        index: the checkpoint.

    Raises:
        CheckpointError: as `check_optimizer`, or a tensor that does not fit this plan.
    """

    def __init__(self, optimizer: Optimizer, held: Sequence[LocalTensor], index: Index) -> None:
        self._optimizer, self._held = optimizer, held
        self._record = index.details["optimizer"]
        check_optimizer(optimizer, held, self._record)
        self.parts: list[Part] = []
        self._tensors: list[tuple[Tensor, str, Tensor]] = []
        self._values: list[tuple[Tensor, str, Any]] = []
        stored = index.optimizer_state()
        dtypes = {name: entry.dtype for name, entry in index.under("model").items()}
        for group, members in groups_of(optimizer, held):
            for h, tensor in members:
                if h.stateless:
                    continue
                for key, entry in stored.get(h.name, {}).items():
                    dtype = DTYPES[dtypes.get(h.name, entry.dtype)]
                    old = optimizer.state.get(tensor, {}).get(key)
                    part = room_for(h, tensor, key, entry, dtype, group, old)
                    self.parts.append(part)
                    self._tensors.append((tensor, key, part.tensor))
                for key, value in self._record["values"].get(h.name, {}).items():
                    self._values.append((tensor, key, decode(value)))

    def give(self) -> None:
        """Replaces the optimizer's state by the one that was read."""
        state = self._optimizer.state
        state.clear()
        for parameter, key, value in (*self._tensors, *self._values):
            state[parameter][key] = value
        for group, options in _options(self._optimizer, self._held, self._record):
            group.update(options)
