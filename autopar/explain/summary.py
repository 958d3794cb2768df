"""Where a plan's time and memory go, as data: by block, line of code and parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile

from autopar.explain.layers import layers
from autopar.explain.moves import Move, moves, planned
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph, Node, Source
from autopar.ir.recompute import repetitions
from autopar.plan import NodePlan, Plan


@dataclass(frozen=True)
class Cost:
    """What one node of the folded graph costs a device, all blocks together.

    `compute` is seconds forwards and backwards, `saved` the bytes kept for the backward.
    """

    compute: float
    saved: float


@dataclass(frozen=True)
class Operator:
    """A node of the folded graph with its layouts, its cost, and the moves before and after it.

    `layer` is where it belongs (see layers.py), `axes` are the mesh axes that split it.
    """

    name: str
    op: str
    layer: str
    axes: tuple[str, ...]
    layouts: str
    cost: Cost
    before: tuple[Move, ...]
    after: tuple[Move, ...]

    @property
    def kind(self) -> str:
        """An ATen operator without its overload; what a share computes is a sum."""
        if self.op == "autopar.share":
            return "sum of gradients"
        if self.op.startswith("aten."):
            return self.op.split(".")[1]
        return self.op.removeprefix("autopar.")

    @property
    def seconds(self) -> float:
        """Compute and moves, all blocks together."""
        return self.cost.compute + sum(move.seconds for move in (*self.before, *self.after))


@dataclass(frozen=True)
class Line:
    """A line of the user's code in one module, with its operators."""

    module: str
    place: str
    text: str
    operators: tuple[Operator, ...]

    @property
    def seconds(self) -> float:
        """Compute and moves, all blocks together."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def saved(self) -> float:
        """Bytes kept for the backward, all blocks together."""
        return sum(operator.cost.saved for operator in self.operators)


@dataclass(frozen=True)
class Section:
    """Lines that run once, or those of a repeated block; `title` is what its modules share."""

    title: str
    times: int
    lines: tuple[Line, ...]

    @property
    def seconds(self) -> float:
        """Compute and moves, all blocks together."""
        return sum(line.seconds for line in self.lines)


@dataclass(frozen=True)
class Parameter:
    """A parameter, or one per block: how it is stored and used, and what it costs.

    Attributes:
        name: the user's, with "*" for the number of the block.
        times: number of blocks.
        layer: where it belongs; see layers.py.
        stored, used: layouts, in the notation of a pin, with the dtype.
        axes, updated_axes, used_axes: the mesh axes that split it as it is held, as it is updated
            and as it is used.
        moves: gathering it and synchronising its gradient.
        nbytes: of what is stored, on one device, all blocks together.
        gathered: of the copy that is kept for the backward, where that is another.
        gradient: of its gradient.
        optimizer: of its optimizer state, as far as the device holds it.
        host: of that which lies in host memory.
    """

    name: str
    times: int
    layer: str
    stored: str
    used: str
    axes: tuple[str, ...]
    updated_axes: tuple[str, ...]
    used_axes: tuple[str, ...]
    moves: tuple[Move, ...]
    nbytes: int
    gathered: int
    gradient: int
    optimizer: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Its moves, all blocks together."""
        return sum(move.seconds for move in self.moves)


@dataclass(frozen=True)
class Explanation:
    """Where time and memory of one plan go.

    Attributes:
        graph, mesh: what the plan is for, as in its file.
        predicted: the figures of its file.
        sections: operators with the moves of activations, in order of execution.
        parameters: with the moves that belong to them.
        memory: bytes per device by cause; a step never holds all of them at once.
        limit: memory of one device in bytes.
        whole: operators that run whole on every device for want of a rule.
        hidden: seconds in which gradients and parameters go beside kernels; causes, lines and
            views count them twice, `step` once.
        peak: bytes per device at the peak of the step, where that has been simulated.
        copies: seconds of copies to host memory and back.
        host: bytes per device in host memory.
        caution: what its precision does to results; see `Precision.caution`.
    """

    graph: str
    mesh: str
    predicted: dict[str, float]
    sections: tuple[Section, ...]
    parameters: tuple[Parameter, ...]
    memory: dict[str, float]
    limit: float
    whole: tuple[str, ...]
    hidden: float = 0.0
    peak: float | None = None
    copies: float = 0.0
    host: float = 0.0
    caution: str = ""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values()) - self.hidden

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds a step by cause; their sum is the predicted step and what is hidden in it."""
        operators = [o for s in self.sections for line in s.lines for o in line.operators]
        moved = sum(m.seconds for o in operators for m in (*o.before, *o.after))
        found = {
            "compute": sum(operator.cost.compute for operator in operators),
            "activations": moved,
            "parameters": sum(parameter.seconds for parameter in self.parameters),
        }
        return found | ({"host copies": self.copies} if self.copies else {})

    @property
    def stale(self) -> bool:
        """Whether the plan's own figures are not those of its layouts."""
        activations = self.memory["activations"]
        own = {
            "step_seconds": self.step,
            "parameter_bytes": sum(self.memory.values()) - activations,
            "activation_bytes": activations,
        }
        return any(
            not math.isclose(value, self.predicted.get(name, value), rel_tol=1e-6)
            for name, value in own.items()
        )

    @property
    def dearest(self) -> tuple[tuple[Section, Line], ...]:
        """All lines that take time or memory, the slowest first."""
        lines = [(s, line) for s in self.sections for line in s.lines]
        lines = [pair for pair in lines if pair[1].seconds or pair[1].saved]
        return tuple(sorted(lines, key=lambda pair: -pair[1].seconds))


