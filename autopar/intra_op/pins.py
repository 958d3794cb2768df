"""Pins: layouts that the user fixes before the rest is planned.

    {"transformer.h.*.mlp.c_fc.weight": "[256@tensor, 64]", "transformer.h.*": "[8, 16@tensor, 64]"}

A key is a pattern of shell style over the names of parameters, inputs and modules, or of nodes. A
parameter's pin is the layout in which it is used, a module's that of the last value computed in it.
A layout with a `-sum(...)` must agree in it, one without leaves it open. How a parameter is stored
may be said too, before an arrow: ZeRO-3 is "[256@data, 64] => [256, 64] -sum(data)". Equal blocks
are planned alike: a pin on one is a pin on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.errors import PlanError
from autopar.intra_op.options import Option
from autopar.ir.graph import Graph, Node
from autopar.ir.tensor import Layout


@dataclass(frozen=True)
class Pin:
    """One pin, read: a shape, a layout, and for a parameter how it is stored if that is said."""

    shape: tuple[int, ...]
    layout: Layout
    stored: Layout | None

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read "[8, 4@gpu]" or "[8@gpu, 4] => [8, 4]".

        Raises:
            LayoutError: a layout that cannot be read.
            PlanError: two shapes.
        """
        before, arrow, used = text.rpartition("=>")
        shape, layout = Layout.parse(used)
        if not arrow:
            return cls(shape, layout, None)
        stored_shape, stored = Layout.parse(before)
        if stored_shape != shape:
            raise PlanError(
                f"the pin {text!r} has two shapes",
                why="a parameter is used in the shape in which it is stored",
            )
        return cls(shape, layout, stored)

    def __str__(self) -> str:
        text = self.layout.format(self.shape)
        return text if self.stored is None else f"{self.stored.format(self.shape)} => {text}"

    def agrees(self, option: Option) -> bool:
        """Whether an option is what the pin says."""
        layout, pin = option.results[0], self.layout
        return (
            layout.dims == pin.dims
            and set(layout.partial) == set(pin.partial)
            and (not pin.varying or set(layout.varying) == set(pin.varying))
            and self.stored in (None, option.stored)
        )


class Pins:
    """The pins of one graph; `keep` filters options, `check` refuses pins that met nothing.

    Raises:
        LayoutError, PlanError: a pin that cannot be read.
    """

    def __init__(self, graph: Graph, pins: Mapping[str, str]) -> None:
        self.graph = graph
        self.pins = {key: Pin.parse(text) for key, text in pins.items()}
        self.unmet = set(pins)
        self.names: dict[str, set[str]] = {}
        last: dict[str, str] = {}
        for node in graph.nodes:
            template = graph.template[node.name]
            self.names.setdefault(template, set()).update(self._names(node))
            if not node.is_leaf and node.op != "autopar.share" and node.source.module:
                words = node.source.module.split(".")
                for count in range(1, len(words) + 1):
                    last[".".join(words[:count])] = template
        for module, template in last.items():
            self.names[template].add(module)

    def keep(self, node: Node, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """The options that agree with every pin on this node.

        Raises:
            PlanError: there are none.
        """
        for key, pin in self.pins.items():
            if not any(fnmatchcase(name, key) for name in self.names[node.name]):
                continue
            self.unmet.discard(key)
            fitting = tuple(option for option in options if pin.agrees(option))
            if pin.shape != node.type.shape or not fitting:
                found = dict.fromkeys(_label(option, node) for option in options)
                raise PlanError(
                    f"the pin {key!r} = {str(pin)!r} fits no choice of %{node.name}",
                    where=self._place(node),
                    why=f"its choices are {'; '.join(found)}",
                    todo="pin it to one of these, or leave the pin out",
                )
            options = fitting
        return options

    def _place(self, node: Node) -> str:
        """The user's line, or name of what has none."""
        leaf = self.graph[node.inputs[0]] if node.op == "autopar.share" else node
        return f"the {leaf.op} {leaf.target!r}" if leaf.is_leaf else str(node.source)

    def _names(self, node: Node) -> Iterator[str]:
        """The node's own names; a share has its parameter's."""
        yield node.name
        if node.is_leaf:
            yield node.target
        elif node.op == "autopar.share":
            source = self.graph[node.inputs[0]]
            if source.op == "param":
                yield source.target

    def check(self) -> None:
        """PlanError if a pin named nothing in the graph."""
        if self.unmet:
            raise PlanError(
                f"pins that name nothing: {', '.join(sorted(self.unmet))}",
                why="a pin names a parameter, an input, a module or a node",
                todo="take names from model.named_parameters(), model.named_modules() or the plan",
            )


def _label(option: Option, node: Node) -> str:
    """What a pin would write for an option."""
    return option.label if option.stored else option.results[0].format(node.type.shape)
