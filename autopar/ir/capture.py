"""A torch model -> Graph. The only file that knows torch.export."""

from __future__ import annotations

import inspect
import keyword
import operator
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Graph, Name, Node, Ref, Source, iterate_refs
from autopar.ir.interpret import DTYPE_NAMES, tensor_type
from autopar.ir.structure import Inputs, Structure

_TORCH = os.path.dirname(torch.__file__)
_DROPPED_ARGUMENTS = ("device", "layout", "pin_memory")
_ASSERTIONS = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten._assert_async")


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph: the forward.
        buffers: leaf target -> tensor of the model's buffers and constants (not copied).
        parameter_names: every name of every parameter -> the leaf target that holds it.
        inputs: flattens a batch into values of the input leaves.
        output: rebuilds the model's output from the graph's named outputs.
    """

    graph: Graph
    buffers: dict[str, Tensor]
    parameter_names: dict[str, str]
    inputs: Inputs
    output: Structure


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    name: str = "",
) -> Captured:
    """The model's forward on a batch like `model(*args, **kwargs)`.

    The loss is `loss_fn(output, *args, **kwargs)` of the same batch where a loss_fn is given, else
    the scalar that is returned, `output.loss`, `output["loss"]` or a tuple's first floating scalar.
    Nothing is computed: only shapes, dtypes and constants of the batch are looked at. What the
    model returns besides tensors (caches) is left out.

    Raises:
        CaptureError: torch.export cannot trace the model, or an operation has no place in a Graph.
        BatchError: the model's signature does not take the batch.
    """
    kwargs = kwargs or {}
    inputs = Inputs.of(inspect.signature(model.forward), args, kwargs)
    device = next((p.device for p in (*model.parameters(), *model.buffers())), None)
    flat = inputs.flatten(args, kwargs)
    # Tensors of their own: export would alias one tensor that is passed as two inputs.
    examples = tuple(torch.empty_like(tensor, device=device) for tensor in flat.values())
    wrapper = _Flat(model, loss_fn, inputs)
    try:
        program = torch.export.export(wrapper, examples, strict=False)
    except Exception as error:
        raise _explain(error) from error
    seen = wrapper.seen
    lowering = _Lowering(program, wrapper, model)
    outputs = lowering.outputs
    loss = next((node for label, node in outputs if label == seen.loss), None)
    outputs.sort(key=lambda item: item[0] != seen.loss)
    nodes = [node for node in lowering.nodes if node.is_leaf]
    nodes += [node for node in lowering.nodes if not node.is_leaf]
    graph = Graph(name or type(model).__name__, tuple(nodes), tuple(outputs), loss)
    return Captured(graph, lowering.buffers, lowering.parameter_names, inputs, seen.output)


@dataclass
class _Seen:
    """What one traced call returned: its structure, its tensors' names, which one is the loss."""

    output: Structure
    labels: tuple[str, ...] = ()
    loss: str | None = None


