"""What lies in host memory: chosen like what is computed again, where memory asks for it.

Like that it is one decision of few values, so it is branched on: under each of them the rest is
planned as ever, and one is left out where even without a memory limit its plan is no faster than
the best one found. Nothing is offloaded where the fastest plan fits without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.recompute import run_names
from autopar.ir.units import format_bytes
from autopar.planning.recomputation import faster
from autopar.stage_plan import StagePlan

WORDS = ("optimizer", "activations")
PARTS = 2  # of the blocks of every run, of which activations are offloaded


def cheapest(
    graph: Graph,
    wanted: str,
    limit: float,
    host: float,
    planned: Callable[[Offload, float], StagePlan],
    free: Callable[[Offload], StagePlan],
) -> StagePlan:
    """The fastest plan that fits.

    Args:
        graph: prepared, with its repeats.
        wanted: "none", "auto", "optimizer", "activations", both of these joined by "+", or such as
            "activations 8", of the first eight blocks that are not computed again.
        limit: bytes a device.
        host: bytes of the host that a device has.
        planned: the fastest plan of at most so many bytes with that offloaded; InfeasibleError if
            there is none.
        free: a plan with it that is as fast as any, if memory had no limit.

    Raises:
        InfeasibleError: nothing fits, or the host has too little memory for it.
        PlanError: `wanted` is none of these.
    """
    if wanted != "auto":
        return _within_host(planned(told(graph, wanted), limit), host)
    best: StagePlan | None = None
    missing: InfeasibleError | None = None
    try:
        best = planned(NOTHING, limit)
    except InfeasibleError as error:
        missing = error
    if best is not None and free(NOTHING).predicted.peak_bytes <= limit:
        return best
    for value in _values(graph):
        if best is not None and not faster(free(value), best):
            continue
        try:
            found = _within_host(planned(value, limit), host)
        except InfeasibleError as error:
            missing = error
            continue
        if best is None or faster(found, best):
            best = found
    if best is None:
        assert missing is not None
        raise missing
    return best


def told(graph: Graph, wanted: str) -> Offload:
    """What the words of a user say.

    Raises:
        PlanError: they cannot be read.
    """
    if wanted == "none":
        return NOTHING
    optimizer, blocks = False, dict[str, int]()
    for word in wanted.split("+"):
        kind, _, number = word.strip().partition(" ")
        if kind == "optimizer" and not number:
            optimizer = True
        elif kind == "activations" and (not number or (number.isdecimal() and int(number) > 0)):
            most = int(number) if number else math.inf
            pairs = zip(run_names(graph), graph.repeats, strict=True)
            blocks = {name: int(min(most, repeat.count)) for name, repeat in pairs}
        else:
            raise PlanError(
                f"cannot offload {word!r}",
                todo='pass "optimizer", "activations", "optimizer+activations", such as '
                '"activations 8", "auto" or "none"',
            )
    return Offload(optimizer, blocks)


def check(wanted: str) -> None:
    """PlanError unless `told` understands it, or it is "auto"."""
    if wanted != "auto":
        told(Graph("", (), ()), wanted)


def _values(graph: Graph) -> Iterator[Offload]:
    """What may be offloaded, the least first."""
    yield Offload(optimizer=True)
    pairs = list(zip(run_names(graph), graph.repeats, strict=True))
    for optimizer in (False, True) if pairs else ():
        for part in range(1, PARTS + 1):
            blocks = {name: math.ceil(part / PARTS * repeat.count) for name, repeat in pairs}
            yield Offload(optimizer, blocks)


def _within_host(plan: StagePlan, host: float) -> StagePlan:
    """The plan; InfeasibleError if it needs more of the host than a device has."""
    needed = plan.predicted.host_bytes
    if needed > host:
        raise InfeasibleError(
            "the host has too little memory for what is offloaded",
            why=f"{format_bytes(needed)} a device, of {format_bytes(host)}",
            todo="offload less, or split the states over more devices",
        )
    return plan
