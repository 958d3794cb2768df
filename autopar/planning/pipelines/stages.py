"""Plans a pipeline with given cuts: every stage on its own part of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.cost.device import refuse_unlike
from autopar.errors import MeshError, StageError
from autopar.intra_op.node_choices import operand_types, whole_options
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rule import resolve
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.rewrite import writes
from autopar.ir.stage_graphs import alike, cut, free_values
from autopar.passes.alike_stages import preparing
from autopar.passes.observations import NOTHING, Observations
from autopar.passes.verify import verify
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.pipelines.schedule_names import in_flight, schedule_of, stages_of_rank
from autopar.planning.pipelines.simulated import predicted
from autopar.planning.pipelines.stage_pins import Spoken, spoken, stage_pins
from autopar.planning.pipelines.stages_at_once import at_once, by_in_flight
from autopar.planning.pipelines.streaming import Copies, copies_of, options_for, taken
from autopar.planning.pipelines.wiring import wiring_of
from autopar.planning.planner import make_plan
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.planning.workers import Workers
from autopar.stage_plan import StagePlan

__all__ = [
    "Devices",
    "equal_parts",
    "even_ends",
    "in_flight",
    "legal_cuts",
    "plan_stages",
    "schedule_of",
    "stage_graphs",
    "stages_of_rank",
    "translated",
    "weights",
]  # fmt: skip

Floats = NDArray[np.float64]
_SLACK = 0.05  # fraction by which the slowest stage may be slower, to send fewer bytes


@dataclass(frozen=True)
class Devices:
    """A part of a mesh, which holds one or more stages.

    Attributes:
        mesh: its devices as a mesh of their own.
        start: global rank of the first device; the others follow it.
    """

    mesh: Mesh
    start: int


def equal_parts(mesh: Mesh, count: int) -> tuple[Devices, ...]:
    """Divides a mesh into equal parts of neighbouring ranks, along its outer axes.

    Every part has all axes of the mesh, and those that were divided have fewer devices.

    Raises:
        MeshError: the outer axes do not divide into `count` parts.
    """
    refuse_unlike(mesh)
    axes: list[Axis] = []
    left = count
    for axis in mesh.axes:
        size = axis.size // left if axis.size % left == 0 else 1
        if left % (axis.size // size):
            raise MeshError(
                f"mesh {str(mesh)!r} does not divide into {count} equal parts",
                why=f"its axis {axis.name} of {axis.size} devices does not divide into {left}",
                todo="change the number of stages or the mesh, or pass the parts yourself",
            )
        left //= axis.size // size
        axes.append(replace(axis, size=size))
    if left > 1:
        raise MeshError(
            f"mesh {str(mesh)!r} does not divide into {count} equal parts",
            why=f"it has {mesh.size} devices",
            todo="use fewer stages or more devices",
        )
    part = replace(mesh, axes=tuple(axes))
    return tuple(Devices(part, number * part.size) for number in range(count))


def plan_stages(
    graph: Graph,
    ends: Sequence[str],
    groups: Sequence[Devices],
    mesh: Mesh,
    microbatches: int,
    schedule: str,
    options: Options,
    trace: Trace,
    recompute: Sequence[str] | None = None,
    rank_stages: Sequence[float] | None = None,
    workers: Workers | None = None,
    observed: Observations = NOTHING,
) -> Plan:
    """Plans a pipeline whose cuts and devices are given.

    Equal stages on equal meshes are planned together; see `by_in_flight`. The plan's predictions
    are simulated.

    Args:
        graph: the whole model on one microbatch, normalised, without shares and repeats.
        ends: the last node of every stage but the last.
        groups: the devices of each rank of the schedule.
        mesh: all devices.
        microbatches, schedule: number of microbatches in a step; schedule with its options.
        options, trace: for every stage.
        recompute: recomputation of each stage, in place of the option.
        rank_stages: of each stage, see `Repeated`; None if the stages of a rank keep equally much.
        workers: processes that plan stages, unless something is traced.
        observed: of the whole model.

    Raises:
        ScheduleError: the schedule is unknown, or does not fit the sizes.
        StageError: the graph cannot be cut there, or copies of a stage have unequal meshes or write
            buffers.
        InfeasibleError, UnknownOperatorError, UnknownDeviceError, CostError, PinError: of a stage,
            see `make_plan`.
    """
    rows = schedule_of(schedule, len(groups), microbatches)
    options = options_for(
        replace(
            options, whole=mesh, stages=rows.stages, microbatches=microbatches, schedule=schedule,
            global_batch=None,
        ),
        rows,
    )  # fmt: skip
    if rows.stages != len(ends) + 1:
        raise StageError(
            f"{len(ends) + 1} stages for the schedule {schedule!r}",
            why=f"on {len(groups)} groups of devices it has {rows.stages}",
            todo="cut the model into as many stages",
        )
    parts = stage_graphs(graph, ends, trace, observed)
    held = [[groups[placed[number]] for placed in rows.placement] for number in range(len(parts))]
    for number, copies in enumerate(held):
        if any(sub.mesh != copies[0].mesh for sub in copies):
            raise StageError(
                f"the copies of stage {number} have unequal meshes",
                why=", ".join(str(sub.mesh) for sub in copies),
                todo="use the same mesh for all groups of devices",
            )
        written = [parts[number][name].target for n in parts[number].nodes for name in writes(n)]
        if written and len(copies) > 1:
            raise StageError(
                f"schedule {schedule!r} cannot run stage {number}",
                where=written[0],
                why="it has copies of the stage on two groups of devices, each of which would "
                "write that buffer from its own microbatches",
                todo="use a schedule with one copy, such as 1f1b",
            )
    pins = stage_pins(graph, parts, meshes := [copies[0].mesh for copies in held], options)
    again = recompute or [options.recompute] * len(parts)
    shared = rank_stages or [stages_of_rank(rows, number) for number in range(len(parts))]
    wiring = wiring_of(parts, meshes)
    further = copies_of(rows, wiring)
    alone: dict[tuple[str, Mesh, Spoken, str, float, Copies], list[int]] = {}
    for number, part in enumerate(parts):
        pinned, held_too = spoken(part, pins[number]), (shared[number], further[number])
        key = (alike(part), meshes[number], pinned, again[number], *held_too)
        alone.setdefault(key, []).append(number)
    kept = {number: in_flight(rows, number) for number in range(len(parts))}
    silent = Trace(None) if trace.folder is None else trace  # can be sent to another process
    workers = workers if workers and trace.folder is None else Workers(0)
    prices = {mesh: Prices(mesh, cost_model(mesh, options)) for mesh in dict.fromkeys(meshes)}

    def planning(one: int, most: float) -> Callable[[], StagePlan]:
        own = replace(options, pins=pins[one], recompute=again[one])
        repeated = Repeated(
            microbatches, most, shared[one], further[one], options.precision, taken(rows),
            rows.pending > 0,
        )  # fmt: skip
        known = prices[meshes[one]]  # a process that plans several stages prices operators once
        return partial(make_plan, parts[one], meshes[one], own, silent, repeated, known)

    ready = at_once(
        {
            (same[0], most): planning(same[0], most)
            for same in alone.values()
            for most in {min(map(kept.__getitem__, same)), max(map(kept.__getitem__, same))}
        },
        workers,
    )
    plans: dict[int, StagePlan] = {}
    for same in alone.values():
        one = same[0]
        by_count = by_in_flight(
            sorted({kept[number] for number in same}),
            lambda most, one=one: ready.get((one, most)) or planning(one, most)(),  # type: ignore[misc]
        )
        plans |= {n: translated(parts[one], by_count[kept[n]], parts[n], pins[n]) for n in same}
    stages = tuple(
        replace(plans[number], end=end, starts=tuple(sub.start for sub in held[number]))
        for number, end in enumerate((*ends, ""))
    )
    whole = Plan(fingerprint(graph), mesh, stages, microbatches, schedule)
    return replace(whole, predicted=predicted(parts, whole, options))


def stage_graphs(
    graph: Graph, ends: Sequence[str], trace: Trace, observed: Observations = NOTHING
) -> tuple[Graph, ...]:
    """Returns the prepared graphs of a normalised graph's stages; raises StageError as `cut`."""
    stages, prepared = [], preparing(observed)
    for number, part in enumerate(cut(graph, ends)):
        stage = prepared(verify(part))
        trace(f"stage_{number}.txt", lambda stage=stage: format_graph(stage))  # type: ignore[misc]
        stages.append(stage)
    return tuple(stages)


