"""Decomposes unknown operators by torch's table of decompositions.

For backends that lack a kernel, torch defines many operators by others. If all of these are known,
they replace the operator: they can be split, while an unknown operator runs whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.lowering import Lowering
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, rewrite
from autopar.ir.splits import SPLITS
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import TORCH_DTYPES, execute

Table = dict[Any, Callable[..., Any]]
_LOWERED = ("aten.unbind.int", "aten._native_batch_norm_legit_functional")
# Those whose definition in torch computes something else: this one counts labels behind the end.
_WRONG = ("aten.multilabel_margin_loss_forward",)


def decompose_unknown(graph: Graph, known: Container[str]) -> Graph:
    """Returns `graph` with unknown operators decomposed where their parts are known.

    Args:
        graph: as captured.
        known: names of operators that stay.

    Returns:
        A graph with the same outputs, up to rounding. An operator is kept if torch has no
        decomposition of it, if its decomposition contains an unknown operator, or if it draws
        random numbers. The parts have the operator's source.
    """
    unknown = [node for node in graph.nodes if _is_candidate(node, known)]
    if not unknown:
        return graph
    table = {op: f for op, f in decomposition_table.items() if _name(op) not in known}
    results: dict[str, list[Ref]] = {}

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        first = node.args[0] if node.args else None
        if node.op == "getitem" and isinstance(first, Ref) and first.name in results:
            index = node.args[1]
            assert isinstance(index, int)
            return results[first.name][index]
        if not _is_candidate(node, known):
            return None
        parts = _definition(node, editor, table, known)
        if parts is None:
            return None
        results[node.name] = list(_place(node, editor, *parts))
        # An operator with several results has no readers any more and is dropped.
        return results[node.name][0] if len(node.types) == 1 else None

    return rewrite(graph, lower)


def _is_candidate(node: Node, known: Container[str]) -> bool:
    if node.is_leaf or node.op in known or node.op in _WRONG:
        return False
    if node.op in SPLITS or node.op in _LOWERED:
        return False  # lowered by passes of their own
    return node.op.startswith("aten.")


def _name(op: Any) -> str:
    return str(op).removesuffix(".default")


def _definition(
    node: Node, editor: Editor, table: Table, known: Container[str]
) -> tuple[list[str], Lowering, list[str]] | None:
    """Returns the values it reads, its parts with a leaf for each, and the names of its results."""
    inputs = list(dict.fromkeys(node.inputs))
    graph = _trace(node, [editor[name].type for name in inputs], inputs, table)
    if graph is None:
        return None
    lowering = Lowering(known)
    leaves = [item for item in graph.nodes if item.op == "placeholder"]
    for leaf, name in zip(leaves, inputs, strict=True):
        lowering.leaf(leaf, "input", name, editor[name].requires_grad and node.requires_grad)
    try:
        lowering.run(graph)
        outputs: Any = graph.output_node().args[0]
        read = [outputs] if isinstance(outputs, fx.Node) else list(outputs)
        if not all(isinstance(item, fx.Node) for item in read):
            return None  # one result is a list of tensors
        results = [lowering.read(item).name for item in read]
    except CaptureError:
        return None
    nodes = {item.name: item for item in lowering.nodes}
    parts = [item for item in lowering.nodes if not item.is_leaf]
    fits = [nodes[name].type for name in results] == list(node.types)
    if not fits or any(part.op not in known for part in parts):
        return None
    return inputs, lowering, results


def _trace(node: Node, types: list[TensorType], inputs: list[str], table: Table) -> fx.Graph | None:
    """Returns the decomposition for these types, traced above autograd; None without one."""

    def call(*tensors: Tensor) -> Any:
        return execute(node, dict(zip(inputs, tensors, strict=True)), torch.device("cpu"))

    operator = _overload(node.op)
    if operator is None or operator not in table:
        return None
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    with FakeTensorMode():
        fakes = [torch.empty(kind.shape, dtype=TORCH_DTYPES[kind.dtype]) for kind in types]
        try:
            traced = make_fx(call, decomposition_table=table, pre_dispatch=True)(*fakes)
        except Exception:  # decompositions are Python code, and may raise anything
            return None
    return traced.graph


def _overload(op: str) -> OpOverload | None:
    namespace: Any = torch.ops
    for part in op.split("."):
        namespace = getattr(namespace, part, None)
    namespace = getattr(namespace, "default", namespace)
    return namespace if isinstance(namespace, OpOverload) else None


def _place(
    node: Node, editor: Editor, inputs: list[str], lowering: Lowering, results: list[str]
) -> Iterator[Ref]:
    """Appends the parts in place of `node`; yields references to its results."""
    leaves = [item.name for item in lowering.nodes if item.is_leaf]
    names = dict(zip(leaves, inputs, strict=True))

    def rename(name: str) -> Arg:
        return Ref(names[name])

    for part in lowering.nodes:
        if not part.is_leaf:
            names[part.name] = editor.fresh(f"{node.name}_{part.name}")
            editor.put(replace(part.map_refs(rename), name=names[part.name], source=node.source))
    yield from (Ref(names[name]) for name in results)
