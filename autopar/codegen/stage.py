"""One stage of a pipeline on one of its devices: its parameters, forwards and backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn

from autopar.codegen.runtime import Received, Runtime
from autopar.codegen.state import State

Tensors = dict[str, Tensor]


@dataclass
class _Kept:
    """What a forward leaves for its backward: leaves that were received, results with gradients."""

    leaves: Tensors
    results: Tensors
    gradients: Tensors = field(default_factory=dict)


class Stage:
    """A stage, with the state that this device holds of it.

    Args:
        module: the loaded program of the stage.
        runtime: its mesh.
        number, copy: which stage, and which copy of it.
        state: how the mesh stores the parameters and buffers.
    """

    def __init__(
        self, module: ModuleType, runtime: Runtime, number: int, copy: int, state: State
    ) -> None:
        self.module, self.runtime, self.number, self.copy = module, runtime, number, copy
        self.state = state
        self.received: dict[str, Received] = getattr(module, "RECEIVED", {})
        self.tensors: list[Tensor] = []
        self.named: Tensors = {}
        self._kept: dict[int, _Kept] = {}

    def hold(self, shards: Mapping[int, Tensor]) -> None:
        """Take the local tensors of all parameters and buffers, by number."""
        if self.tensors:  # an optimizer knows them already
            for number, tensor in enumerate(self.tensors):
                tensor.copy_(shards[number])
            return
        self.tensors = [
            nn.Parameter(shards[number]) if parameter.trainable else shards[number]
            for number, parameter in enumerate(self.state.parameters)
        ]
        keys = (parameter.key for parameter in self.state.parameters)
        self.named = dict(zip(keys, self.tensors, strict=True))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that have gradients, by key."""
        return {k: t for k, t in self.named.items() if isinstance(t, nn.Parameter)}

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this device's part of a received value."""
        value = self.received[name]
        return value.layout.local_shape(value.shape, self.runtime.mesh, self.runtime.coordinate)

    def forward(
        self, microbatch: int, batch: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Tensors:
        """The results on one microbatch by name; under autograd its backward can follow.

        Args:
            microbatch: its number.
            batch: the inputs, whole.
            received: what other stages sent, in the layouts that the module tells.
        """
        leaves: Tensors = {}
        inputs = {name: batch[name] for name in self.module.INPUTS}
        for name, value in received.items():
            if torch.is_grad_enabled() and self.received[name].gradient:
                leaves[name] = value.detach().requires_grad_()
                # The program must not take it for a parameter, whose gradient waits for the end.
                inputs[name] = leaves[name].view_as(leaves[name])
            else:
                inputs[name] = value
        results: Tensors = dict(self.module.forward(self.runtime, self.named, inputs))
        if torch.is_grad_enabled():
            with_gradient = {
                name: value
                for name, value in results.items()
                if value.requires_grad and (name.startswith("%") or name == self.module.LOSS)
            }
            self._kept[microbatch] = _Kept(leaves, with_gradient)
        return {name: value.detach() for name, value in results.items()}

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], share: float) -> Tensors:
        """The whole backward: gradients of what was received, by name.

        Args:
            microbatch: its number.
            gradients: of the results, by name; of those that are missing there is none.
            share: gradient of the loss, where it is made here.
        """
        kept = self._kept.pop(microbatch)
        gradients = dict(gradients)
        if self.module.LOSS in kept.results:
            loss = kept.results[self.module.LOSS]
            gradients[self.module.LOSS] = torch.full_like(loss, share)
        wanted = {name: value for name, value in kept.results.items() if name in gradients}
        if wanted:
            torch.autograd.backward(list(wanted.values()), [gradients[name] for name in wanted])
        return {name: _gradient(leaf) for name, leaf in kept.leaves.items()}

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._kept.clear()


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
