"""Decides whether all ranks apply a step, by one all_reduce of four numbers.

    squares, loss, token, token²            summed over all ranks

Clipping also needs the sum of the gradients' squares, and a pipeline returns the loss, so these
need no collective of their own. Both sums are finite only if everything is, on every rank. A token
is a hash of everything that must be equal on all ranks (`batches.py`); n tokens are equal if Σt² =
n (Σt / n)². They have 20 bits, so that both sides are exact on up to 2^13 ranks.

The host reads the outcome before the update, except if the update is a kernel on a CUDA device: the
kernel then skips the step by itself. It also skips later steps until the host has read the outcome,
one step later and without waiting for the device.

Buffers that the forward writes (running statistics) are restored when a step is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopar.errors import AutoparError, NonFiniteError, ProgramError

if TYPE_CHECKING:
    from autopar.runtime.update.scaler import Scaler

POLICIES = ("raise", "skip", "continue")
AddUp = Callable[[Tensor], Tensor]
Named = Sequence[tuple[str, Tensor | None]]


@dataclass(frozen=True)
class StepPart:
    """This rank's part of a step besides gradients.

    Attributes:
        loss: its part of the loss; parts add up, or are all infinite or NaN if one is.
        token: f64[], hash of all its inputs so far.
        inputs: the batch on this device, by name.
        world: number of ranks.
        add_up: returns the sum of a tensor over all ranks.
        differences: describes how ranks with different tokens differ; all of them call it.
        gather: returns the values that all ranks pass; all ranks call it.
    """

    loss: Tensor
    token: Tensor
    inputs: Mapping[str, Tensor]
    world: int
    add_up: AddUp
    differences: Callable[[], AutoparError]
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Outcome:
    """The decision of all ranks, on the device.

    Attributes:
        norm: norm of all gradients, still scaled, f64[].
        loss: the sum of the ranks' parts, f64[].
        made: whether the step is made, bool[].
    """

    norm: Tensor
    loss: Tensor
    made: Tensor


class StepCheck:
    """Decides whether steps are made.

    Args:
        policy: treatment of a step that is not finite: "raise", "skip" or "continue".
        device: device of this rank.

    Attributes:
        steps: number of steps begun.
        late: whether the host reads the report of a step after the next one.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy, self.steps, self.late = policy, 0, False
        self._nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        self._halted = torch.zeros((), dtype=torch.bool, device=device)
        self._report = torch.zeros(4, dtype=torch.float64, device=device)
        self._before: list[tuple[Tensor, Tensor]] = []
        self._pending: _Pending | None = None

    @property
    def wanted(self) -> bool:
        """Returns whether a step that is not finite is not made."""
        return self.policy != "continue"

    @property
    def nonfinite(self) -> int:
        """Number of steps so far that were not finite; waits for the device."""
        return int(self._nonfinite)

    def keep(self, written: Sequence[Tensor]) -> None:
        """Remembers buffers that the coming step writes."""
        self._before = [(tensor, tensor.clone()) for tensor in written] if self.wanted else []

    @torch.no_grad()
    def decide(self, squares: Tensor, seen: StepPart, scaler: Scaler | None) -> Outcome:
        """Combines the reports of all ranks and decides; nothing waits for the device.

        Args:
            squares: this rank's part of the sum of the gradients' squares, f64[].
            seen: the rest of its report.
            scaler: the loss scaler; its overflows are not errors unless its scale is too small.
        """
        loss, token = seen.loss.detach().double(), seen.token
        parts = torch.stack([squares.to(loss.device), loss, token, token.square()])
        total, loss, tokens, token_squares = seen.add_up(parts).unbind()
        norm, mean = total.sqrt(), tokens / seen.world
        alike = token_squares == seen.world * mean.square()
        sound, fine = norm.isfinite(), loss.isfinite()
        fine = fine & (sound if scaler is None else sound | scaler.useful)
        self._nonfinite += ~fine
        made = alike & ~self._halted
        back = ~made
        if self.wanted:
            made, back = made & fine & sound, back | ~fine
        elif scaler is not None:
            made = made & sound
        for tensor, before in self._before:
            tensor.copy_(torch.where(back, before, tensor))
        self._before = []
        if self.late:
            self._halted |= ~(alike & fine) if self.policy == "raise" else ~alike
        self._report.copy_(torch.stack([fine.double(), alike.double(), loss, norm]))
        return Outcome(norm, loss, made)

    def read(self, seen: StepPart, named: Callable[[], tuple[Named, Named]]) -> None:
        """Raises, on all ranks, unless training may continue.

        Args:
            seen: as passed to `decide`.
            named: returns parameters and gradients, by name.

        Raises:
            NonFiniteError: loss or gradients are not finite.
            BatchError, RanksDifferError: the ranks got different inputs.
        """
        if self.late:
            return
        fine, alike, loss, norm = self._report.tolist()
        if not alike:
            raise seen.differences()
        if not fine and self.policy == "raise":
            faults = [_first(pairs) for pairs in (list(seen.inputs.items()), *named())]
            raise _error(self.steps, loss, norm, seen.gather(faults))

    def end(self, differences: Callable[[], AutoparError]) -> None:
        """Ends a step; if the host reads late, raises the error of the previous step.

        Args:
            differences: as in `StepPart`.

        Raises:
            NonFiniteError, BatchError, RanksDifferError: as `read`.
        """
        if self.late:
            pending, self._pending = self._pending, _Pending(self.steps, self._report)
            self._raise(pending, differences)

    def heard(
        self,
        loss: float,
        norm: float,
        fine: bool,
        alike: bool,
        differences: Callable[[], AutoparError],
    ) -> None:
        """Takes the sums over all ranks of a step that was already applied.

        Args:
            loss, norm: of that step.
            fine: whether all gradients were finite.
            alike: whether ranks were given alike.
            differences: as of `StepPart`.

        Raises:
            NonFiniteError, BatchError, RanksDifferError: as `read`.
        """
        fine = fine and math.isfinite(loss)
        self._nonfinite += not fine
        if not alike:
            raise differences()
        if not fine and self.policy == "raise":
            raise _made_error(self.steps, loss, norm)

    def settle(self, differences: Callable[[], AutoparError]) -> None:
        """Waits for the last step, and raises its error, if any; see `end`."""
        pending, self._pending = self._pending, None
        self._raise(pending, differences)

    def _raise(self, pending: _Pending | None, differences: Callable[[], AutoparError]) -> None:
        if pending is None:
            return
        fine, alike, loss, norm = pending.read()
        raising = not alike or (not fine and self.policy == "raise")
        if not raising:
            return
        self._pending = None  # the step that was skipped because of that one
        self._halted.fill_(False)
        raise _error(pending.step, loss, norm) if alike else differences()

    def state_dict(self) -> dict[str, int]:
        """Returns the state needed to continue."""
        return {"steps": self.steps, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from a saved state."""
        self.steps = int(state["steps"])
        self._nonfinite.fill_(int(state["nonfinite"]))


class _Pending:
    """The report of a step, on its way to the host."""

    def __init__(self, step: int, report: Tensor) -> None:
        self.step, self._event = step, None
        if report.device.type == "cuda":
            self._host = torch.empty(4, dtype=report.dtype, pin_memory=True)
            self._host.copy_(report, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = report.clone()

    def read(self) -> list[float]:
        """Returns its numbers, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def check_policy(policy: str) -> None:
    """Raises ProgramError unless there is such a policy."""
    if policy not in POLICIES:
        raise ProgramError(
            f"on_nonfinite is {policy!r}",
            why="a step that is not finite raises, is skipped, or is made anyway",
            todo='pass "raise", "skip" or "continue"',
        )


def _first(pairs: Named) -> str:
    """Returns the first name whose tensor is not finite, "" if all are."""
    for name, tensor in pairs:
        if tensor is not None and tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return ""


def _made_error(step: int, loss: float, norm: float) -> NonFiniteError:
    """The error of a step that was made before the ranks knew."""
    return NonFiniteError(
        f"step {step} or the one before it is not finite: its loss is {loss:g}, the norm of its"
        f" gradients {norm:g}",
        why="stages that do not wait for one another have updated their weights since",
        todo="load a checkpoint from before it, and lower the rate or clip",
    )


def _error(
    step: int, loss: float, norm: float, found: Sequence[Sequence[str]] = ()
) -> NonFiniteError:
    """Returns the error of a step, given each rank's first bad input, parameter and gradient."""
    where, why = "", []
    for place, kind in enumerate(("the input", "the parameter", "the gradient of")):
        rank = next((rank for rank, names in enumerate(found) if names[place]), None)
        if rank is None:
            continue
        who = f"{kind} {found[rank][place]!r}"
        where = f"{who} on rank {rank}" if len(found) > 1 else who
        before = " before the step" if place == 1 else ""
        why.append(f"{who} has NaN or infinite values{before}")
    if not found:
        why.append("the host noticed it a step later, when gradients were gone")
    return NonFiniteError(
        f"step {step} is not finite: its loss is {loss:g}, the norm of its gradients {norm:g}",
        where=where,
        why="; ".join(why) or "the squares of the gradients exceed the range of their dtype",
        todo="parameters and optimizer are as before it: check the batch, lower the rate, clip, "
        'or skip such steps with on_nonfinite="skip"',
    )
