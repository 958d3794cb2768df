"""Sums a stage's gradients over its replicas while the next steps run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.action import COPIES, SYNC_BEGIN, Action
from autopar.runtime.parameters.shards import Weight
from autopar.runtime.pipeline.in_flight_state import Get, Put
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.ranks.channel import PendingCall


def names_sums(action: Action) -> bool:
    """Returns whether an action sums gradients apart from the backward that made them."""
    return action.kind == SYNC_BEGIN or bool(
        action.axes or (action.names and action.over != COPIES)
    )


@dataclass(frozen=True)
class _Sum:
    """One buffer of gradients of weights that are replicated over the same devices."""

    weights: list[Weight]
    total: Tensor
    waiting: PendingCall | None


@dataclass(frozen=True)
class Sums:
    """The gradients of one update of a stage, during their reduction."""

    parts: list[_Sum]

    @classmethod
    def begin(cls, stage: Stage, axes: Collection[str] = (), names: Collection[str] = ()) -> Sums:
        """Starts to reduce a stage's local gradients.

        Every parameter needs at most one all_reduce; `refusals.py` ensures that.

        Args:
            stage: whose gradients are reduced.
            axes: axes of its mesh over which they are reduced; () for all.
            names: keys of the parameters; () for all.
        """
        gradients = stage.runtime.gradients
        if gradients is not None:
            gradients.give_up()
        together: dict[tuple[str, ...], list[Weight]] = {}
        chosen = {id(stage.updated[name]) for name in names}
        for weight in stage.weights.all:
            if weight.updated.grad is not None and (not names or id(weight.updated) in chosen):
                every = [axis for hop in weight.path("reduce") for axis in hop.call.axes]
                own = tuple(axis for axis in every if not axes or axis in axes)
                together.setdefault(own, []).append(weight)
        return cls([_begun(stage, own, weights) for own, weights in together.items()])

    def saved(self, stage: Stage, put: Put) -> Any:
        """Returns the completed sums and their parameters; see `in_flight_state.py`."""
        every = stage.weights.all
        return [[[every.index(w) for w in part.weights], put(part.total)] for part in self.parts]

    @classmethod
    def resume(cls, stage: Stage, saved: Any, get: Get) -> Sums:
        """Restores what `saved` returned."""
        every = stage.weights.all
        return cls([_Sum([every[n] for n in own], get(total), None) for own, total in saved])

    def wait(self) -> None:
        """Waits for the sums."""
        for part in self.parts:
            if part.waiting is not None:
                part.waiting.wait()

    def arrive(self) -> None:
        """Waits for the sums and passes them to the optimizer."""
        self.wait()
        for part in self.parts:
            sizes = [weight.updated.numel() for weight in part.weights]
            for weight, own in zip(part.weights, part.total.split(sizes), strict=True):
                weight.updated.grad = own.view(weight.updated.shape)


def _begun(stage: Stage, axes: tuple[str, ...], weights: list[Weight]) -> _Sum:
    own = [weight.updated.grad for weight in weights]
    total = torch.cat([gradient.reshape(-1) for gradient in own if gradient is not None])
    for weight in weights:
        weight.updated.grad = None
    group = stage.runtime.group(axes) if axes else None
    channel = None if group is None else group.channel
    return _Sum(weights, total, None if channel is None else channel.all_reduce_async(total))
