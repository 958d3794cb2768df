"""Graph x strategies x prices -> Problem; Solution -> the layouts of a plan.

One problem node stands for one node of the folded graph, priced forwards and backwards and times
the number of blocks it stands for; a parameter and its share are one node, "stored => used", whose
cost is the resharding between the two (data parallelism's all_reduce, ZeRO-3's all_gather and
reduce_scatter) and whose memory is exact. Edges are reshardings. Memory is what is alive at the end
of the forward: parameters, gradients, optimizer state and saved activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.cost.model import Checked, CostModel, Work
from autopar.cost.overlap import TAKE_TURNS, side_by_side
from autopar.errors import InfeasibleError, UnknownOperatorError
from autopar.intra_op.options import Option, node_options, operand_types, parameter_options
from autopar.intra_op.pins import Pins
from autopar.intra_op.problem import Choices, Edge, Problem
from autopar.intra_op.rule import OpRule, Signature
from autopar.intra_op.works import node_work
from autopar.ir.collective import Resharder
from autopar.ir.exchange import exchanged
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.ir.units import format_bytes
from autopar.plan import NodePlan, Plan


@dataclass(frozen=True)
class Built:
    """A Problem and what its choices mean.

    Attributes:
        problem: the strategy problem.
        names: IR node of each problem node (a parameter's share stands for both).
        options: the meaning of each choice.
        replicated: operators that run whole for want of a rule.
        exchanged: node -> seconds of each choice that it takes to ask other devices.
        backward: node -> seconds of each choice for the kernels of the backward.
        beside: parameter's share -> seconds of each choice for synchronising the gradient next to
            the parameter, for which the backward does not wait.
        slowdown: how many times as long kernels and collectives take side by side.
    """

    problem: Problem
    names: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    replicated: tuple[str, ...]
    exchanged: Mapping[str, tuple[float, ...]]
    backward: Mapping[str, tuple[float, ...]]
    beside: Mapping[str, tuple[float, ...]]
    slowdown: float

    def side_by_side(self, choice: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of the backward's kernels, and of the gradients synchronised beside them."""
        chosen = dict(zip(self.names, choice, strict=True))
        return tuple(  # type: ignore[return-value]
            math.fsum(seconds[chosen[name]] for name, seconds in part.items())
            for part in (self.backward, self.beside)
        )

    def hidden(self, choice: tuple[int, ...]) -> float:
        """Seconds saved by not waiting for gradients."""
        kernels, collectives = self.side_by_side(choice)
        together = side_by_side(kernels, collectives, self.slowdown)
        return max(kernels + collectives - together, 0.0)

    def figures(self, choice: tuple[int, ...]) -> dict[str, float]:
        """Seconds and bytes per device of a choice, by cause.

        `compute_seconds` of operators, `exchange_seconds` of what they ask other devices for,
        `parameter_seconds` of gathering parameters and of synchronising gradients,
        `reshard_seconds` of activations; `parameter_bytes` with gradients and optimizer state,
        `activation_bytes` saved for the backward. `peak_bytes` is their sum; `step_seconds` is the
        sum of the seconds less `hidden_seconds`, in which gradients are synchronised beside the
        backward.
        """
        causes = ("compute_seconds", "exchange_seconds", "parameter_seconds", "reshard_seconds")
        totals = dict.fromkeys((*causes, "parameter_bytes", "activation_bytes"), 0.0)
        for node, options, index in zip(self.problem.nodes, self.options, choice, strict=True):
            parameter = options[index].stored is not None
            inside = self.exchanged[node.name][index] if node.name in self.exchanged else 0.0
            totals["exchange_seconds"] += inside
            cause = "parameter_seconds" if parameter else "compute_seconds"
            totals[cause] += node.cost[index] - inside
            totals["parameter_bytes" if parameter else "activation_bytes"] += node.memory[index]
        for edge in self.problem.edges:
            parameter = self.options[edge.a][choice[edge.a]].stored is not None
            cause = "parameter_seconds" if parameter else "reshard_seconds"
            totals[cause] += float(edge.cost[choice[edge.a], choice[edge.b]])
        hidden = self.hidden(choice)
        step = sum(value for name, value in totals.items() if name.endswith("seconds")) - hidden
        peak = sum(value for name, value in totals.items() if name.endswith("bytes"))
        return {"step_seconds": step, "peak_bytes": peak, **totals, "hidden_seconds": hidden}

    def replicated_seconds(self, choice: tuple[int, ...]) -> dict[str, float]:
        """Seconds of each operator that runs whole for want of a rule."""
        rows = zip(self.names, self.problem.nodes, choice, strict=True)
        return {name: node.cost[at] for name, node, at in rows if name in self.replicated}


class Builder:
    """Collects the nodes and edges of one Problem; `build` is its only use."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        model: CostModel,
        table: dict[str, OpRule],
        state_bytes: float,
        unknown_ops: str,
        pins: Pins,
        slowdown: float,
    ) -> None:
        self.slowdown = slowdown
        self.graph, self.mesh, self.model, self.table = graph, mesh, Checked(model), table
        self.state_bytes, self.unknown_ops, self.pins = state_bytes, unknown_ops, pins
        self.resharder = Resharder(mesh, self.model.collective)
        self.choices: list[Choices] = []
        self.options: list[tuple[Option, ...]] = []
        self.names: list[str] = []
        self.position: dict[str, int] = {}
        self.replicated: list[str] = []
        self.exchanged: dict[str, tuple[float, ...]] = {}
        self.backward: dict[str, tuple[float, ...]] = {}
        self.beside: dict[str, tuple[float, ...]] = {}
        self.savers = self._first_savers()
        self.last_blocks = {name for r in graph.repeats for name in r.iterations[-1]}
        self.left_by: dict[str, list[str]] = {}  # share -> values that leave a run held as in it
        for value, share in self._held_after_blocks().items():
            self.left_by.setdefault(share, []).append(value)

    def _first_savers(self) -> dict[tuple[str, int], int]:
        """(saver, place in its `saved`) -> how many of its blocks pay for that value.

        Each piece of storage has one payer in the whole graph: what all blocks save is paid once,
        and what leaves one block is what enters the next.
        """
        paid: set[str] = set()
        payers: dict[tuple[str, int], int] = {}
        for node in self.graph.nodes:
            for place, value in enumerate(node.saved):
                key, root = (self.graph.template[node.name], place), self._storage(value)
                pays = root not in paid and self.graph[root].op != "param"
                payers[key] = payers.get(key, 0) + pays
                paid.add(root)
        return payers

    def _storage(self, value: str) -> str:
        alias = self.graph[value].alias
        while alias is not None:
            value, alias = alias, self.graph[alias].alias
        return value

    def add(self, node: Node) -> None:
        """One operator, input or buffer."""
        options, signature = node_options(self.graph, node, self.mesh, self.table)
        if signature is None and not node.is_leaf:
            if self.unknown_ops == "error":
                raise UnknownOperatorError(
                    f"{node.op} has no sharding rule",
                    where=str(node.source),
                    todo='add a rule, or pass unknown_ops="replicate" to run it whole',
                )
            self.replicated.append(node.name)
        options = self.pins.keep(node, options)
        count = self.graph.multiplicity[node.name]
        asked = tuple(count * self._exchange_seconds(node, option) for option in options)
        if any(asked):
            self.exchanged[node.name] = asked
        kernels = [self._seconds(node, option, signature) for option in options]
        backward = tuple(
            count * seconds + self._sum_seconds(node, option)
            for option, (_, seconds) in zip(options, kernels, strict=True)
        )
        if any(backward):
            self.backward[node.name] = backward
        cost = tuple(
            count * forward + after + self._loss_seconds(node, option) + inside
            for option, (forward, _), after, inside in zip(
                options, kernels, backward, asked, strict=True
            )
        )
        memory = tuple(self._saved_bytes(node, option) for option in options)
        self._append(node.name, options, cost, memory)

    def add_parameter(self, node: Node, share: Node) -> None:
        """A parameter and its share as one problem node."""
        options = tuple(parameter_options(node.type, self.mesh, node.requires_grad))
        options = self.pins.keep(share, options)
        count = self.graph.multiplicity[node.name]
        cost, memory, beside = [], [], []
        for option in options:
            stored, used = option.operands[0], option.results[0]
            seconds = self.resharder.cost(node.type, stored, used, node.requires_grad)
            held = stored.local_bytes(node.type, self.mesh)
            copies = 1.0 + (1.0 + self.state_bytes if node.requires_grad else 0.0)
            gathered = used.dims != stored.dims
            extra = used.local_bytes(node.type, self.mesh) if gathered else 0
            cost.append(count * seconds)
            memory.append(count * (held * copies + extra))
            beside.append(count * self._beside_seconds(node, stored, used))
        if any(beside):
            self.beside[share.name] = tuple(beside)
        self._append(share.name, options, tuple(cost), tuple(memory))
        self.position[node.name] = self.position[share.name]

    def _append(
        self,
        name: str,
        options: tuple[Option, ...],
        cost: tuple[float, ...],
        memory: tuple[float, ...],
    ) -> None:
        self.position[name] = len(self.choices)
        labels = tuple(option.label for option in options)
        self.choices.append(Choices(name, labels, cost, memory, (0, 1)))
        self.options.append(options)
        self.names.append(name)

    def _seconds(
        self, node: Node, option: Option, signature: Signature | None
    ) -> tuple[float, float]:
        """Forward and backward of one operator on one device."""
        work = node_work(self.graph, node, option.operands, option.results, signature, self.mesh)
        forward, backward = (sum(map(self.model.compute, w)) for w in (work.forward, work.backward))
        return forward, backward

    def gradient_seconds(self, share: Node, plan: Plan) -> float:
        """What a plan synchronises of a parameter's gradient beside the backward, in all blocks."""
        if share.op != "autopar.share" or self.graph[share.inputs[0]].op != "param":
            return 0.0
        entry, leaf = plan.nodes[share.name], self.graph[share.inputs[0]]
        count = self.graph.multiplicity[share.name]
        return count * self._beside_seconds(leaf, entry.operands[0][1], entry.results[0][1])

    def _beside_seconds(self, leaf: Node, stored: Layout, used: Layout) -> float:
        """The gradient's move next to the parameter, which only the optimizer waits for."""
        if self.slowdown >= TAKE_TURNS or not leaf.requires_grad:
            return 0.0
        steps = self.resharder.steps(leaf.type, stored, used)
        return self.model.collective(steps[0].backward) if steps and steps[0].backward else 0.0

    def _sum_seconds(self, share: Node, option: Option) -> float:
        """Adding up the gradients of a value that leaves a run of blocks, held as in `share`."""
        given = option.results[0].local_bytes(share.type, self.mesh)
        seconds = 0.0
        for value in self.left_by.get(share.name, ()):
            users = set(self.graph.users[value]) - self.last_blocks
            readers = sum(self.graph[user].requires_grad for user in users)
            if self.graph[value].requires_grad and readers > 1:
                work = Work(f"{share.op} backward", share.type.numel, 3 * given, share.type.dtype)
                seconds += (readers - 1) * self.model.compute(work)
        return seconds

    def _exchange_seconds(self, node: Node, option: Option) -> float:
        """What the operator itself sends, in both directions."""
        types = operand_types(self.graph, node)
        forward, backward = exchanged(node, types, option.operands, self.mesh)
        return sum(map(self.model.collective, (*forward, *backward)))

    def _loss_seconds(self, node: Node, option: Option) -> float:
        """The loss ends whole on every device, so that all report the same."""
        if node.name != self.graph.loss:
            return 0.0
        whole = Layout.replicated(len(node.type.shape))
        return self.resharder.cost(node.type, option.results[0], whole, node.requires_grad)

    def _saved_bytes(self, node: Node, option: Option) -> float:
        """Bytes that stay alive for this operator's backward, in all blocks.

        What another operator pays for is left out.
        """
        total = 0.0
        for place, value in enumerate(node.saved):
            copies = self.savers[node.name, place]
            if not copies:
                continue
            if value == node.name:
                layout = option.results[0]
            else:
                layout = option.operands[node.inputs.index(value)]
            total += copies * layout.local_bytes(self.graph[value].type, self.mesh)
        extra = sum(tensor.nbytes for tensor in node.saved_types)
        return total + self.graph.multiplicity[node.name] * option.share * extra

    def edges(self) -> Iterator[Edge]:
        """One resharding matrix per use of a value.

        A block's function takes a carried value in the layout in which its share reads it, and
        returns it in that layout from every block. So the value enters once, is resharded at the
        end of each block, and whoever reads it after the last one finds it in that layout.
        """
        held = self._held_after_blocks()
        leaving = {
            (entry, name): (leaves, repeat.count)
            for repeat in self.graph.repeats
            for entry, leaves in repeat.carried
            for name in repeat.iterations[0]
        }
        for node in self.graph.folded:
            if node.op == "param":
                continue
            for index, value in enumerate(node.inputs):
                source = held.get(value, self.graph.template[value])
                if self.position[source] == self.position[node.name]:
                    continue
                enters = (value, node.name) in leaving
                count = 1 if enters else self.graph.multiplicity[node.name]
                yield self._edge(source, count, node, index)
                if enters:
                    yield self._edge(*leaving[value, node.name], node, index)

    def _held_after_blocks(self) -> dict[str, str]:
        """Value that leaves the last block of a run -> the share in whose layout it is held.

        A share's layouts on both sides are one.
        """
        found: dict[str, str] = {}
        for repeat in self.graph.repeats:
            last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
            for entry, leaves in repeat.carried:
                readers = (n for n in self.graph.users[entry] if n in repeat.iterations[0])
                found[last[leaves]] = next(readers)
        return found

    def _edge(self, source: str, count: int, node: Node, index: int) -> Edge:
        """`count` reshardings of an operand of `node`, from what `source` gives."""
        a, b = self.position[source], self.position[node.name]
        tensor, grad = self.graph[source].type, self.graph[source].requires_grad
        rows = [option.results[0] for option in self.options[a]]
        columns = [option.operands[index] for option in self.options[b]]
        sources, targets = (
            {layout: n for n, layout in enumerate(dict.fromkeys(side))} for side in (rows, columns)
        )
        price = np.array(self.resharder.costs(tensor, tuple(sources), tuple(targets), grad))
        matrix = price[np.ix_([sources[row] for row in rows], [targets[c] for c in columns])]
        return Edge(a, b, count * matrix)


def build(
    graph: Graph,
    mesh: Mesh,
    model: CostModel,
    table: dict[str, OpRule],
    *,
    memory_limit: float | None = None,
    state_bytes: float = 2.0,
    unknown_ops: str = "replicate",
    pins: Mapping[str, str] | None = None,
    slowdown: float = TAKE_TURNS,
    progress: Callable[[str], None] = lambda stage: None,
) -> Built:
    """The strategy problem of a graph in which every parameter is read by one share.

    Args:
        graph: normalised, annotated, with its repeats.
        mesh: the devices.
        model: prices, in seconds.
        table: rules by operator.
        memory_limit: bytes per device.
        state_bytes: optimizer state in units of the parameter's own bytes (AdamW: 2).
        unknown_ops: "replicate" or "error".
        pins: layouts that are fixed; see pins.py.
        slowdown: how many times as long kernels and collectives take side by side; 2, as if they
            took turns, leaves nothing to gain from not waiting for gradients.
        progress: told of each stage as it begins.

    Raises:
        UnknownOperatorError: an operator has no rule and `unknown_ops` is "error", or is neither.
        PlanError: a pin names nothing or fits no choice.
        CostError: a price of the model is negative or not finite.
        InfeasibleError: no plan at all can meet the memory limit.
    """
    if unknown_ops not in ("replicate", "error"):
        raise UnknownOperatorError(
            f"unknown_ops is {unknown_ops!r}", todo='pass "replicate" or "error"'
        )
    progress("strategies")
    fixed = Pins(graph, pins or {})
    builder = Builder(graph, mesh, model, table, state_bytes, unknown_ops, fixed, slowdown)
    for node in graph.folded:
        if node.op == "param" and graph.users[node.name]:
            continue  # with its share
        if node.op == "autopar.share" and graph[node.inputs[0]].op == "param":
            builder.add_parameter(graph[graph.template[node.inputs[0]]], node)
        else:
            builder.add(node)
    fixed.check()
    choices = tuple(builder.choices)
    if memory_limit is not None:
        _check_memory(choices, memory_limit)
    progress("reshardings")
    problem = Problem(graph.name, choices, tuple(builder.edges()), memory_limit)
    return Built(
        problem,
        tuple(builder.names),
        tuple(builder.options),
        tuple(builder.replicated),
        builder.exchanged,
        builder.backward,
        builder.beside,
        slowdown,
    )


def _check_memory(choices: tuple[Choices, ...], limit: float) -> None:
    """InfeasibleError if every node's most frugal choice together need more than `limit` bytes."""
    frugal = sorted(((min(node.memory), node.name) for node in choices), reverse=True)
    least = sum(nbytes for nbytes, _ in frugal)
    if least > limit:
        largest = ", ".join(f"%{name} {format_bytes(nbytes)}" for nbytes, name in frugal[:3])
        raise InfeasibleError(
            f"no plan fits into {format_bytes(limit)} a device",
            why=f"the most frugal plan needs {format_bytes(least)}, {format_bytes(least - limit)} "
            f"more; largest: {largest}",
            todo="use more devices, a smaller batch, a lower precision or a leaner optimizer",
        )


def layouts(built: Built, graph: Graph, choice: tuple[int, ...]) -> dict[str, NodePlan]:
    """The plan's entries for a choice: node -> its layouts, with shapes."""
    plan: dict[str, NodePlan] = {}
    for name, options, index in zip(built.names, built.options, choice, strict=True):
        node, option = graph[name], options[index]
        plan[name] = option.entry(graph, node)
        if option.stored is not None:
            stored = graph.template[node.inputs[0]]
            plan[stored] = NodePlan((), ((graph[stored].type.shape, option.stored),))
    return plan
