"""The emitted program as lines over variables: what is computed, resharded, kept and overwritten.

A variable keeps its value alive until it is given another one or its function returns. Code
generation gives a value that is resharded its variable again where nobody needs the old one, and
sends a value that several readers want in one layout once; the lines here say the same, found from
graph and plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.ir.collective import Resharder, Step
from autopar.ir.fusion.overlapped import LINEAR, SHARE
from autopar.ir.graph import Graph, Node, Repeat
from autopar.ir.tensor import Layout
from autopar.placed import Placed
from autopar.plan import Plan
from autopar.simulate.lines import (
    LEAF,
    Assign,
    Call,
    Compute,
    Function,
    Line,
    Move,
    Program,
    Sum,
    Use,
)

IDENTITIES = ("autopar.share", "autopar.shard")


def program(graph: Graph, plan: Plan, resharder: Resharder) -> Program:
    """What the program of a plan does in its forward, line by line.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    placed = Placed(graph, plan, resharder)
    outside = [_outside(graph, repeat) for repeat in graph.repeats]
    blocks = tuple(
        _block(placed, repeat, names) for repeat, names in zip(graph.repeats, outside, strict=True)
    )
    return Program(_forward(placed, outside), blocks)


def _carried(placed: Placed, repeat: Repeat) -> list[Layout]:
    """The layout of each carried value where a block begins."""
    first, users = set(repeat.iterations[0]), placed.graph.users
    shares = (next(name for name in users[e] if name in first) for e, _ in repeat.carried)
    return [placed.planned(share).operands[0][1] for share in shares]


@dataclass
class _Held:
    variable: str
    layout: Layout


