"""Storage: layouts of one parameter, its gradients and its optimizer state, and their collectives.

Operators use a parameter in the layout `used`. Along its varying axes the devices compute on
different data and hold replicas of the parameter; each of its states may be split over some of
those axes:

    held     the parameter between steps
    grads    the gradients accumulated over microbatches
    updated  the optimizer's state, and the part of the parameter that it updates
    kept     the parameter between the forward and the backward of a microbatch

`updated` is split at least as far as `held` and `grads` (PaRO, arXiv:2310.06003, principle 1), and
one is a prefix of the other: axes are added to one dimension, after those that split it in `used`.
Their order determines the collectives. Axes in mesh order are gathered by one call, `768@node@gpu`;
an axis against mesh order begins a new call, so that `768@gpu@node` is gathered first over nodes
and then inside them, and scattered in the opposite order.

`hops` is the one list of a parameter's collectives: it is priced, simulated, printed and run.
`Collective.compression` marks the collectives that a precision compresses: gathers of `held` as
int8 blocks, so that forward and backward use the same values, and the reductions of gradients.
Nothing is rounded after the update, since the parameters of later steps would inherit the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from autopar.errors import LayoutError
from autopar.ir.collective import Collective
from autopar.ir.compression import Factors, Method
from autopar.ir.compression._method import matrix
from autopar.ir.int8_blocks import in_blocks
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType

EACH = ("forward", "backward", "accumulate")  # per microbatch; "reduce" and "update" per step
REDUCED = ("accumulate", "reduce")  # hops of a gradient
BUCKET = 25 * 2**20  # bytes of gradients, as in torch's DistributedDataParallel
COPIED = 2**20  # bytes; smaller gradients are packed, which is faster than one call each
Dims = tuple[tuple[str, ...], ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Hop:
    """One collective of a parameter or its gradient.

    Attributes:
        when: "forward", "backward", "accumulate" (each once per microbatch), "reduce" or "update".
        call: the collective, with axes in the order in which they split the dimension.
        src, dst: layouts before and after.
        dim: the dimension that is gathered or scattered, None for an all_reduce.
        times: number of runs in a step.
        whole: bytes of the parameter on the larger side.
        further: number of following hops that belong to the same compressed reduction.
        residual: bytes that a compressed reduction keeps on this device for the next one.
    """

    when: str
    call: Collective
    src: Layout
    dst: Layout
    dim: int | None
    times: int
    whole: int
    further: int = 0
    residual: int = 0

    def seconds(self, price: Callable[[Collective], float], bucket: int) -> float:
        """Returns the seconds of one call: its part of a call for `bucket` bytes of parameters."""
        if self.whole >= bucket:
            return price(self.call)
        return price(self.together(bucket)) * self.whole / bucket

    def together(self, bucket: int) -> Collective:
        """The collective that it goes in: one for several parameters in `bucket` bytes."""
        if self.whole >= bucket:
            return self.call
        sizes = self.call.nbytes, self.call.quantised
        nbytes, quantised = (size * bucket // max(self.whole, 1) for size in sizes)
        return replace(self.call, nbytes=nbytes, quantised=quantised)

    @property
    def way(self) -> tuple[str, tuple[str, ...], str]:
        """Key that is equal for hops that can share a call."""
        return self.call.kind, self.call.axes, self.call.compression


def rows(
    items: Iterable[Item],
    way: Callable[[Item], object],
    nbytes: Callable[[Item], float],
    bucket: float,
) -> list[list[Item]]:
    """Parameters of one block that are gathered by one call each row.

    Args:
        items: the parameters, in order.
        way: returns the dtype and `Hop.way`s of a parameter, which are equal within a row.
        nbytes: returns the bytes of a parameter as operators use it.
        bucket: bytes after which a row is full; the last parameter may exceed them.
    """
    ways: dict[object, list[list[Item]]] = {}
    for item in items:
        found = ways.setdefault(way(item), [[]])
        if sum(map(nbytes, found[-1])) >= bucket:
            found.append([])
        found[-1].append(item)
    return [row for found in ways.values() for row in found]


def scattered(hops: Sequence[Hop]) -> bool:
    """Returns whether a parameter's hops leave its gradient as a part from a reduce_scatter."""
    last = [hop.call for hop in hops if hop.when in ("accumulate", "reduce")][-1:]
    return any(call.kind == "reduce_scatter" for call in last)


