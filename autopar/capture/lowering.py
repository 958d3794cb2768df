"""Lowers the operators of a traced torch.fx graph to nodes of a Graph, undoing in-place writes.

A traced program may write into tensors of which other tensors are views. A Graph contains values
only, so a write creates a new value, and this value is put back into the tensors of which the
written tensor is a view (`y[0].fill_(1)` becomes select, fill, select_scatter). Every other tensor
that shares their storage is recomputed when it is read next. The same holds for a write into a
buffer, which outlives the step: earlier reads get the buffer, later reads the new value, and one
`autopar.write` gives the buffer's value at the end of the step. In a graph, a node that reads a
buffer gets its value before the forward.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx
from torch._ops import OpOverload

from autopar.capture import composite
from autopar.capture import in_place as writes
from autopar.capture.advice import unsupported
from autopar.capture.autograd_functions import call_of, is_function_call
from autopar.capture.dtypes.autocast import Autocast
from autopar.capture.node_writer import Call, Draft
from autopar.capture.traced_nodes import dtype_of, source_of, tensors_of
from autopar.capture.watch import taken_out
from autopar.errors import AnnotationError, AutoparError, CaptureError
from autopar.ir.graph import WRITE, Arg, Name, Node, Ref
from autopar.operators.interpret import DTYPE_NAMES

_CHECKS = re.compile(
    r"aten\.(_assert_|_functional_assert|sym_constrain_range|_linalg_check_errors)"
)
# The plan decides where a tensor is placed.
_PLACEMENT = ("device", "layout", "pin_memory")


class Lowering(Draft):
    """Writes nodes, leaves first, in the order of their traced nodes.

    Args:
        known: operators that are kept. Others are decomposed if torch defines them by other
            operators; None decomposes nothing.
    """

    def __init__(self, known: Container[str] | None = None) -> None:
        super().__init__()
        self.known = known
        self._by_target: dict[str, Node] = {}
        self._leaves: dict[fx.Node, Node] = {}
        # The current value of a traced node, and whether it is computed with gradients enabled.
        self._values: dict[fx.Node, Ref] = {}
        self._with_grad: dict[fx.Node, bool] = {}
        # Traced nodes that are the same tensor object as another node; the results of a region.
        self._autocast: Autocast | None = None  # of the region that is being inlined
        self._same: dict[fx.Node, fx.Node] = {}
        self._regions: dict[fx.Node, Sequence[fx.Node | Ref]] = {}
        # Written leaves, each with its traced tensor and the last operator that wrote it.
        self._dirty: dict[str, tuple[fx.Node, fx.Node]] = {}
        # Tensors that were written without gradients, with the writing operator.
        self._lost: dict[fx.Node, fx.Node] = {}
        # The fake tensors of the trace share storage exactly where the model's own tensors do.
        self._sharing: dict[UntypedStorage, dict[fx.Node, None]] = {}

    def leaf(self, node: fx.Node, kind: str, target: str, requires_grad: bool = False) -> None:
        """Places an input, parameter or buffer; two placeholders with one target are one leaf."""
        if target not in self._by_target:
            placed = self.add(node, target, kind, (target,))
            leaf = replace(self.nodes.pop(), requires_grad=requires_grad)
            self.nodes.append(leaf)
            self._by_target[target] = self.by_name[placed.name] = leaf
        self._leaves[node] = self._by_target[target]
        self._set(node, Ref(self._leaves[node].name))

    def run(self, graph: fx.Graph, grad: bool = True) -> None:
        """Lowers every operator of a traced graph; `grad` says whether gradients are enabled.

        Raises:
            CaptureError: an operator cannot be part of a Graph.
        """
        for node in graph.nodes:
            if node.op == "call_function":
                try:
                    self._step(node, grad)
                except AutoparError as error:
                    error.where = error.where or str(source_of(node))
                    raise

    def read(self, node: fx.Node) -> Ref:
        """Returns the current value of a traced tensor.

        Raises:
            CaptureError: it is a number that depends on values.
        """
        node = self._same.get(node, node)
        if node in self._lost:
            raise _ungraded(self._lost[node])
        if node not in self._values:
            if node not in self._with_grad:
                raise taken_out(str(source_of(node)))
            self._compute(node, self._with_grad[node])
        return self._values[node]

    def _step(self, node: fx.Node, grad: bool) -> None:
        value: Any = node.meta.get("val")
        op, first = str(node.target), self._first(node)
        if any(item.op == "get_attr" for item in node.all_input_nodes):
            self._region(node, op, grad)  # an operator with a subgraph
        elif node.target is operator.getitem and first in self._regions:
            self._return(node, [self._regions[first][node.args[1]]])  # type: ignore[index]
        elif not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            functions = "functorch" in getattr(node.target, "__module__", "")
            raise unsupported("vmap") if functions else _no_place(op)
        elif writes.is_write(node):
            self._write(node, grad)
        elif value is None and not _CHECKS.match(op):
            raise _no_place(op)
        elif not tensors_of(value):
            return  # A check, or a number; `read` raises an error if anything depends on it.
        elif op == "aten.lift_fresh_copy.default" and first is not None:
            self._set(node, self.read(first))
            # The trace shares the constant's storage; the model has a copy in every call.
            self._sharing[first.meta["val"].untyped_storage()].pop(first)
        elif op == "aten.dropout.default" and first is not None and not all(node.args[1:3]):
            # With p = 0 or outside training, dropout returns its operand; the trace has a copy.
            self._same[node] = first
            shared = self._sharing[first.meta["val"].untyped_storage()]
            self._sharing[value.untyped_storage()] = shared
        elif op == "autopar.shard.default":
            self._annotate(node, grad)
        elif writes.is_composed(node) or (
            self.known is not None and composite.is_composite(node, self.known)
        ):
            inputs = node.all_input_nodes
            flows = [grad and self.by_name[self.read(i).name].requires_grad for i in inputs]
            self._inline(node, composite.parts(node, flows), inputs, grad)
        else:
            self._compute(node, grad)

    def _region(self, node: fx.Node, op: str, grad: bool) -> None:
        """Inlines a region that runs with gradients or autocast on or off."""
        args: Any = node.args
        before = self._autocast
        if "wrap_with_set_grad_enabled" in op:
            grad, body, *operands = args
        elif "wrap_with_autocast" in op:
            device, dtype, on, _, body, *operands = args
            self._autocast = Autocast(device, dtype) if on else None
        else:
            raise unsupported(op)
        inner = getattr(node.graph.owning_module, body.target).graph
        if self._autocast is not None:
            self._autocast.write_out(inner)
        self._inline(node, inner, operands, grad)
        self._autocast = before

    def _inline(
        self, node: fx.Node, inner: fx.Graph, operands: Iterable[fx.Node], grad: bool
    ) -> None:
        """Lowers a subgraph in place of `node`."""
        placeholders = (item for item in inner.nodes if item.op == "placeholder")
        for item, operand in zip(placeholders, operands, strict=True):
            self._same[item] = self._same.get(operand, operand)
        self.run(inner, grad)
        results: Any = inner.output_node().args[0]
        if isinstance(results, fx.Node):
            self._same[node] = self._same.get(results, results)
        elif not all(isinstance(result, fx.Node) for result in results):
            raise _no_place(str(node.target))  # one of its results is a list
        else:
            self._regions[node] = [self._same.get(result, result) for result in results]

    def _compute(self, node: fx.Node, grad: bool) -> None:
        op, args, kwargs = self._call(node, grad)
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            first = self._first(node)
            while first not in self._leaves and writes.is_idle(first):
                first = self._first(first)
            op = writes.view_name(node, self._leaves[first].target if first in self._leaves else "")
        self._with_grad[node] = grad
        self._set(node, self.result(node, node.name, (op, args, kwargs), grad, node.meta["val"]))

    def _annotate(self, node: fx.Node, grad: bool) -> None:
        """Keeps an annotation whole; raises AnnotationError if its result is never read."""
        if not node.users:
            raise AnnotationError(
                "the result of autopar.shard is not used",
                why="an annotation takes effect where its result is read",
                todo="write x = autopar.shard(x, ...)",
            )
        self._compute(node, grad)

    def _set(self, node: fx.Node, value: Ref) -> None:
        self._values[node] = value
        for tensor in tensors_of(node.meta["val"])[:1]:
            self._sharing.setdefault(tensor.untyped_storage(), {})[node] = None

    def _first(self, node: fx.Node | None) -> fx.Node | None:
        """Returns the traced tensor that is the operator's first argument."""
        first = node.args[0] if node is not None and node.args else None
        return self._same.get(first, first) if isinstance(first, fx.Node) else None

    def _write(self, node: fx.Node, grad: bool) -> None:
        """Lowers an operator that writes: its new values replace the written ones."""
        first = self._first(node)
        if first is not None and str(node.target) == "aten.copy_.default":
            written_values = {first: self.copy(node, self._arg(node.args[1], grad), grad)}
            self._same[node] = first
        else:
            call = writes.functional(node)
            flowing = grad and any(map(self._flows, node.all_input_nodes))
            if flowing and writes.loses_gradients(node, call, self._flows):
                raise _ungraded(node)
            written_values = self._functional(node, call, grad)
        for written, value in written_values.items():
            self._overwrite(node, written, value, grad)

    def _functional(self, node: fx.Node, call: writes.Functional, grad: bool) -> dict[fx.Node, Ref]:
        """Writes an operator's functional variant; returns new values of the written tensors."""
        op, args, kwargs = self._called(call.target, call.args, call.kwargs, grad)
        name, values = writes.functional_name(node.name), tensors_of(call.value)
        single = isinstance(call.value, Tensor)
        title = name if single else f"{name}_all"
        whole = self.result(node, title, (op, args, kwargs), grad, call.value)

        def result(at: int, name: str, flows: bool) -> Ref:
            if single:
                return whole
            return self.add(node, name, "getitem", (whole, at), grad=flows, value=values[at])

        new_values: dict[fx.Node, Ref] = {}
        returned = [result(r, name, grad) if isinstance(r, int) else r for r in call.returned]
        for item, at in call.written:
            # For autograd, running statistics do not depend on the batch.
            new = result(at, f"{name}_{at}", grad and call.target is not writes.NORM)
            old = item.meta["val"]
            if values[at].dtype != old.dtype:  # `x += y` keeps the dtype of x
                cast = (new, Name(DTYPE_NAMES[old.dtype]))
                new = self.add(node, f"{name}_cast", "aten.to.dtype", cast, grad=grad, value=old)
            new_values[self._same.get(item, item)] = new
        self._return(node, returned)
        return new_values

    def _return(self, node: fx.Node, results: Sequence[fx.Node | Ref]) -> None:
        """Records the results of a traced operator."""
        if not isinstance(node.meta.get("val"), Tensor):
            self._regions[node] = results
            return
        (result,) = results
        if isinstance(result, Ref):
            self._set(node, result)
        else:
            self._same[node] = self._same.get(result, result)

    def _overwrite(self, node: fx.Node, written: fx.Node, value: Ref, grad: bool) -> None:
        """Gives a tensor a new value, and updates all tensors that share its storage."""
        chain = self._owners(node, written)
        leaf = self._leaves.get(chain[-1])
        if leaf is not None and leaf.op == "param" and leaf.requires_grad:
            raise _ungraded(node, f"the parameter {leaf.target!r}, which is trained")
        if self._flows(written) and not grad and len(chain) > 1:
            raise _ungraded(node)
        if self._flows(written) and not grad:
            value = self.straight_through(node, self.read(written), value)
        self._values[written] = value
        new = {written}
        for view, owner in pairwise(chain):
            if str(view.target) == "aten.detach.default" or not self._with_grad.get(view, True):
                if self._flows(owner):  # its value changes, but its gradient does not
                    self._lost.update(dict.fromkeys(chain[chain.index(owner) :], node))
                    break
                self._values[view] = self.detach(node, self._values[view])
            old = owner.meta["val"]
            call = writes.put_back(view, old, self.read(owner), self._values[view])
            name = f"{owner.name}_new"
            self._values[owner] = self.add(node, name, *call, grad=grad, value=old)
            new.add(owner)
        if leaf is not None and leaf.op in ("buffer", "param"):
            self._dirty[leaf.name] = chain[-1], node
        for other in self._sharing[written.meta["val"].untyped_storage()]:
            if other in self._leaves and self._leaves[other] is not leaf:
                raise CaptureError(
                    f"{node.target} changes {self._leaves[other].target!r} under another name",
                    todo="give every parameter and buffer storage of its own",
                )
            if other in self._leaves and chain[-1] in self._values:
                self._values[other] = self._values[chain[-1]]
            elif other not in new:
                self._values.pop(other, None)

    def _flows(self, node: fx.Node) -> bool:
        """Returns whether a gradient flows into the current value of a traced tensor."""
        return self.by_name[self.read(node).name].requires_grad

    def _owners(self, node: fx.Node, written: fx.Node) -> list[fx.Node]:
        """Returns the tensor that `node` writes and those it is a view of, up to the owner."""
        sharing = self._sharing[written.meta["val"].untyped_storage()]
        chain, first = [written], written
        while first not in self._leaves:
            before = self._first(first)
            if before is None or before not in sharing:
                break
            first = before
            if isinstance(first.meta["val"], Tensor):  # otherwise it has several results
                chain.append(first)
        owner = next(member for member in sharing if isinstance(member.meta["val"], Tensor))
        if chain[-1] is not owner:
            raise CaptureError(
                f"{node.target} writes into a tensor that shares memory in an unknown way",
                todo="write into a copy, x.clone()",
            )
        return chain

    def finish(self, assigned: Mapping[str, fx.Node]) -> None:
        """Writes the final values of buffers, each once, directly after its value.

        Args:
            assigned: buffers that are set to another tensor, as in `self.n = self.n + 1`.

        Raises:
            CaptureError: such a tensor is also another buffer or a parameter.
        """
        last = {name: tensor for name, (tensor, _) in self._dirty.items()}
        for target, tensor in assigned.items():
            self._refuse_aliases(target, self._same.get(tensor, tensor))
            last[self._by_target[target].name] = tensor
        size = len(self.nodes)
        for name, tensor in last.items():
            source = self._dirty[name][1] if name in self._dirty else tensor
            new = self.detach(source, self.read(tensor))
            self.add(source, f"{name}_write", WRITE, (Ref(name), new), value=tensor.meta["val"])
            # A parameter that only the forward changes is a buffer of the program.
            self.by_name[name] = replace(self.by_name[name], op="buffer")
        self.move_forward(size)

    def _refuse_aliases(self, target: str, tensor: fx.Node) -> None:
        """Raises CaptureError if a buffer is set to another buffer or a parameter."""
        own = self._by_target[target]
        for other in self._sharing.get(tensor.meta["val"].untyped_storage(), ()):
            leaf = self._leaves.get(other, own)
            if leaf is not own and (leaf.requires_grad or leaf.name in self._dirty):
                raise CaptureError(
                    f"the buffer {target!r} is set to the memory of {leaf.target!r}",
                    where=str(source_of(tensor)),
                    why="it would change with every write to that memory",
                    todo=f"set it to a copy, clone() what is assigned to {target!r}",
                )

    def _call(self, node: fx.Node, grad: bool) -> Call:
        """Returns the operator's name in a Graph, its arguments and keywords."""
        return self._called(node.target, node.args, node.kwargs, grad)

    def _called(
        self, target: Any, given: Sequence[Any], keywords: Mapping[str, Any], grad: bool
    ) -> Call:
        op = "getitem" if target is operator.getitem else str(target)
        if is_function_call(op):
            op, given = call_of(*given)
        op = op.removesuffix(".default")
        if op == "aten.to.device":
            op, given = "aten.to.dtype", (*given[:1], *given[2:])
        kwargs = ((k, v) for k, v in keywords.items() if k not in _PLACEMENT)
        args = tuple(self._arg(arg, grad) for arg in given)
        return op, args, tuple((key, self._arg(value, grad)) for key, value in kwargs)

    def _arg(self, arg: Any, grad: bool) -> Arg:
        if isinstance(arg, fx.Node):
            ref = self.read(arg)
            return ref if grad else self.detach(arg, ref)
        if isinstance(arg, torch.dtype):
            return Name(dtype_of(arg))
        if isinstance(arg, torch.memory_format):
            return Name(str(arg).removeprefix("torch."))
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item, grad) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise CaptureError(f"the argument {arg!r} cannot be represented in a graph")


def _ungraded(node: fx.Node, what: str = "a value that gradients flow through") -> CaptureError:
    return CaptureError(
        f"{node.target} changes {what}, without gradients",
        where=str(source_of(node)),
        todo="write into a copy, x.detach().clone()",
    )


def _no_place(op: str) -> CaptureError:
    return CaptureError(
        f"the operator {op} cannot be represented in a graph",
        todo="select between branches with torch.where, or write it with other operators of torch",
    )
