"""Storage: where one parameter, its gradients and its optimizer state lie, and what moves them.

Operators use a parameter in the layout `used`. Along its varying axes the devices compute on
different data, so that they hold replicas of the parameter, and each of its states may be split
over some of those axes:

    held     the parameter between steps
    grads    the gradients that are added up over microbatches
    updated  the optimizer's state, and the part of the parameter that it updates
    kept     the parameter between the forward and the backward of a microbatch

`updated` is split at least as far as `held` and `grads` (PaRO, arXiv:2310.06003, principle 1), and
one is a beginning of the other: axes are added to one dimension, behind those that split it in
`used`. How they stand there says how they are exchanged. Axes in mesh order are gathered by one
call, `768@node@gpu`; where the order turns a new call begins, so that `768@gpu@node` is gathered
over nodes first and inside them after that, and scattered the other way round.

`hops` is the one list of a parameter's collectives: it is priced, simulated, printed and run. Those
that a precision sends as int8 blocks are told by `Collective.quantised`: gathers of what is held,
so that forward and backward have the same, and reduce_scatters of gradients. After the update
nothing is rounded, or devices would go on from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import LayoutError
from autopar.ir.collective import Collective
from autopar.ir.int8_blocks import in_blocks
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.tensor import DTYPE_BYTES, Layout, TensorType

EACH = ("forward", "backward", "accumulate")  # for every microbatch; "reduce" and "update" once
REDUCED = ("accumulate", "reduce")  # what becomes of a gradient
BUCKET = 25 * 2**20  # bytes of them, as in torch's DistributedDataParallel
COPIED = 2**20  # bytes; copying smaller gradients beside one another is faster than a launch each


@dataclass(frozen=True)
class Hop:
    """One collective of a parameter or its gradient.

    Attributes:
        when: "forward", "backward", "accumulate" (each once a microbatch), "reduce" or "update".
        call: what it sends; its axes stand as they split the dimension.
        src, dst: layouts before and after.
        dim: which dimension is put together or dealt out, None for an all_reduce.
        times: how often in a step.
        whole: bytes of the parameter on that side of it which has more.
    """

    when: str
    call: Collective
    src: Layout
    dst: Layout
    dim: int | None
    times: int
    whole: int

    def seconds(self, price: Callable[[Collective], float], bucket: int) -> float:
        """Of one such collective: its part of one for several parameters in `bucket` bytes."""
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
    def way(self) -> tuple[str, tuple[str, ...], bool]:
        """What it has in common with those that it can go together with."""
        return self.call.kind, self.call.axes, bool(self.call.quantised)


def scattered(hops: Sequence[Hop]) -> bool:
    """Whether a gradient ends as a part that a reduce_scatter gave, by its parameter's hops."""
    last = [hop.call for hop in hops if hop.when in ("accumulate", "reduce")][-1:]
    return any(call.kind == "reduce_scatter" and not call.quantised for call in last)


