"""The nodes that a lowering has written so far, with names, types and gradient flow."""

from __future__ import annotations

import keyword
import re
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from autopar.capture.traced_nodes import drawn_along, source_of, tensors_of, type_of
from autopar.ir.graph import Arg, Name, Node, Ref
from autopar.operators.interpret import DTYPE_NAMES

# These use only the type of their second operand, or of their only one; no gradient flows into it.
_LIKE = {"aten.type_as", "aten.to.other", "aten.view_as", "aten.reshape_as", "aten.expand_as"}
_MADE = re.compile(
    r"aten\.(new_)?(zeros|ones|full|empty|rand|randn|randint)(_like)?\b|aten\.(zero|fill\.Scalar)$"
)

# An operator, its arguments and its keywords.
Call = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]


class Draft:
    """Nodes in execution order.

    Attributes:
        nodes: the nodes written so far.
        by_name: the same by name.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.by_name: dict[str, Node] = {}
        self._detached: dict[str, Ref] = {}

    def detach(self, node: fx.Node, ref: Ref) -> Ref:
        """Returns the value without its gradient, for operators that run without gradients."""
        if not self.by_name[ref.name].requires_grad:
            return ref
        if ref.name not in self._detached:
            name = f"{ref.name}_detached"
            self._detached[ref.name] = self.add(node, name, "autopar.detach", (ref,))
        return self._detached[ref.name]

    def add(
        self,
        node: fx.Node,
        name: str,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
        *,
        grad: bool = False,
        value: Any = None,
    ) -> Ref:
        """Adds a node with the source of the traced `node`, and the type of `value` or `node`."""
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        stem = f"v_{name}" if keyword.iskeyword(name) or not name.isidentifier() else name
        name, count = stem, 0
        while name in self.by_name:
            count += 1
            name = f"{stem}_{count}"
        types = tuple(map(type_of, tensors_of(node.meta["val"] if value is None else value)))
        new = Node(name, op, args, kwargs, types, source_of(node))
        if grad and op != "aten.detach" and not _MADE.match(op) and any(k.floating for k in types):
            read = new.inputs[:1] if op in _LIKE else new.inputs
            flows = any(self.by_name[name].requires_grad for name in read)
            new = replace(new, requires_grad=flows)
        self.by_name[name] = new
        self.nodes.append(new)
        return Ref(name)

    def result(self, node: fx.Node, name: str, call: Call, grad: bool, value: Any) -> Ref:
        """Adds the result of an operator; random numbers are drawn in the order of dimensions.

        They are not drawn in memory order, which for a shard depends on earlier communication.
        """
        add, (op, args, kwargs) = partial(self.add, node, grad=grad), call
        if not (order := drawn_along(node, op)):
            return add(name, op, args, kwargs, value=value)
        given = node.args[0].meta["val"].permute(order)  # type: ignore[union-attr]
        along = add(f"{name}_along", "aten.permute", (args[0], order), value=given)
        drawn = add(name, op, (along, *args[1:]), kwargs, value=value.permute(order))
        back = (drawn, tuple(map(order.index, range(len(order)))))
        return add(f"{name}_back", "aten.permute", back, value=value)

    def straight_through(self, node: fx.Node, old: Ref, new: Ref) -> Ref:
        """Returns the new value, with the gradient of the old one as its own.

        Writing into a tensor without gradients has this effect: autograd sees only the old value.
        """
        zero = (old, self.detach(node, old))
        kept = self.add(node, f"{node.name}_kept", "aten.sub.Tensor", zero, grad=True)
        return self.add(node, f"{node.name}_through", "aten.add.Tensor", (new, kept), grad=True)

    def copy(self, node: fx.Node, source: Arg, grad: bool) -> Ref:
        """Returns the value written by `copy_`: the source in the dtype and shape of the target."""
        assert isinstance(source, Ref)
        target, value = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
        if value.dtype != target.dtype:
            value = value.to(target.dtype)
            cast = (source, Name(DTYPE_NAMES[value.dtype]))
            name = f"{node.name}_cast"
            source = self.add(node, name, "aten.to.dtype", cast, grad=grad, value=value)
        if value.shape != target.shape:
            wide = (source, tuple(map(int, target.shape)))
            name = f"{node.name}_wide"
            source = self.add(node, name, "aten.expand", wide, grad=grad, value=target)
        return source

    def move_forward(self, start: int) -> None:
        """Moves every node from index `start` on directly behind the last value that it reads."""
        ordered = self.nodes[:start]
        behind: dict[str, list[str]] = {}
        for node in self.nodes[start:]:
            behind.setdefault(node.inputs[-1], []).append(node.name)
        stack = [node.name for node in reversed(ordered)]
        self.nodes = []
        while stack:
            self.nodes.append(self.by_name[stack.pop()])
            stack += reversed(behind.get(self.nodes[-1].name, []))
