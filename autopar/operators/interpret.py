"""Runs a Graph with torch: on real tensors, and on fake tensors to observe what autograd saves."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from autopar.errors import GraphError
from autopar.ir.graph import PREFIX, WRITE, Arg, Graph, Name, Node, Ref
from autopar.ir.tensor import TensorType
from autopar.operators import ctc as ctc  # registers operators that graphs call
from autopar.operators.assume import assume
from autopar.operators.attention.document_lengths import PRICED
from autopar.operators.attention.sequence_forms import SINKS
from autopar.operators.attention.sink_attention import sink_attention
from autopar.operators.branches import ASSUME
from autopar.operators.expert_load import PRICED as PRICED_MIXTURES
from autopar.operators.mixture import MIXTURE, Experts, mixture
from autopar.operators.own_functions import called, find
from autopar.operators.sharded_operators import ShardedOperators

TORCH_DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "f8e4": torch.float8_e4m3fn,
    "f8e5": torch.float8_e5m2, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64, "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def tensor_type(tensor: Tensor) -> TensorType:
    """Returns the dtype and shape of a torch tensor."""
    return TensorType(DTYPE_NAMES[tensor.dtype], tuple(int(size) for size in tensor.shape))


def run(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the graph's outputs by name, computed node by node with torch, differentiably.

    Args:
        graph: any graph, folded or not; every node is run.
        values: a tensor for the target of every leaf; buffers are updated in it.

    Raises:
        GraphError: a leaf has no value, or torch has no such operator.
    """
    device = next((value.device for value in values.values()), torch.device("cpu"))
    results: dict[str, Any] = {}
    writes = [node for node in graph.nodes if node.op == WRITE]
    written = {graph[node.inputs[0]].target: node.name for node in writes}
    for node in graph.nodes:
        if node.is_leaf:
            if node.target not in values:
                raise GraphError(f"no value for {node.op} {node.target!r}", where=f"%{node.name}")
            value = _piece(node, values[node.target])
            results[node.name] = value.clone() if node.target in written else value
        else:
            results[node.name] = execute(node, results, device)
    for target, name in written.items():
        values[target].copy_(results[name])
    return {name: results[node] for name, node in graph.outputs}


def annotate(graph: Graph) -> Graph:
    """Returns the graph with types, requires_grad, alias, saved and saved_types observed in torch.

    The folded nodes run once on fake CPU tensors, which have shapes and strides but no memory;
    hooks for saved tensors show what autograd saves. Other blocks copy the results of the first.

    Raises:
        GraphError: torch does not know an operator or refuses its arguments.
    """
    recorded: dict[str, Node] = {}
    results: dict[str, Any] = {}
    template = graph.template
    # There is no public way to run operators on shapes and strides as the CPU's kernels would: the
    # public meta device chooses other attention kernels, which save other tensors.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for node in graph.folded:
            local = node.map_refs(lambda name: Ref(template[name]))
            if node.is_leaf:
                results[node.name] = _fake_leaf(node)
                recorded[node.name] = node
            else:
                recorded[node.name] = _observe(node, local, results)
    nodes = []
    counterpart = _counterparts(graph)
    for node in graph.nodes:
        if node.name in recorded:
            nodes.append(recorded[node.name])
            continue
        first = recorded[template[node.name]]
        if not node.is_leaf:
            node = _transfer(node, first, counterpart[node.name])
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _counterparts(graph: Graph) -> dict[str, dict[str, str]]:
    """Returns for each node of a later block a map from names of the first block to its own."""
    maps: dict[str, dict[str, str]] = {}
    for repeat in graph.repeats:
        first = repeat.iterations[0]
        for index, iteration in enumerate(repeat.iterations[1:], 1):
            mapping = dict(zip(first, iteration, strict=True))
            before = dict(zip(first, repeat.iterations[index - 1], strict=True))
            mapping.update((enters, before[leaves]) for enters, leaves in repeat.carried)
            maps.update((name, mapping) for name in iteration)
    return maps


def _transfer(node: Node, first: Node, rename: Mapping[str, str]) -> Node:
    return replace(
        node,
        types=first.types,
        requires_grad=first.requires_grad,
        alias=None if first.alias is None else rename.get(first.alias, first.alias),
        saved=tuple(rename.get(name, name) for name in first.saved),
        saved_types=first.saved_types,
    )


def _fake_leaf(node: Node) -> Tensor:
    dtype = TORCH_DTYPES[node.type.dtype]
    return torch.empty(node.type.shape, dtype=dtype, requires_grad=node.requires_grad)


