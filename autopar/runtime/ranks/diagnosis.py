"""Compares the records of ranks to find out which rank waits for which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.runtime.ranks.record import Entry, Record


@dataclass(frozen=True)
class Wait:
    """A rank that waits in an event for ranks that have not begun it.

    Attributes:
        rank: the waiting rank.
        entry: the event that it waits in.
        absent: ranks of the channel that have not reached it.
    """

    rank: int
    entry: Entry
    absent: tuple[int, ...]


@dataclass(frozen=True)
class Disagreement:
    """An event that ranks of a channel execute differently.

    Attributes:
        channel, number: the event.
        entries: the event of each rank that has it.
    """

    channel: str
    number: int
    entries: Mapping[int, Entry]


@dataclass(frozen=True)
class Diagnosis:
    """Conclusions from the records of several ranks.

    Attributes:
        missing: ranks without a record.
        waits: waits of ranks for others.
        behind: ranks that others wait for and that wait for none, including `missing` ones.
        disagreement: the first event that ranks execute differently.
    """

    missing: tuple[int, ...]
    waits: tuple[Wait, ...]
    behind: tuple[int, ...]
    disagreement: Disagreement | None


def diagnose(records: Mapping[int, Record]) -> Diagnosis:
    """Compares the records of ranks of one program; some may be missing.

    A rank waits for those that have begun fewer events of the channel. A rank that others wait for,
    and that waits for none, holds up the others.
    """
    world = max((record.world for record in records.values()), default=0)
    missing = tuple(rank for rank in range(world) if rank not in records)
    waits = tuple(wait for rank in sorted(records) if (wait := _wait(rank, records)) is not None)
    waiting = {wait.rank for wait in waits}
    behind = {rank for wait in waits for rank in wait.absent} - waiting
    return Diagnosis(missing, waits, tuple(sorted(behind)), _disagreement(records))


def _wait(rank: int, records: Mapping[int, Record]) -> Wait | None:
    entry = records[rank].waiting
    if entry is None:
        return None
    absent = tuple(
        other
        for other in records[rank].members.get(entry.channel, ())
        if other not in records or records[other].begun.get(entry.channel, 0) < entry.number
    )
    return Wait(rank, entry, absent) if absent else None


def _disagreement(records: Mapping[int, Record]) -> Disagreement | None:
    """Returns the earliest event of a channel whose ranks call different functions or sizes."""
    events: dict[tuple[str, int], dict[int, Entry]] = {}
    for rank, record in sorted(records.items()):
        for entry in record.events:
            events.setdefault((entry.channel, entry.number), {})[rank] = entry
    differing = [
        key for key, entries in events.items() if len(set(map(_call, entries.values()))) > 1
    ]
    if not differing:
        return None
    first = min(differing, key=lambda key: min(entry.began for entry in events[key].values()))
    return Disagreement(*first, events[first])


def _call(entry: Entry) -> tuple[str, int]:
    # The two ends of a message call different functions with equal sizes.
    return ("message" if ">" in entry.channel else entry.kind), entry.nbytes
