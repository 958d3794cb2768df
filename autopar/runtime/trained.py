"""The training state that a program shows: optimizer, scale, norm, parameters and averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
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
    """A program that trains a model; all members raise ProgramError before the first batch."""

    _model: nn.Module
    _training: Training

    @abstractmethod
    def _ready(self) -> Program:
        """Returns the executor; raises ProgramError before the first batch."""

    @abstractmethod
    def _buffers(self) -> Mapping[str, Tensor]:
        """Returns buffers and constants of the captured model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's shards, for learning-rate schedules."""
        return self._ready().optimizer

    @property
    def scaler(self) -> Scaler | None:
        """The loss scaler in float16, which also shows whether a step was skipped; else None."""
        return self._ready().update.scaler

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm of the last step's gradients before clipping.

        None before the first step, and if nothing needs it: with on_nonfinite="continue" and
        neither `clip_norm` nor float16.
        """
        return self._ready().grad_norm

    @property
    def nonfinite_steps(self) -> int:
        """Number of steps with a non-finite loss or gradients; waits for the device.

        Steps that float16's scaler skips to find its scale do not count.
        """
        return self._ready().update.check.nonfinite

    def update_bytes(self) -> dict[str, int]:
        """Returns the bytes of all tensors that updates keep on this rank, by names of states.

        They are those that the plan predicts: masters, moments, averages, what compressed messages
        have left out, and states of an outer method. Counts of steps are not among them.
        """
        program, found = self._ready(), Counter[str]()
        kept = [*program.update.kept()]
        kept += program.rounds.kept() if isinstance(program, LocalUpdates) else ()
        for name, tensor in kept:
            found[name] += tensor.nbytes
        return dict(found)

    @property
    def rounds(self) -> Report:
        """The report of the last round of local updates, equal on all ranks.

        Its `loss` is the mean over replicas; `step` returns that of this rank's own.

        Raises:
            ProgramError: before the first batch, or without `outer`.
        """
        program = self._ready()
        if not isinstance(program, LocalUpdates):
            raise ProgramError(
                "the program has no rounds", todo='pass outer="local over node, tau=8"'
            )
        return program.report

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the model's state_dict, with whole tensors on every rank."""
        executor = self._ready()
        executor.meet("state_dict")
        full = executor.state_dict()
        return {name: full[name] for name in self._model.state_dict() if name in full}

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Returns the state_dict with averages of trained parameters, whole tensors on every rank.

        The average starts from the compiled parameters, or from those loaded without an average;
        each step replaces it by ema times the average plus (1 - ema) times the new parameters.

        Raises:
            ProgramError: there was no batch yet, or `ema` was not set.
        """
        executor = self._ready()
        if self._training.ema is None:
            raise ProgramError(
                "the program has no weight average", todo="pass ema=0.999 to compile"
            )
        executor.meet("ema_state_dict")
        full = executor.state_dict(average=True)
        return {name: full[name] for name in self._model.state_dict() if name in full}

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Loads a full or DTensor state_dict of the model; raises StateError if it does not fit."""
        executor = self._ready()
        executor.meet("load_state_dict")
        # Constants are not part of a state_dict, and stay unchanged.
        names = set(self._model.state_dict())
        constants = {k: v for k, v in self._buffers().items() if k not in names}
        lacking = [k for k, v in constants.items() if v.is_meta and k not in values]
        if lacking:
            raise StateError(
                f"the program has no value of {', '.join(lacking)}",
                why="a state_dict leaves it out, and on the meta device the model has none",
                todo="add it to the state_dict, or give its module a reset_buffers() that sets it",
            )
        executor.load_state_dict({**constants, **values})