def _observe(node: Node, local: Node, results: dict[str, Any]) -> Node:
    """Runs one node and describes it; `local` reads the folded names, `node` its own."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = results[node.name] = _execute_fake(local, results)
    tensors = _tensors(value)
    # Several operands with one storage are distinguished by offset and strides.
    near = {name: results[own] for name, own in zip(node.inputs, local.inputs, strict=True)}
    candidates = [(name, t) for name, value in near.items() for t in _tensors(value)]
    saved: dict[str, None] = {}
    others: dict[UntypedStorage, Tensor] = {}  # by storage, as an operator may save it twice
    for tensor in kept:
        name = _find(tensor, [*candidates, *((node.name, t) for t in tensors)])
        if name is None:
            others.setdefault(tensor.untyped_storage(), tensor)
        else:
            saved[name] = None
    return replace(
        node,
        types=tuple(map(tensor_type, tensors)),
        requires_grad=any(tensor.requires_grad for tensor in tensors),
        alias=_find(tensors[0], candidates) if tensors else None,
        saved=tuple(saved),
        saved_types=tuple(map(tensor_type, others.values())),
    )


def _execute_fake(node: Node, results: Mapping[str, Any]) -> Any:
    """Returns a node's value as fake tensors; those of its captured types without a CPU kernel."""
    try:
        return execute(node, results, torch.device("cpu"))
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError) as error:
        if node.requires_grad or not node.types:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise GraphError(
                f"%{node.name} ({node.op}) cannot run", where=str(node.source), why=reason
            ) from error
    fakes = [torch.empty(kind.shape, dtype=TORCH_DTYPES[kind.dtype]) for kind in node.types]
    return fakes[0] if len(fakes) == 1 else fakes


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def _find(tensor: Tensor, candidates: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the value that shares `tensor`'s storage, preferring the most similar."""
    storage = tensor.untyped_storage()
    same = [(name, t) for name, t in candidates if t.untyped_storage() is storage]
    if not same:
        return None

    def likeness(item: tuple[str, Tensor]) -> tuple[bool, bool, bool]:
        other = item[1]
        return (
            other.storage_offset() == tensor.storage_offset(),
            other.numel() == tensor.numel(),
            other.shape == tensor.shape and other.stride() == tensor.stride(),
        )

    return max(same, key=likeness)[0]


def _piece(node: Node, value: Tensor) -> Tensor:
    dim, start, length = (node.keyword(key) for key in ("dim", "start", "length"))
    if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
        return value.narrow(dim, start, length)
    return value


def execute(
    node: Node,
    results: Mapping[str, Any],
    device: torch.device,
    mesh: ShardedOperators | None = None,
) -> Any:
    """Returns the value of one operator node, as torch computes it.

    Args:
        node: an operator, not a leaf.
        results: the value of every node it reads, by name.
        device: where operators without tensor operands (zeros, arange) create their result.
        mesh: the object whose methods localised operators ("mesh.embedding") call.

    Returns:
        A tensor, or a tuple or list of them for an operator with several results.

    Raises:
        GraphError: torch has no such operator.
    """
    args = [_materialise(arg, results) for arg in node.args]
    kwargs = {key: _materialise(value, results) for key, value in node.kwargs}
    if node.op == "getitem":
        return args[0][args[1]]
    if node.op.startswith("mesh."):
        return getattr(mesh, node.op.removeprefix("mesh."))(*args, **kwargs)
    if node.op.startswith(PREFIX):
        # The import registers torch operators, which most graphs do not need.
        kernels = importlib.import_module("autopar.operators.kernels")
        return getattr(kernels, node.op.removeprefix(PREFIX))(*args, **kwargs)
    if node.op in ("autopar.share", "autopar.shard"):
        return args[0]
    if node.op == "autopar.detach":
        return args[0].detach()
    if node.op == ASSUME:
        return assume(*args)
    if node.op == WRITE:
        return args[1].clone()
    if node.op == MIXTURE:
        gate, up, down, x, ids, weights, act, *biases = args
        for name in PRICED_MIXTURES:
            kwargs.pop(name, None)
        experts = Experts(gate, up, down, act, tuple(biases) or (None, None, None))
        return mixture(experts, x, ids, weights, **kwargs)
    for name in PRICED:
        kwargs.pop(name, None)
    if node.op == SINKS:
        return sink_attention(*args, **kwargs)
    if (function := called(node)) is not None:
        name, first = function
        return find(name).apply(*args[first:])
    operator = _operator(node)
    # Operators that create tensors need a device. Only the schema, a private attribute, shows which
    # operators take one.
    takes_device = any(argument.name == "device" for argument in operator._schema.arguments)
    if takes_device and not node.inputs:
        kwargs["device"] = device
    return operator(*args, **kwargs)


def _operator(node: Node) -> Any:
    namespace: Any = torch.ops
    try:
        for part in node.op.split("."):
            namespace = getattr(namespace, part)
        return namespace if hasattr(namespace, "_schema") else namespace.default
    except AttributeError:
        raise GraphError(f"torch has no operator {node.op}", where=str(node.source)) from None


def _materialise(arg: Arg, results: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return results[arg.name]
    if isinstance(arg, Name):
        return TORCH_DTYPES.get(arg.text) or getattr(torch, arg.text)
    if isinstance(arg, tuple):
        return [_materialise(item, results) for item in arg]
    return arg
