"""Pins: layouts that the user fixes before the rest is planned.

    {"transformer.h.*.mlp.c_fc.weight": "[256@tensor, 64]", "transformer.h.*": "[8, 16@tensor, 64]"}

A key is a shell-style pattern over the names of parameters, inputs and modules, or of nodes,
"%linear_3". The pin of a parameter is the layout in which it is used; that of a module, the layout
of the last value computed in it. A layout with a `-sum(...)` must match exactly; one without leaves
the sum open. The storage of a parameter may be given before an arrow: ZeRO-3 is
"[256@data, 64] => [256, 64] -sum(data)". That is the layout of the parameter itself; the layouts in
which its gradients accumulate and in which it is updated may follow, and that in which it is kept
for the backward: ZeRO-2 is "[256, 64] | [256@data, 64] | [256@data, 64] => [256, 64]" (see
`ir/storage.py`). Equal blocks have equal layouts: a pin on one is a pin on all.

A pin may be limited to some mesh axes: "[8@node, 16, 64] along node" leaves the other axes open.
"not [8@node, 16]" excludes the layouts that "[8@node, 16]" would require. Several pins on one name
are separated by ";".

"by ring" names the form of an operator, "by plain" the operator without a form; the key may also be
a module that contains the operator. "[8, 16@gpu] by ring" requests a layout and a form.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autopar.errors import InfeasibleError, PinError
from autopar.intra_op.node_choices import Option
from autopar.ir.graph import Graph, Node
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout
from autopar.operators.attention.sequence_forms import ATTENTION
from autopar.operators.forms import PLAIN, forms, forms_of

_SHOWN = 12  # number of choices that an error lists


@dataclass(frozen=True)
class Pin:
    """One parsed pin.

    Attributes:
        shape: shape of the value.
        layout: layout of the value, or of the parameter where it is used.
        stored: for a parameter, the layout in which it is stored, optionally followed by those in
            which its gradients accumulate, it is updated and it is kept; empty if not given.
        along: the mesh axes that the pin is limited to, None for all.
        other: whether the pin excludes this layout rather than requiring it.
        form: name of the form, or PLAIN; "" for any.
        anywhere: whether it speaks of the form alone, and leaves the layout open.
    """

    shape: tuple[int, ...]
    layout: Layout
    stored: tuple[Layout, ...] = ()
    along: tuple[str, ...] | None = None
    other: bool = False
    form: str = ""
    anywhere: bool = False

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Parses "[8, 4@gpu]", "[8@gpu, 4] => [8, 4]", "[8@node, 4] along node" or "not [8, 4]".

        Raises:
            LayoutError: a layout cannot be read.
            PinError: two shapes, or an axis outside those that the pin is limited to.
        """
        said_not = re.match(r"\s*not\b", text)
        if said_not:
            return replace(cls.parse(text[said_not.end() :]), other=True)
        said, by, form = f" {text.strip()} ".partition(" by ")
        if by and (not said.strip() or "[" in said):
            _check_form(form.strip(), text)
            if not said.strip():
                return cls((), Layout(()), form=form.strip(), anywhere=True)
            return replace(cls.parse(said), form=form.strip())
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
                todo='write the stored layout, "stored | gradients | updated", or these with '
                '"| kept"',
            )
        if not word:
            return cls(shape, layout, stored)
        along = tuple(axis.strip() for axis in axes.split(","))
        named = {axis for one in (layout, *stored) for axis in one.axes}
        if not all(along) or not named.issubset(along):
            raise PinError(
                f"cannot read the pin {text!r}",
                why=f"it is along {axes.strip() or 'nothing'}, "
                f"and speaks of {', '.join(sorted(named - set(along))) or 'no axis'}",
                todo='write e.g. "[8@node, 16] along node"',
            )
        return cls(shape, layout, stored, along)

    def __str__(self) -> str:
        text = self.layout.format(self.shape)
        if self.stored:
            states = " | ".join(state.format(self.shape) for state in self.stored)
            text = f"{states} => {text}"
        text = text if self.along is None else f"{text} along {', '.join(self.along)}"
        text = "" if self.anywhere else f"{text} "
        text += f"by {self.form}" if self.form else ""
        return f"{'not ' * self.other}{text.strip()}"

    def spoken_of(self, layout: Layout) -> Layout:
        """Returns a layout without the axes that the pin leaves open."""
        along = self.along
        if along is None:
            return layout

        def cut(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis in along)

        return Layout(tuple(map(cut, layout.dims)), cut(layout.partial), cut(layout.varying))

    def agrees(self, option: Option) -> bool:
        """Returns whether an option satisfies the pin."""
        formed = not self.form or (option.form or PLAIN) == self.form
        if self.anywhere:
            return formed != self.other
        layout, pin = self.spoken_of(option.results[0]), self.layout
        alike = (
            formed
            and layout.dims == pin.dims
            and set(layout.partial) == set(pin.partial)
            and (not pin.varying or set(layout.varying) == set(pin.varying))
            and self._stores(option.storage)
        )
        return alike != self.other

    def _stores(self, storage: Storage | None) -> bool:
        """Returns whether a parameter is stored as the pin says, if it says so."""
        if not self.stored or storage is None:
            return not self.stored
        states = (storage.held, storage.grads, storage.updated, storage.kept)
        pairs = zip(states, self.stored, strict=False)
        return all(self.spoken_of(state).dims == pinned.dims for state, pinned in pairs)


