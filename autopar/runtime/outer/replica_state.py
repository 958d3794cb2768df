"""Saves and loads the state of replicas in checkpoints.

    model.NAME, optimizer.NAME.KEY        common parameters, and the first replica's optimizer
    replica.N.model.NAME, ...             state of replica N
    outer.STATE.NAME                      anchors, momenta, and averages that are not yet applied

Any other plan can load such a checkpoint as that of a single program, and the same replicas resume
bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.contents import LocalTensor
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.values import decode

if TYPE_CHECKING:
    from autopar.runtime.outer.buckets import Bucket
    from autopar.runtime.outer.local_updates import LocalUpdates

_MESSAGE, _LOSSES = "message", "losses"


class ReplicaState:
    """Saves and loads the state of this rank's replica.

    Args:
        program: the program with replicas.
    """

    def __init__(self, program: LocalUpdates) -> None:
        self._program = program

    @torch.no_grad()
    def saved(self, own: Sequence[Part]) -> list[Part]:
        """Returns the replica's own parts, and on the first replica also the common ones."""
        program = self._program
        program.rounds.settle()
        number = program.index
        # Copy, because the tensors change while all replicas hold the common parameters.
        found = [replace(p, name=f"replica.{number}.{p.name}") for p in own]
        found.append(self._losses())
        with program.together():
            agreed = [replace(p, tensor=p.tensor.detach().clone()) for p in own]
        if number == 0:
            found += agreed
            for bucket in program.rounds.buckets:
                states = dict(bucket.states)
                if bucket.message is not None:
                    states[_MESSAGE] = bucket.message
                found += self._parts(bucket, states, first=True)
        return found

    def wanted(self, own: Sequence[Part], index: Index) -> list[Part]:
        """Returns the replica's own parts that the checkpoint contains, and outer states."""
        found = []
        for part in own:
            name = f"replica.{self._program.index}.{part.name}"
            found.append(replace(part, name=name) if name in index.tensors else part)
        if not self._fits(decode(index.details.get("outer"))):
            return found
        if self._losses().name in index.tensors:
            found.append(self._losses())
        for bucket in self._program.rounds.buckets:
            states = dict(bucket.states)
            values = bucket.values()
            pending = self._parts(bucket, {_MESSAGE: values}, first=False)
            bucket.message = None
            if pending and all(part.name in index.tensors for part in pending):
                bucket.message = states[_MESSAGE] = values
            found += self._parts(bucket, states, first=False)
        return found

    def details(self) -> dict[str, Any]:
        """Returns the method and the rounds."""
        program = self._program
        return {"method": self._method, "rounds": program.rounds.state_dict()}

    def take(self, details: Any) -> None:
        """Resumes the saved round, or starts the first one.

        Raises:
            CheckpointError: the details of the round are damaged.
        """
        if not self._fits(details):
            self._program.rounds.restart()
            return
        try:
            self._program.rounds.load_state_dict(details["rounds"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint's round cannot be read", why=f"{type(error).__name__}: {error}"
            ) from error

    @property
    def _method(self) -> list[Any]:
        """Returns the settings that must be equal for saved states to be valid."""
        method, program = self._program.method, self._program
        return [method.NAME, list(method.states), method.fragments, program.replicas]

    def _fits(self, details: Any) -> bool:
        return isinstance(details, Mapping) and details.get("method") == self._method

    def _losses(self) -> Part:
        name = f"replica.{self._program.index}.{_LOSSES}"
        return Part(name, self._program.rounds.losses, Box.whole((1,)), (1,))

    def _parts(self, bucket: Bucket, states: Mapping[str, Tensor], first: bool) -> list[Part]:
        """Returns a bucket's flat tensors as parts with the shapes of the parameters."""
        held: dict[int, LocalTensor] = {id(h.updated): h for h in self._program.held}
        return [
            Part(f"outer.{state}.{h.name}", part, h.updated_box, h.shape)
            for state, flat in states.items()
            for h, part in zip((held[k] for k in bucket.keys), bucket.parts(flat), strict=True)
            if h.first or not first
        ]
