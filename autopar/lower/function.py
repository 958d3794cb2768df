"""Writes the lines of one function: operators in execution order, with the resharding between them.

A value that several readers need in the same layout is resharded once. A resharded value reuses the
variable of the old value if nothing reads the old value any more, which frees its memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.collective import Step
from autopar.ir.fusion import async_tensor_parallel as overlapped
from autopar.ir.fusion.packed import PACK, packing, reader
from autopar.ir.graph import PREFIX, Node, Source
from autopar.ir.tensor import Layout
from autopar.lower.lines import (
    LEAF,
    Assign,
    Bound,
    Compute,
    Drop,
    Joined,
    Line,
    Move,
    SourceLine,
    Sum,
    Use,
)
from autopar.lower.planned_layouts import Placed
from autopar.lower.variables import IDENTITIES, Names
from autopar.operators.exchange import local_steps

# Suffixes of the names of resharded values whose old value is still read.
_SUFFIXES = {
    "all_gather": "gathered", "reduce_scatter": "scattered", "all_reduce": "summed",
    "all_to_all": "exchanged", "slice": "part",
}  # fmt: skip


class Writer:
    """Writes the lines of one function.

    Args:
        placed: the graph with the layouts of a plan.
        nodes: the nodes that the function computes, in order.
        results: values that it returns or passes to other functions; each counts as a use.
    """

    def __init__(self, placed: Placed, nodes: Iterable[Node], results: Iterable[str]) -> None:
        nodes = tuple(nodes)
        self.placed, self.graph = placed, placed.graph
        self.names = Names(placed.graph, nodes)
        self.lines: list[Line] = []
        self.held: dict[str, Bound] = {}
        self._copies: dict[tuple[str, Layout], str] = {}
        self._kept: frozenset[str] = frozenset()
        self._uses: dict[str, int] = {}
        self._source = Source()
        for name in (*(n for node in nodes for n in node.inputs), *results):
            self._uses[name] = self._uses.get(name, 0) + 1

    def hold(self, value: str, variable: str, layout: Layout) -> Bound:
        """Records that a variable holds a value in a layout."""
        self.names.take(variable)
        self.held[value] = Bound(variable, value, layout)
        return self.held[value]

    def look_up(self, value: str) -> Bound:
        """Returns the variable that holds a value, or the leaf itself."""
        return self.held.get(value) or self.hold(value, LEAF + value, self.placed.result(value))

    def operands(self, reads: Iterable[tuple[str, Layout]]) -> tuple[str, ...]:
        """Returns the variables that hold values in the layouts in which one line reads them.

        A value that the line reads in two layouts has two variables.
        """
        variables, kept = list[str](), self._kept
        for value, layout in reads:
            variables.append(self._operand(value, layout))
            self.keep(variables[-1:])
        self._kept = kept
        return tuple(variables)

    def keep(self, variables: Iterable[str]) -> None:
        """Protects variables from being reassigned in later lines."""
        self._kept |= frozenset(variables)

    def _operand(self, value: str, wanted: Layout) -> str:
        self._uses[value] -= 1
        held = self.look_up(value)
        steps = self._steps(value, held.layout, wanted)
        if not steps:
            return held.variable
        key = (value, steps[-1].dst)
        if key not in self._copies:
            self._copies[key] = self._target(value, held.variable, steps[-1].op)
            self._reshard(value, held.variable, self._copies[key], steps)
        return self._copies[key]

    def _steps(self, value: str, src: Layout, dst: Layout) -> tuple[Step, ...]:
        node = self.graph[value]
        return self.placed.resharder.steps(node.type, src, dst, node.requires_grad)

    def _reshard(self, value: str, source: str, target: str, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self.lines.append(Move(value, self.graph[value].type, step, source, target))
            source = target

    def _target(self, value: str, variable: str, op: str = "") -> str:
        """Returns the variable for a resharded value: the old one if nothing reads that any more.

        Args:
            value: name of its node.
            variable: the variable of the old value.
            op: the last collective on its way, such as `all_gather`.
        """
        suffix = next((word for start, word in _SUFFIXES.items() if op.startswith(start)), "")
        if variable.startswith(LEAF):
            return self.names.fresh(value)
        owners = [name for name, held in self.held.items() if held.variable == variable]
        owners += [name for (name, _), copy in self._copies.items() if copy == variable]
        if variable in self._kept or any(self._uses.get(name, 0) for name in owners):
            return self.names.fresh(f"{variable}_{suffix}" if suffix else variable)
        return variable

    def _cite(self, source: Source) -> None:
        """Adds a line with the user's source, if it differs from the previous one."""
        if source.file and (source.file, source.line) != (self._source.file, self._source.line):
            self.lines.append(SourceLine(source))
        self._source = source

    def add(self, node: Node) -> None:
        """Writes one operator."""
        if node.op == "getitem":
            self._getitem(node)
        elif node.name in self.held or self._overlapped(node):
            return  # it was written earlier, together with another operator
        elif node.op in IDENTITIES:
            self._share(node)
        else:
            self._compute(node)

    def _compute(self, node: Node) -> None:
        planned = self.placed.planned(node.name)
        self._cite(node.source)
        into = tuple(layout for _, layout in planned.operands)
        out = tuple(layout for _, layout in planned.results)
        operands = self.operands(zip(node.inputs, into, strict=True))
        types = tuple(self.graph[name].type for name in node.inputs)
        wish, steps = self.names.wish(node), local_steps(node, types, into, planned.form)
        borders = tuple(self.names.fresh(f"{wish}_halo") for _ in steps[:-1])
        target = ""  # it runs for its side effect
        if self._uses.get(node.name):
            target = self._unpacked(node, out) or self.names.fresh(wish)
        compute = Compute(node, operands, into, out, target, borders, form=planned.form)
        step = self._packing(node, out[0]) if target else None
        if step is not None:
            move = Move(node.name, node.type, step, target, target)
            self.lines.append(Joined((compute, move)))
        else:
            self.lines.append(compute)
        if target:
            self.hold(node.name, target, out[0] if step is None else step.dst)

    def _unpacked(self, node: Node, out: tuple[Layout, ...]) -> str:
        """Names the variables of a kernel's results, "a,_,b"; returns "" for other operators."""
        if not node.op.startswith(PREFIX) or len(node.types) < 2:
            return ""
        readers = map(self.graph.__getitem__, self.graph.users[node.name])
        readers_by_index = {reader.args[1]: reader for reader in readers}
        variables = []
        for index, layout in enumerate(out):
            unpacking = readers_by_index.get(index)
            variables.append(
                self.names.fresh("_" if unpacking is None else self.names.wish(unpacking))
            )
            if unpacking is not None:
                self.hold(unpacking.name, variables[-1], layout)
        return ",".join(variables)

    def _packing(self, node: Node, given: Layout) -> Step | None:
        """Returns the exchange that an operator's kernel packs, if it does."""
        after = reader(self.graph, node) if PACK in self.placed.plan.fuse else None
        if after is None:
            return None
        _, wanted = self.placed.planned(after.name).operands[after.inputs.index(node.name)]
        return packing(node, given, wanted, self.placed.resharder)

    def _getitem(self, node: Node) -> None:
        """Writes the unpacking of one of several results; only then can it be resharded."""
        value, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        self._uses[value] -= 1
        given, wanted = self.placed.result(value, index), self.placed.result(node.name)
        if node.name in self.held:  # unpacked by the kernel's line
            target = self.held[node.name].variable
        else:
            self._cite(node.source)
            target = self.names.fresh(self.names.wish(node))
        source = self.look_up(value).variable
        self.lines.append(Compute(node, (source,), (given,), (given,), target))
        self._reshard(node.name, target, target, self._steps(node.name, given, wanted))
        self.hold(node.name, target, wanted)

    def _share(self, node: Node) -> None:
        """Writes an identity; it gets a variable of its own only if the layout changes."""
        planned = self.placed.planned(node.name)
        value = node.inputs[0]
        if self.graph[value].op == "param" and self._use(node, self.graph[value]):
            return
        (_, into), (_, out) = planned.operands[0], planned.results[0]
        before = self.look_up(value)
        if node.op == "autopar.shard" and before.layout != into:
            self._cite(node.source)
        variable = self._operand(value, into)
        steps, named = self._steps(value, into, out), not variable.startswith(LEAF)
        target = variable
        if not named:
            target = self.names.fresh(self.names.wish(self.graph[value]))
        elif steps:
            target = self._target(value, variable)
        if steps:
            self._reshard(value, variable, target, steps)
        elif not named:
            self.lines.append(Assign(variable, target, node.name, out))
        self.lines.append(Sum(node, target))
        self.hold(node.name, target, out)

    def _use(self, node: Node, leaf: Node) -> bool:
        """Writes the use of a parameter, and returns whether its used and stored layouts differ."""
        storage = self.placed.storage(leaf)
        if storage.moves:
            self._uses[leaf.name] -= 1
            target = self.names.fresh(self.names.wish(leaf))
            self.lines += [Use(leaf, storage, LEAF + leaf.name, target), Sum(node, target)]
            self.hold(node.name, target, storage.used)
        return storage.moves

    def _overlapped(self, node: Node) -> bool:
        """Writes a node and a collective that overlaps with it; returns whether it did."""
        if node.op not in (overlapped.LINEAR, overlapped.SHARE) or not self.placed.overlaps.near:
            return False
        return self._gathered(node) or self._scattered(node)

    def _gathered(self, node: Node) -> bool:
        """Writes an all_gather and the linears that read it as one call; returns whether it did."""
        read = self.look_up(node.inputs[0])
        overlap = self.placed.overlaps.gather(node, read.layout)
        if overlap is None:
            return False
        for name in (name for linear in overlap.linears for name in linear.inputs[1:]):
            self._ahead(name)
        self._cite(overlap.linears[0].source)
        parameters = iter(self.operands(self.placed.overlaps.parameters(overlap)))
        value, step, whole = overlap.value, overlap.step, f"{read.variable}.gathered"
        self._uses[value.name] -= 1
        move = Move(value.name, value.type, step, read.variable, whole, overlapped=overlap.linears)
        # The backward's product adds up the gradients, which are concatenated for it.
        shared = (Sum(node, whole),) if node.op == overlapped.SHARE else ()
        self.hold(node.name, whole, step.dst)
        linears = []
        for linear in overlap.linears:
            planned = self.placed.planned(linear.name)
            into = tuple(layout for _, layout in planned.operands)
            out = tuple(layout for _, layout in planned.results)
            operands = (whole, *(next(parameters) for _ in linear.inputs[1:]))
            target = self.names.fresh(self.names.wish(linear))
            linears.append(Compute(linear, operands, into, out, target, overlaps=True))
            self.hold(linear.name, target, out[0])
        self.lines.append(Joined((move, *shared, *linears, Drop(whole))))
        return True

    def _ahead(self, name: str) -> None:
        """Writes the lines of a parameter before its turn."""
        node = self.graph[name]
        if not node.is_leaf and name not in self.held:
            self._ahead(node.inputs[0])
            self.add(node)

    def _scattered(self, node: Node) -> bool:
        """Writes a linear and the reduce_scatter of its result as one call; returns whether."""
        overlap = self.placed.overlaps.scatter(node)
        if overlap is None:
            return False
        self._cite(node.source)
        operands = self.operands(zip(node.inputs, overlap.operands, strict=True))
        target = self.names.fresh(self.names.wish(node))
        into, step = overlap.operands, overlap.step
        compute = Compute(node, operands, into, (step.src,), target, overlaps=True)
        move = Move(node.name, node.type, step, target, target, overlapped=(node,))
        self.lines.append(Joined((compute, move)))
        self.hold(node.name, target, step.dst)
        return True