class Pins:
    """The pins of one graph; `keep` filters options, `check` refuses pins that match nothing.

    Raises:
        LayoutError, PinError: a pin that cannot be read.
    """

    def __init__(self, graph: Graph, pins: Mapping[str, str]) -> None:
        self.graph = graph
        self.pins = [(key, Pin.parse(part)) for key, text in pins.items() for part in parts(text)]
        self.unmet = set(pins)
        self.names: dict[str, set[str]] = {}
        self.modules: dict[str, set[str]] = {}  # of operators with forms, those that they are in
        last: dict[str, str] = {}
        for node in graph.nodes:
            template = graph.template[node.name]
            self.names.setdefault(template, set()).update(self._names(node))
            if not node.is_leaf and node.op != "autopar.share" and node.source.module:
                path = node.source.module.split(".")
                modules = [".".join(path[:count]) for count in range(1, len(path) + 1)]
                last |= dict.fromkeys(modules, template)
                if forms_of(node.op):
                    self.modules.setdefault(template, set()).update(modules)
        for module, template in last.items():
            self.names[template].add(module)

    def keep(self, node: Node, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """Returns the options that satisfy every pin on this node.

        Raises:
            PinError: there are none; names the pin, or the pins that contradict each other.
            InfeasibleError: there were none before the pins.
        """
        if not options:
            raise self._without_options(node)
        fitting: list[tuple[str, Pin, frozenset[int]]] = []
        for key, pin in self.pins:
            if self.speaks(key, pin, node):
                self.unmet.discard(key)
                agree = frozenset(i for i, option in enumerate(options) if pin.agrees(option))
                if (pin.shape != node.type.shape and not pin.anywhere) or not agree:
                    raise self._unfit(key, pin, node, options)
                fitting.append((key, pin, agree))
        if not fitting:
            return options
        left = frozenset(range(len(options))).intersection(*(agree for _, _, agree in fitting))
        if not left:
            raise self._contradiction(fitting, node, options)
        return tuple(option for i, option in enumerate(options) if i in left)

    def names_any(self, node: Node) -> bool:
        """Returns whether any pin is on a node."""
        return any(self.speaks(key, pin, node) for key, pin in self.pins)

    def speaks(self, key: str, pin: Pin, node: Node) -> bool:
        """Returns whether a pin is on a node; one of a form may name a module that it is in."""
        if not pin.anywhere:
            return _names(key, self.names[node.name])
        known = pin.form == PLAIN or any(form.name == pin.form for form in forms_of(node.op))
        names = self.names[node.name] | self.modules.get(node.name, set())
        return known and bool(forms_of(node.op)) and _names(key, names)

    def _without_options(self, node: Node) -> InfeasibleError:
        """Returns the error of a node that has no choices, which is no fault of any pin."""
        return InfeasibleError(
            f"%{node.name} cannot be laid out on this mesh",
            where=self._place(node),
            why=f"no layout is left of its {node.type}: none was given, or another program stores "
            "it in a layout that it cannot have here",
            todo="compile a program of its own for this call, or use another mesh",
        )

    def _unfit(self, key: str, pin: Pin, node: Node, options: tuple[Option, ...]) -> PinError:
        alike = [o for o in options if pin.form and (o.form or PLAIN) == pin.form]
        return PinError(
            f"the pin {key!r} = {str(pin)!r} fits no choice of %{node.name}",
            where=self._place(node),
            why=f"{_reason(pin, node, options)}; its choices are {_listed(node, alike or options)}",
            todo="pin it to one of these, or leave the pin out",
        )

    def _formless(self, key: str, pin: Pin) -> PinError:
        """Returns the error of a form that no operator has in the modules that a pin names."""
        ops = dict.fromkeys(form.op for form in forms().values() if form.name == pin.form)
        inside = dict.fromkeys(
            node.op
            for node in self.graph.nodes
            if forms_of(node.op) and _names(key, self.modules.get(node.name, set()))
        )
        todo = "name modules that have such an operator, or leave the pin out"
        if ATTENTION in ops and all(node.op != ATTENTION for node in self.graph.nodes):
            todo = (
                "compute attention with F.scaled_dot_product_attention or flex_attention, not with "
                'products and a softmax (transformers: attn_implementation="sdpa")'
            )
        return PinError(
            f"the pin {key!r} = {str(pin)!r} fits no operator",
            why=f"{pin.form} is a form of {' and of '.join(ops)}; the operators with forms in "
            f"{key} are of {' and of '.join(inside) or 'no kind'}",
            todo=todo,
        )

    def _contradiction(
        self,
        fitting: list[tuple[str, Pin, frozenset[int]]],
        node: Node,
        options: tuple[Option, ...],
    ) -> PinError:
        """Returns an error that names two contradictory pins, or all if it takes more than two."""
        pairs = itertools.combinations(fitting, 2)
        guilty = next(((a, b) for a, b in pairs if not a[2] & b[2]), tuple(fitting))
        named = " and ".join(f"{key!r} = {str(pin)!r}" for key, pin, _ in guilty)
        leaves = (
            f"{str(pin)!r} leaves {_listed(node, [options[i] for i in sorted(agree)], 4)}"
            for _, pin, agree in guilty
        )
        return PinError(
            f"the pins {named} contradict each other on %{node.name}",
            where=self._place(node),
            why="; ".join(leaves),
            todo="correct one of them, or leave it out",
        )

    def _place(self, node: Node) -> str:
        """Returns the user's line, or the name of a node without one."""
        leaf = self.graph[node.inputs[0]] if node.op == "autopar.share" else node
        return f"the {leaf.op} {leaf.target!r}" if leaf.is_leaf else f"{node.op} at {node.source}"

    def _names(self, node: Node) -> Iterator[str]:
        """Yields the node's names; a share also has its parameter's."""
        yield node.name
        yield f"%{node.name}"
        if node.is_leaf:
            yield node.target
        elif node.op == "autopar.share":
            source = self.graph[node.inputs[0]]
            if source.op == "param":
                yield source.target

    def check(self) -> None:
        """Raises PinError if a pin matches nothing in the graph."""
        known = set().union(*self.names.values())
        for key, pin in self.pins:
            if key in self.unmet and pin.anywhere and _names(key, known):
                raise self._formless(key, pin)
        if self.unmet:
            raise PinError(
                f"pins that name nothing: {', '.join(sorted(self.unmet))}",
                why="a pin names a parameter, an input, a module or a node",
                todo="take names from model.named_parameters(), model.named_modules() or the plan",
            )


def _check_form(name: str, text: str) -> None:
    """Raises PinError unless some operator has a form of this name."""
    known = [PLAIN, *dict.fromkeys(form.name for form in forms().values())]
    if name not in known:
        raise PinError(
            f"cannot read the pin {text!r}",
            why=f"there is no form {name!r}",
            todo=f"write by {' or by '.join(known)}",
        )


def _names(key: str, names: set[str]) -> bool:
    """Returns whether a key matches one of a node's names; in deep models there are many."""
    if not any(sign in key for sign in "*?["):
        return key in names
    return any(fnmatchcase(name, key) for name in names)


def naming(graph: Graph, pins: Mapping[str, str]) -> dict[str, str]:
    """Returns the pins that match something in a graph, such as a stage of a model."""
    known = Pins(graph, {})
    names = set().union(*known.names.values(), *known.modules.values())
    return {key: text for key, text in pins.items() if _names(key, names)}


def parts(text: str) -> list[str]:
    """Splits a text into the pins that are separated by ";"."""
    return re.split(r"\s*;\s*", text.strip())


def joined(groups: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merges mappings of pins; several pins on one name are joined by ";", without repeats."""
    merged: dict[str, dict[str, None]] = {}
    for group in groups:
        for key, text in group.items():
            merged.setdefault(key, {}).update(dict.fromkeys(parts(text)))
    return {key: "; ".join(texts) for key, texts in merged.items()}


def _label(option: Option, node: Node) -> str:
    """Returns the text of a pin for an option."""
    text = option.label if option.stored else option.results[0].format(node.type.shape)
    return f"{text} by {option.form}" if option.form else text


def _listed(node: Node, options: Iterable[Option], limit: int = _SHOWN) -> str:
    labels = list(dict.fromkeys(_label(option, node) for option in options))
    more = f"; and {len(labels) - limit} more" if len(labels) > limit else ""
    return "; ".join(labels[:limit]) + more


def _reason(pin: Pin, node: Node, options: tuple[Option, ...]) -> str:
    """Explains why no option satisfies a pin: its shape, a dimension, or a sum."""
    needs = next((f.needs for f in forms_of(node.op) if f.name == pin.form), "")
    if pin.form and not any((option.form or PLAIN) == pin.form for option in options):
        return f"{pin.form} needs {needs}"
    if pin.anywhere:
        return "no other form is left"
    if pin.shape != node.type.shape:
        return f"its shape is {list(node.type.shape)}"
    layouts = [pin.spoken_of(option.results[0]) for option in options]
    if node.op == "input":
        return "a batch is given whole to every device"
    if pin.other:
        return "no other layout is left"
    for dim, axes in enumerate(pin.layout.dims):
        if axes and not any(layout.dims[dim] for layout in layouts):
            return f"{node.op} needs dimension {dim} whole"
        if not any(layout.dims[dim] == axes for layout in layouts):
            named = " and ".join(axes)
            how = f"is not split over {named}" if axes else "is always split"
            return f"dimension {dim} of {node.type.shape[dim]} {how} by any strategy of {node.op}"
    if not any(set(layout.partial) == set(pin.layout.partial) for layout in layouts):
        return f"no strategy of {node.op} has a result {_owed(pin)}"
    if needs:
        return f"in this layout there is no form {pin.form}, which needs {needs}"
    return f"no strategy of {node.op} satisfies the whole pin"


def _owed(pin: Pin) -> str:
    axes = ", ".join(pin.layout.partial)
    return f"with a partial sum over {axes}" if axes else "without a partial sum"
