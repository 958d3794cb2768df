"""Measures the algorithms of collectives side by side, for `cost/programs/choice.py`.

All ranks run one call at a time, and it takes as long as its slowest rank. Short calls follow one
another in a run, since ranks do not begin it at quite the same moment. The algorithms and the
library's call take turns, in an order that is drawn anew each time, so that a disturbance of the
machine, or of a call by the one before it, meets all of them. After each round those that are
clearly slower drop out, and the time goes to the rest (successive halving: Jamieson
& Talwalkar, "Non-stochastic Best Arm Identification", AISTATS 2016).
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.cost.calibration import Exchange, Timing
from autopar.cost.programs.choice import KINDS, candidates
from autopar.ir.chosen_algorithms import LIBRARY
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.clocks import timing
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.group import Group
from autopar.runtime.communication.measure import Progress, groups


class Round(NamedTuple):
    """One round of a comparison.

    Attributes:
        least: fewest runs of each algorithm.
        seconds: for how long the fastest is run at least, in at most `MOST` runs.
        within: whose fastest run is slower than that of all by more than this factor drops out.
    """

    least: int
    seconds: float
    within: float


MOST = 100
RUN = 0.01  # seconds of a run of short calls
CALLS = 16  # most calls of a run
SLOWER = 1.01  # than the winner, at least, is a call that dropped out
_JUST_BELOW = 0.999  # factor that keeps a call from winning by the measurement of a larger one
ROUNDS = (Round(2, 0.0, 3.0), Round(3, 0.05, 1.5), Round(5, 0.2, 1.15), Round(12, 0.5, 1.0))
QUICK = (Round(1, 0.0, 3.0), Round(3, 0.0, 1.0))


@dataclass(frozen=True)
class Effort:
    """The extent of a comparison.

    Attributes:
        payloads: bytes per device of each call.
        rounds: in order.
        over: sets of axes in mesh order; () for all.
    """

    payloads: tuple[int, ...]
    rounds: tuple[Round, ...] = ROUNDS
    over: tuple[tuple[str, ...], ...] = ()


def compare(mesh: Mesh, device: torch.device, effort: Effort, progress: Progress) -> list[Exchange]:
    """Returns the times of all algorithms of all collectives over all sets of axes.

    All ranks of the mesh call it with equal arguments and get the same times; see `at_most`.

    Args:
        mesh: a mesh with as many devices as there are processes.
        device: device of this process.
        effort: the extent of the comparison.
        progress: called for each call with its name, its number and the total.

    Raises:
        MeshError: the mesh and the number of processes differ.
    """
    comm, found = Communicator(mesh), list[Exchange]()
    plan = list(itertools.product(effort.over or groups(mesh), KINDS))
    total = len(plan) * len(effort.payloads)
    for number, (axes, kind) in enumerate(plan):
        larger: dict[str, float] = {}
        for place, payload in enumerate(sorted(effort.payloads, reverse=True)):
            name = f"algorithms of {kind} of {payload} bytes over {', '.join(axes)}"
            progress(name, number * len(effort.payloads) + place + 1, total)
            measured = compare_call(comm, device, effort, axes, kind, payload)
            measured = at_most(measured, larger)
            found += measured
            larger = {one.by: one.time.seconds for one in measured}
    return found


def compare_call(
    comm: Communicator,
    device: torch.device,
    effort: Effort,
    axes: tuple[str, ...],
    kind: str,
    payload: int,
) -> list[Exchange]:
    """Returns the times of the library's call and of every algorithm for one payload."""
    names = [LIBRARY, *candidates(kind, tuple(comm.mesh.axis_size(name) for name in axes))]
    count = comm.group(axes).size
    x = torch.zeros(max(payload // 4 // count, 1) * count, device=device)
    runs = {by: prepared(comm.group(axes, by), kind, x) for by in names}
    samples = race(comm.group(comm.mesh.names), device, effort.rounds, runs)
    medians = paired_medians(samples)
    return [
        Exchange(kind, axes, float(x.nbytes), replace(timing(found), seconds=medians[by]), by)
        for by, found in samples.items()
    ]


def paired_medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the median seconds of every call of a race.

    Calls that dropped out early have few samples, from a time when the machine may have been less
    busy. They are compared with the winner's samples of the same turns.
    """
    longest = max(map(len, samples.values()))
    ends = {name: median(own) for name, own in samples.items() if len(own) == longest}
    best = min(ends, key=lambda name: ends[name])
    made = {}
    for name, own in samples.items():
        ratio = median(a / b for a, b in zip(own, samples[best], strict=False))
        made[name] = ends[best] * (ratio if name in ends else max(ratio, SLOWER))
    return made


def at_most(measured: Sequence[Exchange], larger: Mapping[str, float]) -> list[Exchange]:
    """Returns calls that take at most as long as larger ones, of which the fastest stays so.

    Other load on the machine only slows calls down, and not all sizes are measured under the same:
    the fastest takes at most as long as the fastest of the larger ones, and the others are scaled
    with it.

    Args:
        measured: calls of one size.
        larger: the seconds of the same calls of a larger size, by algorithm; {} if there is none.
    """
    fastest = min(one.time.seconds for one in measured)
    scale = min(1.0, _JUST_BELOW * min(larger.values(), default=math.inf) / fastest)
    made = []
    for one in measured:
        seconds = min(scale * one.time.seconds, larger.get(one.by, math.inf))
        made.append(replace(one, time=Timing(seconds, one.time.spread)))
    return made


def race(
    everyone: Group,
    device: torch.device,
    rounds: Sequence[Round],
    runs: Mapping[str, Callable[[], object]],
    kept: Collection[str] = (),
) -> dict[str, list[float]]:
    """Returns the seconds of a call on the slowest rank, in all runs of each.

    Args:
        everyone: all ranks.
        device: device of this rank.
        rounds: rounds of the comparison.
        runs: the calls by name.
        kept: names of calls that never drop out.
    """
    clock = partial(_slowest, everyone, device)
    first = {name: clock(run, 1) for name, run in runs.items()}  # opens connections
    length = RUN if any(each.seconds for each in rounds) else 0.0
    calls = {name: min(max(round(length / took), 1), CALLS) for name, took in first.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    racing, dice = list(runs), random.Random(len(runs))  # the same order on all ranks
    for least, seconds, within in rounds:
        fastest = min(calls[name] * min(samples[name] or [first[name]]) for name in racing)
        for _ in range(max(least, min(round(seconds / fastest), MOST))):
            for name in dice.sample(racing, len(racing)):
                samples[name].append(clock(runs[name], calls[name]))
        # Few runs say little of the median, but other load on the machine only slows them down.
        most = within * min(min(samples[name]) for name in racing)
        racing = [name for name in racing if name in kept or min(samples[name]) <= most]
    return samples


def _slowest(
    everyone: Group, device: torch.device, call: Callable[[], object], times: int
) -> float:
    """Returns the seconds of one of consecutive calls on the slowest rank; all begin together."""
    now = torch.zeros(1, dtype=torch.float64, device=device)
    everyone.maximum(now)
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    now.fill_((time.perf_counter() - began) / times)
    return float(everyone.maximum(now))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepared(group: Group, kind: str, x: Tensor) -> Callable[[], object]:
    """Returns a call with a payload of x on each rank, whose buffers exist."""
    sent, channel = x.clone(), group.calls
    if kind == "all_reduce":
        return lambda: channel.all_reduce(sent)
    if kind == "all_gather":
        out = x.new_empty(group.size * x.numel())
        return lambda: channel.all_gather(out, sent)
    if kind == "reduce_scatter":
        part = x.new_empty(x.numel() // group.size)
        return lambda: channel.reduce_scatter(part, sent)
    taken = torch.empty_like(x)
    return lambda: channel.all_to_all(taken, sent)
