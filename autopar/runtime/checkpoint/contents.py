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


def room_for(
    h: LocalTensor,
    updated: Tensor,
    name: str,
    stored: Stored,
    dtype: torch.dtype,
    group: Mapping[str, Any],
    old: Any,
) -> Part:
    """Returns the destination of this rank's part of one tensor of the optimizer's state.

    Args:
        h: the parameter.
        updated: the tensor of it that the optimizer updates.
        name, stored: name and description of the state tensor in the checkpoint.
        dtype: the parameter's dtype in the checkpoint; state of the same dtype follows the
            program's.
        group: the parameter's group.
        old: the optimizer's present value, which is overwritten if it fits.

    Raises:
        CheckpointError: this plan splits the parameter, but the tensor has another shape.
    """
    key = name.rpartition(".")[2]
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
    return Part(name, tensor, box, stored.shape)


class OptimizerState:
    """An optimizer's state on this rank; see `SavedState`.

    Args:
        optimizer: the optimizer.
        held: the parameters that it updates.
    """

    def __init__(self, optimizer: Optimizer, held: Sequence[LocalTensor]) -> None:
        self._optimizer, self._held = optimizer, held
        self._stored: Mapping[str, str] = {}  # parameter -> its name in the checkpoint
        self._record: Mapping[str, Any] = {}
        self._tensors: list[tuple[Tensor, str, Tensor]] = []
        self._values: list[tuple[Tensor, str, Any]] = []

    def saved(self) -> tuple[list[Part], dict[str, Any]]:
        """Returns the tensors of the state, and the rest of it as JSON.

        Raises:
            CheckpointError: something cannot be saved; names it.
        """
        parts: list[Part] = []
        values: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for group, members in groups_of(self._optimizer, self._held):
            options = {k: v for k, v in group.items() if k not in _MANNER}
            names = list(dict.fromkeys(h.name for h, _ in members))
            groups.append({"options": encode(options, "an optimizer group"), "parameters": names})
            for h, tensor in members:
                for key, value in self._optimizer.state.get(tensor, {}).items() if h.first else ():
                    where = f"{key!r} of the optimizer's state of {h.name}"
                    if not isinstance(key, str) or "." in key:
                        why = "it is not a plain name"
                        raise CheckpointError(f"{where} cannot be saved", why=why)
                    if isinstance(value, Tensor):
                        parts.append(_state_part(h, key, value, where))
                    else:
                        values.setdefault(h.name, {})[key] = encode(value, where)
        kind = type(self._optimizer).__name__
        return parts, {"optimizer": {"kind": kind, "groups": groups, "values": values}}

    def wanted(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Returns the destinations of the tensors.

        Raises:
            CheckpointError: the optimizer is of another kind, parameters of one group had different
                options, or a tensor does not fit this plan.
        """
        self._record, self._stored = index.details["optimizer"], matches
        self._check()
        parts: list[Part] = []
        stored = index.optimizer_state()
        dtypes = {name: entry.dtype for name, entry in index.under("model").items()}
        for group, members in groups_of(self._optimizer, self._held):
            for h, tensor in members:
                if h.stateless:
                    continue
                name = self._name(h)
                for key, entry in stored.get(name, {}).items():
                    dtype = DTYPES[dtypes.get(name, entry.dtype)]
                    old = self._optimizer.state.get(tensor, {}).get(key)
                    where = f"optimizer.{name}.{key}"
                    part = room_for(h, tensor, where, entry, dtype, group, old)
                    parts.append(part)
                    self._tensors.append((tensor, key, part.tensor))
                for key, value in self._record["values"].get(name, {}).items():
                    self._values.append((tensor, key, decode(value)))
        return parts

    def give(self) -> None:
        """Replaces the optimizer's state and options by those that were read."""
        state = self._optimizer.state
        state.clear()
        for parameter, key, value in (*self._tensors, *self._values):
            state[parameter][key] = value
        for group, options in self._options():
            group.update(options)

    def restart(self) -> None:
        """Does nothing: the optimizer continues with other weights, as torch's do."""

    def _name(self, h: LocalTensor) -> str:
        """Returns the name of a parameter in the checkpoint; tied parameters have several."""
        return self._stored.get(h.name, h.name)

    def _check(self) -> None:
        """Compares the optimizer with that of the checkpoint, as far as this rank sees it."""
        kind = type(self._optimizer).__name__
        if self._record["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint is of {self._record['kind']}, the program trains with {kind}",
                todo="train with the same optimizer, or load the weights only: "
                "load_weights(folder)",
            )
        for _ in self._options():
            pass

    def _options(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yields every group that the checkpoint contains, with its saved options.

        A group is identified by its parameters, or by its number if it has none on this rank.
        """
        groups = self._record["groups"]
        known = {name: group for group in groups for name in group["parameters"]}
        numbered = len(groups) == len(self._optimizer.param_groups)
        for number, (group, members) in enumerate(groups_of(self._optimizer, self._held)):
            names = [self._name(h) for h, _ in members]
            group_of = {json.dumps(known[n]["options"]): n for n in names if n in known}
            if len(group_of) > 1:
                raise CheckpointError(
                    "the optimizer's groups differ from those of the checkpoint",
                    why=f"{' and '.join(group_of.values())} had different options",
                    todo="restore the groups, or load the weights only",
                )
            if not members and numbered:
                group_of = {json.dumps(groups[number]["options"]): ""}
            for text in group_of:
                options = decode(json.loads(text))
                if not isinstance(options, dict) or any(key in options for key in _MANNER):
                    raise CheckpointError(
                        "the checkpoint's options of the optimizer are not a mapping"
                    )
                yield group, options
