"""The collectives of generated programs: autograd-aware, named as in `autopar.ir.collective`.

A generated program makes one `Communicator` and calls its methods:

    y = comm.reduce_scatter(y, dim=1, axis="gpu")        # bf16[8, 1024@gpu, 2048]

Each method is one row of the table in `autopar/ir/collective.py`: what it does to the value and,
in backward, to the gradient. All ranks of the mesh must make the same calls in the same order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.codegen import torch_private
from autopar.codegen.gradients import Gradients
from autopar.errors import LayoutError, MeshError
from autopar.ir.across import Across, Axes
from autopar.ir.collective import GATHERS, Step
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.tensor import Layout, part_of

_Move = Callable[[Tensor], Tensor]


def mesh_of(device_mesh: DeviceMesh, device: str) -> Mesh:
    """The `Mesh` of a torch DeviceMesh whose devices are called `device` (as in devices.toml).

    Raises:
        MeshError: the DeviceMesh has no axis names, or its ranks are not numbered row-major.
    """
    names = device_mesh.mesh_dim_names
    if names is None:
        raise MeshError(
            "the DeviceMesh has no axis names",
            todo='pass mesh_dim_names=("data", "tensor") to init_device_mesh',
        )
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise MeshError(
            f"the DeviceMesh holds the ranks {ranks}",
            why="ranks must be numbered row-major from 0",
            todo="build it with init_device_mesh over all processes",
        )
    axes = zip(names, device_mesh.mesh.shape, strict=True)
    return Mesh(device, tuple(Axis(name, int(size)) for name, size in axes))


@dataclass(frozen=True)
class Group:
    """The ranks that differ from this one along `axes` only.

    Attributes:
        axes: outermost first, in the order in which they split a dimension.
        sizes: the number of devices along each.
        order: positions in `axes` of the axes in mesh order, which is the order of group ranks.
        index: which block of a dimension split over `axes` this rank holds.
        process_group: torch's handle; None stands for a group of one.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def parts(self, extent: int) -> tuple[tuple[int, int], ...]:
        """(start, length) of the blocks of a dimension of `extent` elements, by group rank.

        Raises:
            LayoutError: a block would be empty.
        """
        if extent < self.size:
            raise LayoutError(
                f"a dimension of {extent} does not split {self.size} ways",
                where=f"axis {', '.join(self.axes)}",
                why="a device would hold none of its elements",
            )
        return _parts(self.sizes, self.order, extent)

    def own(self, extent: int) -> tuple[int, int]:
        """(start, length) of this rank's block."""
        start = 0
        remainder = self.index
        for count, inner in zip(self.sizes, _inner(self.sizes), strict=True):
            position, remainder = divmod(remainder, inner)
            offset, extent = part_of(extent, count, position)
            start += offset
        return start, extent

    def split(self, x: Tensor, dim: int) -> Tensor:
        """x cut along `dim` into `size` blocks: contiguous [size, *block], by group rank.

        Shorter blocks are padded with zeros to the length of the longest.
        """
        dim = dim % x.dim()
        parts = self.parts(int(x.shape[dim]))
        if x.shape[dim] % self.size:
            longest = max(length for _, length in parts)
            return torch.stack([_padded(x.narrow(dim, *part), dim, longest) for part in parts])
        blocks = x.unflatten(dim, (*self.sizes, parts[0][1]))
        blocks = blocks.movedim([dim + i for i in self.order], list(range(len(self.axes))))
        result: Tensor = blocks.flatten(0, len(self.axes) - 1).contiguous()
        return result

    def join(self, blocks: Tensor, dim: int, extent: int) -> Tensor:
        """The inverse of `split`: [size, *block] by group rank to one tensor, contiguous."""
        dim = dim % (blocks.dim() - 1)
        if extent % self.size:
            pairs = sorted(zip(self.parts(extent), blocks, strict=True), key=lambda pair: pair[0])
            return torch.cat([block.narrow(dim, 0, part[1]) for part, block in pairs], dim)
        count = len(self.axes)
        blocks = blocks.unflatten(0, [self.sizes[i] for i in self.order])
        blocks = blocks.movedim(list(range(count)), [dim + i for i in self.order])
        return blocks.flatten(dim, dim + count).contiguous()

    # The moves of a plain tensor. Each returns a new tensor and leaves x as it is. `extent` is the
    # length of the whole dimension whose parts are gathered; without it all parts are equal.

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over the group, on every rank."""
        total = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(total, group=self.process_group)
        return total

    def maximum(self, x: Tensor) -> Tensor:
        """The largest over the group, on every rank."""
        largest = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.process_group)
        return largest

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the ranks with the blocks before and after this one's sent here, None at the ends.

        `before` goes to the rank before, `after` to the one after; shapes are equal on all ranks.
        """
        if self.size == 1:
            return None, None
        blocks = _parts(self.sizes, self.order, self.size)
        rank_of = {start: rank for rank, (start, _) in enumerate(blocks)}
        sides = (
            (rank_of.get(self.index - 1), before, after),
            (rank_of.get(self.index + 1), after, before),
        )
        # All ranks take part; most pairs of them have nothing to say to one another.
        sent, taken = [before.new_empty(0)] * self.size, [before.new_empty(0)] * self.size
        for rank, outgoing, incoming in sides:
            if rank is not None:
                sent[rank], taken[rank] = outgoing.reshape(-1), torch.empty_like(incoming).view(-1)
        takes, sends = ([piece.numel() for piece in pieces] for pieces in (taken, sent))
        out = before.new_empty(sum(takes))
        dist.all_to_all_single(out, torch.cat(sent), takes, sends, group=self.process_group)
        taken = list(out.split(takes))
        head, tail = (
            None if rank is None else taken[rank].view(like.shape) for rank, _, like in sides
        )
        return head, tail

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's block of the sum over the group."""
        blocks = self.split(x, dim)
        out = torch.empty_like(blocks[0])
        # Flat buffers: gloo wants equal ranks, and every backend takes them.
        torch_private.reduce_scatter_single(out.view(-1), blocks.view(-1), group=self.process_group)
        return _trimmed(out, dim, self.own(int(x.shape[dim]))[1])

    def gather(self, x: Tensor, dim: int, extent: int | None = None) -> Tensor:
        """The blocks of all ranks in a row."""
        x, extent = self._of_equal_blocks(x, dim, extent)
        blocks = x.new_empty((self.size, *x.shape))
        torch_private.all_gather_single(
            blocks.view(-1), x.contiguous().view(-1), group=self.process_group
        )
        return self.join(blocks, dim, extent)

    def exchange(self, x: Tensor, dim: int, to_dim: int, extent: int | None = None) -> Tensor:
        """Gather `dim` while splitting `to_dim`."""
        length = self.own(int(x.shape[to_dim]))[1]
        x, extent = self._of_equal_blocks(x, dim, extent)
        blocks = self.split(x, to_dim)
        out = torch.empty_like(blocks)
        dist.all_to_all_single(out, blocks, group=self.process_group)
        return _trimmed(self.join(out, dim, extent), to_dim, length)

    def _of_equal_blocks(self, x: Tensor, dim: int, extent: int | None) -> tuple[Tensor, int]:
        """x padded along `dim` to the length of the longest block, and the whole extent."""
        if extent is None:
            return x, int(x.shape[dim]) * self.size
        longest = max(length for _, length in self.parts(extent))
        return _padded(x, dim, longest), extent

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's block of x."""
        self.parts(int(x.shape[dim]))
        own = x.narrow(dim, *self.own(int(x.shape[dim])))
        return own.clone(memory_format=torch.contiguous_format)

    def pad(self, x: Tensor, dim: int, extent: int | None = None) -> Tensor:
        """x in its place among zeros."""
        dim = dim % x.dim()
        extent = int(x.shape[dim]) * self.size if extent is None else extent
        whole = x.new_zeros([*x.shape[:dim], extent, *x.shape[dim + 1 :]])
        whole.narrow(dim, *self.own(extent)).copy_(x)
        return whole

    def first(self, x: Tensor) -> Tensor:
        """x on the first rank, zeros on the others."""
        return x.clone() if self.index == 0 else torch.zeros_like(x)


