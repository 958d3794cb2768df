"""What a program shows of its training: optimizer, scale, norm, parameters and their average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.errors import ProgramError, StateError
from autopar.runtime.executor import Executor
from autopar.runtime.outer.local_updates import LocalUpdates
from autopar.runtime.outer.rounds import Report
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.update.scaler import Scaler
from autopar.runtime.update.update import Training

Program = Executor | Pipeline | LocalUpdates


class Trained(ABC):
    """A program that trains a model; everything raises ProgramError before the first batch."""

    _model: nn.Module
    _training: Training

    @abstractmethod
    def _ready(self) -> Program:
        """What runs it; ProgramError before the first batch."""

    @abstractmethod
    def _buffers(self) -> Mapping[str, Tensor]:
        """Buffers and constants of the model as it was captured."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's shards, for learning-rate schedules."""
        return self._ready().optimizer

    @property
    def scaler(self) -> Scaler | None:
        """What scales the loss in float16, and tells whether a step was skipped; else None."""
        return self._ready().update.scaler

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm of the last step's gradients before clipping.

        None before the first step, and where nobody needs it: with on_nonfinite="continue" and
        neither `clip_norm` nor float16.
        """
        return self._ready().grad_norm

    @property
    def nonfinite_steps(self) -> int:
        """Steps so far whose loss or gradients were not finite; waits for the device.

        Those that float16's scaler leaves out to find its scale are not among them.
        """
        return self._ready().update.check.nonfinite

    @property
    def rounds(self) -> Report:
        """What is known of the last round of replicas that train apart, alike on every rank.

        Its `loss` is the mean over replicas; `step` returns that of this rank's own.

        Raises:
            ProgramError: before the first batch, or without `outer`.
        """
        program = self._ready()
        if not isinstance(program, LocalUpdates):
            raise ProgramError("there are no rounds", todo='pass outer="local over node, tau=8"')
        return program.report

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict, whole tensors on every rank."""
        executor = self._ready()
        executor.meet("state_dict")
        full = executor.state_dict()
        return {name: full[name] for name in self._model.state_dict() if name in full}

    def ema_state_dict(self) -> dict[str, Tensor]:
        """The state_dict with averages of what is trained, whole tensors on every rank.

        The average begins with the parameters that were compiled, or loaded without one; after a
        step it is ema of what it was and the rest of the new parameters.

        Raises:
            ProgramError: before the first batch, or without `ema`.
        """
        executor = self._ready()
        if self._training.ema is None:
            raise ProgramError("there is no average", todo="pass ema=0.999 to compile")
        executor.meet("ema_state_dict")
        full = executor.state_dict(average=True)
        return {name: full[name] for name in self._model.state_dict() if name in full}

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Take a full or DTensor state_dict of the model; StateError if it does not fit."""
        executor = self._ready()
        executor.meet("load_state_dict")
        # Constants are no part of a state_dict; they stay as they are.
        names = set(self._model.state_dict())
        constants = {k: v for k, v in self._buffers().items() if k not in names}
        lacking = [k for k, v in constants.items() if v.is_meta and k not in values]
        if lacking:
            raise StateError(
                f"the program has no value of {', '.join(lacking)}",
                why="a state_dict leaves it out, and on the meta device the model has none",
                todo="pass it with the others, or give its module a reset_buffers() that sets it",
            )
        executor.load_state_dict({**constants, **values})
