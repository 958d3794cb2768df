"""Runs the steps of an asynchronous pipeline; each step is one period of the steady state.

A step takes a new batch, executes its row of the period and returns while the backwards of its last
microbatches are still pending; they belong to the row of the next step. Every stage updates its
weights where its row schedules the update, independently of the other stages, so no rank waits for
all others at the end of a step. Global results of a step (the loss, whether all values were finite,
whether all ranks got equal arguments) are reduced during the next step and read at its end. If
gradients are reduced with a delay of s steps, these results have the same delay: a replica runs up
to s steps ahead of the slowest one before it waits.

`drain` completes all microbatches in flight. It runs before the weights are read.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.action import COPIES, SYNC, SYNC_AWAIT, SYNC_BEGIN, UPDATE, Action, Row
from autopar.ir.pipeline_step import ahead, at_period, draining, in_update, versions
from autopar.runtime.pipeline.group_options import GroupOptions
from autopar.runtime.pipeline.in_flight_state import Get, Put, get_all, put_all
from autopar.runtime.pipeline.interpreter import EXECUTED, Interpreter
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.pipeline.stage import Stage, Tensors
from autopar.runtime.pipeline.sums import Sums
from autopar.runtime.pipeline.tied_copies import Copies
from autopar.runtime.pipeline.versions import Versions
from autopar.runtime.ranks.channel import PendingCall
from autopar.runtime.step_parts import WAIT
from autopar.runtime.update.update import Update

_BITS = 20  # bits of a checksum; the sum of squares over all ranks is exact in float64


@dataclass(frozen=True)
class _Report:
    """Reduction of a step's loss, token, squared token, failure flag and squared gradients."""

    numbers: Tensor
    waiting: PendingCall | None

    def read(self) -> list[float]:
        """Waits for the sums over all ranks and returns them."""
        if self.waiting is not None:
            self.waiting.wait()
        found: list[float] = self.numbers.tolist()
        return found


