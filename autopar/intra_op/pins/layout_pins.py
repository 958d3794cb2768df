"""Pins: layouts that the user fixes before the rest is planned.

    {"transformer.h.*.mlp.c_fc.weight": "[256@tensor, 64]", "transformer.h.*": "[8, 16@tensor, 64]"}

A key is a pattern of shell style over the names of parameters, inputs and modules, or of nodes,
"%linear_3". A parameter's pin is the layout in which it is used, a module's that of the last value
computed in it. A layout with a `-sum(...)` must agree in it, one without leaves it open. How a
parameter is stored may be said too, before an arrow: ZeRO-3 is
"[256@data, 64] => [256, 64] -sum(data)". That says where the parameter itself lies; where its
gradients are added up and where it is updated may follow, and how it is kept for the backward:
ZeRO-2 is "[256, 64] | [256@data, 64] | [256@data, 64] => [256, 64]" (see `ir/storage.py`). Equal
blocks are planned alike: a pin on one is a pin on all.

A pin may speak of some mesh axes only: "[8@node, 16, 64] along node" leaves open what becomes of
the other axes. "not [8@node, 16]" leaves every layout that "[8@node, 16]" would exclude.
Several pins on one name are written in a row, with ";" between them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopar.errors import PinError
from autopar.intra_op.node_choices import Option
from autopar.ir.graph import Graph, Node
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout

_SHOWN = 12  # choices of a node that an error lists


@dataclass(frozen=True)
class Pin:
    """One pin, read.

    Attributes:
        shape: of the value.
        layout: in which it is, or is used.
        stored: for a parameter how it is held, or how it is held, how its gradients are added up,
            how it is updated and perhaps kept; empty if that is not said.
        along: the only mesh axes that are spoken of, None for all.
        other: whether it must be any other than this.
    """

    shape: tuple[int, ...]
    layout: Layout
    stored: tuple[Layout, ...] = ()
    along: tuple[str, ...] | None = None
    other: bool = False

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read "[8, 4@gpu]", "[8@gpu, 4] => [8, 4]", "[8@node, 4] along node" or "not [8, 4]".

        Raises:
            LayoutError: a layout that cannot be read.
            PinError: two shapes, or an axis beside those that are spoken of.
        """
        said_not = re.match(r"\s*not\b", text)
        if said_not:
            return replace(cls.parse(text[said_not.end() :]), other=True)
        layouts, word, axes = text.partition(" along ")
        before, arrow, used = layouts.rpartition("=>")
        shape, layout = Layout.parse(used)
        states = [Layout.parse(part) for part in before.split("|")] if arrow else []
        stored = tuple(state for _, state in states)
        if any(stored_shape != shape for stored_shape, _ in states):
            raise PinError(
                f"the pin {text!r} has two shapes",
                why="a parameter is used in the shape in which it is stored",
            )
        if len(stored) not in (0, 1, 3, 4):
            raise PinError(
                f"cannot read the pin {text!r}",
                why=f"it has {len(stored)} layouts before the arrow",
                todo='write how it is held, or "held | gradients | updated", or with "| kept"',
            )
        if not word:
            return cls(shape, layout, stored)
        along = tuple(axis.strip() for axis in axes.split(","))
        said = {axis for one in (layout, *stored) for axis in one.axes}
        if not all(along) or not said.issubset(along):
            raise PinError(
                f"cannot read the pin {text!r}",
                why=f"it is along {axes.strip() or 'nothing'}, "
                f"and speaks of {', '.join(sorted(said - set(along))) or 'no axis'}",
                todo='write e.g. "[8@node, 16] along node"',
            )
        return cls(shape, layout, stored, along)

    def __str__(self) -> str:
        text = self.layout.format(self.shape)
        if self.stored:
            states = " | ".join(state.format(self.shape) for state in self.stored)
            text = f"{states} => {text}"
        text = f"not {text}" if self.other else text
        return text if self.along is None else f"{text} along {', '.join(self.along)}"

    def spoken_of(self, layout: Layout) -> Layout:
        """A layout without the axes that the pin does not speak of."""
        along = self.along
        if along is None:
            return layout

        def cut(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis in along)

        return Layout(tuple(map(cut, layout.dims)), cut(layout.partial), cut(layout.varying))

    def agrees(self, option: Option) -> bool:
        """Whether an option is what the pin says."""
        layout, pin = self.spoken_of(option.results[0]), self.layout
        alike = (
            layout.dims == pin.dims
            and set(layout.partial) == set(pin.partial)
            and (not pin.varying or set(layout.varying) == set(pin.varying))
            and self._stores(option.storage)
        )
        return alike != self.other

    def _stores(self, storage: Storage | None) -> bool:
        """Whether the states of a parameter lie as the pin says, if it says so."""
        if not self.stored or storage is None:
            return not self.stored
        states = (storage.held, storage.grads, storage.updated, storage.kept)
        pairs = zip(states, self.stored, strict=False)
        return all(self.spoken_of(state).dims == said.dims for state, said in pairs)


