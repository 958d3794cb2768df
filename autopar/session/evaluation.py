"""Evaluation of a model on a batch; its results stay sharded until they are gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch import Tensor

from autopar.capture.capture import Captured
from autopar.errors import ProgramError
from autopar.operators.expert_load import ExpertLoad
from autopar.runtime.calls.evaluated import Evaluated
from autopar.runtime.executor import Executor
from autopar.runtime.trained import Program
from autopar.session.further_programs import Runnable


@dataclass(frozen=True)
class Evaluation:
    """The result of `Session.eval_step`.

    Attributes:
        captured: the call of the model.
        outputs: its results on this rank.
    """

    captured: Captured
    outputs: Evaluated

    @property
    def loss(self) -> Tensor | None:
        """The loss, a scalar, the same on every rank; None if the call has none."""
        graph = self.captured.graph
        named = {node: name for name, node in graph.outputs}
        return None if graph.loss is None else self.outputs.shards[named[graph.loss]]

    @property
    def local(self) -> Any:
        """The model's output with this rank's part of each tensor; see `layouts`."""
        return self.captured.output.rebuild(self.outputs.shards)

    @property
    def layouts(self) -> Mapping[str, str]:
        """Output name -> its dtype, global shape and layout, "f32[8@data, 16, 96]"."""
        return self.outputs.layouts

    def whole(self) -> Any:
        """Returns the model's output with whole tensors; every rank must call it."""
        return self.captured.output.rebuild(self.outputs.gather())


class Evaluating(ABC):
    """The part of a session that evaluates the model.

    Attributes:
        training: whether steps are allowed; see `eval`.
    """

    training: bool

    @abstractmethod
    def _ready(self) -> Program:
        """Returns the executor; raises ProgramError before the first batch."""

    @abstractmethod
    def _ready_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Runnable, dict[str, Tensor]]:
        """Returns the program for a call, and the batch by name."""

    def eval_step(self, *args: Any, **kwargs: Any) -> Evaluation:
        """Evaluates the model on one batch without changing the training.

        The model is captured a second time, in evaluation mode, and its program reads the
        parameters where the training stores them. So dropout is off, and running statistics do not
        change. Batches may have other shapes than those of the training, and may lack its labels;
        each kind of batch is compiled when it first occurs.

        Args:
            *args: positional arguments of the batch, whole on every rank.
            **kwargs: keyword arguments of the batch.

        Returns:
            The loss, and this rank's parts of the outputs.

        Raises:
            BatchError: the batch differs between ranks, or there are more kinds of batches than a
                session compiles.
            RankFailedError: another rank failed.
            AutoparError: see `compile`.
        """
        program, inputs = self._ready_for(args, kwargs, training=False)
        return Evaluation(program.captured, program.forward(inputs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output in evaluation, whole on every rank; see `eval_step`."""
        return self.eval_step(*args, **kwargs).whole()

    def eval(self) -> Self:
        """Refuses steps until `train` is called; evaluation works in both states."""
        self.training = False
        return self

    def train(self, mode: bool = True) -> Self:
        """Allows steps, or refuses them with `mode=False`."""
        self.training = mode
        return self

    def expert_load(self, *args: Any, **kwargs: Any) -> list[ExpertLoad]:
        """Returns the load of the experts in every mixture, in the order of the mixtures.

        Every rank must call it. `str` of an `ExpertLoad` is a value of the option `expert_load` of
        `autopar.plan`; its `imbalance` is the ratio of the busiest device's rows to the mean.

        Raises:
            ProgramError: the program is a pipeline.
            BatchError, RanksDifferError, RankFailedError: as for `step`.
        """
        program, inputs = self._ready_for(args, kwargs, training=False)
        executor = self._ready()
        if not isinstance(executor, Executor):
            raise ProgramError(
                "the load of experts can only be measured in a program without stages",
                why="each stage, or each replica of local updates, sees its own mixtures only",
                todo="compile with stages=1 and without outer, and call it there",
            )
        return executor.expert_load(partial(program.forward, inputs))