@functools.cache
def _parts(
    sizes: tuple[int, ...], order: tuple[int, ...], extent: int
) -> tuple[tuple[int, int], ...]:
    """(start, length) of every block, one split inside the other, by group rank."""
    blocks = []
    for place in itertools.product(*(range(sizes[i]) for i in order)):
        start, length = 0, extent
        for axis, count in enumerate(sizes):
            offset, length = part_of(length, count, place[order.index(axis)])
            start += offset
        blocks.append((start, length))
    return tuple(blocks)


def _inner(sizes: tuple[int, ...]) -> list[int]:
    """For each axis the number of blocks inside one of its parts."""
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """x with zeros after its elements along `dim`, `length` of them in all."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    dim = dim % x.dim()
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)


def _trimmed(x: Tensor, dim: int, length: int) -> Tensor:
    """The first `length` elements of x along `dim`, contiguous."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).contiguous()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Paired(torch.autograd.Function):
    """A move of the value together with the move of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Move, backward: _Move) -> Tensor:
        ctx.backward_move = backward
        return forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_move(gradients[0]), None, None


class _Beside(torch.autograd.Function):
    """A move of a parameter, whose gradient is moved beside the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: _Move, backward: _Move, gradients: Gradients
    ) -> Tensor:
        ctx.parameter, ctx.backward_move, ctx.gradients = x, backward, gradients
        return forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients.move(ctx.parameter, gradients[0], ctx.backward_move)
        return None, None, None, None


