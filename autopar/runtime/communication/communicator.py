"""The collectives of generated programs: autograd-aware, named as in `autopar.ir.collective`.

A generated program creates one `Communicator` and calls its methods:

    y = comm.reduce_scatter(y, dim=1, axis="gpu")        # bf16[8, 1024@gpu, 2048]

Each method is one row of the table in `autopar/ir/collective.py`: its effect on the value and, in
backward, on the gradient. All ranks of the mesh must make the same calls in the same order.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import MeshError
from autopar.ir.chosen_algorithms import LIBRARY_ONLY, ChosenAlgorithms, directions
from autopar.ir.collective import GATHERS, Step
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.sharded_operators import Axes, ShardedOperators
from autopar.runtime.communication.async_linear import (
    GroupProducts,
    gathered_linears,
    reach_one_another,
    scattered_linear,
)
from autopar.runtime.communication.fetch import Fetch
from autopar.runtime.communication.group import Group
from autopar.runtime.communication.programmed import programmed
from autopar.runtime.communication.refetch import Refetch
from autopar.runtime.offload.activations import SavedTensorOffload
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.shards import Weight
from autopar.runtime.ranks.channel import Channel
from autopar.runtime.ranks.recorder import Recorder, generated_line
from autopar.runtime.ranks.shared import Lease, Peers

_Move = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Paired(torch.autograd.Function):
    """Pairs a move of the value with a move of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Move, backward: _Move, recorder: Recorder) -> Tensor:
        ctx.backward_move, ctx.recorder = backward, recorder
        ctx.place = generated_line(sys._getframe(1))
        return forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        with ctx.recorder.on_behalf_of(ctx.place):
            return ctx.backward_move(gradients[0]), None, None, None


