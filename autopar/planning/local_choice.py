"""The choice between one program on all devices and local updates of independent replicas.

Only `allow="local updates"` asks for it, because local updates change the trained weights.
Every set of leading axes, and every single axis, may be independent; every outer method runs with
its default options and the tau that hides its synchronisation. The plan inside a replica is the
fastest one for its part of the batch, with the method's states in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.capture.capture import Captured
from autopar.errors import BatchError, CostError, InfeasibleError, OptionError
from autopar.inter_op.schedules import LOCAL_UPDATES, allowed
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.ir.units import format_bytes
from autopar.ir.update import OUTER, State, Update
from autopar.plan import Plan
from autopar.planning.capturing import Call
from autopar.planning.local_batches import capture_parts, stage_mesh
from autopar.planning.local_rounds import Rounds, rounds_of
from autopar.planning.options import GLOBAL, Options
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.plan_model import plan_captured
from autopar.planning.trace import Trace
from autopar.runtime.outer.method import Method
from autopar.runtime.outer.methods import method_of, methods

ORDINARY = "one program on all devices"
Capture = Callable[[int, Mesh], Captured]  # of a replica: their number, and its mesh


@dataclass(frozen=True)
class Offer:
    """One way to train on all devices.

    Attributes:
        plan: plan of all devices.
        rounds: rounds of replicas; None for one program.
        tokens: number in a batch of all devices.
    """

    plan: Plan
    rounds: Rounds | None
    tokens: int

    @property
    def name(self) -> str:
        """Returns the text of the outer method, with the tau of its price."""
        return ORDINARY if self.rounds is None else self.rounds.title

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step, the share of its synchronisation included."""
        if self.rounds is None:
            return self.plan.predicted.step_seconds
        return self.rounds.price.seconds / self.rounds.price.tau

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens of all devices per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def changes(self) -> str:
        """Returns how training differs from that on one device; "" for not at all."""
        return "" if self.rounds is None else self.rounds.changes

    @property
    def row(self) -> tuple[str, ...]:
        """Returns its row of the table: see `table`."""
        exposed = 0.0 if self.rounds is None else self.rounds.price.exposed_seconds
        return (
            self.name,
            f"{self.tokens_per_second:.4g}",
            f"{1e3 * self.seconds:.4g} ms",
            "in the step" if self.rounds is None else f"{1e3 * exposed:.4g} ms",
            format_bytes(self.plan.predicted.peak_bytes),
            self.changes or "nothing",
        )


HEADS = ("training", "tokens/s", "a step", "exposed sync", "memory", "what changes")


def table(offers: Sequence[Offer]) -> str:
    """Returns the offers as lines of aligned columns."""
    rows = [HEADS, *(offer.row for offer in offers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def asks_for_local(allow: str) -> bool:
    """Returns whether permissions contain "local updates"; ScheduleError for unknown ones."""
    return LOCAL_UPDATES in allowed(allow)


def choose(call: Call, mesh: Mesh, options: Options, trace: Trace) -> Plan:
    """Returns the fastest plan of a model, with or without local updates.

    Args:
        call: the model and the batch of all devices.
        mesh: all devices.
        options: options of planning.
        trace: writes the table of all offers.

    Raises:
        OptionError: the options search for stages.
        CaptureError, InfeasibleError, PinError: see `plan_model`.
    """

    def capture(replicas: int, inside: Mesh) -> Captured:
        part = call.part_of(replicas) if replicas > 1 and options.batches == GLOBAL else call
        count = options.microbatches if options.is_pipeline else None
        return capture_parts(part, stage_mesh(inside, options), options, Trace(None), count)

    found = offers(capture, mesh, options)
    trace("local_updates.txt", lambda: table(found))
    return found[0].plan


def offers(capture: Capture, mesh: Mesh, options: Options) -> list[Offer]:
    """Returns every way to train, the fastest first; with equal seconds, the least memory.

    Args:
        capture: captures the model on one replica's batch, given the number of replicas and its
            mesh.
        mesh: all devices.
        options: options of planning.

    Raises:
        OptionError: the options search for stages.
        InfeasibleError: no plan fits in memory.
    """
    if options.searches_stages:
        raise OptionError(
            f'allow="{LOCAL_UPDATES}" cannot be combined with a search for stages',
            why="the search would have to price replicas for every pipeline",
            todo="give the number of stages, or name the method: outer=...",
        )
    found: list[Offer] = []
    refused: InfeasibleError | None = None
    whole = capture(1, mesh)
    tokens = _tokens(whole) * (options.microbatches if options.is_pipeline else 1)
    try:
        plan = plan_captured(whole, mesh, options, Trace(None))
        found.append(Offer(plan, None, tokens))
    except InfeasibleError as error:
        refused = error
    for axes in _independent(mesh):
        found += _apart(capture, axes, mesh, options, tokens)
    if not found:
        assert refused is not None
        raise refused
    return sorted(found, key=lambda o: (o.seconds, o.plan.predicted.peak_bytes, o.name))


def _independent(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Yields sets of axes along which replicas may train independently."""
    names = [axis.name for axis in mesh.axes if axis.size > 1]
    seen: set[tuple[str, ...]] = set()
    for axes in [(name,) for name in names] + [tuple(names[:n]) for n in range(2, len(names) + 1)]:
        if axes not in seen:
            seen.add(axes)
            yield axes


def _apart(
    capture: Capture, axes: tuple[str, ...], mesh: Mesh, options: Options, tokens: int
) -> Iterator[Offer]:
    """Yields the offers of every method along some axes; methods with equal states share a plan."""
    known: list[tuple[Outer, Method]] = []
    for name in methods():
        outer = Outer(name, axes)
        known.append((outer, method_of(outer)))
    inside = known[0][0].within(mesh)
    try:
        captured = capture(known[0][0].count(mesh), inside)
    except BatchError:
        return  # the batch does not divide
    plans: dict[Update, Plan | None] = {}
    for outer, method in known:
        update = method.added_to(options.update)
        alike = _unnamed(update, options.update)
        if alike not in plans:
            try:
                plans[alike] = plan_captured(
                    captured, inside, replace(options, update=update), Trace(None)
                )
            except InfeasibleError:
                plans[alike] = None
        plan = plans[alike]
        if plan is not None:
            plan = replace(
                plan, stages=tuple(replace(stage, update=update) for stage in plan.stages)
            )
            graphs: tuple[Graph, ...] = (captured.graph,)
            if plan.is_pipeline:
                graphs = stage_graphs(captured.graph, plan.ends, Trace(None))
            try:
                rounds = rounds_of(graphs, plan, outer, method, mesh)
            except CostError:
                continue  # a step that takes no time has no rounds
            yield Offer(plan.under(outer, mesh, rounds.changes), rounds, tokens)


def _unnamed(update: Update, before: Update) -> Update:
    """Returns an update whose further states are numbered, so that equal plans are equal."""
    rules = []
    for rule, old in zip(update.rules, before.rules, strict=True):
        further = rule.states[len(old.states) :]
        states = tuple(State(f"{OUTER}{n}", state.dtype) for n, state in enumerate(further))
        rules.append(replace(rule, states=(*old.states, *states)))
    return Update(tuple(rules))


def _tokens(captured: Captured) -> int:
    """Returns the tokens of a batch: the elements of its first integers, else its samples."""
    inputs = [node for node in captured.graph.nodes if node.op == "input" and node.type.shape]
    whole = [node.type for node in inputs if node.type.dtype.startswith("i")]
    if whole:
        return max(kind.numel for kind in whole)
    return inputs[0].type.shape[0] if inputs else 1
