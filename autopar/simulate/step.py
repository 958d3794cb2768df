"""A plan's training step as tasks: forward, backward in reverse order, optimizer.

The forward plays the program's lines (`program.py`) block by block and writes a tape of what has a
gradient; the backward plays the tape from its end, as autograd does, which runs what was computed
last first. Gradients of the last step are gone when the forward begins, as the emitted program sets
them to None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.memory import Transfer, recipe, transfers
from autopar.cost.model import CostModel, NodeWork
from autopar.errors import SimulationError
from autopar.ir.collective import Collective, Resharder
from autopar.ir.exchange import exchanged
from autopar.ir.graph import Graph, Node, Repeat
from autopar.ir.offload import offloaded_runs
from autopar.ir.recompute import Again, again, of_runs
from autopar.ir.stages import SENT, is_trained
from autopar.plan import Plan
from autopar.simulate.backward import Block, Entry, Met, Moved, Operator, Ran, backward
from autopar.simulate.memory import Buffer, Recorder, Value
from autopar.simulate.program import (
    LEAF,
    Call,
    Compute,
    Function,
    Move,
    Program,
    Sum,
    Use,
    program,
)
from autopar.simulate.settings import OVERLAPS, Settings
from autopar.simulate.stow import Stow
from autopar.simulate.task import Cause, Task
from autopar.simulate.update import Updated, update, updated_of
from autopar.simulate.weight import Used, Weight
from autopar.simulate.weights import Weights

_NO_WORK = NodeWork()


def tasks(
    graph: Graph,
    plan: Plan,
    works: Mapping[str, NodeWork],
    model: CostModel,
    settings: Settings | None = None,
) -> tuple[Task, ...]:
    """Everything that one device does in one training step, repeated blocks unfolded.

    Args:
        graph: prepared, with its repeats and a loss, or a stage of a pipeline (see ir/stages.py),
            whose step is that of one microbatch.
        plan: a layout for every node of the folded graph.
        works: kernels of each node of the folded graph, run once.
        model: the prices under which layouts change, as code generation chooses them.
        settings: optimizer and overlap; by default AdamW, one parameter at a time, and none.

    Returns:
        Tasks in program order. The first one, which takes no time, holds parameters, optimizer
        state and the batch.

    Raises:
        SimulationError: the graph has no loss, or no such collectives overlap.
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    settings = settings or Settings()
    if not is_trained(graph):
        raise SimulationError(
            "there is no training step to simulate",
            why=f"graph {graph.name} has no loss",
            todo="plan a model that returns a loss, or pass loss_fn",
        )
    if not settings.overlap <= set(OVERLAPS):
        raise SimulationError(
            f"nothing called {', '.join(sorted(settings.overlap - set(OVERLAPS)))} overlaps",
            why=f"what may overlap is {', '.join(OVERLAPS)}",
        )
    resharder = Resharder(plan.mesh, model.collective, plan.precision.widened)
    graph = graph.trained
    player = _Player(graph, plan, works, settings)
    return player.play(program(graph, plan, resharder))


@dataclass
class _Twice:
    """A block that is played without a tape, and again in the backward.

    Attributes:
        what: what it does again.
        kept: results that are kept meanwhile, by operator.
        second: whether it is played again.
        over: whether nothing is missing any more, so that torch's checkpoint has stopped.
    """

    what: Again
    kept: dict[str, Buffer] = field(default_factory=dict)
    second: bool = False
    over: bool = False

    def skips(self, name: str) -> bool:
        """Whether an operator is not computed now."""
        return self.second and name not in self.what.operators

    def played(self, name: str) -> None:
        """An operator of the block has been played."""
        self.over = self.second and name == self.what.last


