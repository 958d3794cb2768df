"""The forward of a simulated step: runs the lines of the lowered program, block by block.

Every operation with a gradient is recorded on a tape, which `backward.py` runs in reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost.model import NodeWork
from autopar.cost.operator_memory import Transfer, recipe, transfers
from autopar.cost.overlap import products
from autopar.ir.collective import Collective
from autopar.ir.graph import WRITE, Graph, Node, Repeat
from autopar.ir.offload import offloaded_runs
from autopar.ir.recompute import CORE, RecomputedOperators, again, of_runs
from autopar.lower.lines import LEAF, Assign, Call, Compute, Drop, Function, Lowered, Move, Sum, Use
from autopar.operators.exchange import exchanged
from autopar.operators.form import Part
from autopar.operators.forms import form_named
from autopar.simulate.activation_offload import ActivationOffload
from autopar.simulate.backward import Block, Computed, Entry, Operator, Products, Resharded, Summed
from autopar.simulate.buffers import Buffer, Recorder, Value
from autopar.simulate.parameter import Used
from autopar.simulate.parameter_tasks import Weights
from autopar.simulate.task import AGAIN, Cause
from autopar.stage_plan import StagePlan

_NO_WORK = NodeWork()


@dataclass
class _RecomputedBlock:
    """A block that runs without a tape in the forward, and again in the backward.

    Attributes:
        what: the operators that it recomputes.
        kept: results that are kept between the two, by operator.
        second: whether this is the recomputation.
        over: whether nothing more needs to be recomputed, so that torch's checkpoint has stopped.
    """

    what: RecomputedOperators
    kept: dict[str, Buffer] = field(default_factory=dict)
    second: bool = False
    over: bool = False

    def skips(self, name: str) -> bool:
        """Returns whether an operator is not computed this time."""
        return self.second and name not in self.what.operators

    def ran(self, name: str) -> None:
        """Records that an operator of the block has run."""
        self.over = self.second and name == self.what.last


class Forward:
    """Simulates a program's forward once, by `simulate`.

    Args:
        graph: the prepared graph.
        plan: its plan.
        works: kernels of each node of the folded graph, run once.
        accelerator: see `Settings`.
        recorder: records the tasks.
        weights: the parameters with collectives.
        leaves: values that exist before the forward, by node.
    """

    def __init__(
        self,
        graph: Graph,
        plan: StagePlan,
        works: Mapping[str, NodeWork],
        accelerator: bool,
        recorder: Recorder,
        weights: Weights,
        leaves: Mapping[str, Value],
    ) -> None:
        self.graph, self.plan, self.works, self.accelerator = graph, plan, works, accelerator
        self.recorder, self.weights, self.leaves = recorder, weights, leaves
        self.blocks: Sequence[Function] = ()
        self.tape: list[Entry] = []
        self.operators: dict[str, Operator] = {}
        self.transfers: dict[int, tuple[Transfer, Transfer]] = {}
        self.causes: dict[str, bool] = {}
        self.products: dict[int, tuple[Products, Products]] = {}
        self.recomputed = of_runs(graph, plan.recompute)
        self.offloaded_blocks = offloaded_runs(graph, plan.offload, plan.recompute)
        self.offload = ActivationOffload(recorder, accelerator)
        self.written: list[Buffer] = []  # new contents of the model's buffers
        self.twice: _RecomputedBlock | None = None  # the current block, if it is recomputed

    def simulate(self, program: Lowered) -> tuple[list[Value], list[Entry]]:
        """Simulates the program; returns its results, which are held, and the tape."""
        self.blocks = program.blocks
        outputs = self._results(program.forward, [], {})
        self.offload.gone()
        return outputs, self.tape

    def _run(
        self, function: Function, arguments: list[Value], names: dict[str, str]
    ) -> dict[str, Value]:
        """Simulates a function; `names` maps nodes of the first block to those of this block."""
        recorder, frame = self.recorder, dict[str, Value]()
        for bound, value in zip(function.arguments, arguments, strict=True):
            frame[bound.variable] = value
            recorder.hold(value.buffer)
        for line in function:
            if isinstance(line, Compute):
                operands = [self._read(frame, names, o) for o in line.operands]
                value = self._compute(line, operands, names)
                if line.target:
                    self._bind(frame, line.target, value)
                else:
                    recorder.drop(recorder.hold(value.buffer))
            elif isinstance(line, Move):
                source = self._read(frame, names, line.source)
                self._bind(frame, line.target, self._move(line, source, names))
            elif isinstance(line, Use):
                self._bind(frame, line.target, self._use(line, names))
            elif isinstance(line, Sum):
                self._meet(line, self._read(frame, names, line.variable), names)
            elif isinstance(line, Call):
                self._call(line, frame)
            elif isinstance(line, Assign):
                self._bind(frame, line.target, self._read(frame, names, line.source))
            elif isinstance(line, Drop):
                recorder.drop(frame.pop(line.variable).buffer)
        return frame

    def _leave(self, frame: dict[str, Value]) -> None:
        for value in frame.values():
            self.recorder.drop(value.buffer)

    def _call(self, line: Call, frame: dict[str, Value]) -> None:
        repeat, function = self.graph.repeats[line.run], self.blocks[line.run]
        outside = [self._read(frame, {}, variable) for variable in line.outside]
        how, (first, end) = self.recomputed[line.run], self.offloaded_blocks[line.run]
        for number, block in enumerate(repeat.iterations):
            names = dict(zip(repeat.iterations[0], block, strict=True))
            arguments = [*(frame[variable] for variable in line.targets), *outside]
            if how is not None and number < how.blocks:
                results = self._run_twice(function, arguments, names, how.kind, repeat)
            elif first <= number < end:
                self.offload.begin()
                results = self._results(function, arguments, names)
                self.tape.append(self.offload.end())
            else:
                results = self._results(function, arguments, names)
            for variable, value in zip(line.targets, results, strict=True):
                self._bind(frame, variable, value)
                self.recorder.drop(value.buffer)

    def _results(
        self, function: Function, arguments: list[Value], names: dict[str, str]
    ) -> list[Value]:
        """Simulates a function and returns its results, which are held."""
        frame = self._run(function, arguments, names)
        results = [self._read(frame, names, bound.variable) for bound in function.results]
        for value in results:
            self.recorder.hold(value.buffer)
        self._leave(frame)
        return results

    def _run_twice(
        self,
        function: Function,
        arguments: list[Value],
        names: dict[str, str],
        kind: str,
        repeat: Repeat,
    ) -> list[Value]:
        """Simulates a block without a tape and returns its results; the backward recomputes it."""
        twice = self.twice = _RecomputedBlock(again(self.graph, repeat, kind))
        tape, self.tape = self.tape, []
        results = [
            Value(value.buffer, value.grad, ready=value.ready)
            for value in self._results(function, arguments, names)
        ]
        self.tape, self.twice = tape, None
        for value in arguments:
            self.recorder.hold(value.buffer)

        def second() -> tuple[list[Entry], list[Value]]:
            self.tape, self.twice = [], twice
            twice.second, twice.over = True, not twice.what.last
            inner = self._results(function, arguments, names)
            for value in inner:
                self.recorder.drop(value.buffer)
            for buffer in brief:
                self.recorder.drop(buffer)
            written, self.tape, self.twice = self.tape, [], None
            return written, inner

        kept = tuple(twice.kept.values())
        brief, kept = (kept, ()) if kind == CORE else ((), kept)
        self.tape.append(Block(arguments, results, second, kept))
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

    def _operator(self, line: Compute) -> Operator:
        node = line.node
        if node.name not in self.operators:
            planned = self.plan.nodes[self.graph.template[node.name]]
            reads = tuple(self.graph[name] for name in node.inputs)
            asks: tuple[tuple[Collective, ...], tuple[Collective, ...]] = ((), ())
            if len(planned.operands) == len(reads):
                into = tuple(layout for _, layout in planned.operands)
                types = tuple(read.type for read in reads)
                asks = exchanged(node, types, into, self.plan.mesh, planned.form)
            work = self._work(node)
            if line.overlaps:
                work = NodeWork((), products(work, reads[0].requires_grad)[2])
            sides = ([layout for _, layout in side] for side in (planned.operands, planned.results))
            into, out = map(tuple, sides)
            memory = recipe(node, reads, into, out, self.plan.mesh, self.accelerator, planned.form)
            turns, alone = 1, (0, 0)
            if planned.form:
                form = form_named(node.op, planned.form)
                part = Part(node, tuple(read.type for read in reads), into, self.plan.mesh)
                turns, alone = form.turns(part), form.alone(part)
            self.operators[node.name] = Operator(memory, work, asks, turns, alone)
        return self.operators[node.name]

    def _work(self, node: Node) -> NodeWork:
        return self.works.get(self.graph.template[node.name], _NO_WORK)

    def _compute(self, line: Compute, operands: list[Value], names: dict[str, str]) -> Value:
        recorder, operator, twice = self.recorder, self._operator(line), self.twice
        node = line.node
        memory, name = operator.recipe, names.get(node.name, node.name)
        skipped = twice is not None and twice.skips(node.name)
        if memory.alias >= 0 and (skipped or not operator.work.forward):
            value = Value(operands[memory.alias].buffer, node.requires_grad)
            value.ready = max(operand.ready for operand in operands)
        elif skipped:
            value = Value(self._left(node.name), node.requires_grad)
        else:
            ready = [value.ready for value in operands]
            work = operator.work.forward
            if operator.turns > 1:
                calls, alone = operator.asks[0], operator.alone[0]
                recorder.in_turns(self._title(name), name, calls, work, ready, alone)
            else:
                recorder.compute(self._title(name), name, work, ready)
            value = Value(
                operands[memory.alias].buffer
                if memory.alias >= 0
                else recorder.allocate("temporary", name, sum(memory.results)),
                node.requires_grad,
            )
            recorder.scratch("temporary", f"of {name}", memory.scratch)
        for call in () if skipped or operator.turns > 1 else operator.asks[0]:
            recorder.collective(f"{call.kind} in {self._title(name)}", name, call, "exchange")
        if twice is not None and not twice.second:
            if node.name in twice.what.kept:
                twice.kept[node.name] = recorder.hold(value.buffer)
                value.buffer.kind = "activation"
        elif node.requires_grad:
            read = ((value if place < 0 else operands[place]).buffer for place in memory.saved)
            saved = [self._saved(buffer) for buffer in read]
            for buffer in saved:
                recorder.hold(buffer)
                buffer.kind = "activation" if buffer.kind == "temporary" else buffer.kind
            for nbytes in memory.extra:
                extra = recorder.allocate("activation", f"kept by {name}", nbytes)
                saved.append(recorder.hold(extra))
            value.buffer.holders += 1  # a variable will hold it
            saved = self.offload.put(saved)
            value.buffer.holders -= 1
            for operand, gradient in zip(operands, memory.gradients, strict=False):
                operand.readers += gradient >= 0
            self.tape.append(Computed(name, operator, operands, value, saved))
        if twice is not None:
            twice.ran(node.name)
        if node.op == WRITE and not skipped:
            self.written.append(recorder.hold(value.buffer))
        return value

    def _saved(self, read: Buffer) -> Buffer:
        """Returns the buffer to save for an operator's backward, given the buffer that it reads."""
        if read.kept is None:
            return read
        self.weights.save(read.kept)
        self.offload.leave(read.kept)
        return read.kept

    def _use(self, line: Use, names: dict[str, str]) -> Value:
        weight = self.weights.known[names.get(line.leaf.name, line.leaf.name)]
        source, twice = weight.value, self.twice
        if twice is not None and twice.over:
            target = Value(self._left(""), source.grad, ready=source.ready)
        else:
            target = self.weights.use(weight)
            self.offload.leave(target.buffer)
            if twice is None:
                self.weights.keep(weight, target)
        if source.grad and (twice is None or twice.second):
            source.readers += 1
            self.tape.append(Used(weight, target))
        return target

    def _left(self, name: str) -> Buffer:
        """Returns the kept result of an operator that is not recomputed, or an empty buffer."""
        kept = None if self.twice is None else self.twice.kept.get(name)
        return self.recorder.allocate("temporary", name, 0.0) if kept is None else kept

    def _title(self, name: str) -> str:
        return f"{name}{AGAIN}" if self.twice is not None and self.twice.second else name

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
        ahead, back = self._overlapped(line)
        # A collective that overlaps with products saves its result after all of them.
        over = twice is not None and twice.over and ahead is None
        if over:
            target.buffer = self._left("")
        elif step.forward is not None:
            title = f"{step.forward.kind} of {self._title(value_of)}"
            cause: Cause = "parameter" if parameter else "activation"
            share = 1.0 if ahead is None else 1 - ahead.share
            recorder.collective(title, value_of, step.forward, cause, [source.ready], share)
        elif forward.result is not None:
            recorder.compute(f"{step.op} of {value_of}", value_of, (), [source.ready])
        if forward.result is not None and not over:
            target.buffer = recorder.allocate("temporary", value_of, forward.result)
            recorder.scratch("communication", value_of, forward.staging)
        if ahead is not None and step.forward is not None:
            recorder.side_by_side(title, value_of, step.forward, cause, ahead.works, ahead.share)
        if source.grad and (twice is None or twice.second):
            source.readers += 1
            why: Cause = "gradient" if parameter else "activation"
            entry = Resharded(value_of, step.backward, gradient, why, source, target, back)
            self.tape.append(entry)
        return target

    def _overlapped(self, line: Move) -> tuple[Products, Products] | tuple[None, None]:
        """Returns the products that overlap with a collective, in each direction."""
        if not line.overlapped:
            return None, None
        if id(line) not in self.products:
            share = 1 - 1 / self.plan.mesh.axis_size(line.step.axes[0])
            both = [
                products(self._work(node), self.graph[node.inputs[0]].requires_grad)
                for node in line.overlapped
            ]
            ahead, back = (
                Products(tuple(work for works in side for work in works), share)
                for side in ([each[0] for each in both], [each[1] for each in both])
            )
            self.products[id(line)] = ahead, back
        return self.products[id(line)]

    def _meet(self, line: Sum, value: Value, names: dict[str, str]) -> None:
        work = self._work(line.node)
        if value.grad and work.backward:
            name = names.get(line.node.name, line.node.name)
            self.tape.append(Summed(name, work.backward, value))

    def _of_parameter(self, name: str) -> bool:
        """Returns whether a value is a parameter or a view of one."""
        if name not in self.causes:
            self.causes[name] = self.graph.root(name).op == "param"
        return self.causes[name]
