"""Executes the actions of a row: forwards, backwards and transfers of this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from autopar.ir.action import COMPUTE, TRANSFER, UPDATE, Action
from autopar.runtime.pipeline.messages import Letter, Post
from autopar.runtime.pipeline.routes import Routes
from autopar.runtime.pipeline.stage import Share, Stage, Tensors
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.step_parts import ACTION

EXECUTED = (*COMPUTE, *TRANSFER)  # actions that an interpreter executes


class Interpreter:
    """Executes rows of actions; microbatches are numbered from the start of the training.

    Args:
        stages: stages of this rank by number and copy.
        routes: between stages.
        post: carries messages, including those between devices of one group of ranks, which rows
            do not list.
        recorder: records the actions.

    Attributes:
        results: called with the results of every forward.
    """

    def __init__(
        self,
        stages: Mapping[tuple[int, int], Stage],
        routes: Routes,
        post: Post,
        recorder: Recorder,
    ) -> None:
        self.stages, self.routes, self.post, self.recorder = stages, routes, post, recorder
        self.results: Callable[[Stage, Action, Tensors], None] = lambda stage, action, made: None
        self._outgoing: dict[Letter, Tensor] = {}
        self._batch: Sequence[Tensors] = ()
        self._first = 0
        self._enter: Callable[[Action], None] = lambda action: None
        self._share: Callable[[Stage], Share] = lambda stage: 1.0

    def begin(
        self,
        batch: Sequence[Tensors],
        first: int,
        enter: Callable[[Action], None],
        share: Callable[[Stage], Share],
    ) -> None:
        """Sets the microbatches of the next step.

        Args:
            batch: inputs of each microbatch.
            first: number of the first microbatch.
            enter: called before each forward to set its random state, with the microbatch's index
                in `batch`.
            share: returns the gradient of a microbatch's loss.
        """
        self._batch, self._first, self._enter, self._share = batch, first, enter, share

    def do(self, action: Action) -> None:
        """Executes one computation, send or receive."""
        if action.kind in COMPUTE:
            self._compute(action)
            return
        for _, letter in self.routes.letters(action):
            if action.kind.startswith("SEND"):
                self.post.send(letter, self._outgoing.pop(letter))
            else:
                self.post.ask(letter)

    def _compute(self, action: Action) -> None:
        stage, recorder = self.stages[action.stage, action.copy], self.recorder
        with recorder.within(f"{action} waits for its input"):
            arrived = [
                (name, self.post.receive(letter, stage.runtime))
                for name, letter in self.routes.needed(action)
            ]
        with recorder.part(ACTION, action), stage.weights_for(action):
            made = self._forward(stage, action, arrived) if action.kind == "F" else {}
            if action.kind == "W":
                stage.backward_weight(action.microbatch)
            elif action.kind != "F":
                made = self._backward(stage, action, arrived)
        for name, letter, here in self.routes.made(action):
            if here:
                self.post.send(letter, made[name])
                self.post.ask(letter)
            else:
                self._outgoing[letter] = made[name]

    def _forward(
        self, stage: Stage, action: Action, arrived: Sequence[tuple[str, Tensor]]
    ) -> Tensors:
        self._enter(action._replace(microbatch=action.microbatch - self._first))
        given = self._batch[action.microbatch - self._first]
        made = stage.forward(action.microbatch, given, dict(arrived))
        self.results(stage, action, made)
        return made

    def _backward(
        self, stage: Stage, action: Action, arrived: Sequence[tuple[str, Tensor]]
    ) -> Tensors:
        """Runs a backward on the gradients that the readers of the stage's results sent."""
        gradients: Tensors = {}
        for name, gradient in arrived:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        run = stage.backward if action.kind == "B" else stage.backward_input
        return run(action.microbatch, gradients, self._share(stage))


def losses_to(losses: list[Tensor]) -> Callable[[Stage, Action, Tensors], None]:
    """Returns a callback that appends the loss of each forward that has one to `losses`."""

    def result(stage: Stage, action: Action, made: Tensors) -> None:
        if stage.module.loss is not None:
            losses.append(made[stage.module.loss])

    return result


def phase_of(action: Action) -> str:
    """Returns the phase of the step to which an action belongs."""
    if action.kind in EXECUTED:
        return "microbatches"
    return "optimizer" if action.kind == UPDATE else "gradients"