class _Flat(nn.Module):
    """The model with tensors in and tensors out; `seen` describes what came out.

    A module's own attributes would not do: torch.export restores them after tracing.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor] | None, inputs: Inputs
    ) -> None:
        super().__init__()
        self.training = model.training
        self.model, self.loss_fn, self.inputs = model, loss_fn, inputs
        self.seen = _Seen(Structure(None))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.inputs.rebuild(dict(zip(self.inputs.names, tensors, strict=True)))
        value = self.model(*args, **kwargs)
        root = ("loss" if value.ndim == 0 else "output") if isinstance(value, Tensor) else ""
        output = Structure.of(value, root, constants=False)
        named = output.flatten(value)
        if self.loss_fn is not None:
            # The model's own loss, where it has one, is not the one to differentiate.
            if "loss" in named:
                output = Structure.of(value, "output", constants=False)
                named = output.flatten(value)
            named = {"loss": self.loss_fn(value, *args, **kwargs), **named}
        self.seen.output, self.seen.labels = output, tuple(named)
        self.seen.loss = _loss_name(named, isinstance(value, (tuple, list)))
        return tuple(named.values())


def _loss_name(named: dict[str, Tensor], positional: bool) -> str | None:
    def fits(tensor: Tensor) -> bool:
        return tensor.ndim == 0 and tensor.is_floating_point()

    if "loss" in named:
        return "loss" if fits(named["loss"]) else None
    if positional:
        return next((name for name, tensor in named.items() if fits(tensor)), None)
    return None


class _Lowering:
    """Turns the nodes of an exported program into nodes of a Graph, one by one."""

    def __init__(self, program: Any, wrapper: _Flat, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.requires_grad: dict[str, bool] = {}
        self.detached: dict[str, str] = {}
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[str, set[str]] = {}  # value -> every value that may share its storage
        first: dict[int, str] = {}
        self.parameter_names = {
            alias: first.setdefault(id(parameter), alias)
            for alias, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.env: dict[fx.Node, Any] = {}
        self._leaves(program, wrapper)
        for node in program.graph.nodes:
            if node.op == "call_function":
                self._node(node, True)
        results = next(node for node in program.graph.nodes if node.op == "output").args[0]
        values = [self.env[node] for node in results][-len(wrapper.seen.labels) :]
        self.outputs = [(k, v.name) for k, v in zip(wrapper.seen.labels, values, strict=True)]

    def _leaves(self, program: Any, wrapper: _Flat) -> None:
        inputs = iter(wrapper.inputs.names)
        shared: dict[str, Ref] = {}
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
            kind = spec.kind.name
            target = (spec.target or "").removeprefix("model.")
            if kind == "USER_INPUT":
                leaf, target = "input", next(inputs)
            elif kind == "PARAMETER":
                leaf, target = "param", self.parameter_names.get(target, target)
            else:
                leaf = "buffer"
                held = program.state_dict.get(spec.target)
                self.buffers[target] = program.constants[spec.target] if held is None else held
            if target not in shared:
                grad = leaf == "param" and program.state_dict[spec.target].requires_grad
                shared[target] = self._add(node, target, leaf, (target,), (), grad)
            self.env[node] = shared[target]

    def _node(self, node: fx.Node, grad: bool) -> None:
        op = str(node.target).removesuffix(".default")
        if op in _ASSERTIONS:
            return
        if node.target is operator.getitem:
            container = self.env[node.args[0]]  # type: ignore[index]
            if isinstance(container, list):
                self.env[node] = container[node.args[1]]  # type: ignore[index]
                return
            op = "getitem"
        if op == "aten.lift_fresh_copy":
            self.env[node] = self.env[node.args[0]]  # type: ignore[index]
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._region(node, op)
            return
        args = tuple(self._arg(arg, grad) for arg in node.args)
        kwargs = tuple(
            (key, self._arg(value, grad))
            for key, value in node.kwargs.items()
            if key not in _DROPPED_ARGUMENTS
        )
        schema = getattr(node.target, "_schema", None)
        written = schema is not None and schema.is_mutable
        if written and isinstance(args[0], Ref):
            leaf = next(n for n in self.nodes if n.name == args[0].name)
            if leaf.op != "buffer":
                if leaf.is_leaf or self.views.get(leaf.name):
                    raise CaptureError(
                        f"{op} writes into a value that others look at",
                        where=str(_source(node)),
                        todo="use the operation that returns a new tensor",
                    )
                base, _, overload = op.removeprefix("aten.").partition(".")
                op = ".".join(p for p in ("aten", base.removesuffix("_"), overload) if p)
        flows = grad and any(
            self.requires_grad[r.name] for r in iterate_refs((*args, *(v for _, v in kwargs)))
        )
        result = self._add(node, node.name, op, args, kwargs, flows)
        self.env[node] = result
        if written and isinstance(node.args[0], fx.Node) and not op.split(".")[1].endswith("_"):
            self.env[node.args[0]] = result
        elif (
            schema is not None
            and any(r.alias_info for r in schema.returns)
            and isinstance(args[0], Ref)
        ):
            self.views.setdefault(args[0].name, set()).add(result.name)
            self.views.setdefault(result.name, set()).add(args[0].name)

    def _region(self, node: fx.Node, op: str) -> None:
        """Inline a region that runs with gradients switched on or off."""
        if "wrap_with_set_grad_enabled" in op:
            enabled, body, *args = node.args
        elif "wrap_with_autocast" in op and node.args[2] is False:
            _, _, _, _, body, *args = node.args
            enabled = True
        else:
            raise CaptureError(
                f"the operator {op} has no place in a graph",
                where=str(_source(node)),
                todo="compute both sides and choose with torch.where",
            )
        inner = getattr(node.graph.owning_module, str(body.target))  # type: ignore[union-attr]
        operands = iter(args)
        for item in inner.graph.nodes:
            if item.op == "placeholder":
                self.env[item] = self.env[next(operands)]  # type: ignore[index]
            elif item.op == "call_function":
                self._node(item, bool(enabled))
            elif item.op == "output":
                self.env[node] = [self.env[result] for result in item.args[0]]

    def _arg(self, arg: Any, grad: bool) -> Arg:
        if isinstance(arg, fx.Node):
            ref: Ref = self.env[arg]
            if not grad and self.requires_grad[ref.name]:
                ref = self._detach(arg, ref)
            return ref
        if isinstance(arg, torch.dtype):
            return Name(DTYPE_NAMES[arg])
        if isinstance(arg, torch.memory_format):
            return Name(str(arg).removeprefix("torch."))
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item, grad) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        return str(arg)

    def _detach(self, node: fx.Node, ref: Ref) -> Ref:
        if ref.name not in self.detached:
            made = self._add(node, f"{ref.name}_detached", "autopar.detach", (ref,), (), False)
            self.detached[ref.name] = made.name
        return Ref(self.detached[ref.name])

    def _add(
        self,
        node: fx.Node,
        name: str,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        flows: bool,
    ) -> Ref:
        name = re.sub(r"\W", "_", name)
        if keyword.iskeyword(name) or not name.isidentifier():
            name = f"v_{name}"
        stem, count = name, 0
        while name in self.names:
            count += 1
            name = f"{stem}_{count}"
        self.names.add(name)
        value = node.meta.get("val")
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        types = tuple(tensor_type(v) for v in values if isinstance(v, Tensor))
        flows = flows and any(t.floating for t in types)
        self.requires_grad[name] = flows
        self.nodes.append(Node(name, op, args, kwargs, types, _source(node), flows))
        return Ref(name)


def _source(node: fx.Node) -> Source:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
    module = "" if path == "model" else path.removeprefix("model.")
    frames = re.findall(
        r'File "(.+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or ""
    )
    for file, line, text in reversed(frames):
        if not file.startswith(_TORCH) and file != __file__:
            return Source(module, os.path.basename(file), int(line), text.strip())
    return Source(module)


def _explain(error: Exception) -> CaptureError:
    """What the user can do about an error of torch.export."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((_TORCH, "<")) and frame.filename != __file__:
            where = f"{os.path.basename(frame.filename)}:{frame.lineno}  {frame.line}"
    return CaptureError(
        "torch.export cannot trace the model",
        where=where,
        why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        todo="choose by values with torch.where or a mask, or move this line out of forward",
    )
