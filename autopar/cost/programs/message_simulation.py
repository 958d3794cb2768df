"""Predicts the time of a collective program: simulates its messages on the levels of the network.

Between two ranks, one message at a time is in flight, in the order of the rounds. A message begins
when its sender has the data. It waits for the latency of the outermost level that it crosses, and
then shares links with all other messages in flight. Each rank has one port out and one port in for
each kind of link. If a single device can use more than its share of the network cards, the devices
of a node share these cards in both directions. Messages share a link equally, and the scarcest link
of a message determines its rate. Adding data at the receiver takes time, if `adding` is given.

With `in_step`, a rank begins a round only when all its messages of the previous round have ended,
like calls on one stream. A round of equal messages of m bytes then takes a + m / b, as in the model
of Thakur, Rabenseifner & Gropp (IJHPCA 19(1), 2005).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.algorithms import Level
from autopar.cost.collectives import written
from autopar.cost.programs.collective_program import CollectiveProgram
from autopar.errors import CollectiveError

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Flow:
    """The messages of a program as arrays, with their dependencies.

    Attributes:
        ranks: number of ranks.
        share: size of a chunk as a fraction of a device's payload.
        source, target: the ranks of each message.
        parts: number of chunks of each message.
        adds: whether the target adds the chunks.
        waits: number of messages that must end before each message begins.
        after: the messages that wait for each message.
        unported: for sources and targets, whether the message leaves its port to another message
            that the switch sums it into, or copies it from.
    """

    ranks: int
    share: float
    source: Numbers
    target: Numbers
    parts: Floats
    adds: NDArray[np.bool_]
    waits: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    unported: tuple[NDArray[np.bool_], NDArray[np.bool_]]

    @classmethod
    def of(cls, program: CollectiveProgram, in_step: bool = False) -> Flow:
        """Returns the messages of a program, numbered round by round."""
        before = _in_step(program) if in_step else _by_data(program)
        rows = [(m.source, m.target, len(m.chunks), m.adds) for m in program.messages]
        return cls.of_messages(program.ranks, program.share, rows, before)

    @classmethod
    def of_messages(
        cls,
        ranks: int,
        share: float,
        rows: Sequence[tuple[int, int, float, bool]],
        before: Sequence[Collection[int]],
        unported: Sequence[tuple[bool, bool]] = (),
    ) -> Flow:
        """Returns given messages with their dependencies.

        Args:
            ranks: number of ranks.
            share: size of a chunk as a fraction of a device's payload.
            rows: source, target, number of chunks of each message, and whether they are added.
            before: for each message, the messages that must end before it begins.
            unported: for each message, whether its source and its target leave it no port, see
                `Flow`; () if all messages have ports.
        """
        after: list[list[int]] = [[] for _ in rows]
        for number, earlier in enumerate(before):
            for other in earlier:
                after[other].append(number)
        return cls(
            ranks,
            share,
            np.array([row[0] for row in rows], np.int64),
            np.array([row[1] for row in rows], np.int64),
            np.array([row[2] for row in rows], np.float64),
            np.array([row[3] for row in rows], np.bool_),
            tuple(map(len, before)),
            tuple(map(tuple, after)),
            (_flags(unported, 0, len(rows)), _flags(unported, 1, len(rows))),
        )


def _flags(unported: Sequence[tuple[bool, bool]], end: int, count: int) -> NDArray[np.bool_]:
    return np.array([row[end] for row in unported] or [False] * count, np.bool_)


def _by_data(program: CollectiveProgram) -> list[set[int]]:
    """Returns for each message the writers of its chunks and the previous message of its ranks."""
    wrote: dict[tuple[int, int], tuple[int, ...]] = {}
    last: dict[tuple[int, int], int] = {}
    found: list[set[int]] = []
    for messages in program.rounds:
        fresh = []
        for source, target, chunks, adds in messages:
            number = len(found)
            earlier = {writer for chunk in chunks for writer in wrote.get((source, chunk), ())}
            if (source, target) in last:
                earlier.add(last[source, target])
            last[source, target] = number
            found.append(earlier)
            fresh.append((number, target, chunks, adds))
        for number, target, chunks, adds in fresh:
            for chunk in chunks:
                kept = wrote.get((target, chunk), ()) if adds else ()
                wrote[target, chunk] = (*kept, number)
    return found


def _in_step(program: CollectiveProgram) -> list[set[int]]:
    """Returns for each message the messages of both of its ranks in the previous round."""
    last: dict[int, list[int]] = {}
    found: list[set[int]] = []
    for messages in program.rounds:
        fresh: dict[int, list[int]] = {}
        for source, target, _, _ in messages:
            number = len(found)
            found.append({*last.get(source, ()), *last.get(target, ())})
            for rank in (source, target):
                fresh.setdefault(rank, []).append(number)
        last.update(fresh)
    return found


@dataclass(frozen=True, eq=False)
class MessageTimes:
    """The times of the messages of a program.

    Attributes:
        seconds: end of the last message.
        begins, ends: seconds at which each message begins and ends, in the order of the program.
    """

    seconds: float
    begins: Floats
    ends: Floats


class _Links:
    """The links that each message uses, and their bandwidths."""

    def __init__(self, flow: Flow, levels: Sequence[Level]) -> None:
        names = {name: i for i, name in enumerate(dict.fromkeys(lv.resource for lv in levels))}
        if len(names) == 1 and "" in names:
            kind = np.arange(len(levels))  # each level has links of its own
        else:
            kind = np.array([names[level.resource] for level in levels], np.int64)
        one, other = flow.source, flow.target
        kinds = len(levels)
        self.level = np.full(len(one), kinds - 1, np.int64)
        inside = [math.prod(lv.size for lv in levels[place + 1 :]) for place in range(kinds)]
        for place in range(kinds - 2, -1, -1):
            self.level[one // inside[place] != other // inside[place]] = place
        rates = np.array([max(level.bandwidth, level.alone) for level in levels])[self.level]
        self.counts = flow.ranks * (kinds + 1) + 1  # the last link stands for none
        self.users = []
        for end, free in zip((one, other), flow.unported, strict=True):
            port = np.where(free, self.counts - 1, end * kinds + kind[self.level])
            self.users.append((port, np.where(free, np.inf, rates)))
        # The network cards of a node, where one device alone may use more than its share.
        shared = np.array([level.alone > level.bandwidth for level in levels])[self.level]
        if shared.any():
            size = np.array(inside)[self.level]
            total = np.array([n * lv.bandwidth for n, lv in zip(inside, levels, strict=True)])
            rate = np.where(shared, total[self.level], np.inf)
            ranks = flow.ranks
            for end in (one, other):
                self.users.append(((end // size) + ranks * self.level, rate))

    def rates(self, active: Numbers) -> Floats:
        """Returns the bandwidth of each active message, in bytes/s."""
        found = np.full(len(active), np.inf)
        for link, rate in self.users:
            here = link[active]
            shares = np.bincount(here, minlength=self.counts)
            np.minimum(found, rate[active] / shares[here], out=found)
        return found


def simulate_messages(
    flow: Flow, levels: Sequence[Level], nbytes: float, adding: float = 0.0, base: float = 0.0
) -> MessageTimes:
    """Simulates the messages of a program over the network, and returns their times.

    Args:
        flow: the messages of the program.
        levels: levels of the network, outermost first; the ranks fill them row by row.
        nbytes: payload of each device before the call.
        adding: seconds per byte that a receiver adds.
        base: seconds of every message in addition to its latency.

    Raises:
        CollectiveError: the program is written for another number of ranks.
    """
    devices = math.prod(level.size for level in levels)
    if devices != flow.ranks:
        raise CollectiveError(
            f"a program of {flow.ranks} ranks cannot run on {devices} devices",
            why="each of its ranks is a device",
        )
    count = len(flow.waits)
    size = flow.parts * flow.share * nbytes
    links, waits = _Links(flow, levels), list(flow.waits)
    latency = np.array([level.latency + base for level in levels])[links.level]
    late = np.where(flow.adds, size * adding, 0.0)
    begins, ends = np.zeros(count), np.zeros(count)
    # (time, message, whether it has ended): the ends of latencies and of additions.
    events = [(float(latency[i]), i, False) for i in range(count) if not waits[i]]
    heapq.heapify(events)
    active, left = np.zeros(0, np.int64), np.zeros(0)
    now = 0.0
    rates = np.zeros(0)
    while events or len(active):
        durations = left / rates
        step = float(durations.min(initial=math.inf))
        if events:
            step = min(step, max(events[0][0] - now, 0.0))
        now += step
        # A message that ends with this step has arrived, despite rounding errors of `now`.
        arrived = durations - step <= 1e-12 * now + 1e-9 * durations
        left = left - rates * step
        limit = now * (1 + 1e-12)
        for number in active[arrived].tolist():
            heapq.heappush(events, (now + float(late[number]), number, True))
        joining: list[int] = []
        while events and events[0][0] <= limit:
            _, number, over = heapq.heappop(events)
            if not over:
                joining.append(number)
                continue
            ends[number] = now
            for later in flow.after[number]:
                waits[later] -= 1
                if not waits[later]:
                    begins[later] = now
                    heapq.heappush(events, (now + float(latency[later]), later, False))
        if joining or arrived.any():
            new = np.array(joining, np.int64)
            active = np.concatenate([active[~arrived], new])
            left = np.concatenate([left[~arrived], size[new]])
            rates = links.rates(active)
    return MessageTimes(now, begins, ends)


@lru_cache(maxsize=64)
def flow_of(
    kind: str, name: str, shape: tuple[int, ...], pieces: int = 1, in_step: bool = False
) -> Flow:
    """Returns the messages of an algorithm's program, cached; see `written`."""
    return Flow.of(written(kind, name, shape, pieces), in_step)
