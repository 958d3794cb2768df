"""Lists every layout change and communicating operator with its collectives and their counts.

The list is read from the lines of the lowered program, which run. A value that several
operators read in one layout is moved once but listed for each reader, because the planner prices
each edge of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from autopar.ir.collective import Collective, Step
from autopar.ir.graph import Graph, Node
from autopar.ir.recompute import repetitions
from autopar.ir.storage import Storage
from autopar.lower import lines as lowered
from autopar.lower.lines import LEAF, Assign, Compute, Function, Sum, Use
from autopar.lower.planned_layouts import Placed
from autopar.lower.program import lower
from autopar.operators.exchange import exchanged
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Call:
    """One collective of a move.

    Attributes:
        kind: such as "all_gather", with its algorithm where one was chosen.
        axes: the mesh axes that it runs over.
        nbytes: payload of each device in bytes.
        seconds: predicted seconds of one call.
        backward: whether it runs in the backward pass.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float
    backward: bool


@dataclass(frozen=True)
class Move:
    """A layout change that communicates, or an operator that communicates inside.

    Attributes:
        value: the node whose value is moved.
        reader: the node that reads the value, "" for the end of the program; an operator that
            communicates inside is its own value and reader.
        before, after: the layouts, in the notation of the plan.
        calls: collectives of both directions, in the order of the forward pass.
        times: executions in a step.
        parameter: the parameter that the value is or is a view of, "" for an activation.
        inside: whether an operator communicates inside.
        again: forward executions that recomputed blocks add.
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
        """Returns how often a step runs one of its collectives."""
        return self.times + (0 if call.backward else self.again)

    @property
    def seconds(self) -> float:
        """Predicted seconds in a step, both directions."""
        return sum(self.count(call) * call.seconds for call in self.calls)


def moves(graph: Graph, plan: StagePlan, price: Callable[[Collective], float]) -> tuple[Move, ...]:
    """Returns all that the program of a plan communicates, in order of execution.

    Args:
        graph: the prepared graph with its repeats.
        plan: a layout for every node of the folded graph.
        price: predicts the seconds of one collective.

    Returns:
        The moves of the forward function, followed by the moves of parameters.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    program = lower(graph, plan, price)
    reader = _FunctionReader(Placed(graph, plan, price), program.blocks, 1)
    all_moves = [*reader.moves(program.forward)]
    if program.aside is not None:
        all_moves += reader.moves(program.aside)
    return tuple(all_moves)