def explain(
    graph: Graph,
    plan: Plan,
    price: Callable[[Collective], float],
    costs: Mapping[str, Cost],
    *,
    limit: float,
    state_bytes: float = 2.0,
    whole: Iterable[str] = (),
    hidden: float = 0.0,
    peak: float | None = None,
    stowed: tuple[float, float] = (0.0, 0.0),
    coming: float = 0.0,
) -> Explanation:
    """Everything that the plan makes a step do.

    Args:
        graph: prepared; the plan is for it.
        plan: a layout for every node of the folded graph.
        price: seconds of one collective.
        costs: of the nodes that are no parameters; what is missing is free.
        limit: bytes of one device.
        state_bytes: optimizer state in units of the parameter's own bytes (AdamW: 2).
        whole: operators that run whole for want of a rule.
        hidden: seconds in which gradients and parameters go beside kernels.
        peak: bytes per device at the peak of a simulated step.
        stowed: activations in host memory: bytes, and seconds of copying them both ways.
        coming: seconds that a byte of optimizer state takes to come from host memory and go back.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    moved = moves(graph, plan, price)
    table = parameters(graph, plan, moved, state_bytes)
    memory: dict[str, float] = {
        "parameters": sum(parameter.nbytes for parameter in table),
        "gathered parameters": sum(parameter.gathered for parameter in table),
        "gradients": sum(parameter.gradient for parameter in table),
        "optimizer": sum(parameter.optimizer for parameter in table),
        "activations": sum(cost.saved for cost in costs.values()),
    }
    sections = tuple(_sections(graph, plan, moved, costs))
    states = sum(parameter.host for parameter in table)
    copies = stowed[1] + states * coming / plan.microbatches
    return Explanation(
        plan.graph, str(plan.mesh), dict(plan.predicted), sections, table, memory, limit,
        tuple(whole), hidden, peak, copies, states + stowed[0], plan.precision.caution,
    )  # fmt: skip


def parameters(
    graph: Graph, plan: Plan, moved: Iterable[Move], state_bytes: float = 2.0
) -> tuple[Parameter, ...]:
    """The parameters that the folded graph reads; `moved` are the moves of the whole program."""
    found, layer = [], layers(graph)
    operators, _ = repetitions(graph, plan.recompute)
    by_parameter: dict[str, list[Move]] = {}
    for move in moved:
        by_parameter.setdefault(move.parameter, []).append(move)
    for node in graph.folded:
        if node.op != "param" or not graph.users[node.name]:
            continue
        planned(plan, graph, node.name), planned(plan, graph, graph.users[node.name][0])
        storage = plan.storage(node.name, graph.template[graph.users[node.name][0]])
        stored, used, kept = storage.held, storage.used, storage.kept
        times, nbytes = graph.multiplicity[node.name], stored.local_bytes(node.type, plan.mesh)
        copied = kept.local_bytes(node.type, plan.mesh) if kept.dims != stored.dims else 0
        own = plan.precision.updated(node.type, node.requires_grad)
        updated = times * storage.updated.local_bytes(own, plan.mesh)
        updated = updated if node.requires_grad else 0
        master = updated if own != node.type else 0
        grads = times * storage.grads.local_bytes(own, plan.mesh)
        gradient = max(updated, grads if updated and plan.microbatches > 1 else 0)
        found.append(
            Parameter(
                parameter_name(graph, node),
                times,
                layer[node.name],
                f"{node.type.dtype}{storage.describe(node.type.shape)}",
                f"{node.type.dtype}{used.format(node.type.shape)}",
                stored.sharded_axes,
                storage.updated.sharded_axes,
                used.sharded_axes,
                tuple(by_parameter.get(node.name, ())),
                times * nbytes,
                (times - operators.get(graph.users[node.name][0], 0)) * copied,
                gradient,
                master + (0.0 if plan.offload.optimizer else state_bytes * updated),
                state_bytes * updated if plan.offload.optimizer else 0.0,
            )
        )
    return tuple(found)


def parameter_name(graph: Graph, node: Node) -> str:
    """A leaf of the folded graph as the user knows it, "*" for the number of its block."""
    return _pattern(_label(node), _label(_counterpart(graph, node)))


def module_pattern(graph: Graph, node: Node) -> str:
    """The module of a node of the folded graph, "*" for the number of its block."""
    return _pattern(node.source.module, _counterpart(graph, node).source.module)


def _counterpart(graph: Graph, node: Node) -> Node:
    """What a node of the first block of a run is in the second; itself outside of runs."""
    for repeat in graph.repeats:
        if node.name in repeat.iterations[0]:
            return graph[repeat.iterations[1][repeat.iterations[0].index(node.name)]]
    return node


def _label(node: Node) -> str:
    """A parameter's name, with where it is cut: "c_attn.weight[:, 0:768]"."""
    dim, start, length = (node.keyword(word) for word in ("dim", "start", "length"))
    if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
        return f"{node.target}[{':, ' * dim}{start}:{start + length}]"
    return node.target