class Pins:
    """The pins of one graph; `keep` filters options, `check` refuses pins that met nothing.

    Raises:
        LayoutError, PinError: a pin that cannot be read.
    """

    def __init__(self, graph: Graph, pins: Mapping[str, str]) -> None:
        self.graph = graph
        self.pins = [(key, Pin.parse(part)) for key, text in pins.items() for part in parts(text)]
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
            PinError: there are none; names the pin, or the pins that contradict each other.
        """
        fitting: list[tuple[str, Pin, frozenset[int]]] = []
        for key, pin in self.pins:
            if _names(key, self.names[node.name]):
                self.unmet.discard(key)
                agree = frozenset(i for i, option in enumerate(options) if pin.agrees(option))
                if pin.shape != node.type.shape or not agree:
                    raise self._unfit(key, pin, node, options)
                fitting.append((key, pin, agree))
        left = frozenset(range(len(options))).intersection(*(agree for _, _, agree in fitting))
        if not left:
            raise self._contradiction(fitting, node, options)
        return tuple(option for i, option in enumerate(options) if i in left)

    def _unfit(self, key: str, pin: Pin, node: Node, options: tuple[Option, ...]) -> PinError:
        return PinError(
            f"the pin {key!r} = {str(pin)!r} fits no choice of %{node.name}",
            where=self._place(node),
            why=f"{_reason(pin, node, options)}; its choices are {_listed(node, options)}",
            todo="pin it to one of these, or leave the pin out",
        )

    def _contradiction(
        self,
        fitting: list[tuple[str, Pin, frozenset[int]]],
        node: Node,
        options: tuple[Option, ...],
    ) -> PinError:
        """Names two pins that leave nothing together, or all if it takes more than two."""
        pairs = itertools.combinations(fitting, 2)
        guilty = next(((a, b) for a, b in pairs if not a[2] & b[2]), tuple(fitting))
        said = " and ".join(f"{key!r} = {str(pin)!r}" for key, pin, _ in guilty)
        leaves = (
            f"{str(pin)!r} leaves {_listed(node, [options[i] for i in sorted(agree)], 4)}"
            for _, pin, agree in guilty
        )
        return PinError(
            f"the pins {said} contradict each other on %{node.name}",
            where=self._place(node),
            why="; ".join(leaves),
            todo="correct one of them, or leave it out",
        )

    def _place(self, node: Node) -> str:
        """The user's line, or name of what has none."""
        leaf = self.graph[node.inputs[0]] if node.op == "autopar.share" else node
        return f"the {leaf.op} {leaf.target!r}" if leaf.is_leaf else f"{node.op} at {node.source}"

    def _names(self, node: Node) -> Iterator[str]:
        """The node's own names; a share has its parameter's."""
        yield node.name
        yield f"%{node.name}"
        if node.is_leaf:
            yield node.target
        elif node.op == "autopar.share":
            source = self.graph[node.inputs[0]]
            if source.op == "param":
                yield source.target

    def check(self) -> None:
        """PinError if a pin named nothing in the graph."""
        if self.unmet:
            raise PinError(
                f"pins that name nothing: {', '.join(sorted(self.unmet))}",
                why="a pin names a parameter, an input, a module or a node",
                todo="take names from model.named_parameters(), model.named_modules() or the plan",
            )


def _names(key: str, names: set[str]) -> bool:
    """Whether a key fits one of a node's names; in deep models those are many."""
    if not any(sign in key for sign in "*?["):
        return key in names
    return any(fnmatchcase(name, key) for name in names)


def naming(graph: Graph, pins: Mapping[str, str]) -> dict[str, str]:
    """Those pins that name something in a graph, such as a stage of a model."""
    names = set().union(*Pins(graph, {}).names.values())
    return {key: text for key, text in pins.items() if _names(key, names)}


def parts(text: str) -> list[str]:
    """The pins that stand in a row in one text."""
    return re.split(r"\s*;\s*", text.strip())


def joined(groups: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """One mapping of several; pins on one name stand in a row, each once."""
    found: dict[str, dict[str, None]] = {}
    for group in groups:
        for key, text in group.items():
            found.setdefault(key, {}).update(dict.fromkeys(parts(text)))
    return {key: "; ".join(texts) for key, texts in found.items()}


def _label(option: Option, node: Node) -> str:
    """What a pin would write for an option."""
    return option.label if option.stored else option.results[0].format(node.type.shape)


def _listed(node: Node, options: Iterable[Option], limit: int = _SHOWN) -> str:
    found = list(dict.fromkeys(_label(option, node) for option in options))
    more = f"; and {len(found) - limit} more" if len(found) > limit else ""
    return "; ".join(found[:limit]) + more


def _reason(pin: Pin, node: Node, options: tuple[Option, ...]) -> str:
    """Why no option agrees with a pin: its shape, a dimension, or a sum."""
    if pin.shape != node.type.shape:
        return f"its shape is {list(node.type.shape)}"
    layouts = [pin.spoken_of(option.results[0]) for option in options]
    if node.op == "input":
        return "a batch is given whole to every device"
    if pin.other:
        return "no other is left"
    for dim, axes in enumerate(pin.layout.dims):
        if axes and not any(layout.dims[dim] for layout in layouts):
            return f"{node.op} needs dimension {dim} whole"
        if not any(layout.dims[dim] == axes for layout in layouts):
            said = " and ".join(axes)
            how = f"is not split over {said}" if axes else "is always split"
            return f"dimension {dim} of {node.type.shape[dim]} {how} by any strategy of {node.op}"
    if not any(set(layout.partial) == set(pin.layout.partial) for layout in layouts):
        return f"no strategy of {node.op} leaves {_owed(pin)}"
    return f"no strategy of {node.op} does all of this at once"


def _owed(pin: Pin) -> str:
    axes = ", ".join(pin.layout.partial)
    return f"a sum over {axes} owed" if axes else "no sum owed"
