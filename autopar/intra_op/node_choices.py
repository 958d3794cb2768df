"""Choices of a node: layouts of its operands and results, and the storage of a parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import AnnotationError
from autopar.intra_op.axis_runs import storage_within, within_runs
from autopar.intra_op.rule import OpRule, Signature, resolve
from autopar.intra_op.strategy import form_strategies, strategies
from autopar.ir.graph import OVER, Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.lower.parameter_keys import leaf_key
from autopar.operators.annotation import Annotation
from autopar.plan_entries import NodePlan


@dataclass(frozen=True)
class Option:
    """One choice of a problem node: layouts for each of its IR nodes, and its form."""

    label: str
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    share: float
    storage: Storage | None = None
    form: str = ""

    @property
    def stored(self) -> Layout | None:
        """Layout of a parameter between steps; None for anything else."""
        return None if self.storage is None else self.storage.held

    @property
    def split(self) -> tuple[object, ...]:
        """A key that is equal for choices that split the same dimensions, in one form."""
        return self.form, *(layout.dims for layout in (*self.operands, *self.results))

    def entry(self, graph: Graph, node: Node) -> NodePlan:
        """Returns the plan entry of `node` under this choice: its layouts, with shapes."""
        reads = (t.shape for t in operand_types(graph, node))
        gives = (t.shape for t in node.types)
        return NodePlan(
            tuple(zip(reads, self.operands, strict=True)),
            tuple(zip(gives, self.results, strict=True)),
            self.form,
        )


def operand_types(graph: Graph, node: Node) -> tuple[TensorType, ...]:
    """Returns the types of the tensors a node reads, in argument order."""
    return tuple(graph[name].type for name in node.inputs)


def whole_options(graph: Graph, node: Node) -> tuple[Option, ...]:
    """Returns the only choice of an input, a buffer or an operator without a rule: replicated."""
    operands = tuple(Layout.replicated(len(t.shape)) for t in operand_types(graph, node))
    results = tuple(Layout.replicated(len(t.shape)) for t in node.types)
    return (Option("whole", operands, results, 1.0),)


def input_layout(node: Node) -> Layout:
    """Returns the layout in which an input is passed: whole, or split over the axes it names."""
    dims = len(node.type.shape)
    over = node.keyword(OVER)
    if not isinstance(over, str):
        return Layout.replicated(dims)
    return Layout((tuple(over.split(", ")), *[()] * (dims - 1)))


AllowedStorages = Callable[[Layout, TensorType, Mesh], Iterable[Storage]]


def parameter_options(
    tensor: TensorType,
    mesh: Mesh,
    grad: bool,
    allowed_storages: AllowedStorages | None = None,
    runs: int | None = None,
) -> tuple[Option, ...]:
    """Returns every "stored => used" choice of a parameter.

    Along each axis it is used split, whole, or varying; along varying axes its states may be split.
    A frozen parameter has only one state.

    Args:
        tensor: its type.
        mesh: the devices.
        grad: whether it is trained.
        allowed_storages: returns the possible storages, given the layout in which the parameter is
            used, its type and the mesh; by default `storages`.
        runs: into how many runs of equal uses a layout may divide the axes; None for any number.
    """
    options: dict[Option, None] = {}
    for storage in _every_storage(
        tensor, mesh, "RV" if grad else "V", allowed_storages or storages, runs
    ):
        storage = storage if grad else storage.frozen(mesh.names)
        options[stored_option(storage, tensor)] = None
    return tuple(options)


def _every_storage(
    tensor: TensorType, mesh: Mesh, whole: str, allowed_storages: AllowedStorages, runs: int | None
) -> Iterator[Storage]:
    """Yields storages of a parameter that is split along an axis, or one of the kinds `whole`.

    Where a user's state sharding needs more runs of axes, all that it allows remain.
    """
    dims = range(len(tensor.shape))
    kinds: list[tuple[int | None, str]] = [*((None, kind) for kind in whole)]
    kinds[1:1] = ((dim, "S") for dim in dims)
    axes = [axis.name for axis in mesh.axes if axis.size > 1]
    for combination in itertools.product(kinds, repeat=len(axes)):
        if not within_runs(combination, runs):
            continue
        split: list[tuple[str, ...]] = [()] * len(tensor.shape)
        for axis, (dim, _) in zip(axes, combination, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis)
        varying = tuple(a for a, (_, kind) in zip(axes, combination, strict=True) if kind == "V")
        used = Layout(tuple(split), varying=varying)
        if fits(used, tensor, mesh):
            every = list(allowed_storages(used, tensor, mesh))
            yield from [one for one in every if storage_within(one, mesh, runs)] or every


def stored_option(storage: Storage, tensor: TensorType) -> Option:
    """Returns the choice of a parameter with this storage."""
    label = f"{storage.format(tensor.shape)} => {storage.used.format(tensor.shape)}"
    return Option(label, (storage.held,), (storage.used,), 1.0, storage)


def storages(
    used: Layout, tensor: TensorType, mesh: Mesh, microbatches: int = 1
) -> Iterator[Storage]:
    """Yields the storages of a parameter that is used as `used`, the fully replicated one first.

    The optimizer state is split along one dimension over some of the axes that hold replicas, and
    gathered by one call or by several, inner axes first; the other states are split as far or less.
    The gradients of a single microbatch are not accumulated, so they have the layout of the update.
    The parameter gathered for the forward is kept for the backward, or gathered again.
    """
    whole = Layout(used.dims)
    yield Storage(used, whole, whole, whole, whole)
    for dim, size in itertools.product(range(len(used.dims)), range(1, len(used.varying) + 1)):
        for axes in itertools.combinations(used.varying, size):
            for groups in _cuts(axes):
                # Inner axes split first, so that outer axes carry less.
                ends = [whole]
                for group in reversed(groups):
                    ends.append(behind(ends[-1], dim, group))
                if not fits(ends[-1], tensor, mesh):
                    continue
                for held, grads in itertools.product(ends, repeat=2):
                    if microbatches > 1 or grads == ends[-1]:
                        # Kept as used, as stored, or in between.
                        for kept in ends[: ends.index(held) + 1]:
                            yield Storage(used, held, grads, ends[-1], kept)


def accumulating(used: Layout, tensor: TensorType, mesh: Mesh) -> Iterator[Storage]:
    """Yields `storages` where gradients of several microbatches are accumulated."""
    return storages(used, tensor, mesh, microbatches=2)


def _cuts(axes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields every partition of a row into groups of neighbours."""
    for marks in itertools.product((False, True), repeat=len(axes) - 1):
        places = [0, *(at for at, mark in enumerate(marks, 1) if mark), len(axes)]
        yield tuple(axes[a:b] for a, b in itertools.pairwise(places))