class Continuous:
    """Runs the steps of one rank.

    Args:
        stages: the stages of this rank.
        placement: placement of all stages, with their rows.
        row: index of this rank's row.
        interpreter: executes computations and transfers.
        update: updates this rank's parameters.
        copies: parameters that several stages share.
        differences: describes how ranks differ.

    Attributes:
        broken_off: whether a step or a drain was interrupted.
        grad_norm: norm of the most recently applied gradients, before clipping.
        ahead: maximal number of steps between replicas.
        waited: seconds that this rank has waited for sums of gradients and for reports.
    """

    def __init__(
        self,
        stages: Mapping[tuple[int, int], Stage],
        placement: Placement,
        row: Row,
        interpreter: Interpreter,
        update: Update,
        copies: Copies,
        differences: Callable[[], AutoparError],
    ) -> None:
        self._stages, self._row, self._size = stages, row, placement.microbatches
        self._interpreter, self._update = interpreter, update
        self._copies, self._everyone, self._differences = copies, copies.everyone, differences
        self._recorder = interpreter.recorder
        self._taken = in_update([row])
        self._updates = sum(action.kind == UPDATE for action in row) // len(stages)
        self._flushed = placement.first[0] if placement.first else 0
        held = versions([row])
        self.versions = {
            key: Versions(stage.weights, held[key], stage.number, placement.adjustment)
            for key, stage in stages.items()
        }
        for key, stage in stages.items():
            stage.weights_for = self._weights_for(self.versions[key])
        self._period = 0
        self.broken_off = False
        self._squares: dict[tuple[int, int], Tensor] = {}
        self._broken = False
        self._sums: dict[Action, Sums] = {}  # by the action that began them
        self.ahead = ahead(placement.rows, self._size)
        self._reports: deque[_Report] = deque()  # of the steps whose loss has not been read
        self._told: float | None = None  # the last loss that was read
        self.grad_norm: Tensor | None = None
        self.waited = 0.0
        self._placement = placement
        self._later = _later(row, self._size)
        self._aside: dict[tuple[int, int], list[Tensor | None]] = {}  # by stage and microbatch
        self._early: set[Action] = set()  # receives that were posted for a checkpoint
        self._options = GroupOptions(update.optimizer, draining([row], self._size))

    def _weights_for(self, own: Versions) -> Callable[[Action], AbstractContextManager[None]]:
        def weights(action: Action) -> AbstractContextManager[None]:
            if action.kind == "F":
                return own.forward(action.age, action.microbatch)
            return own.backward(action.age, action.microbatch, self._update.optimizer)

        return weights

    def step(
        self,
        parts: Sequence[Tensors],
        enter: Callable[[Action], None],
        report: Callable[[], tuple[Tensor, Tensor]],
    ) -> float:
        """Runs one period.

        Args:
            parts: the microbatches.
            enter: called before each forward to set its random state.
            report: called at the end; returns this rank's part of the loss and its token.

        Returns:
            The loss of the previous step, or of the step `ahead` steps before if that is earlier.
            The first steps after a drain all return the loss of the first.

        Raises:
            NonFiniteError, BatchError, RanksDifferError: for the step whose loss is returned.
        """
        self.broken_off = True
        if not self._period:
            self._update.forget()  # gradients of a flushed step
            done = max(self._update.check.steps - 1 - self._flushed, 0)  # this step has begun
            for own in self.versions.values():
                own.total = done * self._updates
        scale = self._update.scale
        share = {key: scale / count for key, count in self._taken.items()}
        self._interpreter.begin(
            parts, self._period * self._size, enter, lambda s: share[s.number, s.copy]
        )
        self._options.begin(self._period)
        drawn = 0
        if self.ahead:  # ranks that do not synchronise detect differing generators by the report
            # Before forwards give the generator the states of their stages.
            drawn = zlib.crc32(torch.get_rng_state().numpy().tobytes()) & 2**_BITS - 1
        for action in at_period(self._row, self._size, self._period):
            self._do(action)
        self._options.end()
        self._period += 1
        self.broken_off = False
        loss, token = report()
        self._reports.append(self._begin(loss, token + drawn))
        if self._told is None or len(self._reports) > max(self.ahead, 1):
            self._told = self._read(self._reports.popleft())
        return self._told

    @property
    def filling(self) -> bool:
        """Returns whether no microbatch is in flight yet."""
        return not self._period

    def _do(self, action: Action) -> None:
        """Executes one action of the row."""
        if action in self._early:
            self._early.remove(action)
            return
        stage = self._stages[action.stage, action.copy]
        gradients = stage.runtime.gradients
        if action.kind in EXECUTED:
            if action.kind == "B" and gradients is not None:
                for weight in gradients.weights.values():
                    gradients.leave(weight)
            self._interpreter.do(action)
        elif action.kind == SYNC and action.over == COPIES:
            with self._taken_aside(stage, action.microbatch):
                self._copies.add_up(action.names)
        elif action.kind == SYNC and (action.over or action.names):
            Sums.begin(stage, action.axes, action.names).arrive()
        elif action.kind == SYNC and gradients is not None:
            gradients.collect()
            if (action.stage, action.copy, action.microbatch % self._size) in self._later:
                self._aside[action.stage, action.microbatch] = stage.weights.gradients
                for tensor in stage.weights.updated:
                    tensor.grad = None
        elif action.kind == SYNC_BEGIN:
            self._sums[action] = Sums.begin(stage, action.axes, action.names)
        elif action.kind == SYNC_AWAIT:
            with self._waiting(f"{action} waits for its sums"):
                self._sums.pop(action._replace(kind=SYNC_BEGIN)).arrive()
        elif action.kind == UPDATE:
            options = self._options.of(action.microbatch // self._size)
            with self._taken_aside(stage, action.microbatch), options:
                self._updated(stage)
            self._aside.pop((action.stage, action.microbatch), None)

    @contextmanager
    def _taken_aside(self, stage: Stage, microbatch: int) -> Iterator[None]:
        """Hides gradients of later microbatches in this context."""
        key = stage.number, microbatch
        if key not in self._aside:
            yield
            return
        later = stage.weights.gradients
        _give(stage, self._aside[key])
        yield
        self._aside[key] = stage.weights.gradients
        _give(stage, later)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Measures the time that this rank waits for others in this context."""
        began = time.perf_counter()
        with self._recorder.part(WAIT, name):
            yield
        self.waited += time.perf_counter() - began

    def _updated(self, stage: Stage) -> None:
        """Updates a stage."""
        key, update = (stage.number, stage.copy), self._update
        norm = None
        if update.check.wanted or update.training.clip_norm is not None:
            elsewhere = self._copies.counted_elsewhere(stage)
            own = stage.state.squares(stage.weights.gradients, elsewhere, update.squares)
            self._squares[key] = own
            self._broken |= not bool(own.isfinite())
            if update.training.clip_norm is not None:
                norm = stage.norm(own)
        with self.versions[key].updating(update.optimizer):
            update.step_alone(stage.weights, norm)

    def _begin(self, loss: Tensor, token: Tensor) -> _Report:
        """Starts the reduction of this step's report."""
        squares = sum(self._squares.values(), torch.zeros_like(token))
        broken = torch.full_like(token, float(self._broken))
        self._broken = False
        numbers = [loss.detach().double(), token, token.square(), broken, squares.to(token)]
        report = torch.stack(numbers)
        if self._everyone is None:
            return _Report(report, None)
        return _Report(report, self._everyone.all_reduce_async(report))

    def _read(self, report: _Report) -> float:
        """Returns the loss of a report."""
        with self._waiting("waits for the report of a step"):
            loss, token, square, broken, squares = report.read()
        world = 1 if self._everyone is None else len(self._everyone.ranks)
        alike = square == world * (token / world) ** 2
        self.grad_norm = (
            torch.tensor(squares, dtype=torch.float64).sqrt() if self._squares else None
        )
        self._update.check.heard(loss, squares**0.5, not broken, alike, self._differences)
        return loss

    def drain(self) -> None:
        """Completes all microbatches in flight; every rank must call it."""
        if not self._period:
            return
        self.broken_off = True
        last, period = self._period * self._size, self._period
        self._options.begin(period)
        for later in range(draining([self._row], self._size)):
            for action in at_period(self._row, self._size, period + later):
                if action.microbatch < last:
                    self._do(action)
        self._interpreter.post.finish()
        self.restart()
        self.broken_off = False
        self._told = None
        reports = list(self._reports)
        self._reports.clear()
        for report in reports:
            self._read(report)

    def restart(self) -> None:
        """Resets the pipeline to empty."""
        self._period = 0
        self._early.clear()
        self._aside.clear()
        self._options.restart()
        for own in self.versions.values():
            own.restart()

    def settle(self) -> None:
        """Waits for all started transfers between two steps; every rank must call it."""
        for action in self._sent_already():
            self._do(action)
            self._early.add(action)
        self._interpreter.post.settle()
        for report in self._reports:
            report.read()
        for sums in self._sums.values():
            sums.wait()

    def saved(self, put: Put) -> Any:
        """Returns the state in flight between two steps, on all ranks; see `in_flight_state.py`."""
        self.settle()
        return {
            "period": self._period,
            "told": self._told,
            "broken": self._broken,
            "options": self._options.saved(),
            "letters": self._interpreter.post.saved(put),
            "early": sorted(map(str, self._early)),
            "reports": [put(report.numbers) for report in self._reports],
            "stages": {
                key: [self.versions[key].saved(put), stage.saved(put)]
                for key, stage in self._stages.items()
            },
            "aside": {key: put_all(own, put) for key, own in self._aside.items()},
            "sums": {
                str(a): s.saved(self._stages[a.stage, a.copy], put) for a, s in self._sums.items()
            },
        }

    def resume(self, saved: Any, get: Get) -> None:
        """Restores the state in flight, after weights and optimizer state of the checkpoint."""
        self._update.optimizer.zero_grad(set_to_none=True)
        for stage in self._stages.values():
            stage.forget()
            if stage.runtime.gradients is not None:
                stage.runtime.gradients.drop()
        self._period, self._told, self._broken = saved["period"], saved["told"], saved["broken"]
        self._options.resume(saved["options"])
        self._interpreter.post.resume(saved["letters"], get)
        self._early = set(map(Action.parse, saved["early"]))
        self._reports = deque(_Report(get(numbers), None) for numbers in saved["reports"])
        self._aside = {key: get_all(own, get) for key, own in saved["aside"].items()}
        begun = {Action.parse(text): sums for text, sums in saved["sums"].items()}
        self._sums = {
            a: Sums.resume(self._stages[a.stage, a.copy], sums, get) for a, sums in begun.items()
        }
        for key, stage in self._stages.items():
            versions, own = saved["stages"][key]
            self.versions[key].resume(versions, get)
            # Run forwards first, because they must not see gradients.
            stage.again(own, get, partial(self.versions[key].again, saved=versions, get=get))
            stage.resume(own, get)

    def _sent_already(self) -> list[Action]:
        """Returns the receives of later periods whose sends have already run."""
        done: list[Action] = []
        size = self._size
        sends = (a for row in self._placement.rows for a in row if a.kind.startswith("SEND"))
        sent = {(*a[:2], a.microbatch % size, a.copy, a.partner): a.microbatch for a in sends}
        receives = [a.microbatch for a in self._row if a.kind.startswith("RECV")]
        periods = max((-(microbatch // size) for microbatch in receives), default=0)
        for period in range(self._period, self._period + periods + 1):
            for action in at_period(self._row, self._size, period):
                if not action.kind.startswith("RECV") or action in self._early:
                    continue
                send = action.counterpart
                key = (*send[:2], send.microbatch % size, send.copy, send.partner)
                if (send.microbatch - sent[key]) // size < self._period:
                    done.append(action)
        return done


def _give(stage: Stage, gradients: Sequence[Tensor | None]) -> None:
    """Sets the gradients of a stage's parameters."""
    for tensor, gradient in zip(stage.weights.updated, gradients, strict=True):
        tensor.grad = gradient


def _later(row: Row, size: int) -> frozenset[tuple[int, int, int]]:
    """Returns stage, copy and microbatch of the sums whose update does not follow immediately."""
    own = [action for action in row if not (action.over or action.names)]
    return frozenset(
        (action.stage, action.copy, action.microbatch % size)
        for action, after in zip(own, (*own[1:], None), strict=True)
        if action.kind == SYNC and (after is None or after != action._replace(kind=UPDATE))
    )
