"""Collectives, and the single steps from one layout to another.

`Resharder.steps(tensor, src, dst)` in `resharding/` is the one place where a layout change becomes
communication: the cost model prices the steps it returns and codegen prints them, so the two cannot
disagree. The single steps are listed here, by `moves`.

Each step has a forward and a backward. Along one axis a value is sharded (S), replicated with a
replicated gradient (R), replicated with a partial gradient ("varying", V), or a partial sum whose
gradient is replicated (P). The steps, with the collective of each direction:

    step               from -> to    forward         backward
    all_reduce           P -> R      all_reduce      -
    to_varying           R -> V      -               all_reduce
    from_varying         V -> R      -               - (kept on the first device)
    to_partial           R -> P      - (as before)   -
    reduce_scatter       P -> S      reduce_scatter  all_gather
    all_gather           S -> V      all_gather      reduce_scatter
    all_gather_invariant S -> R      all_gather      -
    slice_invariant      R -> S      -               all_gather
    slice_varying        V -> S      -               - (padded with zeros)
    all_to_all           S -> S'     all_to_all      all_to_all

The names and the pairing follow JAX's varying manual axes ("Efficient transposition of replication
-inducing collectives", jax docs) and Megatron-LM's f and g operators (arXiv:1909.08053, sec. 3).
A value without a gradient has no V and costs nothing backwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType

GATHERS = ("all_gather", "all_gather_invariant", "all_to_all")  # join parts of unequal lengths
SUMS = ("all_reduce", "reduce_scatter")
_Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective call.

    Attributes:
        kind: name of the collective.
        axes: mesh axes of the group.
        nbytes: bytes per device before the call: the shard of an all_gather, else the whole tensor.
        quantised: bytes moved by kernels that compress the payload and restore it, or 0.
        algorithm: the algorithm that runs it, "2d_torus"; "" is the library's own.
        compression: the method that compresses the payload, e.g. "int8".
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    quantised: int = 0
    algorithm: str = ""
    compression: str = ""

    @property
    def title(self) -> str:
        """Display name: "all_gather", "int8 all_gather", "all_gather by ho_ring"."""
        words = self.compression, self.kind, self.algorithm and f"by {self.algorithm}"
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Step:
    """One step from layout `src` to `dst`; `op` names the runtime function that performs it."""

    op: str
    axes: tuple[str, ...]
    dim: int | None
    to_dim: int | None
    src: Layout
    dst: Layout
    forward: Collective | None
    backward: Collective | None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of both directions."""
        return tuple(c for c in (self.forward, self.backward) if c is not None)


def _without(names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in axes)


def moves(layout: Layout, tensor: TensorType, mesh: Mesh, grad: bool = True) -> Iterator[Step]:
    """Yields every single step that leaves `layout` (see the table above), with its collectives."""
    # Elements of the smallest part along each dimension; a further split must leave some.
    local = tuple(
        size // math.prod(mesh.axis_size(axis) for axis in axes)
        for size, axes in zip(tensor.shape, layout.dims, strict=True)
    )
    nbytes = layout.local_bytes(tensor, mesh)
    replicated = tuple(n for n in mesh.names if n not in layout.axes)
    yield from _reductions(layout, mesh, nbytes, replicated, grad)
    for axis in mesh.names:
        yield from _scatters(layout, tensor, mesh, local, axis, grad)
    yield from _gathers(layout, tensor, mesh, local, grad)


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields every selection of at least one name, in their order."""
    for size in range(1, len(names) + 1):
        yield from itertools.combinations(names, size)


def _reductions(
    layout: Layout, mesh: Mesh, nbytes: int, replicated: tuple[str, ...], grad: bool
) -> Iterator[Step]:
    """Yields P -> R and R -> V, over any set of axes at once."""
    for axes in subsets(layout.partial):
        dst = Layout(layout.dims, _without(layout.partial, axes), layout.varying)
        call = Collective("all_reduce", axes, nbytes)
        yield Step("all_reduce", axes, None, None, layout, dst, call, None)
    if grad:
        for axes in subsets(replicated):
            dst = Layout(layout.dims, layout.partial, _merge(mesh, layout.varying, axes))
            call = Collective("all_reduce", axes, nbytes)
            yield Step("to_varying", axes, None, None, layout, dst, None, call)
    for axis in layout.varying:
        dst = Layout(layout.dims, layout.partial, _without(layout.varying, (axis,)))
        yield Step("from_varying", (axis,), None, None, layout, dst, None, None)
    for axis in replicated:
        dst = Layout(layout.dims, _merge(mesh, layout.partial, (axis,)), layout.varying)
        yield Step("to_partial", (axis,), None, None, layout, dst, None, None)


def _merge(mesh: Mesh, names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the union in mesh order, so that equal layouts are equal values."""
    return tuple(name for name in mesh.names if name in names or name in more)


def _scatters(
    layout: Layout, tensor: TensorType, mesh: Mesh, local: tuple[int, ...], axis: str, grad: bool
) -> Iterator[Step]:
    """Yields R, V or P -> S: `axis` becomes the innermost split of a dimension."""
    if axis in layout.sharded_axes:
        return
    size = mesh.axis_size(axis)
    for dim, extent in enumerate(local):
        if extent < size:
            continue
        dims = put(layout.dims, dim, (*layout.dims[dim], axis))
        dst = Layout(dims, _without(layout.partial, (axis,)), _without(layout.varying, (axis,)))
        forward: Collective | None = None
        backward: Collective | None = None
        if axis in layout.partial:
            nbytes = layout.local_bytes(tensor, mesh)
            op, forward = "reduce_scatter", Collective("reduce_scatter", (axis,), nbytes)
        elif axis in layout.varying:
            op = "slice_varying"
        else:
            op = "slice_invariant"
        if op != "slice_varying" and grad:
            backward = Collective("all_gather", (axis,), dst.local_bytes(tensor, mesh))
        yield Step(op, (axis,), dim, None, layout, dst, forward, backward)


def _gathers(
    layout: Layout, tensor: TensorType, mesh: Mesh, local: tuple[int, ...], grad: bool
) -> Iterator[Step]:
    """Yields S -> V, R or another S: only a dimension's innermost axis can leave it."""
    nbytes = layout.local_bytes(tensor, mesh)
    for dim, axes in enumerate(layout.dims):
        if not axes:
            continue
        axis, size = axes[-1], mesh.axis_size(axes[-1])
        dims = put(layout.dims, dim, axes[:-1])
        forward = Collective("all_gather", (axis,), nbytes)
        whole = layout.with_dims(dims)
        yield Step("all_gather_invariant", (axis,), dim, None, layout, whole, forward, None)
        if grad:
            dst = Layout(dims, layout.partial, _merge(mesh, layout.varying, (axis,)))
            backward = Collective("reduce_scatter", (axis,), whole.local_bytes(tensor, mesh))
            yield Step("all_gather", (axis,), dim, None, layout, dst, forward, backward)
        for other, extent in enumerate(local):
            if other != dim and extent >= size:
                dst = layout.with_dims(put(dims, other, (*dims[other], axis)))
                call = Collective("all_to_all", (axis,), nbytes)
                back = replace(call, nbytes=dst.local_bytes(tensor, mesh)) if grad else None
                yield Step("all_to_all", (axis,), dim, other, layout, dst, call, back)


def put(dims: _Dims, dim: int, axes: tuple[str, ...]) -> _Dims:
    """Returns the splits of all dimensions after a change of one of them."""
    return (*dims[:dim], axes, *dims[dim + 1 :])
