"""The body of one generated function: operators, and the resharding between them, line by line."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest

from autopar.codegen.literals import comment, identifier, names_text, quoted
from autopar.codegen.ops import expression
from autopar.codegen.overlapped import overlapped
from autopar.codegen.printer import Printer
from autopar.ir.assume import ASSUME
from autopar.ir.collective import Step
from autopar.ir.functions import called
from autopar.ir.fusion.packed import PACK, packing, reader
from autopar.ir.graph import PREFIX, WRITE, Node, Source
from autopar.ir.localise import localise
from autopar.ir.tensor import Layout, TensorType
from autopar.plan import NodePlan

WIDTH = 100
RESERVED = (
    *dir(builtins),
    "torch",
    "F",
    "aten",
    "mesh",
    "kernels",
    "functions",
    "p",
    "batch",
    "outputs",
    "i",
    "names",
    "received",
    "stored",
    "together",
    "Piece",
    "checkpoint",
    "keep_products",
    "repeatable",
)
# What stands for a layout of its own and computes nothing.
IDENTITIES = ("autopar.share", "autopar.shard")
_WORDS = {
    "scaled_dot_product_attention": "attention",
    "cross_entropy_loss": "cross_entropy",
    "slice": "part",
    "sum": "total",
    "pow": "power",
}
# Operators after which their module is named in the user's code: their result bears that name.
_NAMED_AFTER_MODULE = (
    "aten.linear", "aten.layer_norm", "aten.rms_norm", "aten.embedding", "aten.gelu", "aten.silu",
    "aten.relu", "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.batch_norm", "aten.dropout",
    "kernels.rms_norm", "kernels.add_rms_norm", "kernels.add_layer_norm", "kernels.swiglu",
    "kernels.geglu", "kernels.gelu",
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A value as a scope holds it: its variable and its layout."""

    variable: str
    layout: Layout