class _Writer:
    """The lines of one function."""

    def __init__(self, placed: Placed, nodes: Iterable[Node], results: Iterable[str]) -> None:
        self.placed, self.graph = placed, placed.graph
        self.lines: list[Line] = []
        self.held: dict[str, _Held] = {}
        self.sent: dict[tuple[str, Layout], str] = {}
        self.kept: frozenset[str] = frozenset()
        self.uses: dict[str, int] = {}
        self.count = 0
        for name in (*(n for node in nodes for n in node.inputs), *results):
            self.uses[name] = self.uses.get(name, 0) + 1

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def hold(self, value: str, variable: str, layout: Layout) -> None:
        self.held[value] = _Held(variable, layout)

    def look_up(self, value: str) -> _Held:
        if value not in self.held:
            self.hold(value, LEAF + value, self.placed.result(value))
        return self.held[value]

    def operands(self, reads: Iterable[tuple[str, Layout]]) -> list[str]:
        """The variables that hold values in these layouts when one line reads them all."""
        found, kept = list[str](), self.kept
        for value, layout in reads:
            found.append(self.operand(value, layout))
            self.kept |= {found[-1]}
        self.kept = kept
        return found

    def operand(self, value: str, wanted: Layout) -> str:
        """The variable that holds `value` in the layout `wanted`."""
        self.uses[value] -= 1
        held = self.look_up(value)
        steps = self._steps(value, held.layout, wanted)
        if not steps:
            return held.variable
        key = (value, steps[-1].dst)
        if key not in self.sent:
            self.sent[key] = self._target(held.variable)
            self._reshard(value, held.variable, self.sent[key], steps)
        return self.sent[key]

    def _steps(self, value: str, src: Layout, dst: Layout) -> tuple[Step, ...]:
        node = self.graph[value]
        return self.placed.resharder.steps(node.type, src, dst, node.requires_grad)

    def _reshard(self, value: str, source: str, target: str, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self.lines.append(Move(value, self.graph[value].type, step, source, target))
            source = target

    def _target(self, variable: str) -> str:
        owners = [name for name, held in self.held.items() if held.variable == variable]
        owners += [name for (name, _), copy in self.sent.items() if copy == variable]
        read = variable in self.kept or any(self.uses.get(name, 0) for name in owners)
        if not variable.startswith(LEAF) and not read:
            return variable
        return self.fresh()

    def add(self, node: Node) -> None:
        if node.op == "getitem":
            self._getitem(node)
            return
        if node.name in self.held:  # with another, before its place
            return
        beside = node.op in (LINEAR, SHARE) and self.placed.overlaps.near
        if beside and (self._gathered(node) or self._scattered(node)):
            return
        if node.op in IDENTITIES:
            self._share(node)
            return
        planned = self.placed.planned(node.name)
        wanted = (layout for _, layout in planned.operands)
        operands = self.operands(zip(node.inputs, wanted, strict=True))
        target = self.fresh()
        self.lines.append(Compute(node, tuple(operands), target))
        if self.uses.get(node.name):
            self.hold(node.name, target, planned.results[0][1])
        else:  # the value is not kept
            self.lines.append(Assign("", target))

    def _gathered(self, node: Node) -> bool:
        """What is read by linears that run while it is gathered, and those linears."""
        read = self.look_up(node.inputs[0])
        found = self.placed.overlaps.gather(node, read.layout)
        if found is None:
            return False
        for name in (name for linear in found.linears for name in linear.inputs[1:]):
            self._ahead(name)
        self.uses[found.value.name] -= 1
        whole = self.fresh()
        value, step = found.value, found.step
        self.lines.append(Move(value.name, value.type, step, read.variable, whole, found.linears))
        if node.op == SHARE:
            # The sum is made by the product, of gradients that are copied side by side for it.
            self.lines.append(Sum(node, whole))
            self.hold(node.name, whole, found.step.dst)
        parameters = iter(self.operands(self.placed.overlaps.parameters(found)))
        for linear in found.linears:
            operands = (whole, *(next(parameters) for _ in linear.inputs[1:]))
            target = self.fresh()
            self.lines.append(Compute(linear, operands, target, apart=True))
            self.hold(linear.name, target, self.placed.result(linear.name))
        self.lines.append(Assign("", whole))
        return True

    def _ahead(self, name: str) -> None:
        """Write down what is made of a parameter before its place."""
        node = self.graph[name]
        if not node.is_leaf and name not in self.held:
            self._ahead(node.inputs[0])
            self.add(node)

    def _scattered(self, node: Node) -> bool:
        """A linear that runs while its result is scattered."""
        found = self.placed.overlaps.scatter(node)
        if found is None:
            return False
        operands = self.operands(zip(node.inputs, found.operands, strict=True))
        target = self.fresh()
        self.lines += [
            Compute(node, tuple(operands), target, apart=True),
            Move(node.name, node.type, found.step, target, target, (node,)),
        ]
        self.hold(node.name, target, found.step.dst)
        return True

    def _share(self, node: Node) -> None:
        planned = self.placed.planned(node.name)
        value = node.inputs[0]
        (_, into), (_, out) = planned.operands[0], planned.results[0]
        if self.graph[value].op == "param" and self._use(node, self.graph[value]):
            return
        variable = self.operand(value, into)
        steps = self._steps(value, into, out)
        if steps:
            named = not variable.startswith(LEAF)
            target = self._target(variable) if named else self.fresh()
            self._reshard(value, variable, target, steps)
        elif not variable.startswith(LEAF):
            target = variable
        else:
            target = self.fresh()
            self.lines.append(Assign(variable, target))
        self.lines.append(Sum(node, target))
        self.hold(node.name, target, out)

    def _use(self, node: Node, leaf: Node) -> bool:
        storage = self.placed.storage(leaf)
        if storage.moves:
            self.uses[leaf.name] -= 1
            target = self.fresh()
            self.lines += [Use(leaf, storage, LEAF + leaf.name, target), Sum(node, target)]
            self.hold(node.name, target, storage.used)
        return storage.moves

    def _getitem(self, node: Node) -> None:
        value, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        self.uses[value] -= 1
        target = self.fresh()
        self.lines.append(Compute(node, (self.look_up(value).variable,), target))
        wanted = self.placed.result(node.name)
        steps = self._steps(node.name, self.placed.result(value, index), wanted)
        self._reshard(node.name, target, target, steps)
        self.hold(node.name, target, wanted)

    def function(self, arguments: Iterable[str], results: Iterable[str]) -> Function:
        return Function(tuple(self.lines), tuple(arguments), tuple(results))


def _outside(graph: Graph, repeat: Repeat) -> tuple[str, ...]:
    """What a block reads that is neither its own, carried, nor a parameter."""
    inside = set(repeat.iterations[0])
    entries = {entry for entry, _ in repeat.carried}
    nodes = (graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf)
    reads = dict.fromkeys(name for node in nodes for name in node.inputs)
    return tuple(
        name
        for name in reads
        if name not in inside | entries and graph[name].op not in ("param", "buffer")
    )


def _block(placed: Placed, repeat: Repeat, outside: tuple[str, ...]) -> Function:
    graph = placed.graph
    nodes = [graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf]
    writer = _Writer(placed, nodes, [leaves for _, leaves in repeat.carried])
    carried = _carried(placed, repeat)
    arguments = []
    for (entry, _), layout in zip(repeat.carried, carried, strict=True):
        arguments.append(writer.fresh())
        writer.hold(entry, arguments[-1], layout)
    for name in outside:
        arguments.append(writer.fresh())
        writer.hold(name, arguments[-1], placed.result(name))
    for node in nodes:
        writer.add(node)
    leaving = (leaves for _, leaves in repeat.carried)
    results = writer.operands(zip(leaving, carried, strict=True))
    return writer.function(arguments, results)


def _forward(placed: Placed, outside: list[tuple[str, ...]]) -> Function:
    graph = placed.graph
    home = {n: k for k, repeat in enumerate(graph.repeats) for it in repeat.iterations for n in it}
    nodes = [node for node in graph.nodes if node.name not in home and not node.is_leaf]
    used = [name for names in outside for name in names]
    used += [entry for repeat in graph.repeats for entry, _ in repeat.carried]
    used += [node for _, node in graph.outputs]
    writer = _Writer(placed, nodes, used)
    wanted = {name for node in nodes for name in node.inputs} | set(used)
    for leaf in (*graph.leaves("input"), *graph.leaves("received")):
        if leaf.name in wanted:
            variable = writer.fresh()
            writer.lines.append(Assign(LEAF + leaf.name, variable))
            writer.hold(leaf.name, variable, placed.result(leaf.name))
    called: set[int] = set()
    for node in graph.nodes:
        run = home.get(node.name)
        if node.is_leaf or run in called:
            continue
        if run is None:
            writer.add(node)
            continue
        called.add(run)
        _call(writer, run, outside[run])
    results = writer.operands((node, _ending(placed, node)) for _, node in graph.outputs)
    return writer.function((), results)


def _call(writer: _Writer, run: int, outside: tuple[str, ...]) -> None:
    repeat = writer.graph.repeats[run]
    carried = _carried(writer.placed, repeat)
    entries = (entry for entry, _ in repeat.carried)
    variables = writer.operands(zip(entries, carried, strict=True))
    targets = [writer.fresh() for _ in variables]
    for target, variable in zip(targets, variables, strict=True):
        writer.lines.append(Assign(variable, target))
    read = writer.operands((name, writer.placed.result(name)) for name in outside)
    writer.lines.append(Call(run, tuple(targets), tuple(read)))
    last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
    for (_, leaves), target, layout in zip(repeat.carried, targets, carried, strict=True):
        writer.hold(last[leaves], target, layout)


def _ending(placed: Placed, node: str) -> Layout:
    """The loss ends whole on every device, other outputs stay as they are."""
    graph = placed.graph
    if node == graph.loss:
        return Layout.replicated(len(graph[node].type.shape))
    for repeat in graph.repeats:
        last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
        for (_, leaves), layout in zip(repeat.carried, _carried(placed, repeat), strict=True):
            if last[leaves] == node:
                return layout
    return placed.result(node)
