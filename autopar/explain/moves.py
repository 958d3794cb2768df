"""Every layout change and every operator that communicates, with each of its collectives and how
often it is made.

What is listed is what runs: the steps are the `Resharder`'s, as in the emitted program, and their
prices those of the planner's edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.errors import PlanMismatchError
from autopar.ir.collective import Collective, Resharder
from autopar.ir.graph import Graph
from autopar.ir.recompute import repetitions
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.exchange import exchanged
from autopar.plan_entries import NodePlan
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Call:
    """One collective: the payload of each device in bytes, and its predicted seconds."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    backward: bool


@dataclass(frozen=True)
class Move:
    """A layout change that communicates, or an operator that asks other devices itself.

    Attributes:
        value: the node whose value is moved.
        reader: the node for which it is, "" for the end of the program. An operator that asks is
            both.
        before, after: the layouts, in the notation of the plan.
        calls: its collectives in the order of the forward pass, those of the backward marked.
        times: how often a step makes it.
        parameter: the parameter that the value is or is a view of, "" for an activation.
        inside: whether it is an operator that asks.
        again: how often its forward is repeated by blocks that are computed again.
    """

    value: str
    reader: str
    before: str
    after: str
    calls: tuple[Call, ...]
    times: int
    parameter: str
    inside: bool = False
    again: int = 0

    def count(self, call: Call) -> int:
        """How often a step makes one of its collectives."""
        return self.times + (0 if call.backward else self.again)

    @property
    def seconds(self) -> float:
        """Predicted seconds a step, both directions, all times."""
        return sum(self.count(call) * call.seconds for call in self.calls)


def moves(graph: Graph, plan: StagePlan, price: Callable[[Collective], float]) -> tuple[Move, ...]:
    """What the emitted program communicates: layout changes in order of execution, then operators.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    resharder = Resharder(plan.mesh, price, plan.precision.widened, plan.collectives.named)
    _, reached = repetitions(graph, plan.recompute)
    carried = {user for r in graph.repeats for entry, _ in r.carried for user in graph.users[entry]}
    found = []
    for value, reader, tensor, src, dst, times in _changes(graph, plan):
        steps = resharder.steps(tensor, src, dst, graph[value].requires_grad)
        calls = tuple(
            Call(call.title, call.axes, call.nbytes, price(call), backward)
            for step in steps
            for backward, call in ((False, step.forward), (True, step.backward))
            if call is not None
        )
        if calls:
            before, after = src.format(tensor.shape), dst.format(tensor.shape)
            root = _parameter_of(graph, value)
            # What is carried enters and leaves blocks outside of what is computed again.
            enters = reader in carried and value != reader
            again = 0 if enters else reached.get(reader, 0)
            found.append(Move(value, reader, before, after, calls, times, root, again=again))
    return (*found, *_of_parameters(graph, plan, price), *_exchanges(graph, plan, price))


def _of_parameters(
    graph: Graph, plan: StagePlan, price: Callable[[Collective], float]
) -> Iterator[Move]:
    """What parameters and their gradients send; of what a step does once a microbatch's part."""
    operators, _ = repetitions(graph, plan.recompute)
    for node in graph.folded:
        if node.op != "param" or not graph.users[node.name]:
            continue
        share = graph.template[graph.users[node.name][0]]
        planned(plan, graph, node.name), planned(plan, graph, share)
        storage = plan.storage(node.name, share)
        hops = storage.hops(
            node.type, plan.mesh, plan.microbatches, node.requires_grad, plan.precision
        )
        shape, again = node.type.shape, operators.get(share, 0)
        before, after = storage.format(shape), storage.used.format(shape)
        for times, repeated in ((graph.multiplicity[node.name] - again, 0), (again, again)):
            # What is computed again gathers as in the forward, and has it for the backward then.
            calls = tuple(
                Call(
                    plan.collectives.title(hop.call, hop.together(plan.bucket).nbytes),
                    hop.call.axes,
                    hop.call.nbytes,
                    hop.seconds(price, plan.bucket) * hop.times / plan.microbatches,
                    hop.when != "forward",
                )
                for hop in hops
                if not (repeated and hop.when == "backward")
            )
            if times and calls:
                yield Move(share, share, before, after, calls, times, node.name, again=repeated)


