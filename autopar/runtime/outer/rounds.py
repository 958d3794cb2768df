"""Rounds: counts local steps, and synchronises replicas at the end of a round.

Replicas exchange further data (losses, seconds, numbers that must be equal) together with the
messages, so that steps wait for the slow axes only at the end of a round. Data about other replicas
therefore describes the last round, or with a late method the round before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.ir.replicas.tau import Tau
from autopar.ir.update import OUTER
from autopar.runtime.outer.buckets import Bucket
from autopar.runtime.outer.method import LateMethod, LearningRates, Method, PromptMethod
from autopar.runtime.outer.round_clock import FEW, RoundClock, best_tau
from autopar.runtime.outer.survivors import Survivors
from autopar.runtime.ranks.channel import Channel, PendingCall

_STEADY = 0.1  # relative change of seconds that changes nothing
_LOSS, _STEP, _SYNC, _TAKEN = range(4)  # positions in a replica's report


@dataclass(frozen=True)
class Report:
    """Measurements of the last round, equal on every rank.

    Attributes:
        number: number of completed rounds.
        tau: steps of the next round.
        loss: mean over replicas and steps of the last round that all have reported; NaN before.
        step_seconds: seconds of a local step on the slowest device, with or without messages.
        sync_seconds: seconds from the first send to the last arrival on the slowest device.
        waited: seconds that this rank waited at the end of the last round.
        taken_seconds: seconds of a round, which a synchronisation takes from the steps of the
            slowest device although it overlaps: the outer update, and slower steps.
    """

    number: int = 0
    tau: int = 1
    loss: float = math.nan
    step_seconds: float = 0.0
    sync_seconds: float = 0.0
    waited: float = 0.0
    taken_seconds: float = 0.0


class Rounds:
    """The rounds of one device.

    Args:
        method: the outer method.
        tau: steps of a round.
        buckets: this device's tensors.
        channel: the peers; None for a single replica.
        slowest: returns the largest of some numbers over the devices of the replica.
        settle: updates the stored parameters from changed tensors.
        survivors: continues without lost replicas; None if all stop.

    Attributes:
        report: report of the last round.
        steps: number of steps so far.
        at: number of steps in this round.
        count: number of replicas.
    """

    def __init__(
        self,
        method: Method,
        tau: Tau,
        buckets: Sequence[Bucket],
        channel: Channel | None,
        slowest: Callable[[Tensor], Tensor],
        settle: Callable[[], None],
        survivors: Survivors | None = None,
    ) -> None:
        self.survivors = survivors if channel is not None else None
        self.method, self.buckets, self.channel = method, list(buckets), channel
        self._tau, self._slowest, self._settle = tau, slowest, settle
        self.count = 1 if channel is None else len(channel.ranks)
        self.steps, self.at, self.highest = 0, 0, 0.0
        self.first_loss, self._sync = math.nan, 0.0
        self._device = self.buckets[0].device if self.buckets else torch.device("cpu")
        self._losses = torch.zeros((), dtype=torch.float64, device=self._device)
        self._facts: Tensor | None = None  # of all replicas, and of this one
        self._told = torch.empty(0)
        self._telling: PendingCall | None = None
        self._departed, self.clock = 0.0, RoundClock()
        self.report = self._first()

    def step(self, loss: Tensor, rate: float) -> None:
        """Counts a local step and runs the synchronisation that is due after it.

        Args:
            loss: loss of this replica.
            rate: the inner learning rate.
        """
        self.clock.arrived(self._sending)
        self.steps += 1
        self.at += 1
        self._losses += loss.detach().double()
        self.highest = max(self.highest, rate)
        now = LearningRates(rate, self.highest or 1.0)
        self._look()
        if isinstance(self.method, PromptMethod):
            self._prompt(self.method, now)
        elif isinstance(self.method, LateMethod) and self.at >= self.report.tau:
            self._exchange(self.method, now)
        if self.at >= self.report.tau:
            self._end()
        self.clock.left(self._sending)

    @property
    def _sending(self) -> bool:
        return not all(bucket.is_sent for bucket in self.buckets)

    def _look(self) -> None:
        """Records the time at which all messages have arrived."""
        if self._departed and not self._sending:
            self._sync, self._departed = time.perf_counter() - self._departed, 0.0

    # Synchronisation ------------------------------------------------------------------------------

    def _prompt(self, method: PromptMethod, now: LearningRates) -> None:
        """Sends and applies the fragments that are due."""
        tau, count = self.report.tau, method.fragments
        changed = False
        for fragment in range(count):
            due = -(-(fragment + 1) * tau // count)
            own = [bucket for bucket in self.buckets if bucket.fragment == fragment]
            if self.at == max(1, due - method.delay) and due != self.at:
                self._depart()
                for bucket in own:
                    self._send(bucket, method.outgoing(bucket.values(), bucket.states))
            if self.at == due:
                if self.survivors is not None:
                    self._send_all(method, own)
                    self._gathered(own, self.survivors)
                for bucket in own:
                    self._use(method, bucket, now)
                changed = True
        if changed:
            self._settle()

    @torch.no_grad()
    def _send_all(self, method: PromptMethod, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.message is None:
                self._depart()
                self._send(bucket, method.outgoing(bucket.values(), bucket.states))

    def _gathered(self, buckets: Sequence[Bucket], survivors: Survivors) -> None:
        """Waits for sums; if replicas are lost, all that is in flight is added up without them."""
        with self.clock.waiting():
            self._agree(buckets, survivors)

    def _agree(self, buckets: Sequence[Bucket], survivors: Survivors) -> None:
        waiting = [bucket for bucket in buckets if bucket.work is not None]
        while not survivors.agree(self._works(waiting)):
            flying = [bucket for bucket in self.buckets if bucket.work is not None]
            self.channel = survivors.regroup(self._works(flying))
            self.count = 1 if self.channel is None else len(self.channel.ranks)
            for bucket in flying:
                assert bucket.sent is not None
                bucket.work = None
                self._send(bucket, bucket.sent.clone())
            if self._facts is not None:
                self._facts = self._told.clone()
                self._share()
        for bucket in waiting:
            bucket.arrive(self.count, self.method.quantised)

    def _works(self, buckets: Sequence[Bucket]) -> list[PendingCall]:
        works = [bucket.work for bucket in buckets]
        return [work for work in (*works, self._telling) if work is not None]

    @torch.no_grad()
    def _use(self, method: PromptMethod, bucket: Bucket, now: LearningRates) -> None:
        values = bucket.values()
        if bucket.message is None:
            self._depart()
            self._send(bucket, method.outgoing(values, bucket.states))
        self._arrive(bucket)
        assert bucket.message is not None
        for x, average, states in bucket.chunks(values, bucket.message):
            method.update(x, average, states, now)
        bucket.give(values)
        bucket.message = None

    @torch.no_grad()
    def _exchange(self, method: LateMethod, now: LearningRates) -> None:
        """Ends a round of a late method."""
        if self.survivors is not None:
            self._gathered(self.buckets, self.survivors)
        for bucket in self.buckets:
            arrived = bucket.message is not None
            self._arrive(bucket)
            values = bucket.values()
            if bucket.message is None:
                bucket.message = torch.empty_like(values)
            for x, message, states in bucket.chunks(values, bucket.message):
                method.exchange(x, message, arrived, states, now)
            bucket.give(values)
        self._note()
        self._depart()
        for bucket in self.buckets:
            assert bucket.message is not None
            self._send(bucket, bucket.message)
        self._settle()

    def _depart(self) -> None:
        self._departed = self._departed or time.perf_counter()

    def _note(self) -> None:
        if self._departed:
            self._sync, self._departed = time.perf_counter() - self._departed, 0.0

    def _send(self, bucket: Bucket, message: Tensor) -> None:
        if self.survivors is not None:
            bucket.sent = message.clone()
        if self.channel is None:
            bucket.message = message
        else:
            bucket.send(message, self.channel, self.method.quantised)

    def _arrive(self, bucket: Bucket) -> None:
        with self.clock.waiting():
            bucket.arrive(self.count, self.method.quantised)

    # The end of a round -------------------------------------------------------------------------

    def _end(self) -> None:
        """Exchanges reports with the other replicas and starts the next round."""
        if not self.method.late:
            self._note()
        if self.method.late:
            heard = self._hear()
            self._tell()
        else:
            self._tell()
            heard = self._hear()
        report = replace(self.report, number=self.report.number + 1, waited=self.clock.waited)
        measured = report.tau
        if heard is not None:
            loss, step, sync, taken = heard
            if math.isnan(self.first_loss):
                self.first_loss = loss
            if sync > 0:  # no message has arrived before a late method's first report
                measured = self._measured(sync, step, taken)
            report = replace(
                report, loss=loss, step_seconds=step, sync_seconds=sync, taken_seconds=taken
            )
        self.report = replace(report, tau=self._choose(report.loss, measured))
        self.at = 0
        self.clock.start()
        self._losses.zero_()

    def _measured(self, sync: float, step: float, taken: float) -> int:
        late, before = self.method.late, self.report.tau
        sync *= 1 + _STEADY * late  # a late message is exposed
        best = best_tau(sync, step, late, taken)
        return before if (1 - _STEADY) * before <= best <= before else best

    def _first(self) -> Report:
        """Returns the report before the first round.

        If tau is measured, the first round is long enough to measure steps without a message: later
        rounds may have no such steps.
        """
        return Report(tau=self._choose(math.nan, FEW))

    def _choose(self, loss: float, measured: int) -> int:
        return self._tau.steps_at(self.steps, loss, self.first_loss, measured)

    def _tell(self) -> None:
        seconds = [self.clock.step, self._sync, self.clock.taken]
        rest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        self._facts = torch.cat([(self._losses / self.at).view(1), rest])
        self._facts[_STEP:] = self._slowest(self._facts[_STEP:])
        self._told = self._facts.clone()
        self._share()

    def _share(self) -> None:
        """Starts the sum of the reports."""
        assert self._facts is not None
        self._telling = None
        if self.channel is not None:
            self._telling = self.channel.all_reduce_async(self._facts)

    def _hear(self) -> list[float] | None:
        """Returns the means of the replicas' reports; None if no replica has reported."""
        if self._facts is None:
            return None
        if self._telling is not None and self.survivors is not None:
            self._gathered((), self.survivors)
        if self._telling is not None:
            with self.clock.waiting():
                self._telling.wait()
            self._telling = None
        means: list[float] = (self._facts / self.count).tolist()
        self._facts = None
        return means

    # State --------------------------------------------------------------------------------------

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of the outer method, by the names of their states in the update."""
        for bucket in self.buckets:
            for name, value in (
                *bucket.states.items(), ("message", bucket.message), ("sent", bucket.sent)
            ):  # fmt: skip
                if value is not None:
                    yield OUTER + name, value

    def settle(self) -> None:
        """Waits for messages in flight without applying them."""
        if self.survivors is not None:
            self._gathered(self.buckets, self.survivors)
        for bucket in self.buckets:
            bucket.arrive(self.count, self.method.quantised)
        if self._telling is not None:
            self._telling.wait()
            self._telling = None

    def restart(self) -> None:
        """Restarts from the current parameters."""
        self.settle()
        for bucket in self.buckets:
            bucket.restart(self.method)
        self.steps, self.at, self.highest, self.first_loss = 0, 0, 0.0, math.nan
        self._facts, self._departed = None, 0.0
        self.clock.start()
        self._losses.zero_()
        self.report = self._first()

    @property
    def losses(self) -> Tensor:
        """This replica's sum of losses in the round, f64[1]; it may be overwritten."""
        return self._losses.view(1)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that replicas share, without buckets; messages must be settled."""
        return {
            "steps": self.steps, "at": self.at, "highest": self.highest,
            "first_loss": self.first_loss, "report": vars(self.report).copy(),
            "facts": None if self._facts is None else self._facts.tolist(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state."""
        self.steps, self.at = int(state["steps"]), int(state["at"])
        self.highest, self.first_loss = float(state["highest"]), float(state["first_loss"])
        self.report = Report(**state["report"])
        facts = state["facts"]
        self._facts = None
        if facts is not None:
            self._facts = torch.tensor(facts, dtype=torch.float64, device=self._device)
        self._departed = 0.0
        self.clock.start()
