"""Functions that express constraints in terms other than layouts, and their conversion to pins.

A pin function is any callable that takes a `PinContext`, a graph with its mesh, and returns pins by
name. Those of literature.py are frozen dataclasses. Pin functions and plain mappings combine: a
plan must satisfy the pins of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import AutoparError, PinError
from autopar.files.checked_values import Table, Text, shown
from autopar.intra_op.node_choices import Option, node_options
from autopar.intra_op.pins.dim_names import name_dims
from autopar.intra_op.pins.dims import Dims, find_dims
from autopar.intra_op.pins.layout_pins import Pin, joined
from autopar.intra_op.pins.roles import Roles
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout

Axes = tuple[str, ...]


@dataclass(frozen=True)
class PinContext:
    """The graph and mesh that a pin function is applied to.

    Attributes:
        graph: normalised, with its repeats; nodes of the first block represent those of all blocks.
        mesh: the devices.
        rules: rules by operator.
        stored: whether pin functions decide how parameters are stored; False if the user did.
    """

    graph: Graph
    mesh: Mesh
    rules: Mapping[str, OpRule]
    stored: bool = True
    _options: dict[str, tuple[Option, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def dims(self) -> Dims:
        """The classes of dimensions."""
        return find_dims(self.graph, self.rules)

    @cached_property
    def roles(self) -> Roles:
        """The roles of the classes in the model."""
        return Roles(self.dims)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each class."""
        return name_dims(self.roles)

    def axes(self, names: Axes) -> Axes:
        """Returns the given mesh axes that have more than one device, in mesh order.

        Raises:
            MeshError: the mesh has no such axis.
        """
        for name in names:
            self.mesh.axis(name)
        return tuple(axis.name for axis in self.mesh.axes if axis.name in names and axis.size > 1)

    def ways(self, axes: Axes) -> int:
        """Returns the number of devices along some axes."""
        ways = 1
        for axis in axes:
            ways *= self.mesh.axis_size(axis)
        return ways

    def parameters(self) -> tuple[Node, ...]:
        """The parameters that are read; of repeated blocks only the first block's."""
        return tuple(n for n in self.graph.folded if n.op == "param" and self.graph.users[n.name])

    def operators(self) -> Iterator[Node]:
        """The nodes with choices of their own that are not parameters."""
        for node in self.graph.folded:
            share = node.op == "autopar.share" and self.graph[node.inputs[0]].op == "param"
            if not node.is_leaf and not share:
                yield node

    def key(self, node: Node) -> str:
        """Returns the name by which a node is pinned; a parameter's own unless cut in pieces."""
        if node.op != "param":
            return f"%{node.name}"
        pieces = [leaf for leaf in self.parameters() if leaf.target == node.target]
        return node.target if len(pieces) == 1 else f"%{self.graph.users[node.name][0]}"

    def allows(self, node: Node, text: str) -> bool:
        """Returns whether an operator has a strategy that satisfies a pin."""
        if node.name not in self._options:
            self._options[node.name], _ = node_options(
                self.graph, node, self.mesh, dict(self.rules)
            )
        return any(Pin.parse(text).agrees(option) for option in self._options[node.name])


PinFunction = Callable[[PinContext], Mapping[str, str]]
PinsLike = Mapping[str, str] | PinFunction | Sequence[Mapping[str, str] | PinFunction]


def write(
    shape: tuple[int, ...], split: Mapping[int, Axes], along: Axes, *, stored: bool = False
) -> str:
    """Returns a pin that splits dimensions of a value along some axes, without partial sums.

    With `stored`, it is the pin of a parameter that is stored in the layout in which it is used.
    """
    layout = Layout(tuple(split.get(dim, ()) for dim in range(len(shape)))).format(shape)
    return f"{f'{layout} => ' if stored else ''}{layout} along {', '.join(along)}"


def resolve_pins(
    pins: PinsLike | None,
    graph: Graph,
    mesh: Mesh,
    rules: Mapping[str, OpRule],
    stored: bool = True,
) -> dict[str, str]:
    """Returns all constraints as pins by name; arguments as in `PinContext`.

    Raises:
        PinError: a pin function does not apply to this model, or is not one.
        MeshError: the mesh has no such axis.
    """
    if pins is None:
        return {}
    functions = [pins] if isinstance(pins, Mapping) or callable(pins) else list(pins)
    context = PinContext(graph, mesh, rules, stored)
    groups = []
    for function in functions:
        if not isinstance(function, Mapping) and not callable(function):
            raise PinError(
                f"{function!r} is not a pin",
                todo="pass mappings of names to layouts, autopar.pins.megatron(...) and the like, "
                "or autopar.layout(...)",
            )
        groups.append(
            _texts(function if isinstance(function, Mapping) else _said(function, context))
        )
    return joined(groups)


def _said(function: PinFunction, context: PinContext) -> object:
    """Returns the result of a pin function; raises PinError where a user's own function fails."""
    try:
        return function(context)
    except AutoparError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise PinError(
            f"the pins {shown(function)} fail",
            why=f"{type(error).__name__}: {error}",
            todo="pass a function of an autopar.pins.PinContext that returns pins by name",
        ) from error


def _texts(pins: object) -> Mapping[str, str]:
    """Returns pins by name; raises PinError unless names and layouts are strings."""
    try:
        return Table(Text())(pins)
    except ValueError as error:
        raise PinError(
            f"{shown(pins)} are not pins",
            why=str(error),
            todo='pass names with layouts, {"lm_head.weight": "[50257@gpu, 768]"}',
        ) from error