def translated(graph: Graph, plan: StagePlan, other: Graph, pins: Mapping[str, str]) -> StagePlan:
    """Returns the plan of a graph as that of another graph, which differs only in names.

    Args:
        graph, plan: the graph and its plan.
        other: the other graph.
        pins: its pins, which say the same as those of the plan.
    """
    names = dict(zip((n.name for n in graph.nodes), (n.name for n in other.nodes), strict=True))
    return replace(
        plan,
        graph=fingerprint(other),
        nodes={names[name]: entry for name, entry in plan.nodes.items()},
        replicated={names[name]: seconds for name, seconds in plan.replicated.items()},
        pins=dict(pins),
    )


def even_ends(graph: Graph, stages: int, mesh: Mesh, options: Options) -> tuple[str, ...]:
    """Cuts a graph into stages of about equal time on one device, where few bytes cross.

    Repeated blocks stay whole if there are enough of them. Of cuts whose slowest stage is within a
    few per cent of the fastest possible, those with the fewest bytes are chosen.

    Args:
        graph: normalised, without shares and repeats.
        stages: number of stages.
        mesh, options: give prices and rules.

    Returns:
        The last node of every stage but the last.

    Raises:
        StageError: there are fewer operators than stages.
    """
    seconds, blocks = weights(graph, preparing()(graph), mesh, options)
    names = list(seconds)
    crossing = _crossing(graph, names)
    legal = legal_cuts(graph, names, blocks if len(set(blocks.values())) >= stages else {})
    # Where no trained tensor crosses, as behind the loss, a stage would have nothing to do.
    busy = [at for at in legal if crossing[at] > 0]
    legal = busy if len(busy) >= stages - 1 else legal
    if len(legal) < stages - 1:
        raise StageError(
            f"{graph.name} cannot be cut into {stages} stages",
            why=f"of its {len(names)} operators {len(legal)} may end a stage",
            todo="ask for fewer stages",
        )
    # A cut c comes after `legal[c]`; stages consist of the pieces between neighbouring cuts.
    before = np.concatenate([[0.0], np.cumsum(list(seconds.values()))])
    edges = np.array([0, *(before[at + 1] for at in legal), before[-1]])
    nbytes = np.array([0.0, *(crossing[at] for at in legal), 0.0])
    slowest = _slowest(edges, stages)
    chosen = _cheapest_cuts(edges, nbytes, stages, slowest * (1 + _SLACK))
    return tuple(names[legal[at - 1]] for at in chosen)