def behind(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    """Returns a layout with one dimension further split over `axes`."""
    split = (*layout.dims[dim], *axes)
    return layout.with_dims((*layout.dims[:dim], split, *layout.dims[dim + 1 :]))


def fits(layout: Layout, tensor: TensorType, mesh: Mesh) -> bool:
    """Returns whether every device has an element."""
    counts = (math.prod(mesh.axis_size(axis) for axis in axes) for axes in layout.dims)
    return all(count <= max(size, 1) for size, count in zip(tensor.shape, counts, strict=True))


def received_options(node: Node, mesh: Mesh) -> tuple[Option, ...]:
    """Returns the choices of a value received from another stage: all layouts of S and R."""
    shape = node.type.shape
    free = Annotation(Layout.replicated(len(shape)), tuple(range(len(shape))))
    layouts = free.layouts(shape, mesh)
    return tuple(Option(layout.format(shape), (), (layout,), 1.0) for layout in layouts)


def fixed_cache(
    node: Node, options: tuple[Option, ...], stored: Mapping[str, Storage]
) -> tuple[Option, ...]:
    """Returns the choice of a cache that another program stores already; all of other nodes."""
    storage = stored.get(leaf_key(node)) if node.is_cache else None
    if storage is None:
        return options
    return tuple(option for option in options if option.results[0] == storage.held)


def annotated_options(node: Node, mesh: Mesh) -> tuple[Option, ...]:
    """Returns the choices of an `autopar.shard`: the layouts that it allows.

    Raises:
        AnnotationError: it cannot be read or does not fit; names the user's line.
    """
    shape, text = node.type.shape, str(node.args[1])
    try:
        layouts = tuple(Annotation.parse(text, shape).layouts(shape, mesh))
    except AnnotationError as error:
        error.where = str(node.source)
        raise
    return tuple(Option(layout.format(shape), (layout,), (layout,), 1.0) for layout in layouts)


def node_options(
    graph: Graph, node: Node, mesh: Mesh, table: dict[str, OpRule], runs: int | None = None
) -> tuple[tuple[Option, ...], Signature | None]:
    """Returns the choices of a node that is not a parameter, and its signature if it has a rule.

    An annotation has its operand's rule, restricted to the layouts that it allows. A value received
    from another stage, and a cache, may have any layout of splits. For others whole comes first; it
    is the only choice of inputs, buffers and operators without a rule. Those of forms come last.
    `runs` restricts strategies as in `axis_runs.py`.
    """
    rule = table.get(node.op)
    if node.op == "received" or node.is_cache:
        return received_options(node, mesh), None
    if node.op == "input" and node.keyword(OVER):
        layout = input_layout(node)
        return (Option(layout.format(node.type.shape), (), (layout,), 1.0),), None
    if node.is_leaf or rule is None:
        return whole_options(graph, node), None
    signature = resolve(rule, node, operand_types(graph, node), node.types)
    if node.op == "autopar.shard":
        return annotated_options(node, mesh), signature
    every = [(s, s.share(signature.sizes, mesh)) for s in strategies(signature, mesh, runs)]
    every += form_strategies(node, operand_types(graph, node), mesh, runs)
    options = tuple(Option(str(s), s.operands, s.results, share, form=s.form) for s, share in every)
    return options, signature