@dataclass(frozen=True)
class Storage:
    """The layouts of one parameter; see above."""

    used: Layout
    held: Layout
    grads: Layout
    updated: Layout
    kept: Layout

    @classmethod
    def of(cls, used: Layout, layouts: Sequence[Layout]) -> Storage:
        """The storage that `layouts` tells: held, or held, grads and updated, perhaps with kept.

        Raises:
            LayoutError: two layouts, or more than four; or one that cannot be.
        """
        if len(layouts) not in (1, 3, 4):
            raise LayoutError(
                f"{len(layouts)} layouts of one parameter",
                why="its line tells how it is held, or how it is held, how its gradients are added "
                "up and how it is updated, and perhaps how it is kept for the backward",
            )
        if any(len(layout.dims) != len(used.dims) for layout in layouts):
            raise LayoutError(
                "the layouts of one parameter have different numbers of dimensions",
                why=f"{len(used.dims)} where it is used, {[len(a.dims) for a in layouts]} before",
            )
        whole = Layout(used.dims)
        held, grads, updated = layouts[:3] if len(layouts) > 1 else (layouts[0],) * 3
        made = cls(used, held, grads, updated, layouts[3] if len(layouts) > 3 else whole)
        made._check()
        return made

    @classmethod
    def as_is(cls, layout: Layout) -> Storage:
        """Of what is used as it is held: nothing is exchanged."""
        return cls(layout, layout, layout, layout, layout)

    def _check(self) -> None:
        pairs = (
            (self.held, self.used), (self.grads, self.used), (self.kept, self.used),
            (self.updated, self.held), (self.updated, self.grads),
        )  # fmt: skip
        behind = {a for fine, coarse in pairs for _, axes in _added(fine, coarse) for a in axes}
        if not behind <= set(self.used.varying):
            strange = ", ".join(sorted(behind - set(self.used.varying)))
            raise LayoutError(
                f"a state of the parameter is split over {strange}",
                why=f"its replicas stand along {', '.join(self.used.varying) or 'no axis'}",
            )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The fewest layouts that `of` reads back."""
        if self.kept.dims != self.used.dims:
            return self.held, self.grads, self.updated, self.kept
        alike = self.held == self.grads == self.updated
        return (self.held,) if alike else (self.held, self.grads, self.updated)

    @property
    def moves(self) -> bool:
        """Whether the operators use anything but the tensor that is held."""
        return bool(self.used.varying) or self.used.dims != self.held.dims

    def axes(self, state: str) -> tuple[str, ...]:
        """The axes over which "held", "grads", "updated" or "kept" splits the replicas."""
        layout: Layout = getattr(self, state)
        return tuple(axis for _, axes in _added(layout, self.used) for axis in axes)

    def format(self, shape: tuple[int, ...]) -> str:
        """In the notation of a pin, "held", "held | grads | updated" or with "| kept"."""
        return " | ".join(layout.format(shape) for layout in self.layouts)

    def describe(self, shape: tuple[int, ...]) -> str:
        """As `format`, but in words where all states lie alike and nothing else is kept."""
        if self.held == self.grads == self.updated == self.kept != Layout(self.used.dims):
            return f"{self.held.format(shape)}, gathered twice"
        return self.format(shape)

    def hops(
        self,
        tensor: TensorType,
        mesh: Mesh,
        microbatches: int = 1,
        trained: bool = True,
        precision: Precision = AS_IS,
    ) -> tuple[Hop, ...]:
        """Every collective of a training step, in the order in which they first run.

        Before the forward the parameter is gathered, and before the backward again if it was not
        kept; gradients are reduced as far as they are split; at the end the optimizer gets its part
        of the sum, and the parameter is gathered as far as it is held.

        Args:
            tensor: type of the parameter.
            mesh: the devices.
            microbatches: how many a step accumulates.
            trained: whether it has a gradient.
            precision: says in which dtype gradients are sent, and what goes as int8 blocks.
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

        def blocks(call: Collective, part: Layout, kind: TensorType) -> Collective:
            parts = math.prod(mesh.axis_size(axis) for axis in call.axes)
            element = DTYPE_BYTES[kind.dtype]
            return in_blocks(call, part.local_bytes(kind, mesh) // element, element, parts)

        def gathers(when: str, fine: Layout, coarse: Layout, times: int) -> Iterator[Hop]:
            for dim, axes, src, dst in _path(fine, coarse, mesh):
                call = Collective("all_gather", axes, src.local_bytes(tensor, mesh))
                if precision.weights and when != "update" and fine.dims == self.held.dims:
                    call = blocks(call, src, tensor)
                yield Hop(when, call, src, dst, dim, times, dst.local_bytes(tensor, mesh))

        def scatters(when: str, coarse: Layout, fine: Layout, times: int) -> Iterator[Hop]:
            for dim, axes, src, dst in reversed(list(_path(fine, coarse, mesh))):
                nbytes = dst.local_bytes(sent, mesh)
                call = Collective("reduce_scatter", axes, nbytes)
                if precision.gradients:
                    call = blocks(call, src, sent)
                yield Hop(when, call, dst, src, dim, times, nbytes)

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
            yield Hop("reduce", call, self.updated, self.updated, None, 1, nbytes)
        yield from gathers("update", self.updated, self.held, 1)


def _added(fine: Layout, coarse: Layout) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The axes that split a dimension in `fine` and not in `coarse`.

    Raises:
        LayoutError: `coarse` is no beginning of `fine`.
    """
    for dim, (more, less) in enumerate(zip(fine.dims, coarse.dims, strict=True)):
        if more[: len(less)] != less:
            raise LayoutError(
                f"the states of a parameter split dimension {dim} as {'@'.join(more) or 'a whole'} "
                f"and as {'@'.join(less)}",
                why="one is cut out of the other: the axes of the coarser one come first",
                todo="plan again, or write the axes that are gathered last, innermost",
            )
        if len(more) > len(less):
            yield dim, more[len(less) :]


def _path(
    fine: Layout, coarse: Layout, mesh: Mesh
) -> Iterator[tuple[int, tuple[str, ...], Layout, Layout]]:
    """The all_gathers from `fine` to `coarse`: dimension, axes, layouts before and after."""
    layout = Layout(fine.dims)
    for dim, axes in _added(fine, coarse):
        for run in reversed(runs(axes, mesh)):
            shorter = layout.dims[dim][: -len(run)]
            after = layout.with_dims((*layout.dims[:dim], shorter, *layout.dims[dim + 1 :]))
            if any(mesh.axis_size(axis) > 1 for axis in run):
                yield dim, run, layout, after
            layout = after


def runs(axes: Sequence[str], mesh: Mesh) -> list[tuple[str, ...]]:
    """Axes in a row, cut where they turn against the order of the mesh."""
    found: list[tuple[str, ...]] = []
    for axis in axes:
        if found and mesh.names.index(found[-1][-1]) < mesh.names.index(axis):
            found[-1] = (*found[-1], axis)
        else:
            found.append((axis,))
    return found
