"""Prints lowered programs as text and parses them back exactly.

    def forward():
        x = %x : %x [8@data, 16]
        # model.py:7 | h = self.fc(x)
        fc = compute %linear(x, %fc_weight) : [8@data, 16]; [16, 16@gpu] -> [8@data, 16] +sum(gpu)
        fc = all_reduce %linear(fc) : [8@data, 16] +sum(gpu) -> [8@data, 16] | over gpu | ...
        return fc: %linear [8@data, 16]

A line names the node of the graph that it computes or reshards; the graph contains the rest of the
information. The functions of repeated blocks come first, then `forward`, then `aside` if there are
outputs that training does not need. Further attributes of a line follow `|`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from autopar.errors import AutoparError, GraphError
from autopar.ir.collective import Collective, Step
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_source, parse_source
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout
from autopar.lower.lines import (
    Assign,
    Bound,
    Call,
    Compute,
    Drop,
    Function,
    Joined,
    Line,
    Lowered,
    Move,
    SourceLine,
    Sum,
    Use,
)

_INDENT = "    "
_DEF = re.compile(r"def (\w+)\((.*)\):")
_NODE = re.compile(
    r"(?:(?P<target>\S+) = )?(?P<word>\w+) %(?P<node>\w+)\((?P<read>[^)]*)\)(?: : (?P<types>.*))?"
)
_ASSIGN = re.compile(r"(?P<target>\S+) = (?P<source>\S+)(?: : (?P<bound>.*))?")
_LOOP = re.compile(r"(?P<targets>.+) = loop (?P<run>\d+)\((?P<outside>.*)\)")
_BOUND = re.compile(r"(\S+): %(\w+) (\[[^:]*)")


def format_lowered(program: Lowered, graph: Graph) -> str:
    """Returns the program as text, which `parse_lowered` reads.

    Args:
        program: the lowered program.
        graph: its graph.
    """
    functions = [*program.blocks, program.forward]
    functions += [] if program.aside is None else [program.aside]
    return "\n".join(line for f in functions for line in _format_function(f, graph))


def _format_function(function: Function, graph: Graph) -> Iterator[str]:
    yield f"def {function.name}({_format_bounds(function.arguments, graph)}):"
    for line in function.lines:
        if isinstance(line, Joined):
            yield f"{_INDENT}joined:"
            yield from (f"{_INDENT * 2}{_format_line(inner, graph)}" for inner in line.lines)
        else:
            yield f"{_INDENT}{_format_line(line, graph)}"
    yield f"{_INDENT}return {_format_bounds(function.results, graph)}\n"


def _format_bounds(bounds: Iterable[Bound], graph: Graph) -> str:
    texts = []
    for bound in bounds:
        layout = bound.layout.format(graph[bound.value].type.shape)
        texts.append(f"{bound.variable}: %{bound.value} {layout}")
    return "; ".join(texts)


def _format_line(line: Line, graph: Graph) -> str:
    """Returns one line without its indentation."""
    if isinstance(line, SourceLine):
        return f"# {format_source(line.source)}"
    if isinstance(line, Compute):
        shapes = [graph[name].type.shape for name in line.node.inputs]
        if line.node.op == "getitem":
            shapes = [line.node.type.shape]
        results = [tensor.shape for tensor in line.node.types]
        text = f"compute %{line.node.name}({', '.join(line.operands)})"
        text += f" : {_format_layouts(line.into, shapes)} -> {_format_layouts(line.out, results)}"
        text += _attribute("borders", line.borders) + (" | apart" if line.overlaps else "")
        text += _attribute("form", [line.form] if line.form else [])
        return f"{line.target} = {text}" if line.target else text
    if isinstance(line, Move):
        return _format_move(line)
    if isinstance(line, Use):
        shape, storage = line.leaf.type.shape, line.storage
        layouts = (storage.used, storage.held, storage.grads, storage.updated, storage.kept)
        types = _format_layouts(layouts, [shape] * len(layouts))
        return f"{line.target} = use %{line.leaf.name}({line.source}) : {types}"
    if isinstance(line, Assign):
        text = f"{line.target} = {line.source}"
        if line.layout is None:
            return text
        return f"{text} : %{line.value} {line.layout.format(graph[line.value].type.shape)}"
    if isinstance(line, Drop):
        return f"drop {line.variable}"
    if isinstance(line, Sum):
        return f"sum %{line.node.name}({line.variable})"
    assert isinstance(line, Call)
    return f"{', '.join(line.targets)} = loop {line.run}({', '.join(line.outside)})"


def _format_move(line: Move) -> str:
    step, shape = line.step, line.tensor.shape
    text = f"{line.target} = {step.op} %{line.value}({line.source})"
    text += f" : {step.src.format(shape)} -> {step.dst.format(shape)}"
    text += _attribute("over", step.axes)
    text += "".join(
        f" | {key} {at}" for key, at in (("dim", step.dim), ("to", step.to_dim)) if at is not None
    )
    for direction, call in (("forward", step.forward), ("backward", step.backward)):
        if call is not None:
            parts = (call.kind, str(call.nbytes), str(call.quantised), *call.axes)
            text += _attribute(direction, parts)
            text += _attribute(f"{direction}-by", (call.algorithm,) if call.algorithm else ())
    return text + _attribute("beside", [node.name for node in line.overlapped])


def _attribute(name: str, values: Iterable[str]) -> str:
    text = " ".join(values)
    return f" | {name} {text}" if text else ""


def _format_layouts(layouts: Iterable[Layout], shapes: Iterable[tuple[int, ...]]) -> str:
    pairs = zip(layouts, shapes, strict=True)
    return "; ".join(layout.format(shape) for layout, shape in pairs)


def parse_lowered(text: str, graph: Graph) -> Lowered:
    """Parses the text of `format_lowered`.

    Args:
        text: the program.
        graph: its graph.

    Raises:
        GraphError: a line is malformed, or names a node that the graph does not have.
        LayoutError: a layout is malformed.
    """
    functions: list[Function] = []
    name, arguments, lines = "", tuple[Bound, ...](), list[Line]()
    joined: list[Line] | None = None
    for number, row in enumerate(text.splitlines(), start=1):
        line = row.strip()
        if joined is not None and not row.startswith(_INDENT * 2):
            lines.append(Joined(tuple(joined)))  # type: ignore[arg-type]
            joined = None
        if not line:
            continue
        try:
            if match := _DEF.fullmatch(line):
                name, arguments, lines = match[1], _parse_bounds(match[2]), []
            elif line == "joined:":
                joined = []
            elif line.startswith("return"):
                results = _parse_bounds(line.removeprefix("return").strip())
                functions.append(Function(name, arguments, tuple(lines), results))
            else:
                (lines if joined is None else joined).append(_parse_line(line, graph))
        except (AutoparError, ValueError, TypeError) as error:
            raise GraphError(
                f"cannot read the line {line[:80]!r}",
                where=f"line {number}",
                why=str(error).splitlines()[0],
            ) from None
    named = {function.name: function for function in functions}
    if "forward" not in named:
        raise GraphError("the lowered program has no function `forward`")
    blocks = [f for f in functions if f.name not in ("forward", "aside")]
    return Lowered(named["forward"], tuple(blocks), named.get("aside"))


def _parse_bounds(text: str) -> tuple[Bound, ...]:
    bounds = []
    for part in text.split("; ") if text else ():
        match = _BOUND.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a variable with its value and layout")
        bounds.append(Bound(match[1], match[2], Layout.parse(match[3])[1]))
    return tuple(bounds)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _layouts(text: str) -> tuple[Layout, ...]:
    return tuple(Layout.parse(part)[1] for part in text.split(";")) if text.strip() else ()


def _parse_line(line: str, graph: Graph) -> Line:
    if line.startswith("# "):
        return SourceLine(parse_source(line[2:]))
    if line.startswith("drop "):
        return Drop(line.removeprefix("drop "))
    if match := _LOOP.fullmatch(line):
        return Call(int(match["run"]), _names(match["targets"]), _names(match["outside"]))
    head, *rest = line.split(" | ")
    attributes = {key: tuple(words) for key, *words in (part.split() for part in rest)}
    if (match := _NODE.fullmatch(head)) is None:
        return _parse_assign(line)
    return _parse_node(match, attributes, graph)


def _parse_assign(line: str) -> Assign:
    match = _ASSIGN.fullmatch(line)
    if match is None:
        raise ValueError("it is not a line of a lowered program")
    if match["bound"] is None:
        return Assign(match["source"], match["target"])
    (bound,) = _parse_bounds(f"{match['target']}: {match['bound']}")
    return Assign(match["source"], bound.variable, bound.value, bound.layout)


def _parse_node(match: re.Match[str], attributes: dict[str, tuple[str, ...]], graph: Graph) -> Line:
    """Parses a line that names a node."""
    node, target, read = graph[match["node"]], match["target"] or "", match["read"]
    before, _, after = (match["types"] or "").partition("->")
    if match["word"] == "sum":
        return Sum(node, read)
    if match["word"] == "compute":
        borders, overlaps = attributes.get("borders", ()), "apart" in attributes
        into, out = _layouts(before), _layouts(after)
        form = " ".join(attributes.get("form", ()))
        return Compute(node, _names(read), into, out, target, borders, overlaps, form)
    if match["word"] == "use":
        return Use(node, Storage(*_layouts(before)), read, target)
    (src,), (dst,) = _layouts(before), _layouts(after)
    dim, to_dim = (int(attributes[key][0]) if key in attributes else None for key in ("dim", "to"))
    forward, backward = (
        _parse_collective(attributes[key], attributes.get(f"{key}-by", ()))
        if key in attributes
        else None
        for key in ("forward", "backward")
    )
    axes = attributes.get("over", ())
    step = Step(match["word"], axes, dim, to_dim, src, dst, forward, backward)
    overlapped = tuple(graph[name] for name in attributes.get("beside", ()))
    return Move(node.name, node.type, step, read, target, overlapped)


def _parse_collective(parts: tuple[str, ...], by: tuple[str, ...]) -> Collective:
    kind, nbytes, quantised, *axes = parts
    return Collective(kind, tuple(axes), int(nbytes), int(quantised), " ".join(by))
