"""Runs a generated program on one device: its parameters, its optimizer, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from autopar.codegen.batches import Intake
from autopar.codegen.checkpoint.held import Held, held_of
from autopar.codegen.failure import Watch
from autopar.codegen.gradients import Gradients
from autopar.codegen.optimizer import OptimizerFactory, refuse_what_shards_break
from autopar.codegen.parts import PHASE, part
from autopar.codegen.random import synchronised
from autopar.codegen.runtime import Runtime, typed
from autopar.codegen.state import State
from autopar.codegen.weights import Weights
from autopar.errors import ProgramError, StateError


class Executor:
    """One device's part of a program.

    `state.parameters`, `tensors` and `weights.updated` stand in one order: what the program stores,
    what this device holds of it, and what its optimizer updates of that.

    Args:
        program: the loaded module.
        runtime: the mesh.
        values: every parameter and buffer by name, whole; the first rank's count.
        optimizer: makes an optimizer of the local parameters.
        tied: further names of parameters.
        clip_norm: bound of the gradients' global norm, None for no bound.

    Raises:
        StateError: `values` does not fit the program.
        ProgramError: the optimizer cannot work on shards.
    """

    def __init__(
        self,
        program: ModuleType,
        runtime: Runtime,
        values: Mapping[str, Tensor],
        optimizer: OptimizerFactory,
        *,
        tied: Mapping[str, str] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.program, self.runtime, self.clip_norm = program, runtime, clip_norm
        self.state = State(runtime, program.parameters(), tied)
        self.loaded = not any(value.is_meta for value in values.values())
        if self.loaded:
            shards = self.state.load(values, runtime.device, broadcast=True)
        else:
            shards = self.state.empty(runtime.device)
        self.tensors = [
            nn.Parameter(shard) if parameter.trainable else shard
            for parameter, shard in zip(self.state.parameters, shards, strict=True)
        ]
        self.named = {
            parameter.key: tensor
            for parameter, tensor in zip(self.state.parameters, self.tensors, strict=True)
        }
        self.weights = Weights(
            runtime, self.state.parameters, self.tensors, getattr(program, "BUCKET", 1)
        )
        self.optimizer = optimizer(self.weights.trained)
        refuse_what_shards_break(optimizer, self.state.parameters)
        self.grad_norm: Tensor | None = None
        self.gradients = runtime.gradients = Gradients(self.weights, runtime.device)
        runtime.fetch.add(self.weights.all, self.weights.bucket)
        self.watch = Watch.over(runtime.ranks)
        everyone = runtime.group(runtime.mesh.names)
        self._intake = Intake(program.INPUTS, runtime.device, everyone.size, everyone.process_group)

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward and optimizer step on a batch that all ranks hold whole.

        Returns:
            The loss, a scalar, the same on every rank. `grad_norm` is the gradients' norm before
            clipping, where `clip_norm` is set.

        Raises:
            BatchError: the batch is not like the captured one, or not the same on every rank.
            ProgramError: the program has no loss.
            RankFailedError: another rank failed.
        """
        if self.program.LOSS is None:
            raise ProgramError(
                "the program has no loss to train on",
                todo="return a scalar loss from the model, or pass loss_fn",
            )
        with self.watch:
            with part(PHASE, "batch"):
                inputs = self._prepare(batch)
                self.optimizer.zero_grad(set_to_none=True)
                self.gradients.drop()  # those of a step that failed
            with part(PHASE, "forward"), self.runtime.saving(self.weights):
                loss: Tensor = self._forward(inputs, outputs=False)[self.program.LOSS]
            with part(PHASE, "backward"):
                torch.autograd.backward(loss)
                self.runtime.fetch.drop()
                self.gradients.collect()
            with part(PHASE, "optimizer"):
                if self.clip_norm is not None:
                    gradients = self.weights.gradients
                    self.grad_norm = self.state.clip_grad_norm_(gradients, self.clip_norm)
                self.optimizer.step()
                self.weights.gather()
        return loss.detach()

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, whole and on every rank; raises what `step` raises."""
        with self.watch:
            outputs = self._forward(self._prepare(batch))
            held = {name: typed(text) for name, text in self.program.OUTPUTS.items()}
            return {
                name: self.runtime.unshard(value, held[name][2], held[name][1])
                for name, value in outputs.items()
            }

    def _forward(self, batch: Mapping[str, Tensor], outputs: bool = True) -> dict[str, Tensor]:
        """The loss, and all other `outputs`; without these, those that cost nothing more."""
        less = {} if outputs or not getattr(self.program, "ASIDE", False) else {"outputs": False}
        if not self.program.RANDOM:
            return dict(self.program.forward(self.runtime, self.named, batch, **less))
        with synchronised(self.runtime):
            return dict(self.program.forward(self.runtime, self.named, batch, **less))

    def _prepare(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch on this device, after checks."""
        if not self.loaded:
            raise StateError(
                "the program has no weights",
                why="it was compiled from a model on the meta device, or a load broke off",
                todo="call program.load_state_dict(...) first",
            )
        return self._intake.take(batch)

    @property
    def held(self) -> list[Held]:
        """What this rank holds of every parameter and buffer, for checkpoints."""
        return held_of(self.state, self.tensors, self.weights.updated)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes by name."""
        return self.state.shapes

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, whole, on every rank."""
        return self.state.state_dict(self.tensors)

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Take the parameters from a full or DTensor state_dict; StateError if it does not fit."""
        shards = self.state.load(values, self.runtime.device)
        for tensor, shard in zip(self.tensors, shards, strict=True):
            tensor.copy_(shard)
        self.loaded = True
