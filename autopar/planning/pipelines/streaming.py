"""Prices of asynchronous schedules: additional weight versions, and more updates.

A stage may hold older versions of its weights, gradients that no update has used yet, and for a
corrected backward the velocity of the weights. `copies_of` counts them by the rows that run. A
search for stages does not have the rows of its ranks yet; `Streamed` provides the same counts by
the number of microbatches that a rank keeps in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from autopar.errors import ScheduleError
from autopar.inter_op.complete import complete, with_sends
from autopar.inter_op.schedule import Schedule
from autopar.intra_op.node_choices import Option
from autopar.intra_op.states import StateChoice
from autopar.ir.action import SYNC, UPDATE, Row
from autopar.ir.collective import Collective
from autopar.ir.fusion import UPDATE as KERNEL
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline_step import Edge, Wiring, in_update, unrolled, versions
from autopar.ir.precision import Precision
from autopar.ir.storage import Storage
from autopar.ir.tensor import TensorType
from autopar.planning.options import Options
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.stage_plan import StagePlan

_CORRECTED = 2  # the velocity of the weights, and their values before an update


@dataclass(frozen=True)
class Copies:
    """Tensors of the size of trained parameters besides weights, gradients and optimizer state.

    Attributes:
        held: number of copies in the layout and dtype in which a parameter is stored.
        updated: number of copies in the layout and dtype in which the optimizer updates it.
    """

    held: float = 0.0
    updated: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.held or self.updated)

    def of(self, storage: Storage, tensor: TensorType, mesh: Mesh, precision: Precision) -> float:
        """Returns their bytes on a device for one parameter."""
        held, updated = _bytes(storage, tensor, mesh, precision)
        return self.held * held + self.updated * updated

    def of_choices(
        self, graph: Graph, mesh: Mesh, name: str, options: Sequence[Option], precision: Precision
    ) -> tuple[float, ...]:
        """Returns their bytes on a device for every choice of a node, 0 unless it is trained."""
        node = graph[name]
        if not self or options[0].stored is None or not node.requires_grad:
            return (0.0,) * len(options)
        storages = [option.storage for option in options if option.storage is not None]
        own = (self.of(storage, node.type, mesh, precision) for storage in storages)
        return tuple(graph.multiplicity[name] * nbytes for nbytes in own)

    def in_plan(self, graph: Graph, plan: StagePlan) -> float:
        """Returns their bytes on a device for all trained parameters of a stage."""
        return sum(
            graph.multiplicity[node.name] * self.of(storage, node.type, plan.mesh, plan.precision)
            for node, storage in (_trained(graph, plan) if self else ())
        )


NO_COPIES = Copies()


def _bytes(
    storage: Storage, tensor: TensorType, mesh: Mesh, precision: Precision
) -> tuple[float, float]:
    updated = precision.updated(tensor, True)
    return (
        float(storage.held.local_bytes(tensor, mesh)),
        float(storage.updated.local_bytes(updated, mesh)),
    )


def copies_of(schedule: Schedule, wiring: Wiring | None = None) -> tuple[Copies, ...]:
    """Returns the copies that every stage holds under a schedule, from its complete rows.

    A corrected backward also computes the weights that it runs on, a stored tensor for its time.

    Args:
        schedule: schedule of the pipeline.
        wiring: connections of the stages; None for a chain.
    """
    if schedule.flushes:
        return (NO_COPIES,) * schedule.stages
    rows, corrected = with_sends(schedule, wiring).rows, schedule.adjustment.decay > 0
    found = []
    for stage, rank in enumerate(schedule.placement[0]):
        sums = tuple(a for a in rows[rank] if a.kind in (*"BW", SYNC, UPDATE))
        (run,) = unrolled([sums], schedule.microbatches, schedule.warm_up + 2)
        held = versions([rows[rank]])[stage, 0] - 1 + corrected
        updated = schedule.pending + _aside(run) + _CORRECTED * corrected
        found.append(Copies(held, updated))
    return tuple(found)


def _aside(row: Row) -> int:
    """Returns the largest number of sums that wait for their update while a backward runs."""
    most = waiting = 0
    for action in (one for one in row if not (one.over or one.names)):
        waiting += (action.kind == SYNC) - (action.kind == UPDATE and waiting > 0)
        if action.kind in "BW":
            most = max(most, waiting)
    return most


def late_sums(
    graph: Graph, plan: StagePlan, outer: int, price: Callable[[Collective], float]
) -> tuple[float, float]:
    """Returns the seconds of the sums of one update that a stage waits for, and of the late ones.

    All gradients that are summed over the same axes go as one message; see
    `runtime/pipeline/sums.py`.

    Args:
        graph, plan: graph and plan of the stage.
        outer: see `Schedule`.
        price: seconds of a collective.
    """
    axes = [axis.name for axis in plan.mesh.axes if axis.size > 1]
    late = axes[:outer] if 0 < outer < len(axes) else axes
    sizes: dict[tuple[str, ...], int] = {}
    for node, storage in _trained(graph, plan):
        hops = storage.hops(node.type, plan.mesh, plan.microbatches, True, plan.precision)
        for hop in (hop for hop in hops if hop.when == "reduce"):
            nbytes = graph.multiplicity[node.name] * hop.call.nbytes
            sizes[hop.call.axes] = sizes.get(hop.call.axes, 0) + nbytes
    seconds = [0.0, 0.0]
    for every, nbytes in sizes.items():
        for number, wanted in enumerate((set(axes) - set(late), set(late))):
            if part := tuple(axis for axis in every if axis in wanted):
                seconds[number] += price(Collective("all_reduce", part, nbytes))
    return seconds[0], seconds[1]


def _trained(graph: Graph, plan: StagePlan) -> Iterator[tuple[Node, Storage]]:
    """Yields the trained parameters of a stage with their storage."""
    for node in graph.folded:
        if node.op == "param" and node.requires_grad and graph.users[node.name]:
            yield node, plan.storage(node.name, graph.template[graph.users[node.name][0]])


def taken(schedule: Schedule) -> int:
    """Returns the number of microbatches whose gradients one update of a stage takes."""
    return schedule.microbatches if schedule.flushes else in_update(schedule.rows)[0, 0]


@dataclass(frozen=True)
class Streamed:
    """An asynchronous schedule, as prices of stages see it.

    Attributes:
        text: its name with options; "" for any synchronous schedule.
        tied: whether the first and the last stage share parameters.
    """

    text: str = ""
    tied: bool = False

    def made(self, ranks: int, microbatches: int) -> Schedule | None:
        """Returns the schedule; None if it does not take these sizes, or there is none."""
        return _made(self.text, ranks, microbatches) if self.text else None

    def taken(self, microbatches: int) -> int:
        """Returns the microbatches of an update."""
        schedule = self.made(1, microbatches)
        return microbatches if schedule is None else taken(schedule)

    @property
    def late(self) -> bool:
        """Returns whether sums of gradients arrive during later steps."""
        schedule = self.made(1, 4)
        return schedule is not None and schedule.pending > 0

    def copies(self, ranks: int, microbatches: int) -> tuple[Copies, Copies]:
        """Returns the copies of a rank with one microbatch in flight, and per further microbatch.

        They are exact if the number of versions is linear in the microbatches in flight, as in all
        published methods; otherwise they are the maximum of any rank.
        """
        return _copies(self, ranks, min(microbatches, 4 * ranks))


FLUSHED = Streamed()


@cache
def _made(text: str, ranks: int, microbatches: int) -> Schedule | None:
    try:
        return schedule_of(text, ranks, microbatches)
    except ScheduleError:
        return None


@cache
def _copies(streamed: Streamed, ranks: int, microbatches: int) -> tuple[Copies, Copies]:
    schedule = streamed.made(ranks, microbatches) or streamed.made(ranks, ranks)
    if schedule is None or schedule.flushes:
        return NO_COPIES, NO_COPIES
    wiring = _ends_tied(ranks) if streamed.tied and ranks > 1 else None
    every = copies_of(schedule, wiring)
    updated = max(one.updated for one in every)
    flight = np.array(schedule.in_flight, float)
    held = np.array([one.held for one in every])
    slope = 0.0
    if np.ptp(flight):
        slope = float((held[0] - held[-1]) / (flight[0] - flight[-1]))
    constant = held - slope * flight
    if np.ptp(constant) > 1e-9:
        slope, constant = 0.0, held
    return Copies(float(constant.max()) + slope, updated), Copies(slope)


def _ends_tied(ranks: int) -> Wiring:
    """Returns a chain of stages whose first and last share a parameter."""
    tied = [("shared",) if rank in (0, ranks - 1) else () for rank in range(ranks)]
    return Wiring(tuple(Edge(n, n + 1) for n in range(ranks - 1)), tuple(tied))


def trains_shared(text: str) -> bool:
    """Returns whether a schedule can train parameters that its first and last stage share."""
    for ranks in (2, 3, 4):
        schedule = _made(text, ranks, 2 * ranks)
        try:
            if schedule is not None:
                complete(schedule, _ends_tied(ranks))
        except ScheduleError:
            return False
    return True


def options_for(options: Options, schedule: Schedule) -> Options:
    """Returns options under which stages run a schedule; see `runtime/pipeline/refusals.py`.

    Older versions of weights, and their correction, are held whole, so parameters are not split;
    nothing is recomputed on weights that have changed. A choice of the user is kept, and refused
    where the program is made.
    """
    if schedule.flushes:
        return options
    if options.state is None:
        whole = schedule.adjustment.decay or schedule.pending
        options = replace(options, state="ddp" if whole else "zero1")
    if not schedule.stashes and options.recompute == "auto":
        options = replace(options, recompute="none")
    return options


def obstacle(schedule: Schedule, options: Options, mesh: Mesh) -> str:
    """Returns why a program under these options cannot run a schedule, "" if it can.

    Args:
        schedule: any schedule.
        options: from `options_for`.
        mesh: the devices.
    """
    if schedule.flushes:
        return ""
    precision = options.precision
    split = StateChoice.read(options.state or "ddp", mesh.parts[0]).sharding
    masters = bool(precision.compute) and precision.compute != precision.master
    reasons = {
        "a rank holds several stages": any(len(held) > 1 for held in schedule.holds),
        "float16 needs one scale for all stages": precision.scaled,
        "the optimizer updates whole parameters": options.update.mixes,
        "the kernel of AdamW's step takes whole steps": KERNEL in options.fuse,
        "optimizer state lies in host memory": "optimizer" in options.offload,
        "parameters are split": split.params != "N",
        "a corrected backward needs all optimizer state": bool(schedule.adjustment.decay)
        and split.optimizer != "N",
        "late sums need whole optimizer state in one precision, on CPUs": schedule.pending > 0
        and (
            split.optimizer != "N"
            or masters
            or precision.compression is not None
            or any(part.device.lower() != "cpu" for part in mesh.parts)
        ),
        "blocks are recomputed on newer weights": not schedule.stashes
        and options.recompute != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
