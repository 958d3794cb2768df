"""Prints the lines of a lowered function as Python, with layouts and prices in comments."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.codegen.ops import expression
from autopar.codegen.printer import Printer
from autopar.errors import ProgramError
from autopar.ir.chosen_algorithms import directions
from autopar.ir.graph import WRITE
from autopar.ir.recompute import CORE, Recompute, kept_products
from autopar.lower.lines import (
    LEAF,
    Assign,
    Call,
    Compute,
    Joined,
    Line,
    Move,
    SourceLine,
    Use,
)
from autopar.lower.literals import comment, names_text, quoted, shortened
from autopar.lower.parameter_keys import Keys
from autopar.operators.localise import localise
from autopar.operators.narrow.narrow_linear import check_runs, is_narrow

WIDTH = 100


@dataclass(frozen=True)
class Loop:
    """A run of blocks that is called in a loop.

    Attributes:
        function: the name of its function.
        keys: names of a block's parameters.
        count: number of blocks.
        recompute: how many of the first blocks are recomputed in the backward, and how.
        stowed: the range of blocks whose activations are offloaded: the first, and the end
            (exclusive).
        changing: expressions of the names of buffers that a block uses and that a step writes.
    """

    function: str
    keys: Keys
    count: int
    recompute: Recompute | None
    stowed: tuple[int, int]
    changing: tuple[str, ...] = ()


class Body:
    """Prints the lines of one function.

    Args:
        printer: graph, plan and prices.
        leaf: returns the expression that reads a leaf, by node name.
        loops: the blocks that the function calls, by run.
        priced: whether a table at the head of the function prices its parameters.
    """

    def __init__(
        self,
        printer: Printer,
        leaf: Callable[[str], str],
        loops: Sequence[Loop] = (),
        priced: bool = False,
    ) -> None:
        self.printer, self.leaf, self.loops, self.priced = printer, leaf, loops, priced
        self.lines: list[str] = []

    def print(self, lines: Iterable[Line]) -> None:
        """Appends the Python for some lines."""
        for line in lines:
            if isinstance(line, SourceLine):
                source = line.source
                text = f"{source.file}:{source.line}  {source.text}"
                self.lines.append(comment(shortened(text, WIDTH - 6)))
            elif isinstance(line, Compute):
                self._compute(line)
            elif isinstance(line, Move):
                self._move(line)
            elif isinstance(line, Use):
                self._use(line)
            elif isinstance(line, Assign):
                self._assign(line)
            elif isinstance(line, Joined):
                self._joined(line)
            elif isinstance(line, Call):
                self._call(line)

    def read(self, variable: str) -> str:
        """Returns a variable, or the expression that reads a leaf."""
        return self.leaf(variable[len(LEAF) :]) if variable.startswith(LEAF) else variable

    def _statement(self, code: str, note: str = "") -> None:
        """Appends a statement with its comment: on the same line if it fits, else above."""
        if note and len(code) + len(note) + 8 <= WIDTH:
            self.lines.append(f"{code:<56}  {comment(note)}")
            return
        self.lines += [*noted(note), *wrapped(code)]

    def _use(self, line: Use) -> None:
        """Prints the use of a parameter."""
        call = self.printer.use(line.leaf, line.storage).format(self.read(line.source))
        note = self.printer.use_note(line.leaf, line.storage)
        if not self.priced:
            note += self.printer.sent_note(line.leaf, line.storage)
        self._statement(f"{line.target} = mesh.{call}", note)

    def _assign(self, line: Assign) -> None:
        note = ""
        if line.layout is not None:
            tensor = self.printer.graph[line.value].type
            note = f"{tensor.dtype}{line.layout.format(tensor.shape)}"
        self._statement(f"{line.target} = {self.read(line.source)}", note)

    def _move(self, line: Move) -> None:
        step = line.step
        places = "".join(
            f", {key}={at}"
            for key, at in (("dim", step.dim), ("to_dim", step.to_dim))
            if at is not None
        )
        size = self.printer.gathered(step, line.tensor)
        by = "".join(f", {way}={quoted(name)}" for way, name in directions(step).items())
        arguments = f"{self.read(line.source)}{places}, axis={names_text(step.axes)}{size}{by}"
        note = self.printer.step_note(step, line.tensor)
        self._statement(f"{line.target} = mesh.{step.op}({arguments})", note)

    def _compute(self, line: Compute) -> None:
        node = line.node
        operands = [*map(self.read, line.operands)]
        if node.op == "getitem" and "," in line.operands[0]:
            return  # the line of the operator has unpacked it
        if node.op == WRITE:
            key = operands[0].removeprefix("p[").removesuffix("]")
            self._statement(f"mesh.write({key}, {operands[1]})")
            return
        note = _layouts(line) + self.printer.exchange_note(line)
        code = _random(self.printer, line, operands) or self._local(line, operands)
        target = line.target.replace(",", ", ")
        self._statement(f"{target} = {code}" if target else code, note)

    def _local(self, line: Compute, operands: list[str]) -> str:
        """Returns the operator on local parts, and prints the fetching of borders before it."""
        check_runs(line.node)
        types = tuple(self.printer.graph[name].type for name in line.node.inputs)
        calls = localise(line.node, types, line.into, line.out, self.printer.extent, line.form)
        for call, variable in zip(calls[:-1], line.borders, strict=True):
            self._statement(f"{variable} = {expression(call, operands[:1])}")
            operands = [variable, *operands[1:]]
        return expression(calls[-1], operands)

    def _joined(self, line: Joined) -> None:
        """Prints operators and a collective as one call of the mesh."""
        move, operators = line.move, line.operators
        if any(is_narrow(operator.node) for operator in operators):
            self._apart(line)
            return
        note = self.printer.step_note(move.step, move.tensor)
        axis = f"axis={names_text(move.step.axes)}"
        if not move.overlapped:
            ((operands, target),) = [(o.operands, o.target) for o in operators]
            read = ", ".join(map(self.read, operands))
            self._statement(f"{target} = mesh.rotary_all_to_all({read}, {axis})", note)
        elif line.lines[0] != move:
            ((operands, target),) = [(o.operands, o.target) for o in operators]
            read = ", ".join(map(self.read, operands))
            call = f"mesh.linear_reduce_scatter({read}, dim={move.step.dim}, {axis})"
            self._statement(f"{target} = {call}", note)
        else:
            self.lines += noted(note)
            weights = [self.read(linear.operands[1]) for linear in operators]
            biases = [self.read((*linear.operands, "None")[2]) for linear in operators]
            read = f"{self.read(move.source)}, [{', '.join(weights)}]"
            read += f", [{', '.join(biases)}]" if set(biases) != {"None"} else ""
            call = f"mesh.all_gather_linear({read}, dim={move.step.dim}, {axis})"
            targets = ", ".join(linear.target for linear in operators)
            targets = targets if len(operators) > 1 else f"({targets},)"
            self._statement(f"{targets} = {call}", "; ".join(map(_layouts, operators)))

    def _apart(self, line: Joined) -> None:
        """Prints linears in 8 bits and a collective one after the other.

        torch's joint operators do not exchange the largest elements, from which scales follow.
        """
        move, operators = line.move, line.operators
        if line.lines[0] == move:
            whole = move.target.replace(".", "__")
            self._move(replace(move, target=whole))
            for linear in operators:
                self._compute(replace(linear, operands=(whole, *linear.operands[1:])))
            return
        ((x, weight, *biases),) = [linear.operands for linear in operators]
        axis = f"axis={names_text(move.step.axes)}"
        once = [f"mesh.to_partial({self.read(bias)}, {axis})" for bias in biases]
        self._compute(replace(operators[0], operands=(x, weight, *once)))
        self._move(move)

    def _call(self, line: Call) -> None:
        """Prints the loops over the blocks of a run.

        The first blocks may be recomputed in the backward, the next ones offloaded to host memory.
        """
        loop = self.loops[line.run]
        index = "names" if loop.keys.table else "i"
        arguments = ["mesh", "p", index, *line.targets, *map(self.read, line.outside)]
        split, kept = loop.stowed
        for begin, end in ((0, split), loop.stowed, (kept, loop.count)):
            if begin == end:
                continue
            called = f"{loop.function}({', '.join(arguments)})"
            away = split <= begin < kept
            lines = ["with mesh.stowed():"] if away else []
            if loop.recompute is not None and end <= split:
                function = loop.function
                if loop.changing:
                    names = (f"    {name}," for name in loop.changing)
                    lines += [f"block = repeatable({function}, p, [", *names, "])"]
                    function = "block"
                called = self._checkpointed(function, arguments, line.run, loop.recompute)
            lines.append(f"{'    ' if away else ''}{', '.join(line.targets)} = {called}")
            self._statement(_head(loop, begin, end))
            for text in lines:
                self._statement(f"    {text}")

    def _checkpointed(self, function: str, arguments: list[str], run: int, how: Recompute) -> str:
        """Returns the call of a block that is recomputed in the backward.

        Raises:
            ProgramError: only the operators between the products of attention are recomputed.
        """
        graph, keep = self.printer.graph, ""
        if how.kind == CORE:
            raise ProgramError(
                'a block cannot run with recompute="core"',
                why="torch's checkpoints rerun a block, or keep results of chosen products; plans "
                "and prices alone know this recomputation, for systems that have it",
                todo='pass recompute="selective", or "save attention linear"',
            )
        if how.kind == "selective":
            keep = ", context_fn=keep_products"
        elif how.kind != "full":
            nodes = [graph[name] for name in graph.repeats[run].iterations[0]]
            flags = ", ".join(map(str, kept_products(nodes, how.kind).values()))
            keep = f", context_fn=keeping({flags}, mesh=mesh)"
        return f"checkpoint({function}, {', '.join(arguments)}, use_reentrant=False{keep})"


def noted(note: str, lead: str = "") -> list[str]:
    """Wraps a comment whose parts are separated by two spaces.

    Args:
        note: the parts.
        lead: text before the first part; later lines are indented as far.
    """
    lines: list[str] = []
    for part in filter(None, note.split("  ")):
        if lines and len(lines[-1]) + len(part) + 8 <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{' ' * max(len(lead), 2) if lines else lead}{part}")
    return [*map(comment, lines)]


def wrapped(code: str) -> list[str]:
    """A statement; a long call has its arguments on a line of their own, or each on its own."""
    indent = code[: len(code) - len(code.lstrip())]
    if len(code) + 4 <= WIDTH or not code.endswith(")"):
        return [code]
    code = code.strip()
    (statement,) = ast.parse(code).body
    call = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
    if not isinstance(call, ast.Call):
        return [f"{indent}{code}"]
    head = code.encode()[: call.func.end_col_offset].decode()
    given = [ast.get_source_segment(code, value) or "" for value in call.args]
    given += [ast.get_source_segment(code, value) or "" for value in call.keywords]
    whole = f"{indent}    {', '.join(given)}"
    rows = [whole] if len(whole) + 4 <= WIDTH else [f"{indent}    {value}," for value in given]
    return [f"{indent}{head}(", *rows, f"{indent})"]


def _layouts(line: Compute) -> str:
    """Returns the dtype and layout of each result."""
    return "; ".join(
        f"{tensor.dtype}{layout.format(tensor.shape)}"
        for tensor, layout in zip(line.node.types, line.out, strict=True)
    )


def _random(printer: Printer, line: Compute, operands: Sequence[str]) -> str | None:
    """Returns dropout or attention with dropout, with masks that do not depend on the mesh."""
    node = line.node
    if node.op == "aten.dropout" and node.args[2] is True:
        text = line.out[0].format(node.type.shape)
        return f"mesh.dropout({operands[0]}, {node.args[1]!r}, {quoted(text)})"
    args = dict(enumerate(node.args))
    if node.op != "aten.scaled_dot_product_attention" or not args.get(4):
        return None
    query, keys = (printer.graph[name].type.shape for name in node.inputs[:2])
    scores = replace(line.out[0], dims=(*line.out[0].dims[:-1], ()))
    given = {
        "mask": operands[3] if len(operands) > 3 else None,
        "p": repr(args[4]),
        "is_causal": "True" if args.get(5) else None,
        "scale": None if node.keyword("scale") is None else repr(node.keyword("scale")),
        "layout": quoted(scores.format((*query[:-1], keys[-2]))),
    }
    more = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
    return f"mesh.attention({', '.join(operands[:3])}, {more})"


def _head(loop: Loop, begin: int, end: int) -> str:
    """Returns the head of the loop over the blocks from `begin` up to but not including `end`."""
    if loop.keys.table:
        part = f"[{begin or ''}:{end}]" if end - begin < loop.count else ""
        return f"for names in {loop.function.upper()}_NAMES{part}:"
    start, stop = loop.keys.start + begin, loop.keys.start + end
    return f"for i in range({f'{start}, {stop}' if start else stop}):"