class _Used(torch.autograd.Function):
    """A parameter as operators use it, whose gradient is reduced during the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, comm: Communicator) -> Tensor:
        ctx.weight, ctx.comm = weight, comm
        used = x.view_as(x)
        if weight.path("forward"):
            assert comm.fetch is not None
            used = comm.fetch.take(weight)
        # A frozen parameter has no gradient, but is gathered again all the same.
        kept = ctx.needs_input_grad[0] or not weight.held.requires_grad
        if kept and comm.refetch is not None and weight.path("backward"):
            comm.refetch.watch(weight, used)
        if comm.stow is not None:
            comm.stow.leave(used)
        return used

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.comm.gradients.take(ctx.weight, gradients[0])
        return None, None, None


def _view(x: Tensor, dim: int, group: Group) -> Tensor | None:
    """Returns this rank's block without a copy; None with gradients, or if it is not contiguous.

    A decode that copied its part of the weights would read and write them for every token.
    """
    if torch.is_grad_enabled():
        return None
    own = x.narrow(dim, *group.own(int(x.shape[dim])))
    return own if own.is_contiguous() else None


class Groups:
    """The process groups of a mesh, one for each set of axes, created at once.

    Every process must construct it at the same point of the program: all ranks create the groups in
    the same order, so that none waits for another.

    Args:
        mesh: the grid.
        ranks: the global ranks of its devices, row-major; by default 0, 1, ... A process that is
            not among them only takes part in the construction.
        peers: the processes that construct it; by default all of the default group.

    Raises:
        MeshError: the mesh and the number of ranks differ in size.
    """

    chosen: ChosenAlgorithms = LIBRARY_ONLY  # algorithms of calls that name none

    def __init__(
        self, mesh: Mesh, ranks: Sequence[int] | None = None, peers: Peers | None = None
    ) -> None:
        self.mesh = mesh
        # A mesh of one device needs no process group.
        self.peers = Peers.here() if peers is None else peers
        self.ranks = self.peers.ranks if ranks is None else tuple(ranks)
        if mesh.size != len(self.ranks):
            raise MeshError(
                f"mesh {str(mesh)!r} has {mesh.size} devices",
                why=f"there are {len(self.ranks)} processes",
                todo=f"start {mesh.size} processes or write a mesh of {len(self.ranks)}",
            )
        me = self.peers.rank
        self.rank = self.ranks.index(me) if me in self.ranks else -1
        self.coordinate = mesh.coordinate(self.rank) if self.rank >= 0 else {}
        self._lease, self._channels = self._create()
        self._groups: dict[tuple[tuple[str, ...], str, ChosenAlgorithms], Group] = {}
        self._direct: dict[tuple[str, ...], bool] = {}

    def _create(self) -> tuple[Lease, dict[frozenset[str], Channel]]:
        wide = [axis.name for axis in self.mesh.axes if axis.size > 1]
        groups = [
            (names, members)
            for count in range(1, len(wide) + 1)
            for names in itertools.combinations(wide, count)
            for members in self.mesh.groups(names)
        ]
        lease = self.peers.shared(
            "mesh", [tuple(self.ranks[m] for m in members) for _, members in groups]
        )
        pairs = zip(groups, lease.channels, strict=True)
        return lease, {
            frozenset(names): channel for (names, members), channel in pairs if self.rank in members
        }

    def close(self) -> None:
        """Releases the process groups; using them afterwards raises ProgramError."""
        self._lease.close()

    def group(self, axes: Axes, by: str = "") -> Group:
        """Returns the group along `axes`, outermost first; `by` as in `Communicator`."""
        names = (axes,) if isinstance(axes, str) else axes
        key = names, by, self.chosen
        if key not in self._groups:
            self._groups[key] = programmed(self._describe(names), by, self.chosen)
        return self._groups[key]

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
        return Group(names, sizes, order, index, self._channels.get(wide))


class Communicator(Groups, ShardedOperators):
    """The communication methods of a generated program over one mesh; arguments as in `Groups`.

    `axis` is a mesh axis or a tuple of them, outermost first. A call along axes of size one returns
    its input. Parts of a dimension may differ by one element; calls that gather them need its whole
    `size`. `by` names the algorithm of a call, `back` that of its gradient's; "" is `chosen`'s.

    Attributes:
        gradients: collects the gradients of parameters; without it parameters are unknown, and each
            gradient is moved by itself.
        fetch: gathers parameters for operators; set with `gradients`.
        refetch: handles parameters that are not kept for the backward; None keeps all.
        widened: dtype of activations -> dtype in which sums of them over devices are computed.
        stow: offloads blocks' saved tensors to host memory; None leaves them.
    """

    gradients: Gradients | None = None
    fetch: Fetch | None = None
    refetch: Refetch | None = None
    stow: SavedTensorOffload | None = None
    widened: Mapping[torch.dtype, torch.dtype] = MappingProxyType({})

    def _wide(self, x: Tensor) -> torch.dtype | None:
        """Returns the dtype in which sums of such a tensor are computed, None for its own."""
        return self.widened.get(x.dtype)

    def use(self, held: Tensor, weight: Weight) -> Tensor:
        """Returns a parameter as operators use it; its gradient goes to `gradients`."""
        if self.gradients is not None and self.gradients.leave(weight):
            return held.view_as(held)  # later values of it are not parameters
        used: Tensor = _Used.apply(held, weight, self)  # type: ignore[no-untyped-call]
        return used

    def _move(self, x: Tensor, group: Group, forward: _Move, backward: _Move) -> Tensor:
        weight = None if self.gradients is None else self.gradients.weights.get(id(x))
        # Without gradients, only gathering is particular to parameters.
        if weight is not None and (torch.is_grad_enabled() or weight.path("forward")):
            return self.use(x, weight)
        if group.size == 1:
            return x
        moved: Tensor = _Paired.apply(  # type: ignore[no-untyped-call]
            x, forward, backward, self.peers.recorder
        )
        return moved

    def all_reduce(self, x: Tensor, axis: Axes, by: str = "") -> Tensor:
        """P to R: the sum of x over `axis`; the gradient is unchanged."""
        group = self.group(axis, by)
        return self._move(x, group, lambda t: group.reduce(t, self._wide(t)), _same)

    def to_varying(self, x: Tensor, axis: Axes, back: str = "") -> Tensor:
        """R to V: x itself; its gradient is summed over `axis`."""
        group = self.group(axis, back)
        return self._move(x, group, _same, lambda g: group.reduce(g, self._wide(g)))

    def from_varying(self, x: Tensor, axis: Axes) -> Tensor:
        """V to R: x itself; its gradient is kept on the first device, zero on the others."""
        group = self.group(axis)
        return self._move(x, group, _same, group.first)

    def to_partial(self, x: Tensor, axis: Axes) -> Tensor:
        """R to P: x on the first device, zeros on the others; the gradient is unchanged."""
        group = self.group(axis)
        return self._move(x, group, group.first, _same)

    def reduce_scatter(
        self, x: Tensor, dim: int, axis: Axes, by: str = "", back: str = ""
    ) -> Tensor:
        """P to S: this rank's block along `dim` of the sum; the gradient is gathered."""
        group, home, extent = self.group(axis, by), self.group(axis, back), int(x.shape[dim])
        return self._move(
            x,
            group,
            lambda t: group.reduce_scatter(t, dim, self._wide(t)),
            lambda g: home.gather(g, dim, extent),
        )

    def all_gather(
        self,
        x: Tensor,
        dim: int,
        axis: Axes,
        size: int | None = None,
        by: str = "",
        back: str = "",
    ) -> Tensor:
        """S to V: the blocks of all ranks along `dim`; the gradient is summed and scattered."""
        group, home = self.group(axis, by), self.group(axis, back)
        return self._move(
            x,
            group,
            lambda t: group.gather(t, dim, size),
            lambda g: home.reduce_scatter(g, dim, self._wide(g)),
        )

    def all_gather_invariant(
        self, x: Tensor, dim: int, axis: Axes, size: int | None = None, by: str = ""
    ) -> Tensor:
        """S to R: like `all_gather`, for a result with equal uses; the gradient is sliced."""
        group = self.group(axis, by)
        return self._move(
            x, group, lambda t: group.gather(t, dim, size), lambda g: group.slice(g, dim)
        )

    def slice_invariant(self, x: Tensor, dim: int, axis: Axes, back: str = "") -> Tensor:
        """R to S: this rank's block of x along `dim`; the gradient is gathered."""
        group, extent = self.group(axis, back), int(x.shape[dim])
        if (own := _view(x, dim, group)) is not None:
            return own
        return self._move(
            x, group, lambda t: group.slice(t, dim), lambda g: group.gather(g, dim, extent)
        )

    def slice_varying(self, x: Tensor, dim: int, axis: Axes) -> Tensor:
        """V to S: this rank's block of x along `dim`; the gradient is padded with zeros."""
        group, extent = self.group(axis), int(x.shape[dim])
        if (own := _view(x, dim, group)) is not None:
            return own
        return self._move(
            x, group, lambda t: group.slice(t, dim), lambda g: group.pad(g, dim, extent)
        )

    def all_to_all(
        self,
        x: Tensor,
        dim: int,
        to_dim: int,
        axis: Axes,
        size: int | None = None,
        by: str = "",
        back: str = "",
    ) -> Tensor:
        """S to S': gathers `dim` and splits `to_dim`; the gradient does the reverse."""
        group, home, extent = self.group(axis, by), self.group(axis, back), int(x.shape[to_dim])
        return self._move(
            x,
            group,
            lambda t: group.exchange(t, dim, to_dim, size),
            lambda g: home.exchange(g, to_dim, dim, extent),
        )

    def rotary_all_to_all(self, x: Tensor, cos: Tensor, sin: Tensor, axis: Axes) -> Tensor:
        """`kernels.rotary`, then `all_to_all` of rows for heads, which the kernel itself packs."""
        # Imported here because Triton takes a second to import.
        from autopar.runtime.communication.packed_rotary import exchanged

        return exchanged(x, cos, sin, self.group(axis))

    def all_gather_linear(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (),
        *,
        dim: int,
        axis: Axes,
    ) -> tuple[Tensor, ...]:
        """`all_gather`, then `F.linear` with each weight, overlapped where the devices can."""
        group, given = self.group(axis), biases or (None,) * len(weights)
        if group.size == 1:
            return tuple(map(F.linear, (x,) * len(weights), weights, given))
        return gathered_linears(x, weights, given, self._products(group, dim))

    def linear_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dim: int, axis: Axes
    ) -> Tensor:
        """`F.linear`, then `reduce_scatter`, overlapped where the devices can; the bias once."""
        group = self.group(axis)
        if group.size == 1:
            return F.linear(x, weight, bias)
        return scattered_linear(x, weight, bias, self._products(group, dim))

    def _products(self, group: Group, dim: int) -> GroupProducts:
        if group.axes not in self._direct:
            self._direct[group.axes] = reach_one_another(group)
        return GroupProducts(group, dim, self._direct[group.axes])

    def part(self, size: int, axis: Axes) -> int:
        """Returns this rank's number of elements of a dimension of `size` that `axis` splits."""
        return self.group(axis).own(size)[1]

    def apply(self, step: Step, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Performs one step of `autopar.ir.collective.Resharder.steps` on a tensor of `shape`."""
        where = {"dim": step.dim, "to_dim": step.to_dim}
        if step.op in GATHERS and step.dim is not None:
            where["size"] = self.part(shape[step.dim], step.dst.dims[step.dim])
        keywords = {name: value for name, value in where.items() if value is not None}
        moved: Tensor = getattr(self, step.op)(x, axis=step.axes, **keywords, **directions(step))
        return moved

    def shard(self, full: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's part of a tensor that every rank has whole, without communication.

        No gradient. Along partial axes the first device has the value, as after `to_partial`.
        """
        layout.check(tuple(full.shape), self.mesh)
        local = full.detach()
        for dim, axes in enumerate(layout.dims):
            if axes:
                local = self.group(axes).slice(local, dim)
        return self.group(layout.partial).first(local) if layout.partial else local

    def unshard(self, local: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """Inverts `shard`: returns the whole tensor, of `shape`, on every rank; no gradient."""
        full = local.detach()
        for dim, axes in enumerate(layout.dims):
            if self.group(axes).size > 1:
                full = self.group(axes).gather(full, dim, shape[dim])
        if layout.partial and self.group(layout.partial).size > 1:
            full = self.group(layout.partial).reduce(full)
        return full