_paired: Callable[[Tensor, _Move, _Move], Tensor] = _Paired.apply


class Groups:
    """The process groups of a mesh, one for each set of axes, made at once.

    Every process must construct it at the same point of the program: the groups are created in one
    order on all ranks, so that no rank waits for another.

    Args:
        mesh: the grid.
        ranks: the global ranks of its devices, row-major; by default 0, 1, ... A process that is
            not among them takes part in the construction only.

    Raises:
        MeshError: the mesh and the number of ranks differ in size.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int] | None = None) -> None:
        self.mesh = mesh
        # A mesh of one device needs no process group.
        world, me = 1, 0
        if dist.is_initialized():
            world, me = dist.get_world_size(), dist.get_rank()
        self.ranks = tuple(range(world)) if ranks is None else tuple(ranks)
        if mesh.size != len(self.ranks):
            raise MeshError(
                f"mesh {str(mesh)!r} has {mesh.size} devices",
                why=f"there are {len(self.ranks)} processes",
                todo=f"start {mesh.size} processes or write a mesh of {len(self.ranks)}",
            )
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        self.coordinate = mesh.coordinate(self.rank) if self.rank >= 0 else {}
        self._handles = self._create()
        self._groups: dict[tuple[str, ...], Group] = {}

    def _create(self) -> dict[frozenset[str], dist.ProcessGroup]:
        wide = [axis.name for axis in self.mesh.axes if axis.size > 1]
        handles: dict[frozenset[str], dist.ProcessGroup] = {}
        for count in range(1, len(wide) + 1):
            for names in itertools.combinations(wide, count):
                for members in self.mesh.groups(names):
                    handle = dist.new_group([self.ranks[m] for m in members])
                    if self.rank in members:
                        handles[frozenset(names)] = handle
        return handles

    def group(self, axes: Axes) -> Group:
        """The group along `axes`, which are one name or several, outermost first."""
        names = (axes,) if isinstance(axes, str) else axes
        if names not in self._groups:
            self._groups[names] = self._describe(names)
        return self._groups[names]

    def _describe(self, names: tuple[str, ...]) -> Group:
        sizes = tuple(self.mesh.axis_size(name) for name in names)
        if len(set(names)) != len(names):
            raise MeshError(f"the axes {', '.join(names)} name one axis twice")
        if self.rank < 0:
            raise MeshError(f"this process is not on the mesh {str(self.mesh)!r}")
        index = 0
        for name, size in zip(names, sizes, strict=True):
            index = index * size + self.coordinate[name]
        order = tuple(names.index(name) for name in self.mesh.names if name in names)
        wide = frozenset(n for n, size in zip(names, sizes, strict=True) if size > 1)
        return Group(names, sizes, order, index, self._handles.get(wide))


class Communicator(Groups, Across):
    """What a generated program calls to communicate over one mesh; see `Groups` for arguments.

    `axis` is a mesh axis or a tuple of them, outermost first. A call along axes of size one
    returns its input. Parts of a dimension may differ by one element; a call that gathers such
    parts is told the `size` of what it gathers.

    Attributes:
        gradients: where the gradients of parameters are moved; None moves them like all others.
    """

    gradients: Gradients | None = None

    def _move(self, x: Tensor, group: Group, forward: _Move, backward: _Move) -> Tensor:
        if group.size == 1:
            return x
        if self.gradients is not None and x.is_leaf and x.requires_grad:
            beside: Tensor = _Beside.apply(x, forward, backward, self.gradients)  # type: ignore[no-untyped-call]
            return beside
        moved: Tensor = _Paired.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        return moved

    def all_reduce(self, x: Tensor, axis: Axes) -> Tensor:
        """P to R: the sum of x over `axis`; the gradient is passed on as it is."""
        group = self.group(axis)
        return self._move(x, group, group.reduce, _same)

    def to_varying(self, x: Tensor, axis: Axes) -> Tensor:
        """R to V: x itself; its gradient is summed over `axis`."""
        group = self.group(axis)
        return self._move(x, group, _same, group.reduce)

    def from_varying(self, x: Tensor, axis: Axes) -> Tensor:
        """V to R: x itself; its gradient is kept on the first device, zero on the others."""
        group = self.group(axis)
        return self._move(x, group, _same, group.first)

    def to_partial(self, x: Tensor, axis: Axes) -> Tensor:
        """R to P: x on the first device, zeros on the others; the gradient as it is."""
        group = self.group(axis)
        return self._move(x, group, group.first, _same)

    def reduce_scatter(self, x: Tensor, dim: int, axis: Axes) -> Tensor:
        """P to S: this rank's block along `dim` of the sum; the gradient is gathered."""
        group, extent = self.group(axis), int(x.shape[dim])
        return self._move(
            x, group, lambda t: group.reduce_scatter(t, dim), lambda g: group.gather(g, dim, extent)
        )

    def all_gather(self, x: Tensor, dim: int, axis: Axes, size: int | None = None) -> Tensor:
        """S to V: the blocks of all ranks along `dim`; the gradient is summed and scattered."""
        group = self.group(axis)
        return self._move(
            x, group, lambda t: group.gather(t, dim, size), lambda g: group.reduce_scatter(g, dim)
        )

    def all_gather_invariant(
        self, x: Tensor, dim: int, axis: Axes, size: int | None = None
    ) -> Tensor:
        """S to R: as `all_gather`, for a result used alike everywhere; the gradient is sliced."""
        group = self.group(axis)
        return self._move(
            x, group, lambda t: group.gather(t, dim, size), lambda g: group.slice(g, dim)
        )

    def slice_invariant(self, x: Tensor, dim: int, axis: Axes) -> Tensor:
        """R to S: this rank's block of x along `dim`; the gradient is gathered."""
        group, extent = self.group(axis), int(x.shape[dim])
        return self._move(
            x, group, lambda t: group.slice(t, dim), lambda g: group.gather(g, dim, extent)
        )

    def slice_varying(self, x: Tensor, dim: int, axis: Axes) -> Tensor:
        """V to S: this rank's block of x along `dim`; the gradient is padded with zeros."""
        group, extent = self.group(axis), int(x.shape[dim])
        return self._move(
            x, group, lambda t: group.slice(t, dim), lambda g: group.pad(g, dim, extent)
        )

    def all_to_all(
        self, x: Tensor, dim: int, to_dim: int, axis: Axes, size: int | None = None
    ) -> Tensor:
        """S to S': gathers `dim` and splits `to_dim`; the gradient takes the way back."""
        group, extent = self.group(axis), int(x.shape[to_dim])
        return self._move(
            x,
            group,
            lambda t: group.exchange(t, dim, to_dim, size),
            lambda g: group.exchange(g, to_dim, dim, extent),
        )

    def part(self, size: int, axis: Axes) -> int:
        """How many of a dimension's `size` elements this rank holds if `axis` splits it."""
        return self.group(axis).own(size)[1]

    def apply(self, step: Step, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Perform one step of `autopar.ir.collective.Resharder.steps` on a tensor of `shape`."""
        where = {"dim": step.dim, "to_dim": step.to_dim}
        if step.op in GATHERS and step.dim is not None:
            where["size"] = self.part(shape[step.dim], step.dst.dims[step.dim])
        keywords = {name: value for name, value in where.items() if value is not None}
        moved: Tensor = getattr(self, step.op)(x, axis=step.axes, **keywords)
        return moved

    def shard(self, full: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a tensor that every rank holds whole; no communication, no gradient.

        Along partial axes the value lies on the first device, as after `to_partial`.
        """
        layout.check(tuple(full.shape), self.mesh)
        local = full.detach()
        for dim, axes in enumerate(layout.dims):
            if axes:
                local = self.group(axes).slice(local, dim)
        return self.group(layout.partial).first(local) if layout.partial else local

    def unshard(self, local: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `shard`: the whole tensor, of `shape`, on every rank; no gradient."""
        full = local.detach()
        for dim, axes in enumerate(layout.dims):
            if self.group(axes).size > 1:
                full = self.group(axes).gather(full, dim, shape[dim])
        if layout.partial and self.group(layout.partial).size > 1:
            full = self.group(layout.partial).reduce(full)
        return full
