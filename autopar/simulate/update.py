"""The optimizer of a simulated step; its state may come from host memory, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.work import optimizer_work
from autopar.ir.offload import rows
from autopar.simulate.memory import Buffer, Recorder
from autopar.simulate.settings import Settings


@dataclass(frozen=True)
class Updated:
    """What this device updates of a parameter: the node, bytes, and their dtype."""

    name: str
    nbytes: float
    dtype: str


@dataclass
class _Away:
    """The state of some parameters, on its way: its buffer, and the task that moves it, or -1."""

    buffer: Buffer
    task: int


def update(
    recorder: Recorder, settings: Settings, trained: Sequence[Updated], bucket: int | None
) -> None:
    """Play the optimizer's phase.

    Args:
        recorder: takes the tasks.
        settings: of the step.
        trained: what has a gradient.
        bucket: bytes of parameters whose state comes together; None where it is on the device.
    """
    recorder.phase = "optimizer"
    if bucket is None:
        _step(recorder, settings, trained)
        return
    buckets = list(rows(trained, bucket))
    coming = _come(recorder, settings, buckets, 0)
    going: _Away | None = None
    for number, row in enumerate(buckets):
        here = coming
        if here is not None and here.task >= 0:
            recorder.compute("wait for optimizer state", "", (), [here.task])
        if settings.accelerator:
            coming = _come(recorder, settings, buckets, number + 1)
        _step(recorder, settings, row)
        if going is not None:
            _gone(recorder, going)
        going = None if here is None else _go(recorder, settings, here)
        if not settings.accelerator:
            coming = _come(recorder, settings, buckets, number + 1)
    if going is not None:
        _gone(recorder, going)


def _step(recorder: Recorder, settings: Settings, trained: Sequence[Updated]) -> None:
    """One step of the optimizer."""
    groups = [list(trained)] if settings.at_once and trained else [[each] for each in trained]
    last: Buffer | None = None
    for group in groups:
        nbytes = sum(each.nbytes for each in group)
        name = "update" if settings.at_once else f"update of {group[0].name}"
        work = optimizer_work(nbytes, settings.state_bytes, group[0].dtype)
        recorder.compute(name, "", (work,))
        recorder.scratch("temporary", f"of {name}", nbytes * max(settings.update_bytes - 1, 0.0))
        # The loop's variable keeps it until the next parameter has its own.
        kept = recorder.hold(recorder.allocate("temporary", f"in {name}", nbytes))
        if last is not None:
            recorder.drop(last)
        last = kept
    if last is not None:
        recorder.drop(last)


def _come(
    recorder: Recorder, settings: Settings, buckets: Sequence[Sequence[Updated]], number: int
) -> _Away | None:
    """The state of a bucket comes."""
    if number >= len(buckets) or not settings.state_bytes:
        return None
    nbytes = settings.state_bytes * sum(each.nbytes for each in buckets[number])
    title = f"state of {buckets[number][0].name}"
    with recorder.aside(settings.accelerator):
        task = recorder.copy(title, nbytes, True, not settings.accelerator)
        return _Away(recorder.hold(recorder.allocate("optimizer", title, nbytes)), task)


def _go(recorder: Recorder, settings: Settings, here: _Away) -> _Away:
    """It goes back."""
    with recorder.aside(settings.accelerator):
        nbytes = here.buffer.nbytes
        task = recorder.copy(here.buffer.name, nbytes, False, not settings.accelerator)
    if task < 0:
        recorder.drop(here.buffer)
    return _Away(here.buffer, task)


def _gone(recorder: Recorder, away: _Away) -> None:
    """Its memory is free for what is computed next."""
    if away.task >= 0:
        recorder.compute("wait for the host", "", (), [away.task])
        recorder.drop(away.buffer)
