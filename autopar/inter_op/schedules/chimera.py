"""Chimera: two copies of the model, pipelines in opposite directions (arXiv:2107.06925)."""

from __future__ import annotations

from functools import partial

from autopar.errors import ScheduleError
from autopar.inter_op.schedule import Row, Rows, Schedule, Times, check_sizes, fraction
from autopar.ir.action import Action

NAME = "chimera"
NEEDS = "an even number of ranks, an even number of microbatches; two copies of the model"


def schedule(ranks: int, microbatches: int) -> Schedule:
    """Returns Chimera's rows, as a direct concatenation of units of D microbatches.

    Rank r holds stage r of the first copy and stage D-1-r of the second. The first half of each
    unit's microbatches runs on the first copy, the second half on the second.

    Raises:
        ScheduleError: there is no rank or no microbatch, or either number is odd.
    """
    check_sizes(NAME, ranks, microbatches)
    if ranks % 2 or microbatches % 2:
        raise ScheduleError(
            f"{NAME}: {ranks} ranks and {microbatches} microbatches",
            why="half of the microbatches go through each direction, and where the directions meet"
            " each needs the slots that the other leaves; both numbers must be even",
            todo=f"use {ranks + ranks % 2} ranks and {microbatches + microbatches % 2}"
            " microbatches, or another schedule",
        )
    rows = Rows(lambda: [_row(rank, ranks, microbatches) for rank in range(ranks)])
    placement = (tuple(range(ranks)), tuple(reversed(range(ranks))))
    most = [ranks // 2 + 1 + min(rank, ranks - 1 - rank) for rank in range(ranks)]
    in_flight = tuple(min(count, microbatches) for count in most)
    closed = partial(bubble, ranks, microbatches)
    return Schedule(NAME, ranks, microbatches, rows, placement, in_flight, closed)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    """Merges both directions by time slot, where forwards and backwards take one slot each.

    On its own, a direction runs the forward of its m-th microbatch on stage s in slot s + 2m, and
    the backward in slot 2D - 1 - s + 2m. For even D the two directions use slots of different
    parity. Each unit starts 2D slots after the previous one.
    """
    slots = []
    half = ranks // 2
    for copy in (0, 1):
        stage = ranks - 1 - rank if copy else rank
        for number in range(microbatches // 2):
            unit, place = divmod(number, half)
            size = min(half, microbatches // 2 - unit * half)
            batch = unit * ranks + copy * size + place
            begin = 2 * ranks * unit + 2 * place
            slots.append((begin + stage, Action("F", stage, batch, copy)))
            slots.append((begin + 2 * ranks - 1 - stage, Action("B", stage, batch, copy)))
    return tuple(action for _, action in sorted(slots))


def bubble(ranks: int, microbatches: int, times: Times) -> float | None:
    """Returns the fraction of (D-2) (max(F, B) + (u-1) |F-B|) idle seconds, for u whole units.

    If a backward B takes as long as a forward F, it is (D-2)/(D-2+2N); if it takes twice as long
    and there is one unit, (D-2)/(D-2+3N/2). Both are published. The gaps between units for
    different F and B are the reason why Chimera can also double forwards or halve backwards.
    Returns None if the microbatches do not form whole units.
    """
    units, rest = divmod(microbatches, ranks)
    if rest:
        return None
    backward = times.input + times.weight
    gaps = max(times.forward, backward) + (units - 1) * abs(times.forward - backward)
    return fraction((ranks - 2) * gaps, microbatches * times.total)
