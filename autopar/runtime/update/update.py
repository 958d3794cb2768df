"""From gradients to new parameters: checked, unscaled, clipped, updated and averaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopar.errors import NonFiniteError, ProgramError
from autopar.ir.precision import Precision
from autopar.runtime.offload.optimizer_state import HostState, buckets
from autopar.runtime.parameters.pieces import Squares, clip, squares_of
from autopar.runtime.ranks.agreement import gathered
from autopar.runtime.update.groups import Options, grouped
from autopar.runtime.update.kept_tensors import kept_tensors
from autopar.runtime.update.observation import observed
from autopar.runtime.update.optimizer import OptimizerFactory, refuse_what_steps_break
from autopar.runtime.update.owners import (
    Owners,
    step_whole,
    whole_parameters,
    with_owners,
)
from autopar.runtime.update.scaler import Scaler
from autopar.runtime.update.step_check import Named, StepCheck, StepPart, check_policy

if TYPE_CHECKING:
    from autopar.runtime.parameters.shards import Weight, Weights
    from autopar.runtime.update.adamw import AdamW


@dataclass(frozen=True)
class Training:
    """Settings of a program's updates.

    Attributes:
        optimizer: creates an optimizer of the local parameters, or of groups of them.
        clip_norm: bound of the gradients' global norm, None for no bound.
        options: options of the optimizer, by name of a parameter; see `groups.options_of`.
        ema: share of the parameters' average that a step keeps, None for no average.
        on_nonfinite: treatment of steps whose loss or gradients are not finite; see
            `step_check.py`.

    Raises:
        ProgramError: an invalid bound, share or policy.
    """

    optimizer: OptimizerFactory
    clip_norm: float | None = None
    options: Mapping[str, Options] = field(default_factory=dict)
    ema: float | None = None
    on_nonfinite: str = "raise"

    def __post_init__(self) -> None:
        check_policy(self.on_nonfinite)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ProgramError(
                f"clip_norm is {self.clip_norm}",
                why="a norm is bounded by a positive number",
                todo="pass a positive number, or leave clip_norm out",
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ProgramError(
                f"ema is {self.ema}",
                why="it is the part of the average that a step keeps, at least 0 and less than 1",
                todo="pass ema=0.999",
            )


class Update:
    """Applies a step's gradients on this rank.

    Args:
        training: the settings.
        precision: precision of the program.
        trained: tensors that this rank updates, with names of the model's parameters.
        device: device of the parameters.
        bucket: bytes of parameters whose state is copied together from host memory; None if the
            state is on the device.
        held: if AdamW's step is a kernel, stored tensors of masters that only need rounding, by the
            master's id, which the kernel also writes; None to leave every optimizer unchanged.
        scattered: ids of updated tensors whose gradients come from a reduce_scatter.
        weights: all parameters of `trained`. If the state is in host memory, so are masters.

    Raises:
        ProgramError: the state is in host memory, and the optimizer does not update each parameter
            independently.

    Attributes:
        optimizer: a torch optimizer.
        scaler: the loss scaler; None if not needed.
        averages: averages of `trained`, by the id of the parameter, in host memory if the state is;
            {} without.
        away: moves the state to host memory and back; None if it stays.
        kernel: the optimizer, if its step is a kernel, else None.
        owners: the owned parameters of every program; () if there are none.
        written: ids of masters whose stored tensors a step also writes.
        check: decides whether a step is made.
        compared: whether all ranks have the same groups, whose options must then be alike. Stages
            may have different ones.
    """

    def __init__(
        self,
        training: Training,
        precision: Precision,
        trained: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        bucket: int | None = None,
        held: Mapping[int, Tensor] | None = None,
        scattered: Collection[int] = (),
        weights: Sequence[Weights] = (),
    ) -> None:
        if bucket is not None:
            refuse_what_steps_break(training.optimizer)
        self.training, self._trained = training, [parameter for _, parameter in trained]
        self._names = [name for name, _ in trained]
        self.compared = True
        # In a stage without parameters, the optimizer has one without elements.
        name = next(iter(training.options), "")
        nothing = [(name, nn.Parameter(torch.zeros(0, 0, device=device)))]
        rules = observed(training.optimizer, training.options)
        self.owners = tuple(Owners(each, rules) for each in weights) if rules.mixes else ()
        wholes = whole_parameters(self.owners)
        taken = [(name, wholes.get(id(parameter), parameter)) for name, parameter in trained]
        made = training.optimizer(grouped(taken or nothing, training.options))
        self.optimizer = with_owners(made, self.owners)
        self.kernel: AdamW | None = None
        self.written: frozenset[int] = frozenset()
        if held is not None and bucket is None:
            from autopar.runtime.update import adamw  # imports Triton, if installed

            if adamw.takes(self.optimizer):
                self.optimizer = self.kernel = adamw.AdamW(self.optimizer, held, scattered)
                self.written = frozenset(held)
        self.scaler = Scaler(device) if precision.scaled else None
        self.check = StepCheck(training.on_nonfinite, device)
        # True if the host does not need to know whether a step is applied.
        unread = self.kernel is not None or not (self.check.wanted or precision.scaled)
        self.check.late = device.type == "cuda" and unread
        self.averages: dict[int, Tensor] = {}
        self.away: HostState | None = None
        self._weights = weights
        if bucket is not None:
            masters = {id(w.updated) for each in weights for w in each.all if w.has_master}
            self.away = HostState(
                self.optimizer, buckets(weights, bucket), self.averages, device, masters, wholes
            )
            self.written = frozenset(masters)
            for each in weights:
                each.masters = self.away.masters
        self.restart()

    @torch.no_grad()
    def restart(self, known: Collection[int] = ()) -> None:
        """Restarts averages from the current parameters.

        Args:
            known: ids of parameters whose averages stay.
        """
        if self.training.ema is not None:
            for parameter in (one for one in self._trained if id(one) not in known):
                mean = self.averages.setdefault(id(parameter), torch.empty_like(parameter))
                away = {} if self.away is None else self.away.masters
                mean.copy_(away.get(id(parameter), parameter))
        self.settle()

    def settle(self) -> None:
        """Moves loaded or new state to host memory, if it belongs there."""
        if self.away is not None:
            self.away.settle()

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor that this rank keeps from step to step, by the name of its state."""
        wholes = whole_parameters(self.owners)
        yield from kept_tensors(self._weights, self.optimizer, wholes, self.averages)
        if self.scaler is not None:
            yield from self.scaler.kept()

    def averages_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the averages of some parameters, on the device."""
        return [self.averages[id(parameter)].to(parameter.device) for parameter in parameters]

    @property
    def scale(self) -> float | Tensor:
        """Factor of the loss."""
        return 1.0 if self.scaler is None else self.scaler.factor

    @property
    def order(self) -> Mapping[int, int]:
        """Id of a parameter -> number; gradients with one number should be adjacent."""
        return {} if self.kernel is None else self.kernel.order

    def room(self, weights: Sequence[Weight]) -> Tensor | None:
        """Returns a buffer for gradient shards that arrive together, if placement matters."""
        fits = all(w.scattered and w.sent == w.updated.dtype for w in weights)
        parameters = [w.updated for w in weights if isinstance(w.updated, nn.Parameter)]
        return self.kernel.room(parameters) if self.kernel is not None and fits else None

    @property
    def squares(self) -> Squares:
        """Function that adds up the squares of all elements of some tensors."""
        return squares_of if self.kernel is None else self.kernel.squares

    def options(self) -> dict[str, str]:
        """Returns the options of the optimizer's groups as texts, by description.

        Options on a device are left out.
        """
        return {
            f"{name} of the optimizer's group {number}": repr(value)
            for number, group in enumerate(self.optimizer.param_groups)
            for name, value in group.items()
            if name != "params" and not (isinstance(value, Tensor) and not value.is_cpu)
        }

    def compare(self) -> None:
        """Checks whether all ranks have the same groups; all of them call it."""
        options = gathered(list(self.options()))
        self.compared = all(names == options[0] for names in options)

    def begin(self, options: Mapping[str, str]) -> None:
        """Counts a step.

        Raises:
            NonFiniteError: an option of the optimizer is NaN, or its rate is infinite.
        """
        self.check.steps += 1
        for name, text in options.items():
            if text == "nan" or (text == "inf" and name.startswith("lr ")):
                raise NonFiniteError(
                    f"{name} is {text}",
                    why=f"step {self.check.steps} would leave no parameter finite",
                    todo="correct the scheduler",
                )

    def step(self, squares: Callable[[], Tensor], seen: StepPart) -> tuple[Tensor, Tensor | None]:
        """Updates the parameters by their gradients, which have been collected, and gathers them.

        That is left out if the ranks decide against it; see `step_check.py`.

        Args:
            squares: returns this rank's part of the sum of the squares of all gradients.
            seen: the rest of its report of the step.

        Returns:
            The loss, summed over all ranks, and the gradients' norm before clipping, None if it is
            not needed.

        Raises:
            NonFiniteError, BatchError, RanksDifferError: see `StepCheck.read`; nothing is updated.
        """
        kernel, bound, scale = self.kernel, self.training.clip_norm, self.scale
        if kernel is not None:
            kernel.prepare()
        wanted = self.check.wanted or bound is not None or self.scaler is not None
        nothing = torch.zeros((), dtype=torch.float64, device=seen.loss.device)
        outcome = self.check.decide(squares() if wanted else nothing, seen, self.scaler)
        _settle(self._weights, outcome.made)
        self.check.read(seen, self._named)
        norm = outcome.norm / scale
        if kernel is not None:
            finite = kernel.take(outcome.norm, bound, scale)
            if self.check.wanted or self.scaler is not None:
                kernel.scale = torch.where(outcome.made, kernel.scale, torch.nan)
            else:
                kernel.scale = torch.where(finite, kernel.scale, 1.0)
            kernel.step()
            self._averaged(self._trained, outcome.made)
        elif self.check.late or outcome.made:
            gradients = [gradient for each in self._weights for gradient in each.gradients]
            if self.scaler is not None:
                self.scaler.unscale(gradients)
            if bound is not None:
                clip(gradients, norm, bound)
            if self.away is not None:
                self.away.step(self._come, lambda: step_whole(self.optimizer, self.owners))
            else:
                step_whole(self.optimizer, self.owners)
                self._averaged(self._trained)
        if self.scaler is not None:
            self.scaler.follow(outcome.norm.isfinite())
        for each in self._weights:
            each.gather(self.written)
        return outcome.loss, norm if wanted else None

    def forget(self) -> None:
        """Gives up the gradients of all parameters."""
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def step_alone(self, weights: Weights, norm: Tensor | None) -> None:
        """Update the parameters of one stage, whatever becomes of the others', and gather them.

        Args:
            weights: weights of the stage; their gradients are given up.
            norm: norm of its gradients; None where nobody needs it.
        """
        if norm is not None and self.training.clip_norm is not None:
            clip(weights.gradients, norm, self.training.clip_norm)
        self.optimizer.step()
        self._averaged(weights.trained)
        _settle([weights], None)
        weights.gather(self.written)
        for parameter in weights.trained:
            parameter.grad = None

    def _named(self) -> tuple[Named, Named]:
        """Returns parameters and gradients, by name."""
        away = {} if self.away is None else self.away.masters
        values = [away.get(id(parameter), parameter) for parameter in self._trained]
        gradients = [parameter.grad for parameter in self._trained]
        pairs = (zip(self._names, tensors, strict=True) for tensors in (values, gradients))
        parameters, given = (list(each) for each in pairs)
        return parameters, given

    def _come(self, parameters: Sequence[nn.Parameter]) -> None:
        """Finishes updated parameters, before their state is copied back."""
        self._averaged(parameters)
        for weights in self._weights:
            weights.round({id(parameter) for parameter in parameters})

    @torch.no_grad()
    def _averaged(self, parameters: Sequence[nn.Parameter], stepped: Tensor | float = 1.0) -> None:
        if not self.averages:
            return
        part = 1 - (self.training.ema or 0.0)
        for parameter in parameters:
            made = stepped.to(parameter.dtype) if isinstance(stepped, Tensor) else stepped
            self.averages[id(parameter)].lerp_(parameter, made * part)

    def state_dict(self) -> dict[str, Any]:
        """Returns state that is equal on all ranks and is not an option of the optimizer."""
        state = {"check": self.check.state_dict()}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, as far as it has the entries."""
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        if "check" in state:
            self.check.load_state_dict(state["check"])


def _settle(weights: Sequence[Weights], made: Tensor | None) -> None:
    """Commits or restores the memory of compressed reductions; see `Memory.settle`."""
    for each in weights:
        for weight in each.all:
            weight.memory.settle(made)