def _exchanges(
    graph: Graph, plan: StagePlan, price: Callable[[Collective], float]
) -> Iterator[Move]:
    """What operators ask other devices for."""
    operators, _ = repetitions(graph, plan.recompute)
    for node in graph.folded:
        own = planned(plan, graph, node.name)
        types = tuple(graph[name].type for name in node.inputs)
        layouts = tuple(layout for _, layout in own.operands)
        if len(layouts) != len(types):
            continue
        forward, backward = exchanged(node, types, layouts, plan.mesh)
        calls = [
            Call(plan.collectives.named(call).title, call.axes, call.nbytes, price(call), direction)
            for direction, made in ((False, forward), (True, backward))
            for call in made
        ]
        if calls:
            times = graph.multiplicity[node.name]
            (shape, into), (given, out) = own.operands[0], own.results[0]
            before, after = into.format(shape), out.format(given)
            again = operators.get(node.name, 0)
            yield Move(node.name, node.name, before, after, tuple(calls), times, "", True, again)


Change = tuple[str, str, TensorType, Layout, Layout, int]


def _changes(graph: Graph, plan: StagePlan) -> Iterator[Change]:
    """(value, reader, type, layout before, layout after, times) of every use of a value.

    A value that is carried from block to block goes from what enters the first block into the
    layout of the share that reads it there, once, and from what leaves a block into that same
    layout, once for each block; behind the last block it is held in it.
    """
    run = {n: k for k, repeat in enumerate(graph.repeats) for n in repeat.iterations[0]}
    enters: dict[tuple[str, str], tuple[str, int]] = {}
    held: dict[str, Layout] = {}
    for number, repeat in enumerate(graph.repeats):
        for entry, leaving in repeat.carried:
            share = next(n for n in graph.users[entry] if run.get(n) == number)
            enters[entry, share] = (leaving, repeat.count)
            held[leaving] = planned(plan, graph, share).operands[0][1]

    def given(value: str, reader: str, index: int = 0) -> Layout:
        """The layout in which a reader finds a value."""
        source = graph.template[value]
        if source in held and run.get(reader) != run[source]:
            return held[source]
        return planned(plan, graph, source).results[index][1]

    for node in graph.folded:
        own, times = planned(plan, graph, node.name), graph.multiplicity[node.name]
        if node.op == "getitem":  # one of several results, resharded once it is taken
            src = given(node.inputs[0], node.name, int(str(node.args[1])))
            yield node.name, node.name, node.type, src, own.results[0][1], times
            continue
        # An operator that reads a value twice in one layout has it sent once.
        read = dict.fromkeys(zip(node.inputs, (into for _, into in own.operands), strict=True))
        for value, into in read:
            source, tensor = graph.template[value], graph[value].type
            entering = enters.get((value, node.name))
            src = given(value, node.name)
            yield source, node.name, tensor, src, into, 1 if entering else times
            if entering:
                leaving, blocks = entering
                src = planned(plan, graph, leaving).results[0][1]
                yield leaving, node.name, tensor, src, into, blocks
        if node.op == "autopar.share" and graph[node.inputs[0]].op != "param":
            src, out = own.operands[0][1], own.results[0][1]
            yield node.name, node.name, node.type, src, out, times
    if graph.loss is not None:
        kind = graph[graph.loss].type
        whole = Layout.replicated(len(kind.shape))
        yield graph.template[graph.loss], "", kind, given(graph.loss, ""), whole, 1


def planned(plan: StagePlan, graph: Graph, name: str) -> NodePlan:
    """The plan's entry for a node of any block; PlanMismatchError if it has none."""
    try:
        return plan.nodes[graph.template[name]]
    except KeyError:
        raise PlanMismatchError(
            f"the plan has no layout for %{name}", where=str(graph[name].source)
        ) from None


def _parameter_of(graph: Graph, value: str) -> str:
    """The parameter whose storage a value shares, "" if it is none's."""
    root = graph.root(value)
    return graph.template[root.name] if root.op == "param" else ""
