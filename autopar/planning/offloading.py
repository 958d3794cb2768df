"""Chooses the tensors to offload to host memory, if memory requires it.

Like recomputation, offloading is one decision with few values, so the planner branches on it: the
rest is planned under each value. A value is skipped if even without a memory limit its plan is no
faster than the best plan so far. Nothing is offloaded if the fastest plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.offload import NOTHING, Offload
from autopar.ir.recompute import run_names
from autopar.ir.units import format_bytes, parse_whole
from autopar.planning.recomputation import Branch, faster
from autopar.stage_plan import StagePlan

KINDS = ("optimizer", "activations")
PARTS = 2  # fractions of a run's blocks to try: halves


def cheapest(
    graph: Graph,
    wanted: str,
    limit: float,
    host: float,
    planned: Callable[[Offload, float], StagePlan],
    branch: Callable[[Offload], Branch],
) -> StagePlan:
    """Returns the fastest plan that fits in device and host memory.

    Args:
        graph: the prepared graph with its repeats.
        wanted: "none", "auto", "optimizer", "activations", both joined by "+", or with a number,
            such as "activations 8": the first eight blocks that are not recomputed.
        limit: bytes of a device.
        host: bytes of host memory for each device.
        planned: returns the fastest plan with something offloaded within a number of bytes, or
            raises InfeasibleError.
        branch: returns planning with something offloaded.

    Raises:
        InfeasibleError: nothing fits, or host memory is too small.
        PlanError: `wanted` cannot be parsed.
    """
    if wanted != "auto":
        return within_host(planned(parse_offload(graph, wanted), limit), host)
    best: StagePlan | None = None
    missing: InfeasibleError | None = None
    try:
        best = planned(NOTHING, limit)
    except InfeasibleError as error:
        missing = error
    if best is not None and branch(NOTHING).free().predicted.peak_bytes <= limit:
        return best
    for value in _values(graph):
        if best is not None and not branch(value).beats(best):
            continue
        try:
            plan = within_host(planned(value, limit), host)
        except InfeasibleError as error:
            missing = error
            continue
        if best is None or faster(plan, best):
            best = plan
    if best is None:
        assert missing is not None
        raise missing
    return best


def parse_offload(graph: Graph, wanted: str) -> Offload:
    """Parses an option such as "optimizer+activations 8".

    Raises:
        PlanError: it cannot be parsed.
    """
    if wanted == "none":
        return NOTHING
    optimizer, blocks = False, dict[str, int]()
    for part in wanted.split("+"):
        kind, _, number = part.strip().partition(" ")
        if kind == "optimizer" and not number:
            optimizer = True
        elif kind == "activations" and (not number or parse_whole(number)):
            most = parse_whole(number) or math.inf
            pairs = zip(run_names(graph), graph.repeats, strict=True)
            blocks = {name: int(min(most, repeat.count)) for name, repeat in pairs}
        else:
            raise PlanError(
                f"cannot offload {part!r}",
                todo='pass "optimizer", "activations", "optimizer+activations", '
                '"activations 8", "auto" or "none"',
            )
    return Offload(optimizer, blocks)


def check(wanted: str) -> None:
    """Raises PlanError unless `wanted` is "auto" or can be parsed."""
    if wanted != "auto":
        parse_offload(Graph("", (), ()), wanted)


def _values(graph: Graph) -> Iterator[Offload]:
    """Yields the offloads to try, the smallest first."""
    yield Offload(optimizer=True)
    pairs = list(zip(run_names(graph), graph.repeats, strict=True))
    for optimizer in (False, True) if pairs else ():
        for part in range(1, PARTS + 1):
            blocks = {name: math.ceil(part / PARTS * repeat.count) for name, repeat in pairs}
            yield Offload(optimizer, blocks)


def within_host(plan: StagePlan, host: float) -> StagePlan:
    """Returns the plan; raises InfeasibleError if it needs more host memory than there is."""
    needed = plan.predicted.host_bytes
    if needed > host:
        raise InfeasibleError(
            "host memory is too small for this offload",
            why=f"a device needs {format_bytes(needed)} of {format_bytes(host)}",
            todo="offload less, or split the states over more devices",
        )
    return plan