def legal_cuts(
    graph: Graph, names: Sequence[str], blocks: Mapping[str, tuple[int, int]]
) -> list[int]:
    """Returns the indices of `names`, operators in execution order, after which a stage may end.

    It ends neither inside one of `blocks` nor between the write and the reads of a buffer.
    """
    place = {name: at for at, name in enumerate(names)}
    held: set[int] = set()
    for node in graph.nodes:
        for buffer in writes(node):
            users = [place[user] for user in graph.users[buffer] if user in place]
            held.update(range(min(users), max(users)))
    return [
        at
        for at, name in enumerate(names[:-1])
        if at not in held and (name not in blocks or blocks[name] != blocks.get(names[at + 1]))
    ]


def weights(
    graph: Graph, whole: Graph, mesh: Mesh, options: Options
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """Returns the seconds of the operators on one device, and the repeated block of each.

    Operators that every stage computes for itself are left out.

    Args:
        graph: normalised.
        whole: the same graph, prepared.
        mesh, options: give prices and rules; of unlike devices, the first give the prices.
    """
    mesh = mesh.parts[0]
    model = cost_model(mesh, options)
    seconds: dict[str, float] = {}
    for node in whole.folded:
        rule = options.table.get(node.op)
        (option,) = whole_options(whole, node)
        signature = None
        if rule is not None and not node.is_leaf:
            signature = resolve(rule, node, operand_types(whole, node), node.types)
        work = node_work(whole, node, option.operands, option.results, signature, mesh)
        seconds[node.name] = sum(map(model.compute, (*work.forward, *work.backward)))
    blocks = {
        name: (run, number)
        for run, repeat in enumerate(whole.repeats)
        for number, block in enumerate(repeat.iterations)
        for name in block
    }
    free = free_values(graph)
    operators = [n.name for n in graph.nodes if not n.is_leaf and n.name not in free]
    return {name: seconds[whole.template[name]] for name in operators}, blocks


def _crossing(graph: Graph, names: Sequence[str]) -> list[float]:
    """Returns the bytes that are trained, exist after each operator and are read later.

    Single numbers, such as the loss, count as none. Where nothing is trained, all others count.
    """
    trained = any(node.requires_grad for node in graph.nodes)
    place = {name: at for at, name in enumerate(names)}
    change = [0.0] * (len(names) + 1)
    for name in names:
        node = graph[name]
        last = max((place[user] for user in graph.users[name]), default=-1)
        if (node.requires_grad or not trained) and last > place[name]:
            nbytes = float(sum(kind.nbytes for kind in node.types if kind.shape))
            change[place[name]] += nbytes
            change[last] -= nbytes
    return list(np.cumsum(change)[:-1])


def _slowest(edges: Floats, stages: int) -> float:
    """Returns the least time of the slowest stage, if the pieces between `edges` stay whole."""
    low, high = 0.0, float(edges[-1])
    for _ in range(60):
        middle = (low + high) / 2
        at = 0
        for _ in range(stages):
            at = int(np.searchsorted(edges, edges[at] + middle * (1 + 1e-12), side="right")) - 1
        low, high = (low, middle) if at == len(edges) - 1 else (middle, high)
    return high


def _cheapest_cuts(edges: Floats, nbytes: Floats, stages: int, most: float) -> list[int]:
    """Returns the cuts with the fewest bytes whose stages take at most `most` seconds.

    Of cuts with equally few bytes, those of the most even stages: where one piece is long, `most`
    leaves the others much room.
    """
    count, little = len(edges), 1e-6 * float(nbytes.max(initial=0.0)) or 1.0
    best = np.full(count, np.inf)
    best[0] = 0.0
    origins: list[NDArray[np.int64]] = []
    for stage in range(stages):
        fresh, origin = np.full(count, np.inf), np.zeros(count, dtype=np.int64)
        for at in range(1, count):
            first = int(np.searchsorted(edges, edges[at] - most * (1 + 1e-9), side="left"))
            if first < at and np.isfinite(best[first:at]).any():
                uneven = ((edges[at] - edges[first:at]) / edges[-1]) ** 2
                costs = best[first:at] + little * uneven
                origin[at] = first + int(np.argmin(costs))
                fresh[at] = costs.min() + (nbytes[at] if stage < stages - 1 else 0.0)
        best = fresh
        origins.append(origin)
    cuts, at = [], count - 1
    for origin in reversed(origins[1:]):
        at = int(origin[at])
        cuts.append(at)
    return cuts[::-1]
