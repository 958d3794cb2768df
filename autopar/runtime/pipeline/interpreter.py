"""Does what a row of a step says: forwards, backwards and transfers of this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from autopar.ir.action import COMPUTE, TRANSFER, UPDATE, Action
from autopar.runtime.pipeline.messages import Letter, Post
from autopar.runtime.pipeline.routes import Routes
from autopar.runtime.pipeline.stage import Share, Stage, Tensors
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.step_parts import ACTION

PLAYED = (*COMPUTE, *TRANSFER)  # what an interpreter does by itself


class Interpreter:
    """A run over rows, microbatch numbers counted from the first of the training.

    Args:
        stages: of this rank, by number and copy.
        routes: between stages.
        post: what messages go through; those between devices of one group of ranks, too, which no
            row has.
        recorder: is told what is done.

    Attributes:
        results: is given the results of every forward.
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
        """Take new microbatches.

        Args:
            batch: the inputs of each.
            first: the number of the first of them.
            enter: is told before each forward, for its random numbers, with the number of its
                microbatch among these.
            share: gives the gradient of a microbatch's loss.
        """
        self._batch, self._first, self._enter, self._share = batch, first, enter, share

    def do(self, action: Action) -> None:
        """Do an action that computes, sends or receives."""
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
        """A backward on the gradients that came from the readers of its results."""
        gradients: Tensors = {}
        for name, gradient in arrived:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        run = stage.backward if action.kind == "B" else stage.backward_input
        return run(action.microbatch, gradients, self._share(stage))


def losses_to(losses: list[Tensor]) -> Callable[[Stage, Action, Tensors], None]:
    """What keeps the losses of forwards, of stages that have one."""

    def result(stage: Stage, action: Action, made: Tensors) -> None:
        if stage.module.loss is not None:
            losses.append(made[stage.module.loss])

    return result


def phase_of(action: Action) -> str:
    """The phase of a step that an action belongs to."""
    if action.kind in PLAYED:
        return "microbatches"
    return "optimizer" if action.kind == UPDATE else "gradients"
