"""The update of whole parameters by their owners, in rounds of one parameter per owner.

While a device updates its parameter of one round, it receives the parameter of the next round and
sends the result of the previous one. The simulation follows the device with the most work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from autopar.cost.work import products_works
from autopar.ir.collective import Collective
from autopar.ir.storage import Hop
from autopar.ir.tensor import TensorType
from autopar.ir.update import Rule, deal
from autopar.simulate.buffers import Buffer, Recorder


@dataclass(frozen=True)
class Owned:
    """A parameter that one device updates for all devices.

    Attributes:
        name: name of its node.
        own: its type in the dtype of the update.
        rule: the rule of its update.
        hops: the collectives that send it to its owner; the last returns the result.
    """

    name: str
    own: TensorType
    rule: Rule
    hops: tuple[Hop, ...]


def most_states(owned: Sequence[Owned], devices: int) -> float:
    """Returns the bytes of whole states on the device that stores most of them."""
    sums = [0.0] * devices
    owners = deal([each.rule.load(each.own.shape) for each in owned], devices)
    for each, owner in zip(owned, owners, strict=True):
        if each.rule.keeps_whole:
            sums[owner] += each.rule.nbytes(each.own)
    return max(sums)


def owned_update(recorder: Recorder, owned: Sequence[Owned], devices: int) -> None:
    """Records the tasks of all rounds of a step.

    Args:
        recorder: records the tasks.
        owned: parameters that owners update, in the order of the program.
        devices: number of owners.
    """
    loads = [each.rule.load(each.own.shape) for each in owned]
    rows: list[list[int]] = [[] for _ in range(devices)]
    for item, owner in enumerate(deal(loads, devices)):
        rows[owner].append(item)
    rows.sort(key=lambda row: -sum(loads[item] for item in row))
    rounds = [[None if item is None else owned[item] for item in row] for row in zip_longest(*rows)]
    arrival = _sent(recorder, rounds[0], slice(None, -1), -1) if rounds else -1
    results: list[tuple[int, Buffer | None]] = []
    for number, row in enumerate(rounds):
        mine, arrived = row[0], arrival
        if number + 1 < len(rounds):
            arrival = _sent(recorder, rounds[number + 1], slice(None, -1), arrived)
        whole: Buffer | None = None
        if mine is not None:
            works = products_works(mine.rule.products, mine.own)
            recorder.compute(f"update of {mine.name} by its owner", mine.name, works, [arrived])
            whole = recorder.hold(recorder.allocate("temporary", mine.name, float(mine.own.nbytes)))
            recorder.scratch("temporary", f"for {mine.name}", 2.0 * mine.own.nbytes)
        results.append((_sent(recorder, row, slice(-1, None), arrival), whole))
    for task, whole in results:
        recorder.compute("results of owners", "", (), [task])
        if whole is not None:
            recorder.drop(whole)


def _sent(recorder: Recorder, row: Sequence[Owned | None], hops: slice, before: int) -> int:
    """Launches the all_to_all of a round; returns its position."""
    items = [each for each in row if each is not None]
    calls = [hop.call for each in items for hop in each.hops[hops]]
    call: Collective = replace(calls[0], nbytes=sum(call.nbytes for call in calls))
    title = f"{call.kind} of {items[0].name}" + f" and {len(items) - 1} others" * (len(items) > 1)
    with recorder.aside():
        return recorder.launch(title, items[0].name, call, "parameter", [before])
