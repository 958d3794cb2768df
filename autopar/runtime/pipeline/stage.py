"""Runs one stage of a pipeline on one device: its parameters, forwards and backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.action import Action
from autopar.runtime.calls.variant import Caches, caches_of, variant_of
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.buffer_writes import Writes
from autopar.runtime.parameters.pieces import State
from autopar.runtime.parameters.shards import Weight, Weights
from autopar.runtime.pipeline.in_flight_state import Get, Put, get_all, put_all
from autopar.runtime.pipeline.split import WeightBackward, backward_input
from autopar.runtime.runtime import Runtime

Tensors = dict[str, Tensor]
Share = float | Tensor


def _newest(action: Action) -> AbstractContextManager[None]:
    """Runs an action on the newest weights."""
    return nullcontext()


@dataclass
class _Kept:
    """The state that a forward saves for its backward.

    Attributes:
        leaves: received values.
        results: results with gradients.
        given: inputs of the forward, from the batch and received, from which it can run again.
        random: state of the CPU's generator before the forward; None if it draws no numbers.
    """

    leaves: Tensors
    results: Tensors
    given: tuple[Tensors, Tensors]
    random: Tensor | None


class Stage:
    """A stage with its state on this device.

    Args:
        module: the loaded program of the stage.
        runtime: its mesh.
        number, copy: number of the stage, and of its copy.
        state: storage of the parameters and buffers on the mesh.
    """

    def __init__(
        self, module: Generated, runtime: Runtime, number: int, copy: int, state: State
    ) -> None:
        self.module, self.runtime, self.number, self.copy = module, runtime, number, copy
        self.state = state
        self.received = module.received
        self.tensors: list[Tensor] = []
        self.weights = Weights(runtime, (), ())
        self.updated: Tensors = {}
        self.named: Tensors = {}
        self.writes = Writes({})
        self.caches: Caches = {}  # of all programs over these tensors
        # Selects the weights of an action if there are several versions.
        self.weights_for: Callable[[Action], AbstractContextManager[None]] = _newest
        self._kept: dict[int, _Kept] = {}
        self._later: dict[int, WeightBackward] = {}

    def make_room(self, device: torch.device) -> None:
        """Allocates the local tensors of all parameters and buffers, which are loaded later."""
        self.tensors = [
            nn.Parameter(tensor) if parameter.trainable else tensor
            for parameter, tensor in zip(
                self.state.parameters, self.state.empty(device), strict=True
            )
        ]
        keys = [parameter.key for parameter in self.state.parameters]
        caches = caches_of(self.module, self.runtime, self.caches)
        self.named = {**dict(zip(keys, self.tensors, strict=True)), **caches}
        self.writes = Writes(self.named)
        self.weights = Weights(
            self.runtime, self.state.parameters, self.tensors, self.module.bucket
        )
        self.updated = dict(zip(keys, self.weights.updated, strict=True))

    def with_program(self, module: Generated, values: Mapping[str, Tensor]) -> Stage:
        """Returns a stage with another program over the same tensors.

        Args:
            module: the loaded program, with the same layouts of parameters.
            values: whole constants by name that only this program reads.

        Raises:
            ProgramError: the program stores a parameter in another layout.
        """
        known = self.state.parameters
        variant = variant_of(module, self.runtime, known, self.named, values, self.caches)
        other = Stage(module, self.runtime, self.number, self.copy, self.state)
        other.tensors, other.weights, other.updated = self.tensors, self.weights, self.updated
        other.caches = self.caches
        other.named, other.writes = dict(variant.named), variant.writes
        return other

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The stored parameters that have gradients, by key."""
        return {k: t for k, t in self.named.items() if isinstance(t, nn.Parameter)}

    @property
    def reports_loss(self) -> bool:
        """Returns whether this device reports the stage's loss; one of several equal ones does."""
        if self.module.loss is None:
            return False
        _, _, layout = self.module.outputs[self.module.loss]
        comm = self.runtime
        return not any(comm.coordinate[a] for a in comm.mesh.names if a not in layout.partial)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of this device's part of a received value."""
        value = self.received[name]
        return value.layout.local_shape(value.shape, self.runtime.mesh, self.runtime.coordinate)

    def forward(
        self, microbatch: int, batch: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Tensors:
        """Runs a forward on one microbatch and returns its results by name.

        With autograd enabled, a backward can follow.

        Args:
            microbatch: its number.
            batch: the whole inputs.
            received: values from other stages, in the layouts that the module declares.
        """
        leaves: Tensors = {}
        inputs = {name: batch[name] for name in self.module.inputs}
        given = dict(inputs), dict(received)
        random = torch.get_rng_state() if self.module.random else None
        for name, value in received.items():
            if torch.is_grad_enabled() and self.received[name].gradient:
                leaves[name] = value.detach().requires_grad_()
                # The program must not treat it as a parameter, whose gradient is accumulated.
                inputs[name] = leaves[name].view_as(leaves[name])
            else:
                inputs[name] = value
        saving = self.runtime.saving(self.weights, inputs.values())
        with saving, self.runtime.writing(self.writes):
            # Skip outputs that only a caller would read.
            parameters = self.runtime.given(self.writes.given)
            outputs = not torch.is_grad_enabled()
            results = self.module.forward(self.runtime, parameters, inputs, outputs)
        if torch.is_grad_enabled():
            with_gradient = {
                name: value
                for name, value in results.items()
                if value.requires_grad and (name.startswith("%") or name == self.module.loss)
            }
            self._kept[microbatch] = _Kept(leaves, with_gradient, given, random)
        return {name: value.detach() for name, value in results.items()}

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], share: Share) -> Tensors:
        """Runs the whole backward and returns the gradients of received values by name.

        Args:
            microbatch: its number.
            gradients: gradients of the results by name; a missing result has no gradient.
            share: returns the gradient of the loss if this stage computes the loss.
        """
        kept = self._kept.pop(microbatch)
        results, seeds = self._seeds(kept, gradients, share)
        if results:
            torch.autograd.backward(results, seeds)
            self._end_of_backward()
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in kept.leaves.items()
        }

    def backward_input(
        self, microbatch: int, gradients: Mapping[str, Tensor], share: Share
    ) -> Tensors:
        """Runs the first half of a backward and returns the same gradients as `backward`."""
        kept = self._kept.pop(microbatch)
        results, seeds = self._seeds(kept, gradients, share)
        leaves = list(kept.leaves.values())
        if not results:
            self._later[microbatch] = WeightBackward()
            return {name: torch.zeros_like(leaf) for name, leaf in kept.leaves.items()}
        found, later = backward_input(results, seeds, leaves, list(self.trained.values()))
        self._later[microbatch] = later
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(kept.leaves.items(), found, strict=True)
        }

    def backward_weight(self, microbatch: int) -> None:
        """Runs the second half of a backward, which accumulates the gradients of the parameters."""
        self._later.pop(microbatch).run()
        self._end_of_backward()

    def _end_of_backward(self) -> None:
        if self.runtime.gradients is not None:
            self.runtime.gradients.end_of_backward()
        self.runtime.fetch.drop()

    def _seeds(
        self, kept: _Kept, gradients: Mapping[str, Tensor], share: Share
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the results from which a backward starts, and their gradients."""
        given = dict(gradients)
        if self.module.loss in kept.results:
            given[self.module.loss] = torch.ones_like(kept.results[self.module.loss]) * share
        names = [name for name in kept.results if name in given]
        return [kept.results[name] for name in names], [given[name] for name in names]

    def norm(self, squares: Tensor) -> Tensor:
        """Returns the norm of the gradients over all devices of the stage.

        Args:
            squares: this device's part of the sum of squares, with every element counted once.
        """
        mesh = self.runtime.mesh
        split = {
            axis
            for parameter in self.state.parameters
            if parameter.trainable
            for axis in parameter.storage.updated.sharded_axes
        }
        axes = tuple(axis for axis in mesh.names if axis in split)
        # Replicas have equal gradients and need no reduction.
        replicas = math.prod(mesh.axis_size(axis) for axis in mesh.names if axis not in split)
        total = squares * replicas
        return (self.runtime.group(axes).reduce(total) if axes else total).sqrt()

    def forget(self) -> None:
        """Discards the state of a failed step."""
        self._kept.clear()
        self._later.clear()
        self.writes.drop()

    # Checkpoints ---------------------------------------------------------------------------------

    def saved(self, put: Put) -> Any:
        """Returns gradients that are not yet applied, and inputs of microbatches in flight."""
        gradients = self.runtime.gradients
        return {
            "gradients": [
                [
                    *put_all([_apart(weight), weight.updated.grad], put),
                    None if gradients is None else gradients.saved(weight, put),
                ]
                for weight in self.weights.all
            ],
            "inputs": {
                microbatch: [
                    *({name: put(value) for name, value in part.items()} for part in kept.given),
                    *put_all([kept.random], put),
                ]
                for microbatch, kept in sorted(self._kept.items())
            },
        }

    def resume(self, saved: Any, get: Get) -> None:
        """Restores the gradients."""
        gradients = self.runtime.gradients
        for weight, (held, updated, begun) in zip(
            self.weights.all, saved["gradients"], strict=True
        ):
            weight.held.grad, weight.updated.grad = get_all([held, updated], get)
            if gradients is not None and begun is not None:
                gradients.resume(weight, begun, get)

    def again(
        self, saved: Any, get: Get, leaving: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        """Repeats the forwards of microbatches in flight, each in its context `leaving`."""
        for microbatch, (batch, received, random) in sorted(saved["inputs"].items()):
            if random is not None:
                torch.set_rng_state(get(random).cpu())
            given = (
                {name: get(value) for name, value in part.items()} for part in (batch, received)
            )
            with torch.enable_grad(), leaving(microbatch):
                self.forward(microbatch, *given)
        self.writes.drop()


def _apart(weight: Weight) -> Tensor | None:
    """Returns the gradient of the stored parameter if the optimizer updates another tensor."""
    return None if weight.held is weight.updated else weight.held.grad