class _Player:
    """Plays a program once; `play` is its only use."""

    def __init__(
        self, graph: Graph, plan: Plan, works: Mapping[str, NodeWork], settings: Settings
    ) -> None:
        self.graph, self.plan, self.works, self.settings = graph, plan, works, settings
        self.recorder = Recorder()
        self.weights = Weights(
            plan.mesh,
            self.recorder,
            settings.overlap,
            microbatches=plan.microbatches,
            bucket=plan.bucket,
            accelerator=settings.accelerator,
            precision=plan.precision,
            together=plan.fuses_update and not plan.offload.optimizer,
        )
        # The block that a leaf is of, and where its first reader stands.
        self.blocks = {
            name: f"{run}:{number}"
            for run, repeat in enumerate(graph.repeats)
            for number, names in enumerate(repeat.iterations)
            for name in names
        }
        places = {node.name: place for place, node in enumerate(graph.nodes)}
        self.places = {
            leaf.name: min((places[user] for user in graph.users[leaf.name]), default=0)
            for leaf in graph.leaves("param")
        }
        self.leaves: dict[str, Value] = {}
        self.updated: dict[str, Updated] = {}
        self.tape: list[Entry] = []
        self.operators: dict[str, Operator] = {}
        self.transfers: dict[int, tuple[Transfer, Transfer]] = {}
        self.causes: dict[str, bool] = {}
        self.recomputed = of_runs(graph, plan.recompute)
        self.stowing = offloaded_runs(graph, plan.offload, plan.recompute)
        self.stow = Stow(self.recorder, settings.accelerator)
        self.away = plan.offload.optimizer
        self.twice: _Twice | None = None  # the block that is being played, if it is played twice

    def play(self, made: Program) -> tuple[Task, ...]:
        self._begin()
        frame = self._run(made.forward, [], {}, made)
        outputs = [frame[name] for name in made.forward.results]
        ends = [
            value
            for (user, node), value in zip(self.graph.outputs, outputs, strict=True)
            if node == self.graph.loss or (user.startswith(SENT) and value.grad)
        ]
        for value in outputs:
            self.recorder.hold(value.buffer)
        self._leave(frame)
        self.stow.gone()
        for value in outputs:
            if value not in ends:
                self.recorder.drop(value.buffer)
        backward(self.tape, ends, self.recorder, self.weights)
        for value in ends:
            self.recorder.drop(value.buffer)
        trained = [
            self.updated[node.name]
            for node in self.graph.leaves("param")
            if self.leaves[node.name].gradient is not None
        ]
        update(self.recorder, self.settings, trained, self.plan, self.away)
        self.weights.gather()
        return self.recorder.tasks()

    def _begin(self) -> None:
        """What is there all the time."""
        recorder = self.recorder
        recorder.compute("begin", "", ())
        for node in self.graph.nodes:
            if not node.is_leaf:
                continue
            layout = self.plan.nodes[self.graph.template[node.name]].results[0][1]
            nbytes = float(layout.local_bytes(node.type, self.plan.mesh))
            kind = "batch" if node.op in ("input", "received") else "parameter"
            buffer = recorder.hold(recorder.allocate(kind, node.name, nbytes))
            self.leaves[node.name] = Value(buffer, node.requires_grad)
            if node.op == "param" and self.graph.users[node.name]:
                self._parameter(node)

    def _parameter(self, node: Node) -> None:
        """Where the states of a parameter lie."""
        share = self.graph.template[self.graph.users[node.name][0]]
        plan, trained = self.plan, node.requires_grad
        storage = plan.storage(self.graph.template[node.name], share)
        master = plan.precision.has_master(node.type, trained)
        if storage.moves or master:
            hops = storage.hops(node.type, plan.mesh, plan.microbatches, trained, plan.precision)
            value = self.leaves[node.name]
            block, place = self.blocks.get(node.name, node.name), self.places[node.name]
            self.weights.add(Weight(node.name, node, storage, value, hops, block, place))
        elif node.requires_grad and self.plan.microbatches > 1:
            # The sum of the gradients of earlier microbatches, which the last one adds to.
            nbytes = self.leaves[node.name].buffer.nbytes
            earlier = self.recorder.allocate("gradient", node.name, nbytes)
            self.leaves[node.name].gradient = self.recorder.hold(earlier)
        updated = self.updated[node.name] = updated_of(self.graph, plan, node)
        finer = storage.updated.dims != storage.held.dims
        if master or (plan.fuses_update and trained and finer):
            title = "master" if master else "updated part"
            part = self.recorder.allocate("optimizer", f"{node.name}, {title}", updated.nbytes)
            self.recorder.hold(part)
        if node.requires_grad and self.settings.state_bytes and not self.away:
            state = updated.nbytes * self.settings.state_bytes
            self.recorder.hold(self.recorder.allocate("optimizer", node.name, state))

    # Forward ---------------------------------------------------------------------------------

    def _run(
        self, function: Function, arguments: list[Value], names: dict[str, str], made: Program
    ) -> dict[str, Value]:
        """Play a function; `names` are a block's own for those of the first block."""
        recorder, frame = self.recorder, dict[str, Value]()
        for variable, value in zip(function.arguments, arguments, strict=True):
            frame[variable] = value
            recorder.hold(value.buffer)
        for line in function.lines:
            if isinstance(line, Compute):
                operands = [self._read(frame, names, o) for o in line.operands]
                self._bind(frame, line.target, self._compute(line.node, operands, names))
            elif isinstance(line, Move):
                source = self._read(frame, names, line.source)
                self._bind(frame, line.target, self._move(line, source, names))
            elif isinstance(line, Use):
                self._bind(frame, line.target, self._use(line, names))
            elif isinstance(line, Sum):
                self._meet(line, self._read(frame, names, line.variable), names)
            elif isinstance(line, Call):
                self._call(line, frame, made)
            elif line.source:
                self._bind(frame, line.target, self._read(frame, names, line.source))
            else:
                recorder.drop(frame.pop(line.target).buffer)
        return frame

    def _leave(self, frame: dict[str, Value]) -> None:
        for value in frame.values():
            self.recorder.drop(value.buffer)

    def _call(self, line: Call, frame: dict[str, Value], made: Program) -> None:
        repeat, function = self.graph.repeats[line.run], made.blocks[line.run]
        outside = [frame[variable] for variable in line.outside]
        how, (first, end) = self.recomputed[line.run], self.stowing[line.run]
        for number, block in enumerate(repeat.iterations):
            names = dict(zip(repeat.iterations[0], block, strict=True))
            arguments = [*(frame[variable] for variable in line.targets), *outside]
            if how is not None and number < how.blocks:
                results = self._play_twice(function, arguments, names, made, how.kind, repeat)
            elif first <= number < end:
                self.stow.begin()
                results = self._results(function, arguments, names, made)
                self.tape.append(self.stow.end())
            else:
                results = self._results(function, arguments, names, made)
            for variable, value in zip(line.targets, results, strict=True):
                self._bind(frame, variable, value)
                self.recorder.drop(value.buffer)

    def _results(
        self, function: Function, arguments: list[Value], names: dict[str, str], made: Program
    ) -> list[Value]:
        """What a function returns, held."""
        frame = self._run(function, arguments, names, made)
        results = [frame[variable] for variable in function.results]
        for value in results:
            self.recorder.hold(value.buffer)
        self._leave(frame)
        return results

    def _play_twice(
        self,
        function: Function,
        arguments: list[Value],
        names: dict[str, str],
        made: Program,
        kind: str,
        repeat: Repeat,
    ) -> list[Value]:
        """The results of a block that is played without a tape now, and again in the backward."""
        twice = self.twice = _Twice(again(self.graph, repeat, kind))
        tape, self.tape = self.tape, []
        results = [
            Value(value.buffer, value.grad, ready=value.ready)
            for value in self._results(function, arguments, names, made)
        ]
        self.tape, self.twice = tape, None
        for value in arguments:
            self.recorder.hold(value.buffer)

        def second() -> tuple[list[Entry], list[Value]]:
            self.tape, self.twice = [], twice
            twice.second, twice.over = True, not twice.what.last
            inner = self._results(function, arguments, names, made)
            for value in inner:
                self.recorder.drop(value.buffer)
            for buffer in twice.kept.values():
                self.recorder.drop(buffer)
            written, self.tape, self.twice = self.tape, [], None
            return written, inner

        self.tape.append(Block(arguments, results, second))
        return results

    def _read(self, frame: dict[str, Value], names: dict[str, str], variable: str) -> Value:
        if variable.startswith(LEAF):
            name = variable[len(LEAF) :]
            return self.leaves[names.get(name, name)]
        return frame[variable]

    def _bind(self, frame: dict[str, Value], variable: str, value: Value) -> None:
        self.recorder.hold(value.buffer)
        old = frame.get(variable)
        if old is not None:
            self.recorder.drop(old.buffer)
        frame[variable] = value

    def _operator(self, node: Node) -> Operator:
        if node.name not in self.operators:
            planned = self.plan.nodes[self.graph.template[node.name]]
            reads = tuple(self.graph[name] for name in node.inputs)
            asks: tuple[tuple[Collective, ...], tuple[Collective, ...]] = ((), ())
            if len(planned.operands) == len(reads):
                into = tuple(layout for _, layout in planned.operands)
                types = tuple(read.type for read in reads)
                asks = exchanged(node, types, into, self.plan.mesh)
            work = self.works.get(self.graph.template[node.name], _NO_WORK)
            sides = ([layout for _, layout in side] for side in (planned.operands, planned.results))
            into, out = map(tuple, sides)
            made = recipe(node, reads, into, out, self.plan.mesh, self.settings.accelerator)
            self.operators[node.name] = Operator(made, work, asks)
        return self.operators[node.name]

    def _compute(self, node: Node, operands: list[Value], names: dict[str, str]) -> Value:
        recorder, operator, twice = self.recorder, self._operator(node), self.twice
        made, name = operator.recipe, names.get(node.name, node.name)
        skipped = twice is not None and twice.skips(node.name)
        if made.alias >= 0 and (skipped or not operator.work.forward):
            value = Value(operands[made.alias].buffer, node.requires_grad)
            value.ready = max(operand.ready for operand in operands)
        elif skipped:
            value = Value(self._left(node.name), node.requires_grad)
        else:
            ready = [value.ready for value in operands]
            recorder.compute(self._title(name), name, operator.work.forward, ready)
            value = Value(
                operands[made.alias].buffer
                if made.alias >= 0
                else recorder.allocate("temporary", name, sum(made.results)),
                node.requires_grad,
            )
            recorder.scratch("temporary", f"of {name}", made.scratch)
        for call in () if skipped else operator.asks[0]:
            recorder.collective(f"{call.kind} in {self._title(name)}", name, call, "exchange")
        if twice is not None and not twice.second:
            if node.name in twice.what.kept:
                twice.kept[node.name] = recorder.hold(value.buffer)
                value.buffer.kind = "activation"
        elif node.requires_grad:
            read = ((value if place < 0 else operands[place]).buffer for place in made.saved)
            saved = [self._saved(buffer) for buffer in read]
            for buffer in saved:
                recorder.hold(buffer)
                buffer.kind = "activation" if buffer.kind == "temporary" else buffer.kind
            for nbytes in made.extra:
                extra = recorder.allocate("activation", f"kept by {name}", nbytes)
                saved.append(recorder.hold(extra))
            value.buffer.holders += 1  # a variable will hold it
            saved = self.stow.put(saved)
            value.buffer.holders -= 1
            for operand, gradient in zip(operands, made.gradients, strict=False):
                operand.readers += gradient >= 0
            self.tape.append(Ran(name, operator, operands, value, saved))
        if twice is not None:
            twice.played(node.name)
        return value

    def _saved(self, read: Buffer) -> Buffer:
        """What is kept of a value that an operator's backward reads."""
        if read.kept is None:
            return read
        self.weights.save(read.kept)
        self.stow.leave(read.kept)
        return read.kept

    def _use(self, line: Use, names: dict[str, str]) -> Value:
        weight = self.weights.known[names.get(line.leaf.name, line.leaf.name)]
        source, twice = weight.value, self.twice
        if twice is not None and twice.over:
            target = Value(self._left(""), source.grad, ready=source.ready)
        else:
            target = self.weights.use(weight)
            self.stow.leave(target.buffer)
            if twice is None:
                self.weights.keep(weight, target)
        if source.grad and (twice is None or twice.second):
            source.readers += 1
            self.tape.append(Used(weight, target))
        return target

    def _left(self, name: str) -> Buffer:
        """What is left of an operator that is not computed again: its result, or nothing."""
        kept = None if self.twice is None else self.twice.kept.get(name)
        return self.recorder.allocate("temporary", name, 0.0) if kept is None else kept

    def _title(self, name: str) -> str:
        return f"{name} again" if self.twice is not None and self.twice.second else name

    def _move(self, line: Move, source: Value, names: dict[str, str]) -> Value:
        recorder, step = self.recorder, line.step
        if id(step) not in self.transfers:
            self.transfers[id(step)] = transfers(
                step, line.tensor, self.plan.mesh, self.plan.precision.widened
            )
        forward, gradient = self.transfers[id(step)]
        value_of = names.get(line.value, line.value)
        parameter, twice = self._of_parameter(line.value), self.twice
        target = Value(source.buffer, source.grad, ready=source.ready)
        if twice is not None and twice.over:
            target.buffer = self._left("")
        elif step.forward is not None:
            title = f"{step.forward.kind} of {self._title(value_of)}"
            cause: Cause = "parameter" if parameter else "activation"
            recorder.collective(title, value_of, step.forward, cause, [source.ready])
        elif forward.result is not None:
            recorder.compute(f"{step.op} of {value_of}", value_of, (), [source.ready])
        if forward.result is not None and not (twice is not None and twice.over):
            target.buffer = recorder.allocate("temporary", value_of, forward.result)
            recorder.scratch("communication", value_of, forward.staging)
        if source.grad and (twice is None or twice.second):
            source.readers += 1
            back: Cause = "gradient" if parameter else "activation"
            entry = Moved(value_of, step.backward, gradient, back, source, target)
            self.tape.append(entry)
        return target

    def _meet(self, line: Sum, value: Value, names: dict[str, str]) -> None:
        work = self.works.get(self.graph.template[line.node.name], _NO_WORK)
        if value.grad and work.backward:
            name = names.get(line.node.name, line.node.name)
            self.tape.append(Met(name, work.backward, value))

    def _of_parameter(self, name: str) -> bool:
        """Whether a value is a parameter or a view of one."""
        if name not in self.causes:
            root = self.graph[name]
            while root.alias is not None:
                root = self.graph[root.alias]
            self.causes[name] = root.op == "param"
        return self.causes[name]