def _pattern(name: str, other: str) -> str:
    """Two names of one kind as one: "h.0.mlp", "h.1.mlp" -> "h.*.mlp"."""
    words, others = (re.split(r"(\W)", text) for text in (name, other))
    if len(words) != len(others):
        return name
    return "".join(a if a == b else "*" for a, b in zip(words, others, strict=True))


def _sections(
    graph: Graph, plan: Plan, moved: Iterable[Move], costs: Mapping[str, Cost]
) -> Iterator[Section]:
    """The operators in order of execution, by block and by line of the user's code."""
    before: dict[str, list[Move]] = {}
    after: dict[str, list[Move]] = {}
    for move in moved:
        if move.parameter:
            continue
        # A share is a place in the plan and no operator: its moves are those of its value.
        if move.reader and graph[move.reader].op != "autopar.share":
            before.setdefault(move.reader, []).append(move)
        else:
            after.setdefault(_maker(graph, move.value), []).append(move)
    run = {n: k for k, repeat in enumerate(graph.repeats) for n in repeat.iterations[0]}
    # A share computes where the gradients of its readers are added up.
    quiet = {n.name for n in graph.folded if n.is_leaf or n.op == "autopar.share"}
    quiet -= {*after, *(name for name, cost in costs.items() if cost != Cost(0.0, 0.0))}
    listed = [n for n in graph.folded if n.op != "param" and n.name not in quiet]
    layer = layers(graph)
    for number, nodes in groupby(listed, lambda node: run.get(node.name)):
        modules = {} if number is None else _block_modules(graph, number)
        lines = [
            Line(
                modules.get(group[0].name, source.module),
                f"{source.file}:{source.line}" if source.file else "",
                source.text,
                tuple(
                    Operator(
                        node.name,
                        node.op,
                        layer[node.name],
                        _axes(plan, planned(plan, graph, node.name)),
                        str(planned(plan, graph, node.name)),
                        costs.get(node.name, Cost(0.0, 0.0)),
                        tuple(before.get(node.name, ())),
                        tuple(after.get(node.name, ())),
                    )
                    for node in group
                ),
            )
            for source, group in _by_line(nodes)
        ]
        if number is None:
            yield Section("", 1, tuple(lines))
        else:
            title = _common(modules.values())
            yield Section(title, graph.repeats[number].count, tuple(lines))


def _axes(plan: Plan, entry: NodePlan) -> tuple[str, ...]:
    """The mesh axes that split an operand or a result, or leave a sum of it owed."""
    layouts = [layout for _, layout in (*entry.operands, *entry.results)]
    found = {axis for layout in layouts for axis in (*layout.sharded_axes, *layout.partial)}
    return tuple(name for name in plan.mesh.names if name in found)


def _maker(graph: Graph, value: str) -> str:
    """The operator or leaf behind a chain of shares."""
    while graph[value].op == "autopar.share":
        value = graph.template[graph[value].inputs[0]]
    return value


def _by_line(nodes: Iterable[Node]) -> Iterator[tuple[Source, list[Node]]]:
    for source, group in groupby(nodes, lambda node: node.source):
        yield source, list(group)


def _block_modules(graph: Graph, number: int) -> dict[str, str]:
    """Node of the first block of a run -> its module, with "*" for the block's number."""
    first, second = graph.repeats[number].iterations[:2]
    return {
        a: _pattern(graph[a].source.module, graph[b].source.module)
        for a, b in zip(first, second, strict=True)
        if graph[a].source.module and graph[a].op != "autopar.share"
    }


def _common(modules: Iterable[str]) -> str:
    """The beginning that module paths share, in whole words."""
    found: list[str] | None = None
    for module in modules:
        words = module.split(".")
        pairs = zip(words if found is None else found, words, strict=False)
        found = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join(found or []) or "a repeated block"