class _FunctionReader:
    """Reads the lines of one function in order.

    Args:
        placed: the graph with the layouts of the plan.
        blocks: the functions that this one calls.
        times: how often a step runs this one.
    """

    def __init__(self, placed: Placed, blocks: Sequence[Function], times: int) -> None:
        self.placed, self.graph, self.plan = placed, placed.graph, placed.plan
        self.blocks, self.times = blocks, times
        self.operators, self.reached = repetitions(placed.graph, placed.plan.recompute)
        # Variable -> its value and the resharding steps that led to its layout.
        self.arrived: dict[str, tuple[str, tuple[Step, ...]]] = {}
        self.entering: list[str] = []  # variables that the next loop carries in

    def moves(self, function: Function, ends: Sequence[str] = ()) -> Iterator[Move]:
        """Yields the moves of a function's lines.

        Args:
            function: the function.
            ends: for a block, the readers of its results.
        """
        for line in function:
            if isinstance(line, lowered.Move):
                yield from self._step(line)
            elif isinstance(line, Compute):
                yield from self._compute(line)
            elif isinstance(line, Sum):
                yield from self._read(line.variable, line.node.name)
                self.arrived.pop(line.variable, None)  # readers of a share take its layout
            elif isinstance(line, Use):
                yield from self._parameter(line.leaf, line.storage)
            elif isinstance(line, Assign):
                yield from self._assign(line)
            elif isinstance(line, lowered.Call):
                yield from self._loop(line)
        readers = ends or [""] * len(function.results)
        for bound, reader in zip(function.results, readers, strict=True):
            yield from self._read(bound.variable, reader, carried=bool(ends))

    def _step(self, line: lowered.Move) -> Iterator[Move]:
        value, steps = self.arrived.get(line.source, ("", ()))
        before = steps if value == line.value else ()
        self.arrived[line.target] = (line.value, (*before, line.step))
        node = self.graph[line.value]
        if node.op == "getitem" and line.step.dst == self.placed.result(line.value):
            # One of several results; it is moved to its own layout before it is read.
            yield from self._read(line.target, line.value)
            del self.arrived[line.target]

    def _compute(self, line: Compute) -> Iterator[Move]:
        for variable in dict.fromkeys(line.operands):
            yield from self._read(variable, line.node.name)
        for variable in line.target.split(","):
            self.arrived.pop(variable, None)
        name, types = line.node.name, tuple(self.graph[name].type for name in line.node.inputs)
        pairs = exchanged(line.node, types, line.into, self.plan.mesh, line.form)
        if calls := self._calls(zip_longest(*pairs)):
            before, after = (
                line.into[0].format(types[0].shape),
                line.out[0].format(line.node.type.shape),
            )
            again = self.operators.get(name, 0)
            yield Move(name, name, before, after, calls, self.times, "", True, again)

    def _assign(self, line: Assign) -> Iterator[Move]:
        if not line.value:
            self.entering.append(line.source)
        leaf = self.graph[line.source.removeprefix(LEAF)] if line.source.startswith(LEAF) else None
        if leaf is not None and leaf.op == "param":
            yield from self._parameter(leaf, self.placed.storage(leaf))
        self.arrived.pop(line.target, None)

    def _loop(self, line: lowered.Call) -> Iterator[Move]:
        repeat, users = self.graph.repeats[line.run], self.graph.users
        first = frozenset(repeat.iterations[0])
        shares = [next(u for u in users[entry] if u in first) for entry, _ in repeat.carried]
        for variable, share in zip(self.entering, shares, strict=True):
            yield from self._read(variable, share, carried=True)
        for variable in line.outside:
            if variable in self.arrived:
                reader = next(u for u in users[self.arrived[variable][0]] if u in first)
                yield from self._read(variable, reader, carried=True)
        self.entering.clear()
        block = _FunctionReader(self.placed, (), repeat.count)
        yield from block.moves(self.blocks[line.run], shares)

    def _read(self, variable: str, reader: str, carried: bool = False) -> Iterator[Move]:
        """Yields the move of the value in a variable; nothing if it was not moved.

        Args:
            variable: the variable that is read.
            reader: the node that reads it, "" for the end of the program.
            carried: whether the value enters or leaves a block, so that recomputation does not
                repeat the move.
        """
        value, steps = self.arrived.get(variable, ("", ()))
        if calls := self._calls((step.forward, step.backward) for step in steps):
            shape, root = self.graph[value].type.shape, self.graph.root(value)
            before, after = steps[0].src.format(shape), steps[-1].dst.format(shape)
            parameter = self.graph.template[root.name] if root.op == "param" else ""
            again = 0 if carried else self.reached.get(reader, 0)
            value = self.graph.template[value]
            yield Move(value, reader, before, after, calls, self.times, parameter, again=again)

    def _parameter(self, leaf: Node, storage: Storage) -> Iterator[Move]:
        """Yields the moves of a parameter and its gradient, per microbatch."""
        (share,), plan, shape = self.graph.users[leaf.name], self.plan, leaf.type.shape
        hops = plan.hops(leaf, storage)
        before, after = storage.format(shape), storage.used.format(shape)
        again = self.operators.get(share, 0)
        for times, repeated in ((self.times - again, 0), (again, again)):
            # A recomputed block gathers as in the forward and keeps the result for the backward.
            calls = tuple(
                Call(
                    plan.collectives.title(hop.call, hop.together(plan.bucket).nbytes),
                    hop.call.axes,
                    hop.call.nbytes,
                    hop.seconds(self.placed.price, plan.bucket) * hop.times / plan.microbatches,
                    hop.when != "forward",
                )
                for hop in hops
                if not (repeated and hop.when == "backward")
            )
            if times and calls:
                yield Move(share, share, before, after, calls, times, leaf.name, again=repeated)

    def _calls(
        self, pairs: Iterable[tuple[Collective | None, Collective | None]]
    ) -> tuple[Call, ...]:
        """Prices pairs of a forward and a backward collective."""
        return tuple(
            Call(self._title(call), call.axes, call.nbytes, self.placed.price(call), backward)
            for pair in pairs
            for backward, call in zip((False, True), pair, strict=True)
            if call is not None
        )

    def _title(self, call: Collective) -> str:
        return self.plan.collectives.named(call).title
