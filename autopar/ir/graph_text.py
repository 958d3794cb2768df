"""Converts graphs to text and back exactly, and fingerprints them so that plans can name them.

    graph 'mlp'
    %x = input('x') : f32[8, 16]
    %w = param('fc.weight') : f32[16, 16] grad
    %h = aten.linear(%x, %w) : f32[8, 16] grad saved(%x, %w)  # fc | model.py:7 | h = self.fc(x)
    output 'h' = %h

A line is one node. After its types come, where they apply, `grad`, `alias(%storage)`,
`saved(%value, ...)`, `keeps(type, ...)` and `part('...')` of a kernel, then the user's source as a
comment. Outputs, the loss, the repeated runs and how kernels are executed follow the nodes.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections.abc import Iterator

from autopar.errors import AutoparError, GraphError
from autopar.ir.executed.execution import AS_WRITTEN, WHOLE, Execution, Part
from autopar.ir.graph import Arg, Graph, Name, Node, Ref, Repeat, Source, map_arg
from autopar.ir.tensor import TensorType

_CONSTANTS: dict[str, Arg] = {
    "None": None, "True": True, "False": False,
    "inf": math.inf, "-inf": -math.inf, "nan": math.nan,
}  # fmt: skip
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")
_CONSTANT = re.compile(r"(?:None|True|False|-?inf|nan)(?![\w.:])")
_NAME = re.compile(r"[A-Za-z_][\w.:]*")
_KEY = re.compile(r"([A-Za-z_]\w*)=")
_REF = re.compile(r"%(\w+)")
_TYPE = re.compile(r"\w+\[[\d, ]*\]")
_OPERATOR = re.compile(r"[\w.]+(?::[\w.]+)?")
_PLACE = re.compile(r"([^|]+):(\d+)")


def format_graph(graph: Graph) -> str:
    """Returns the graph as text, one node per line; `parse_graph` reads it back to an equal graph.

    Raises:
        GraphError: a symbolic constant that would read back as something else.
    """
    lines = [f"graph {graph.name!r}", *(format_node(node) for node in graph.nodes)]
    lines += [f"output {user!r} = %{name}" for user, name in graph.outputs]
    if graph.loss is not None:
        lines.append(f"loss %{graph.loss}")
    for repeat in graph.repeats:
        pairs = ", ".join(f"%{first} -> %{after}" for first, after in repeat.carried)
        lines.append(f"repeat carried({pairs})")
        lines += ["  block " + _references(block, " ") for block in repeat.iterations]
    if graph.execution != AS_WRITTEN:
        lines.append(f"execution {str(graph.execution)!r}")
    return "\n".join(lines) + "\n"


def format_node(node: Node) -> str:
    """Returns one node as a line of text, with its source as a comment."""
    arguments = [_format_arg(arg) for arg in node.args]
    arguments += [f"{key}={_format_arg(value)}" for key, value in node.kwargs]
    text = f"%{node.name} = {node.op}({', '.join(arguments)}) : "
    text += ", ".join(map(str, node.types)) or "()"
    if node.requires_grad:
        text += " grad"
    if node.alias is not None:
        text += f" alias(%{node.alias})"
    if node.saved:
        text += f" saved({_references(node.saved, ', ')})"
    if node.saved_types:
        text += f" keeps({', '.join(map(str, node.saved_types))})"
    if node.part != WHOLE:
        text += f" part({str(node.part)!r})"
    return text if node.source == Source() else f"{text}  # {format_source(node.source)}"


def _references(names: tuple[str, ...], separator: str) -> str:
    return separator.join(f"%{name}" for name in names)


def _format_arg(arg: Arg) -> str:
    if isinstance(arg, tuple):
        inner = ", ".join(map(_format_arg, arg))
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, Name) and (not _NAME.fullmatch(arg.text) or arg.text in _CONSTANTS):
        raise GraphError(
            f"cannot write the constant {arg.text!r}", why="it would not read back as a name"
        )
    return str(arg) if isinstance(arg, Ref | Name) else repr(arg)


def format_source(source: Source) -> str:
    """Returns a source as text: readable if that reads back exactly, else a tuple of literals."""
    text = str(source)
    if text.isprintable() and text == text.strip() and parse_source(text) == source:
        return text
    return repr((source.module, source.file, source.line, source.text))


def parse_source(text: str) -> Source:
    """Reads the text of `format_source`."""
    if text.startswith("("):
        try:
            fields = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            fields = None
        if isinstance(fields, tuple) and [*map(type, fields)] == [str, str, int, str]:
            return Source(*fields)
    parts = text.split(" | ")
    for index, part in enumerate(parts[:2]):
        if match := _PLACE.fullmatch(part):
            rest = " | ".join(parts[index + 1 :])
            return Source(" | ".join(parts[:index]), match[1], int(match[2]), rest)
    return Source(parts[0], text=" | ".join(parts[1:]))


def parse_graph(text: str) -> Graph:
    """Reads the text of `format_graph`, skipping empty lines and whole-line comments.

    Raises:
        GraphError: a line cannot be read; names the first such line.
    """
    header: str | None = None
    nodes: list[Node] = []
    outputs: list[tuple[str, str]] = []
    losses: list[str] = []
    repeats: list[Repeat] = []
    execution = AS_WRITTEN
    types: dict[str, TensorType] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        reader = _Reader(line.strip(), types)
        try:
            if not reader.text or reader.text.startswith("#"):
                continue
            if reader.text.startswith("%"):
                nodes.append(_read_node(reader))
            elif reader.accept("graph ") and header is None:
                header = reader.string()
            elif reader.accept("output "):
                user = reader.string()
                reader.expect("=")
                outputs.append((user, reader.reference()))
            elif reader.accept("loss ") and not losses:
                losses.append(reader.reference())
            elif reader.accept("repeat "):
                repeats.append(Repeat((), tuple(_read_carried(reader))))
            elif reader.accept("block ") and repeats:
                block = tuple(reader.references())
                last = repeats.pop()
                repeats.append(Repeat((*last.iterations, block), last.carried))
            elif reader.accept("execution ") and execution == AS_WRITTEN:
                execution = Execution.read(reader.string())
            else:
                raise ValueError("a node, graph, output, loss, repeat or block is expected here")
            reader.end()
        except (ValueError, SyntaxError, RecursionError, MemoryError, AutoparError) as error:
            raise GraphError(
                f"cannot read line {number} of the graph",
                where=line.strip()[:5000],
                why=error.what if isinstance(error, AutoparError) else str(error),
                todo="write e.g. %h = aten.relu(%x) : f32[8, 16]",
            ) from None
    if header is None:
        raise GraphError("the text has no line `graph 'name'`", todo="begin with e.g. graph 'mlp'")
    loss = (*losses, None)[0]
    return Graph(header, tuple(nodes), tuple(outputs), loss, tuple(repeats), execution)


class _Reader:
    """Reads a line from left to right; `types` are those that other lines have named."""

    def __init__(self, text: str, types: dict[str, TensorType]) -> None:
        self.text, self.at, self.types = text, 0, types

    @property
    def rest(self) -> str:
        """The part of the line that is still to be read."""
        return self.text[self.at :]

    def _pass(self, end: int) -> None:
        """Consumes the line up to a position, and the spaces after it."""
        while self.text[end : end + 1].isspace():
            end += 1
        self.at = end

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consumes `pattern` if the line continues with it."""
        match = pattern.match(self.text, self.at)
        if match:
            self._pass(match.end())
        return match

    def accept(self, text: str) -> bool:
        """Consumes `text` if the line continues with it."""
        accepted = self.text.startswith(text, self.at)
        if accepted:
            self._pass(self.at + len(text))
        return accepted

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise ValueError(f"{text!r} is expected before {self.rest[:30]!r}")

    def need(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = self.match(pattern)
        if match is None:
            raise ValueError(f"{what} is expected before {self.rest[:30]!r}")
        return match

    def string(self) -> str:
        return str(_literal(self.need(_STRING, "a quoted text")[0]))

    def reference(self) -> str:
        return self.need(_REF, "a reference such as %x")[1]

    def references(self) -> Iterator[str]:
        """Yields all references up to the end of the line."""
        while self.at < len(self.text):
            yield self.reference()

    def items(self, close: str = ")") -> Iterator[None]:
        """Yields once for each item of a comma-separated list, up to and including `close`."""
        while not self.accept(close):
            yield
            if not self.accept(","):
                self.expect(close)
                return

    def type(self) -> TensorType:
        text = self.need(_TYPE, "a type such as f32[8, 16]")[0]
        if text not in self.types:
            self.types[text] = TensorType.parse(text)
        return self.types[text]

    def arg(self) -> Arg:
        """Returns one literal, reference, name or tuple of them."""
        if self.accept("("):
            return tuple(self.arg() for _ in self.items())
        if match := self.match(_REF):
            return Ref(match[1])
        if match := self.match(_CONSTANT):
            return _CONSTANTS[match[0]]
        if match := self.match(_STRING) or self.match(_NUMBER):
            return _literal(match[0])
        return Name(self.need(_NAME, "an argument")[0])

    def end(self) -> None:
        if self.at < len(self.text):
            raise ValueError(f"nothing more is expected before {self.rest[:30]!r}")


def _literal(text: str) -> Arg:
    """Returns the value of a number or of a quoted text."""
    if text.isdecimal() and text.isascii() and text[0] != "0":
        return int(text)
    inside = text[1:-1]
    if text[0] in "'\"" and "\\" not in inside and inside.isprintable():
        return inside
    value: Arg = ast.literal_eval(text)
    return value


def _read_carried(reader: _Reader) -> Iterator[tuple[str, str]]:
    reader.expect("carried(")
    for _ in reader.items():
        first = reader.reference()
        reader.expect("->")
        yield first, reader.reference()


def _read_node(reader: _Reader) -> Node:
    name = reader.reference()
    reader.expect("=")
    op = reader.need(_OPERATOR, "an operator's name")[0]
    reader.expect("(")
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    for _ in reader.items():
        if key := reader.match(_KEY):
            kwargs.append((key[1], reader.arg()))
        elif kwargs:
            raise ValueError("a positional argument follows a keyword")
        else:
            args.append(reader.arg())
    reader.expect(":")
    types: list[TensorType] = []
    if not reader.accept("()"):
        types.append(reader.type())
        while reader.accept(","):
            types.append(reader.type())
    requires_grad = reader.accept("grad")
    alias = saved = keeps = None
    if reader.accept("alias("):
        alias = reader.reference()
        reader.expect(")")
    if reader.accept("saved("):
        saved = tuple(reader.reference() for _ in reader.items())
    if reader.accept("keeps("):
        keeps = tuple(reader.type() for _ in reader.items())
    part = Part.parse(reader.string()) if reader.accept("part(") else WHOLE
    if part != WHOLE:
        reader.expect(")")
    source = Source()
    if reader.accept("#"):
        source, reader.at = parse_source(reader.rest), len(reader.text)
    return Node(
        name, op, tuple(args), tuple(kwargs), tuple(types),
        source, requires_grad, alias, saved or (), keeps or (), part,
    )  # fmt: skip


def fingerprint(graph: Graph) -> str:
    """Returns "name sha256:8hex", a hash of what the graph computes.

    It covers operators, arguments (references by position), types, the user's names of leaves,
    outputs and loss, but neither names of nodes nor source lines.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    numbers = {name: Ref(str(index)) for name, index in position.items()}
    rows: list[object] = []
    for node in graph.nodes:
        arguments = [_format_arg(map_arg(arg, numbers.__getitem__)) for arg in node.args]
        keywords = [
            (key, _format_arg(map_arg(value, numbers.__getitem__))) for key, value in node.kwargs
        ]
        rows.append((node.op, arguments, keywords, [str(kind) for kind in node.types]))
    outputs = [(user, position[name]) for user, name in graph.outputs]
    loss = None if graph.loss is None else position[graph.loss]
    digest = hashlib.sha256(repr((rows, outputs, loss)).encode()).hexdigest()
    return f"{graph.name} sha256:{digest[:8]}"
