"""The operators of a traced torch.fx graph -> nodes of a Graph, with in-place writes undone.

A traced program may write into tensors that other tensors are views of. A Graph has values only: a
write makes a new value, which is put back into the tensors that the written one is a view of
(`y[0].fill_(1)` is select, fill, select_scatter), and whatever else shares their storage is
computed again when it is next read. Only buffers, which outlive a step, are written in place, and
always directly.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx
from torch._ops import OpOverload

from autopar.errors import AnnotationError, AutoparError, CaptureError
from autopar.ir import composite, writes
from autopar.ir.advice import unsupported
from autopar.ir.carried import call_of, is_carried
from autopar.ir.graph import Arg, Name, Node, Ref
from autopar.ir.interpret import DTYPE_NAMES, tensor_type
from autopar.ir.traced import drawn_along, dtype_of, source_of, tensors_of, type_of
from autopar.ir.watch import taken_out

_CHECKS = re.compile(
    r"aten\.(_assert_|_functional_assert|sym_constrain_range|_linalg_check_errors)"
)
# Where a tensor is placed is decided by the plan.
_PLACEMENT = ("device", "layout", "pin_memory")
# These look at the type of their second operand alone, and no gradient flows into it; or of every
# operand.
_LIKE = {"aten.type_as", "aten.to.other", "aten.view_as", "aten.reshape_as", "aten.expand_as"}
_MADE = re.compile(r"aten\.(new_)?(zeros|ones|full|empty|rand|randn|randint)(_like)?\b")

# An operator, its arguments and its keywords.
_Call = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]


class Lowering:
    """Writes nodes, leaves first, in the order in which their traced nodes are given.

    Args:
        known: operators that stay as they are. Of others, those that torch defines by other
            operators are taken apart into these; with None, nothing is.

    Attributes:
        nodes: what is written so far.
    """

    def __init__(self, known: Container[str] | None = None) -> None:
        self.known = known
        self.nodes: list[Node] = []
        self._by_name: dict[str, Node] = {}
        self._by_target: dict[str, Node] = {}
        self._detached: dict[str, Ref] = {}
        self._leaves: dict[fx.Node, Node] = {}
        # The value that a traced node has now, and whether it is computed with gradients on.
        self._values: dict[fx.Node, Ref] = {}
        self._with_grad: dict[fx.Node, bool] = {}
        # A traced node that is the very same tensor as another; the results of a region.
        self._same: dict[fx.Node, fx.Node] = {}
        self._regions: dict[fx.Node, Sequence[fx.Node]] = {}
        # The fake tensors of the trace share storage exactly where the model's own tensors do.
        self._sharing: dict[UntypedStorage, dict[fx.Node, None]] = {}

    def leaf(self, node: fx.Node, kind: str, target: str, requires_grad: bool = False) -> None:
        """Place an input, parameter or buffer; two placeholders of one target are one leaf."""
        if target not in self._by_target:
            made = self._add(node, target, kind, (target,))
            leaf = replace(self.nodes.pop(), requires_grad=requires_grad)
            self.nodes.append(leaf)
            self._by_target[target] = self._by_name[made.name] = leaf
        self._leaves[node] = self._by_target[target]
        self._set(node, Ref(self._leaves[node].name))

    def run(self, graph: fx.Graph, grad: bool = True) -> None:
        """Lower every operator of a traced graph; `grad`: whether gradients are on.

        Raises:
            CaptureError: an operator has no place in a Graph.
        """
        for node in graph.nodes:
            if node.op == "call_function":
                try:
                    self._step(node, grad)
                except AutoparError as error:
                    error.where = error.where or str(source_of(node))
                    raise

    def read(self, node: fx.Node) -> Ref:
        """The value that a traced tensor has at this point.

        Raises:
            CaptureError: it is a number that depends on values.
        """
        node = self._same.get(node, node)
        if node not in self._values:
            if node not in self._with_grad:
                raise taken_out(str(source_of(node)))
            self._compute(node, self._with_grad[node])
        return self._values[node]

    def _step(self, node: fx.Node, grad: bool) -> None:
        value: Any = node.meta.get("val")
        op, first = str(node.target), self._first(node)
        if any(item.op == "get_attr" for item in node.all_input_nodes):
            self._region(node, op, grad)  # an operator over a graph of its own
        elif node.target is operator.getitem and first in self._regions:
            self._same[node] = self._regions[first][node.args[1]]  # type: ignore[index]
        elif not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            functions = "functorch" in getattr(node.target, "__module__", "")
            raise unsupported("vmap") if functions else _no_place(op)
        elif value is None and not _CHECKS.match(op):
            raise _no_place(op)
        elif not tensors_of(value):
            return  # A check, or a number, which `read` refuses if anything depends on it.
        elif op == "aten.lift_fresh_copy.default" and first is not None:
            self._set(node, self.read(first))
            # The trace shares the constant's storage, the model has a copy at every call.
            self._sharing[first.meta["val"].untyped_storage()].pop(first)
        elif op == "aten.dropout.default" and first is not None and not all(node.args[1:3]):
            # With p = 0 or training off, the model gets the very tensor back, the trace a copy.
            self._same[node] = first
            shared = self._sharing[first.meta["val"].untyped_storage()]
            self._sharing[value.untyped_storage()] = shared
        elif op == "autopar.shard.default":
            self._annotate(node, grad)
        elif writes.writes_out(node):
            made, copy = writes.without_out(node)
            self._step(made, grad)
            self._step(copy, grad)
            self._same[node] = self._same[copy]
        elif writes.is_write(node):
            self._write(node, grad)
        elif self.known is not None and composite.is_composite(node, self.known):
            inputs = node.all_input_nodes
            flows = [grad and self._by_name[self.read(i).name].requires_grad for i in inputs]
            self._inline(node, composite.parts(node, flows), inputs, grad)
        else:
            self._compute(node, grad)

    def _region(self, node: fx.Node, op: str, grad: bool) -> None:
        """Inline a region that runs with gradients on or off, or with autocast off."""
        args: Any = node.args
        autocast = False
        if "wrap_with_set_grad_enabled" in op:
            grad, body, *operands = args
        elif "wrap_with_autocast" in op:
            _, _, autocast, _, body, *operands = args
        else:
            raise unsupported(op)
        inner = getattr(node.graph.owning_module, body.target).graph
        if autocast:
            inside = next(item for item in inner.nodes if item.op == "call_function")
            raise CaptureError(
                "the model switches autocast on",
                where=str(source_of(inside)),
                todo="cast the model and its inputs instead, e.g. model.to(torch.bfloat16)",
            )
        self._inline(node, inner, operands, grad)

    def _inline(
        self, node: fx.Node, inner: fx.Graph, operands: Iterable[fx.Node], grad: bool
    ) -> None:
        """Lower a graph of its own in the place of `node`."""
        placeholders = (item for item in inner.nodes if item.op == "placeholder")
        for item, operand in zip(placeholders, operands, strict=True):
            self._same[item] = self._same.get(operand, operand)
        self.run(inner, grad)
        results: Any = inner.output_node().args[0]
        if isinstance(results, fx.Node):
            self._same[node] = self._same.get(results, results)
        elif not all(isinstance(result, fx.Node) for result in results):
            raise _no_place(str(node.target))  # a list among its results
        else:
            self._regions[node] = [self._same.get(result, result) for result in results]

    def _compute(self, node: fx.Node, grad: bool) -> None:
        op, args, kwargs = self._call(node, grad)
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            op = writes.functional_name(op)
        self._with_grad[node] = grad
        self._set(node, self._result(node, node.name, (op, args, kwargs), grad, node.meta["val"]))

    def _annotate(self, node: fx.Node, grad: bool) -> None:
        """An annotation stays whole; AnnotationError if nobody reads its result."""
        if not node.users:
            raise AnnotationError(
                "the result of autopar.shard is not used",
                why="an annotation is obeyed where its result is read",
                todo="write x = autopar.shard(x, ...)",
            )
        self._compute(node, grad)

    def _set(self, node: fx.Node, value: Ref) -> None:
        self._values[node] = value
        for tensor in tensors_of(node.meta["val"])[:1]:
            self._sharing.setdefault(tensor.untyped_storage(), {})[node] = None

    def _first(self, node: fx.Node) -> fx.Node | None:
        """The traced tensor that is the operator's first argument."""
        first = node.args[0] if node.args else None
        return self._same.get(first, first) if isinstance(first, fx.Node) else None

    def _write(self, node: fx.Node, grad: bool) -> None:
        """An operator that writes into its first argument."""
        writes.complete(node)
        written, *owners = chain = self._owners(node)
        leaf = self._leaves.get(chain[-1])
        flows = self._by_name[self.read(written).name].requires_grad
        if (leaf is not None and leaf.op == "param") or (flows and not grad):
            raise CaptureError(
                f"{node.target} changes a value that gradients flow through, without gradients",
                todo="write into a copy, x.detach().clone()",
            )
        op, args, kwargs = self._call(node, grad)
        self._same[node] = written
        stays = leaf is not None and leaf.op == "buffer"
        if stays and not owners:
            self._add(node, node.name, op, args, kwargs)
        else:
            self._values[written] = self._functional(node, op, args, kwargs, grad)
        for view, owner in pairwise(chain):
            value = owner.meta["val"]
            call = writes.put_back(view, value, self.read(owner), self._values[view])
            name = f"{owner.name}_new"
            self._values[owner] = self._add(node, name, *call, grad=grad, value=value)
        if leaf is not None and stays and owners:
            both = (Ref(leaf.name), self._values[chain[-1]])
            self._add(node, f"{leaf.name}_write", "aten.copy_", both, value=chain[-1].meta["val"])
            self._values[chain[-1]] = Ref(leaf.name)
        for other in self._sharing[written.meta["val"].untyped_storage()]:
            if other in self._leaves and self._leaves[other] is not leaf:
                raise CaptureError(
                    f"{node.target} changes {self._leaves[other].target!r} under another name",
                    todo="give every parameter and buffer storage of its own",
                )
            if other not in chain and other not in self._leaves:
                self._values.pop(other, None)

    def _owners(self, node: fx.Node) -> list[fx.Node]:
        """What `node` writes into, then what that is a view of, up to the owner of the storage."""
        first = self._first(node)
        assert first is not None  # `is_write` makes sure of it
        sharing = self._sharing[first.meta["val"].untyped_storage()]
        chain = [first]
        while first not in self._leaves:
            first = self._first(first)
            if first not in sharing:
                break
            if isinstance(first.meta["val"], Tensor):  # else an operator with several results
                chain.append(first)
        owner = next(member for member in sharing if isinstance(member.meta["val"], Tensor))
        if chain[-1] is not owner:
            raise CaptureError(
                f"{node.target} writes into a tensor that shares memory in an unknown way",
                todo="write into a copy, x.clone()",
            )
        return chain

    def _functional(
        self,
        node: fx.Node,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        grad: bool,
    ) -> Ref:
        """The value that an in-place operator leaves in what it writes."""
        kind = tensor_type(node.args[0].meta["val"])  # type: ignore[union-attr]
        if op == "aten.copy_":
            return self._copy(node, args[1], grad)
        try:
            result = writes.functional_result(node)
        except (AttributeError, RuntimeError):
            raise _no_place(op) from None
        op, name = writes.functional_name(op), writes.functional_name(node.name)
        made = self._result(node, name, (op, args, kwargs), grad, result)
        if DTYPE_NAMES[result.dtype] == kind.dtype:
            return made
        cast = (made, Name(kind.dtype))  # `x += y` keeps the dtype of x
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        return self._add(node, f"{name}_cast", "aten.to.dtype", cast, grad=grad, value=value)

    def _result(self, node: fx.Node, name: str, call: _Call, grad: bool, value: Tensor) -> Ref:
        """The result of an operator; numbers are drawn along dimensions, not along memory.

        How a part lies in memory depends on what was sent before.
        """
        add, (op, args, kwargs) = partial(self._add, node, grad=grad), call
        if not (order := drawn_along(node, op)):
            return add(name, op, args, kwargs, value=value)
        given = node.args[0].meta["val"].permute(order)  # type: ignore[union-attr]
        along = add(f"{name}_along", "aten.permute", (args[0], order), value=given)
        drawn = add(name, op, (along, *args[1:]), kwargs, value=value.permute(order))
        back = (drawn, tuple(map(order.index, range(len(order)))))
        return add(f"{name}_back", "aten.permute", back, value=value)

    def _copy(self, node: fx.Node, source: Arg, grad: bool) -> Ref:
        """What `copy_` leaves: the source in the dtype and the shape of what it is written into."""
        assert isinstance(source, Ref)
        target, value = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
        if value.dtype != target.dtype:
            value = value.to(target.dtype)
            cast = (source, Name(DTYPE_NAMES[value.dtype]))
            source = self._add(
                node, f"{node.name}_cast", "aten.to.dtype", cast, grad=grad, value=value
            )
        if value.shape != target.shape:
            wide = (source, tuple(map(int, target.shape)))
            source = self._add(
                node, f"{node.name}_wide", "aten.expand", wide, grad=grad, value=target
            )
        return source

    def _call(self, node: fx.Node, grad: bool) -> _Call:
        """The operator's name in a Graph, its arguments and keywords."""
        op = "getitem" if node.target is operator.getitem else str(node.target)
        given = list(node.args)
        if is_carried(op):
            op, given = call_of(*given)
        op = op.removesuffix(".default")
        if op == "aten.to.device":
            op = "aten.to.dtype"
            del given[1]
        kwargs = ((k, v) for k, v in node.kwargs.items() if k not in _PLACEMENT)
        args = tuple(self._arg(arg, grad) for arg in given)
        return op, args, tuple((key, self._arg(value, grad)) for key, value in kwargs)

    def _arg(self, arg: Any, grad: bool) -> Arg:
        if isinstance(arg, fx.Node):
            ref = self.read(arg)
            return ref if grad else self._detach(arg, ref)
        if isinstance(arg, torch.dtype):
            return Name(dtype_of(arg))
        if isinstance(arg, torch.memory_format):
            return Name(str(arg).removeprefix("torch."))
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item, grad) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise CaptureError(f"the argument {arg!r} has no place in a graph")

    def _detach(self, node: fx.Node, ref: Ref) -> Ref:
        """The value without its gradient, for operators that run with gradients off."""
        if not self._by_name[ref.name].requires_grad:
            return ref
        if ref.name not in self._detached:
            name = f"{ref.name}_detached"
            self._detached[ref.name] = self._add(node, name, "autopar.detach", (ref,))
        return self._detached[ref.name]

    def _add(
        self,
        node: fx.Node,
        name: str,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
        *,
        grad: bool = False,
        value: Tensor | None = None,
    ) -> Ref:
        """A node with the source of the traced `node`, typed like it or like `value`."""
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        stem = f"v_{name}" if keyword.iskeyword(name) or not name.isidentifier() else name
        name, count = stem, 0
        while name in self._by_name:
            count += 1
            name = f"{stem}_{count}"
        types = tuple(map(type_of, tensors_of(node.meta["val"] if value is None else value)))
        made = Node(name, op, args, kwargs, types, source_of(node))
        if grad and op != "aten.detach" and not _MADE.match(op) and any(k.floating for k in types):
            read = made.inputs[:1] if op in _LIKE else made.inputs
            flows = any(self._by_name[name].requires_grad for name in read)
            made = replace(made, requires_grad=flows)
        self._by_name[name] = made
        self.nodes.append(made)
        return Ref(name)


def _no_place(op: str) -> CaptureError:
    return CaptureError(
        f"the operator {op} has no place in a graph",
        todo="choose by torch.where between branches, or write it with other operators of torch",
    )
