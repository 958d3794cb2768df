"""Adds up the gradients of parameters that several stages share, before the update.

These are tied weights, such as an embedding that is also the head, and the second model of a
bidirectional schedule. Every holder sends its gradient to all others and adds all gradients in the
same order, so the copies get bitwise equal gradients and stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from autopar.ir.crossing import Side, crossing
from autopar.ir.tensor import TensorType
from autopar.runtime.parameters.pieces import Parameter
from autopar.runtime.pipeline.messages import TAGS, Letter, Post, Way, Wires
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.ranks.channel import Channel

Key = tuple[int, int]  # stage, copy


class Copies:
    """The parameters that several stages share.

    Args:
        stages: all stages of the pipeline, including those of other ranks.
        rank: global rank of this process.
        wires: channels of the messages.
        device: the device of this process.
        everyone: channel of all ranks; None for a single rank.
    """

    def __init__(
        self,
        stages: Mapping[Key, Stage],
        rank: int,
        wires: Wires | None,
        device: torch.device,
        everyone: Channel | None = None,
    ) -> None:
        self.stages, self.rank, self.wires, self.device = stages, rank, wires, device
        self.everyone = everyone
        holders: dict[str, dict[Key, Parameter]] = {}
        for key, stage in stages.items():
            for parameter in stage.state.parameters:
                if parameter.trainable:
                    holders.setdefault(parameter.key, {})[key] = parameter
        self.holders = {name: held for name, held in holders.items() if len(held) > 1}
        self._ways: list[Way] = []
        self._numbers: dict[tuple[str, Key, Key], int] = {}
        for name, held in self.holders.items():
            for a in held:
                for b in held:
                    if a != b:
                        self._numbers[name, a, b] = len(self._ways)
                        tensor = TensorType(held[a].master.dtype, held[a].shape)
                        sides = (self._side(key, held[key]) for key in (a, b))
                        self._ways.append(Way(tensor, crossing(tensor, *sides)))

    def _side(self, key: Key, parameter: Parameter) -> Side:
        comm = self.stages[key].runtime
        return Side(comm.mesh, comm.ranks, parameter.storage.updated)

    def counted_elsewhere(self, stage: Stage) -> frozenset[str]:
        """Returns keys of a stage's parameters that an earlier stage holds, too."""
        own = (stage.number, stage.copy)
        return frozenset(name for name, held in self.holders.items() if own != next(iter(held)))

    def add_up(self, names: Collection[str] = ()) -> None:
        """Sets the gradients of all copies to their sum; every holder must call it.

        Args:
            names: keys of the parameters; () for all.
        """
        wanted = {name: held for name, held in self.holders.items() if not names or name in names}
        numbers = {key: number for key, number in self._numbers.items() if key[0] in wanted}
        post = Post(self._ways, self.rank, self.device, self.wires, TAGS)
        mine = {key: stage for key, stage in self.stages.items() if stage.runtime.rank >= 0}
        for (name, a, _), number in numbers.items():
            if a in mine:
                post.send(Letter(number, 0), _gradient(mine[a], name))
        for (_, _, b), number in numbers.items():
            if b in mine:
                post.ask(Letter(number, 0))
        totals: list[tuple[Tensor, Tensor]] = []
        for name, held in wanted.items():
            for here in (key for key in held if key in mine):
                stage = mine[here]
                parts = [
                    _gradient(stage, name)
                    if other == here
                    else post.receive(Letter(self._numbers[name, other, here], 0), stage.runtime)
                    for other in held
                ]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                totals.append((stage.updated[name], total))
        post.finish()
        for parameter, total in totals:
            parameter.grad = total


def _gradient(stage: Stage, name: str) -> Tensor:
    parameter = stage.updated[name]
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