class Scope:
    """Writes the lines of one function, in execution order.

    Args:
        printer: graph, plan and prices.
        nodes: the nodes that the function computes.
        leaf: the expression that reads a parameter or a buffer, by node name.
        results: values that the function returns, each of which counts as a use.
    """

    def __init__(
        self,
        printer: Printer,
        nodes: Iterable[Node],
        leaf: Callable[[str], str],
        results: Iterable[str],
    ) -> None:
        self.printer = printer
        self.leaf = leaf
        self.lines: list[str] = []
        self.held: dict[str, Held] = {}
        self._resharded: dict[tuple[str, Layout], str] = {}
        self._kept: frozenset[str] = frozenset()
        self._names = set(RESERVED)
        self._uses: dict[str, int] = {}
        self._source = Source()
        nodes = tuple(nodes)
        self._assigned = _assigned([node for node in nodes if node.op not in IDENTITIES])
        for name in (*(n for node in nodes for n in node.inputs), *results):
            self._uses[name] = self._uses.get(name, 0) + 1

    def fresh(self, wish: str) -> str:
        """A variable name like `wish` that is not taken."""
        wish = identifier(wish)
        name, count = wish, 1
        while name in self._names:
            count += 1
            name = f"{wish}_{count}"
        self._names.add(name)
        return name

    def hold(self, value: str, variable: str, layout: Layout) -> None:
        """Say that `variable` holds `value`."""
        self._names.add(variable)
        self.held[value] = Held(variable, layout)

    def line(self, code: str, note: str = "") -> None:
        """One statement with its comment: beside it if it fits, else above."""
        if note and len(code) + len(note) + 8 <= WIDTH:
            self.lines.append(f"{code:<56}  {comment(note)}")
            return
        if note:
            self.lines.append(comment(note))
        if len(code) + 4 > WIDTH and code.endswith(")"):
            call, _, arguments = code.partition("(")
            self.lines += [f"{call}(", f"    {arguments[:-1]}", ")"]
        else:
            self.lines.append(code)

    def operands(self, reads: Iterable[tuple[str, Layout]]) -> list[str]:
        """The variables that hold values in these layouts when one statement reads them all.

        A value that it reads in two layouts is in two variables.
        """
        found, kept = list[str](), self._kept
        for value, layout in reads:
            found.append(self.operand(value, layout))
            self.keep(found[-1:])
        self._kept = kept
        return found

    def keep(self, variables: Iterable[str]) -> None:
        """Give none of these variables another value from here on."""
        self._kept |= frozenset(variables)

    def operand(self, value: str, wanted: Layout) -> str:
        """The variable that holds `value` in the layout `wanted`, written down if need be."""
        tensor = self._type(value)
        self._uses[value] -= 1
        held = self.look_up(value)
        steps = self._steps(value, tensor, held.layout, wanted)
        if not steps:
            return held.variable
        key = (value, steps[-1].dst)
        if key not in self._resharded:
            self._resharded[key] = self._target(value, held.variable)
            self.reshard(held.variable, self._resharded[key], steps, tensor)
        return self._resharded[key]

    def _steps(self, value: str, tensor: TensorType, src: Layout, dst: Layout) -> tuple[Step, ...]:
        return self.printer.resharder.steps(
            tensor, src, dst, self.printer.graph[value].requires_grad
        )

    def reshard(
        self, variable: str, target: str, steps: tuple[Step, ...], tensor: TensorType
    ) -> None:
        """Write `target = steps(variable)`, one line a step."""
        for step in steps:
            axes = names_text(step.axes)
            places = "".join(
                f", {key}={at}"
                for key, at in (("dim", step.dim), ("to_dim", step.to_dim))
                if at is not None
            )
            size = self.printer.gathered(step, tensor)
            code = f"{target} = mesh.{step.op}({variable}{places}, axis={axes}{size})"
            self.line(code, self.printer.step_note(step, tensor))
            variable = target

    def _target(self, value: str, variable: str) -> str:
        """The name of a resharded value: its own again where nobody needs the old one."""
        owners = [name for name, held in self.held.items() if held.variable == variable]
        owners += [name for (name, _), copy in self._resharded.items() if copy == variable]
        read = variable in self._kept or any(self._uses.get(name, 0) for name in owners)
        if variable.isidentifier() and not read:
            return variable
        stem = variable if variable.isidentifier() else self.printer.graph[value].name
        return self.fresh(stem)

    def _type(self, value: str) -> TensorType:
        return self.printer.graph[value].type

    def read(self, value: str) -> None:
        """A use of a value has been written."""
        self._uses[value] -= 1

    def ahead(self, name: str) -> None:
        """Write down what is made of a parameter before its place."""
        node = self.printer.graph[name]
        if not node.is_leaf and name not in self.held:
            self.ahead(node.inputs[0])
            self.add(node)

    def look_up(self, value: str) -> Held:
        """What holds a value; of a leaf what it is read by."""
        if value not in self.held:
            layout = self.printer.result(value)
            self.held[value] = Held(self.leaf(value), layout)
        return self.held[value]

    def add(self, node: Node) -> None:
        """Write one operator."""
        if node.op == "getitem":
            self._getitem(node)
            return
        if node.name in self.held or overlapped(self, node):  # with another, before its place
            return
        if node.op in IDENTITIES:
            self._share(node)
            return
        planned = self.printer.planned(node.name)
        self.cite(node.source)
        if node.op == WRITE:
            key = self.leaf(node.inputs[0])[len("p[") : -1]
            value = self.operand(node.inputs[1], planned.operands[1][1])
            self.line(f"mesh.write({key}, {value})")
            return
        parts = self._parts(node)
        wanted = (layout for _, layout in planned.operands)
        operands = self.operands(zip(node.inputs, wanted, strict=True))
        layouts = tuple(layout for _, layout in planned.results)
        code = self._random(node, operands, layouts) or self._local(node, planned, operands)
        note = "; ".join(
            f"{tensor.dtype}{layout.format(tensor.shape)}"
            for tensor, layout in zip(node.types, layouts, strict=True)
        )
        note += self.printer.exchange_note(node, planned)
        if not self._uses.get(node.name):
            self.line(code, note)  # run for what it writes
            return
        if parts:
            self._unpack(parts, code, note, layouts)
            return
        variable = self.fresh(self.wish(node))
        if (step := self._packing(node, layouts[0])) is not None:
            code = f"mesh.rotary_all_to_all({', '.join(operands)}, axis={names_text(step.axes)})"
            note = self.printer.step_note(step, node.type)
            layouts = (step.dst,)
        self.hold(node.name, variable, layouts[0])
        self.line(f"{variable} = {code}", note)

    def _packing(self, node: Node, given: Layout) -> Step | None:
        """The exchange that the operator itself makes, where a kernel writes what it sends."""
        found = reader(self.printer.graph, node) if PACK in self.printer.plan.fuse else None
        if found is None:
            return None
        _, wanted = self.printer.planned(found.name).operands[found.inputs.index(node.name)]
        return packing(node, given, wanted, self.printer.resharder)

    def _local(self, node: Node, planned: NodePlan, operands: list[str]) -> str:
        """The operator on local parts; borders that it needs of its neighbours come before."""
        types = tuple(map(self._type, node.inputs))
        into, out = (tuple(layout for _, layout in s) for s in (planned.operands, planned.results))
        *before, last = localise(node, types, into, out, self.printer.extent)
        for step in before:
            variable = self.fresh(f"{self.wish(node)}_halo")
            self.line(f"{variable} = {expression(step, operands[:1])}")
            operands = [variable, *operands[1:]]
        return expression(last, operands)

    def _share(self, node: Node) -> None:
        """The identity: a variable of its own only where the layout changes."""
        planned = self.printer.planned(node.name)
        value, tensor = node.inputs[0], node.type
        if self.printer.graph[value].op == "param" and self._parameter(node):
            return
        (_, into), (_, out) = planned.operands[0], planned.results[0]
        before, found = self.look_up(value).variable, self.look_up(value).layout
        if node.op == "autopar.shard" and found != into:
            self.cite(node.source)
        variable = self.operand(value, into)
        steps = self._steps(value, tensor, into, out)
        if variable == before and variable.isidentifier() and not steps:
            self.held[node.name] = Held(variable, out)
            return
        if variable.isidentifier():
            target = self._target(value, variable) if steps else variable
        else:
            target = self.fresh(self.wish(self.printer.graph[value]))
        if steps:
            self.reshard(variable, target, steps, tensor)
        elif target != variable:
            self.line(f"{target} = {variable}", f"{tensor.dtype}{out.format(tensor.shape)}")
        self.hold(node.name, target, out)

    def _parameter(self, node: Node) -> bool:
        """A parameter as operators use it, if that is another tensor than what is held."""
        leaf = self.printer.graph[node.inputs[0]]
        storage = self.printer.storage(leaf)
        if not storage.moves:
            return False
        self._uses[leaf.name] -= 1
        target = self.fresh(self.wish(leaf))
        self.line(
            f"{target} = mesh.{self.printer.use(leaf, storage).format(self.leaf(leaf.name))}",
            self.printer.use_note(leaf, storage),
        )
        self.hold(node.name, target, storage.used)
        return True

    def _parts(self, node: Node) -> list[Node | None]:
        """Of a kernel with several results the node that takes each, empty for other operators."""
        if not node.op.startswith(PREFIX) or len(node.types) < 2:
            return []
        readers = map(self.printer.graph.__getitem__, self.printer.graph.users[node.name])
        takers = {reader.args[1]: reader for reader in readers}
        return [takers.get(index) for index in range(len(node.types))]

    def _unpack(
        self, parts: list[Node | None], code: str, note: str, layouts: tuple[Layout, ...]
    ) -> None:
        """`a, b = code`."""
        variables = [self.fresh("_" if part is None else self.wish(part)) for part in parts]
        self.line(f"{', '.join(variables)} = {code}", note)
        for part, variable, layout in zip(parts, variables, layouts, strict=True):
            if part is not None:
                self.hold(part.name, variable, layout)

    def _getitem(self, node: Node) -> None:
        """One of several results; it cannot be resharded before it is taken."""
        value, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        given = self.printer.result(value, index)
        self._uses[value] -= 1
        if node.name in self.held:  # it has been unpacked
            variable = self.held[node.name].variable
        else:
            self.cite(node.source)
            variable = self.fresh(self.wish(node))
            code = expression(node, [self.look_up(value).variable])
            self.line(f"{variable} = {code}", f"{node.type.dtype}{given.format(node.type.shape)}")
        steps = self._steps(node.name, node.type, given, self.printer.result(node.name))
        self.reshard(variable, variable, steps, node.type)
        self.hold(node.name, variable, self.printer.result(node.name))

    def _random(self, node: Node, operands: list[str], layouts: tuple[Layout, ...]) -> str | None:
        """Dropout and attention that drops, whose masks must not depend on the mesh."""
        if node.op == "aten.dropout" and node.args[2] is True:
            text = layouts[0].format(node.type.shape)
            return f"mesh.dropout({operands[0]}, {node.args[1]!r}, {quoted(text)})"
        if node.op != "aten.scaled_dot_product_attention":
            return None
        args = dict(enumerate(node.args))
        if not args.get(4):
            return None
        query, keys = (self.printer.graph[name].type.shape for name in node.inputs[:2])
        layout = replace(layouts[0], dims=(*layouts[0].dims[:-1], ()))
        given = {
            "mask": operands[3] if len(operands) > 3 else None,
            "p": repr(args[4]),
            "is_causal": "True" if args.get(5) else None,
            "scale": None if node.keyword("scale") is None else repr(node.keyword("scale")),
            "layout": quoted(layout.format((*query[:-1], keys[-2]))),
        }
        more = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
        return f"mesh.attention({', '.join(operands[:3])}, {more})"

    def wish(self, node: Node) -> str:
        """What a person would call a node's value."""
        if node.is_leaf:
            parts = [part for part in node.target.split(".") if not part.isdigit()]
            start = node.keyword("start")
            return "_".join(parts[-2:]) + (f"_{start}" if start is not None else "")
        if node.op in IDENTITIES or node.op == ASSUME:
            return self.wish(self.printer.graph[node.inputs[0]])
        module = node.source.module.rpartition(".")[2]
        op = node.op
        if op == "getitem" and node.args[1] == 0:  # a kernel's first result is its own
            op = self.printer.graph[node.inputs[0]].op
        if op in _NAMED_AFTER_MODULE and module.isidentifier():
            return module
        if node.name in self._assigned:
            return self._assigned[node.name]
        if (function := called(node)) is not None:
            return re.split(r"[.:]", function[0])[-1].lower()
        word = node.op.split(".")[1] if "." in node.op else node.op
        return _WORDS.get(word, word).strip("_")

    def cite(self, source: Source) -> None:
        """Write the user's line, where it is another than the one before."""
        place = (source.file, source.line)
        if source.file and place != (self._source.file, self._source.line):
            said = f"{source.file}:{source.line}  {source.text}"
            self.lines.append(comment(said)[: WIDTH - 4].rstrip())
        self._source = source


def _assigned(nodes: list[Node]) -> dict[str, str]:
    """The last node of a line `name = ...` of the user's code -> that name."""
    names: dict[str, str] = {}
    for node, after in zip_longest(nodes, nodes[1:]):
        last = after is None or after.source != node.source
        match = re.match(r"([A-Za-z_]\w*)\s*[-+*/]?=(?!=)", node.source.text)
        if last and match:
            names[node.name] = match[1]
    return names