@dataclass(frozen=True)
class Storage:
    """The layouts of one parameter; see the module."""

    used: Layout
    held: Layout
    grads: Layout
    updated: Layout
    kept: Layout

    @classmethod
    def of(cls, used: Layout, layouts: Sequence[Layout]) -> Storage:
        """Returns a storage from its layouts: held, or held, grads, updated, or these with kept.

        Raises:
            LayoutError: two layouts, or more than four; or an impossible one.
        """
        if len(layouts) not in (1, 3, 4):
            raise LayoutError(
                f"{len(layouts)} layouts of one parameter",
                why="its line gives the stored layout, or those in which it is stored, its "
                "gradients are accumulated and it is updated, and perhaps the one kept for the "
                "backward",
            )
        if any(len(layout.dims) != len(used.dims) for layout in layouts):
            raise LayoutError(
                "the layouts of one parameter have different numbers of dimensions",
                why=f"{len(used.dims)} where it is used, {[len(a.dims) for a in layouts]} before",
            )
        whole = Layout(used.dims)
        held, grads, updated = layouts[:3] if len(layouts) > 1 else (layouts[0],) * 3
        storage = cls(used, held, grads, updated, layouts[3] if len(layouts) > 3 else whole)
        storage._check()
        return storage

    @classmethod
    def as_is(cls, layout: Layout) -> Storage:
        """Returns the storage of a parameter that needs no collectives: one layout for all."""
        return cls(layout, layout, layout, layout, layout)

    def frozen(self, names: Sequence[str]) -> Storage:
        """Returns the storage of a parameter without a gradient, in which varying means whole.

        Args:
            names: the axes of the mesh, in order.
        """
        over = self.axes("held")
        used = Layout(self.used.dims, varying=tuple(name for name in names if name in over))
        return Storage(used, self.held, self.held, self.held, self.kept)

    def _check(self) -> None:
        pairs = (
            (self.held, self.used), (self.grads, self.used), (self.kept, self.used),
            (self.updated, self.held), (self.updated, self.grads),
        )  # fmt: skip
        added = (each for fine, coarse in pairs for each in _added(fine.dims, coarse.dims))
        behind = {axis for _, axes in added for axis in axes}
        if not behind <= set(self.used.varying):
            strange = ", ".join(sorted(behind - set(self.used.varying)))
            raise LayoutError(
                f"a state of the parameter is split over {strange}",
                why=f"its replicas are along {', '.join(self.used.varying) or 'no axis'}",
            )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Returns the fewest layouts that `of` reads back."""
        if self.kept.dims != self.used.dims:
            return self.held, self.grads, self.updated, self.kept
        alike = self.held == self.grads == self.updated
        return (self.held,) if alike else (self.held, self.grads, self.updated)

    @property
    def moves(self) -> bool:
        """Returns whether operators use anything but the stored tensor."""
        return bool(self.used.varying) or self.used.dims != self.held.dims

    def axes(self, state: str) -> tuple[str, ...]:
        """Returns the axes over which "held", "grads", "updated" or "kept" splits the replicas."""
        layout: Layout = getattr(self, state)
        return tuple(axis for _, axes in _added(layout.dims, self.used.dims) for axis in axes)

    def format(self, shape: tuple[int, ...]) -> str:
        """Returns the notation of a pin: "held", "held | grads | updated", or with "| kept"."""
        return " | ".join(layout.format(shape) for layout in self.layouts)

    def describe(self, shape: tuple[int, ...]) -> str:
        """Returns `format`, or a shorter text if all states have one layout and none is kept."""
        if self.held == self.grads == self.updated == self.kept != Layout(self.used.dims):
            return f"{self.held.format(shape)}, gathered twice"
        return self.format(shape)

    @lru_cache(maxsize=1 << 14)  # noqa: B019, a frozen value; the blocks of a model ask alike
    def hops(
        self,
        tensor: TensorType,
        mesh: Mesh,
        microbatches: int = 1,
        trained: bool = True,
        precision: Precision = AS_IS,
    ) -> tuple[Hop, ...]:
        """Returns every collective of a training step, in the order in which they first run.

        The parameter is gathered before the forward, and again before the backward if it was not
        kept; gradients are reduced as far as they are split; at the end the optimizer gets its part
        of the sum, and the parameter is gathered to the layout in which it is stored.

        Args:
            tensor: type of the parameter.
            mesh: the devices.
            microbatches: number that a step accumulates.
            trained: whether it has a gradient.
            precision: dtypes of messages, including int8 blocks.
        """
        return tuple(self._hops(tensor, mesh, microbatches, trained, precision))

    def _hops(
        self,
        tensor: TensorType,
        mesh: Mesh,
        microbatches: int,
        trained: bool,
        precision: Precision,
    ) -> Iterator[Hop]:
        sent = precision.sent(tensor, trained)
        long = tuple(axis.name for axis in mesh.axes if axis.size > 1)

        def gathers(when: str, fine: Layout, coarse: Layout, times: int) -> Iterator[Hop]:
            for dim, axes, src, dst in _path(fine.dims, coarse.dims, mesh.names, long):
                call = Collective("all_gather", axes, src.local_bytes(tensor, mesh))
                if precision.weights and when != "update" and fine.dims == self.held.dims:
                    parts = math.prod(mesh.axis_size(axis) for axis in axes)
                    element = DTYPE_BYTES[tensor.dtype]
                    call = in_blocks(call, call.nbytes // element, element, parts)
                yield Hop(when, call, src, dst, dim, times, dst.local_bytes(tensor, mesh))

        def scatters(when: str, coarse: Layout, fine: Layout, times: int) -> Iterator[Hop]:
            for dim, axes, src, dst in reversed(_path(fine.dims, coarse.dims, mesh.names, long)):
                nbytes = dst.local_bytes(sent, mesh)
                call = Collective("reduce_scatter", axes, nbytes)
                exact = Hop(when, call, dst, src, dim, times, nbytes)
                yield from compressed(exact, precision.compression, sent, mesh)

        yield from gathers("forward", self.held, self.used, microbatches)
        yield from gathers("backward", self.kept, self.used, microbatches)
        if not trained:
            return
        yield from scatters("accumulate", self.used, self.grads, microbatches)
        yield from scatters("reduce", self.grads, self.updated, 1)
        split = self.axes("updated")
        owed = tuple(a for a in mesh.names if a in self.used.varying and a not in split)
        if any(mesh.axis_size(axis) > 1 for axis in owed):
            nbytes = self.updated.local_bytes(sent, mesh)
            call = Collective("all_reduce", owed, nbytes)
            exact = Hop("reduce", call, self.updated, self.updated, None, 1, nbytes)
            yield from compressed(exact, precision.compression, sent, mesh)
        yield from gathers("update", self.updated, self.held, 1)


def compressed(hop: Hop, method: Method | None, sent: TensorType, mesh: Mesh) -> tuple[Hop, ...]:
    """Returns the hops that replace the reduction of a gradient, or itself if they send no less.

    Args:
        hop: a reduce_scatter or an all_reduce.
        method: how gradients are compressed, None for not at all.
        sent: the parameter's type, in the dtype in which its gradient is sent.
        mesh: the devices.
    """
    if method is None:
        return (hop,)
    shape, element = hop.src.local_shape(sent.shape, mesh), DTYPE_BYTES[sent.dtype]
    parts = math.prod(mesh.axis_size(axis) for axis in hop.call.axes)
    exact, wide = (2 if hop.dim is None else 1) * hop.whole, max(element, 4)
    residual = wide * math.prod(shape) if method.feedback else 0
    if isinstance(method, Factors):
        rows, columns = matrix(shape)
        calls = [("all_reduce", size * element) for size in method.sizes(rows, columns)]
        received = 2 * sum(size for _, size in calls)
        residual += calls[-1][1] // element * wide
    elif hop.dim is not None:
        part = hop.dst.local_bytes(sent, mesh) // element
        calls = [("all_to_all", parts * method.nbytes(part, element))]
        received = calls[0][1]
    else:
        n = math.prod(shape)
        calls = [("all_gather", method.nbytes(n, element))]
        received = parts * calls[0][1]
        if received > exact:
            message = method.nbytes(-(-n // parts), element)
            calls = [("all_to_all", parts * message), ("all_gather", message)]
            received = 2 * parts * message
    if received >= exact:
        return (hop,)
    # Kernels read and write the gradient and the residual, and read the received messages.
    moved = 4 * hop.whole + 2 * residual + 2 * received
    return tuple(
        replace(
            hop,
            call=Collective(kind, hop.call.axes, nbytes, moved // len(calls), "", str(method)),
            dst=hop.src if at < len(calls) - 1 else hop.dst,
            further=len(calls) - 1 - at,
            residual=0 if at else residual,
        )
        for at, (kind, nbytes) in enumerate(calls)
    )


def _added(fine: Dims, coarse: Dims) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields the axes that split a dimension in `fine` but not in `coarse`.

    Raises:
        LayoutError: `coarse` is not a prefix of `fine`.
    """
    for dim, (more, less) in enumerate(zip(fine, coarse, strict=True)):
        if more[: len(less)] != less:
            raise LayoutError(
                f"the states of a parameter split dimension {dim} as {'@'.join(more) or 'a whole'} "
                f"and as {'@'.join(less)}",
                why="one must be a prefix of the other: the axes of the coarser one come first",
                todo="plan again, or write the axes that are gathered last, innermost",
            )
        if len(more) > len(less):
            yield dim, more[len(less) :]


@lru_cache(maxsize=1 << 14)
def _path(
    fine: Dims, coarse: Dims, names: tuple[str, ...], long: tuple[str, ...]
) -> tuple[tuple[int, tuple[str, ...], Layout, Layout], ...]:
    """Returns the all_gathers from `fine` to `coarse`: dimension, axes, layouts before and after.

    Args:
        fine, coarse: the axes that split each dimension.
        names: the axes of the mesh, in order.
        long: those with more than one device.
    """
    path, layout = [], Layout(fine)
    for dim, axes in _added(fine, coarse):
        for run in reversed(runs(axes, names)):
            shorter = layout.dims[dim][: -len(run)]
            after = layout.with_dims((*layout.dims[:dim], shorter, *layout.dims[dim + 1 :]))
            if not set(long).isdisjoint(run):
                path.append((dim, run, layout, after))
            layout = after
    return tuple(path)


def runs(axes: Sequence[str], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Cuts a sequence of axes into runs that are in the order of `names`."""
    pieces: list[tuple[str, ...]] = []
    for axis in axes:
        if pieces and names.index(pieces[-1][-1]) < names.index(axis):
            pieces[-1] = (*pieces[-1], axis)
        else:
            pieces.append((axis,))
    return pieces
