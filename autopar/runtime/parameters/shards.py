"""The parameters of a program on one device, as stored and as updated by the optimizer.

In mixed precision the stored tensor has the dtype in which operators compute; the optimizer updates
a separate master, from which the stored tensor is rounded after every update.

The collectives of a parameter are the list `Storage.hops`, which the planner priced. Parameters
with the same collectives are sent together, packed into one flat buffer for one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autopar.ir.storage import REDUCED, Hop, Storage, scattered
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.communication.compressed import Memory, reduce_compressed

if TYPE_CHECKING:
    from autopar.runtime.communication.communicator import Groups
    from autopar.runtime.parameters.pieces import Parameter, State

Way = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Weight:
    """One parameter on this device.

    Attributes:
        name: name of its tensor in the state_dict.
        type: its dtype and global shape.
        storage: layouts of its states.
        held: the stored tensor, kept between steps.
        updated: the part that the optimizer updates: in the storage of `held`, or in another dtype
            a separate tensor from which `held` is rounded.
        hops: its collectives in a step.
        sent: the dtype in which its gradient is sent.
        block: parameters of one block are gathered together.
        memory: tensors that compressed reductions keep of it from step to step, by name.
    """

    name: str
    type: TensorType
    storage: Storage
    held: Tensor
    updated: Tensor
    hops: tuple[Hop, ...]
    sent: torch.dtype
    block: str = ""
    memory: Memory = field(default_factory=Memory)

    def path(self, when: str) -> tuple[Hop, ...]:
        """Returns its collectives at one time of a step."""
        return tuple(hop for hop in self.hops if hop.when == when)

    @property
    def has_master(self) -> bool:
        """True if the optimizer updates a copy of it in another dtype."""
        return self.held.dtype != self.updated.dtype

    @property
    def scattered(self) -> bool:
        """True if its gradient comes from a reduce_scatter."""
        return scattered(self.hops)

    @cached_property
    def only_summed(self) -> bool:
        """True if only its gradient is exchanged, and updated in the layout of use."""
        kinds = {hop.call.kind for hop in self.hops}
        return self.updated is self.held and kinds == {"all_reduce"}

    def way(self, when: str) -> Way:
        """Returns the key of the parameters that it can be sent together with."""
        hops = tuple(hop.way for hop in self.path(when))
        return (self.sent if when in ("accumulate", "reduce") else self.held.dtype, hops)


Room = Callable[[Sequence[Weight]], Tensor | None]


class Weights:
    """The parameters of one program.

    Args:
        comm: the mesh.
        parameters: the program's stored tensors.
        tensors: this device's tensor of each.
        bucket: bytes that are sent together, 1 to send each by itself.

    Attributes:
        masters: values of masters in host memory, by the id of the updated tensor.
    """

    def __init__(
        self,
        comm: Groups,
        parameters: Sequence[Parameter],
        tensors: Sequence[Tensor],
        bucket: int = 1,
    ) -> None:
        self.comm, self.bucket = comm, bucket
        self.all = tuple(
            _weight(comm, parameter, tensor)
            for parameter, tensor in zip(parameters, tensors, strict=True)
        )
        self.moving = {id(w.held): w for w in self.all if w.storage.moves or w.has_master}
        self.masters: Mapping[int, Tensor] = {}

    @property
    def updated(self) -> list[Tensor]:
        """The optimizer's tensor of each parameter, in the order of the program's table."""
        return [weight.updated for weight in self.all]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The tensors of `updated` that have gradients."""
        return [w.updated for w in self.all if isinstance(w.updated, nn.Parameter)]

    @property
    def values(self) -> list[Tensor]:
        """The values of `trained`, on the device."""
        return [self.masters.get(id(own), own).to(own.device) for own in self.trained]

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """`trained`, with names of the state_dict."""
        return [(w.name, w.updated) for w in self.all if isinstance(w.updated, nn.Parameter)]

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradient of each parameter, in the layout of the update; None where there is none."""
        return [tensor.grad if tensor.requires_grad else None for tensor in self.updated]

    @property
    def fetched_again(self) -> bool:
        """True if some are gathered again for the backward."""
        return any(weight.path("backward") for weight in self.all)

    @property
    def scattered(self) -> frozenset[int]:
        """Ids of updated tensors whose gradients come from a reduce_scatter."""
        return frozenset(id(weight.updated) for weight in self.all if weight.scattered)

    @property
    def rounded(self) -> dict[int, Tensor]:
        """Stored tensors that only need rounding after an update, by the id of the master."""
        return {
            id(weight.updated): weight.held
            for weight in self.all
            if weight.has_master and not weight.path("update")
        }

    @torch.no_grad()
    def gather(self, written: Collection[int] = ()) -> None:
        """Gathers updated parameters from other devices, as far as this one stores them.

        Args:
            written: ids of masters whose local part is already rounded.
        """
        bucket = Bucket(self.comm, self.bucket, "update")
        for weight in self.all:
            done = id(weight.updated) in written
            if weight.path("update"):
                value = self._own(weight) if done else self._value(weight)
                bucket.add(weight, value.to(weight.held))
            elif weight.has_master and not done:
                weight.held.copy_(self._value(weight))
        bucket.empty()

    @torch.no_grad()
    def round(self, masters: Collection[int]) -> None:
        """Rounds this device's part of stored tensors from masters on it, given by their ids."""
        for weight in self.all:
            if weight.has_master and id(weight.updated) in masters:
                self._own(weight).copy_(weight.updated)

    def _own(self, weight: Weight) -> Tensor:
        """Returns a view of the part of the stored tensor that this device updates."""
        return _part(self.comm, weight.storage, weight.held)

    def _value(self, weight: Weight) -> Tensor:
        """Returns the tensor that the optimizer updates, wherever it is."""
        return self.masters.get(id(weight.updated), weight.updated.detach())

    @torch.no_grad()
    def cut(self) -> None:
        """Takes updated tensors as views of stored ones, except for masters."""
        for weight in self.all:
            self._cut(weight)

    def _cut(self, weight: Weight) -> None:
        if weight.updated is not weight.held and not weight.has_master:
            weight.updated.copy_(self._own(weight))

    @torch.no_grad()
    def take(self, state: State, name: str, full: Tensor) -> None:
        """Stores the values of a tensor of the state_dict.

        Args:
            state: state of these parameters.
            name: name of the tensor.
            full: the whole tensor.
        """
        for number, shard in state.shards(name, full, self.all[0].held.device).items():
            self.all[number].held.copy_(shard)
            self._cut(self.all[number])
        if name in state.with_master:
            for number, shard in state.trained.shards(name, full, "cpu").items():
                own = self.trained[number]
                self.masters.get(id(own), own).copy_(shard)


def _weight(comm: Groups, parameter: Parameter, held: Tensor) -> Weight:
    """Returns a parameter, given this device's stored tensor."""
    storage, precision, trained = parameter.storage, parameter.precision, parameter.trainable
    sent = TORCH_DTYPES[precision.sent(parameter.type, trained).dtype]
    hops = storage.hops(parameter.type, comm.mesh, trained=trained, precision=precision)
    updated = _updated(comm, storage, held) if trained else held
    if parameter.has_master:
        updated = nn.Parameter(updated.detach().to(TORCH_DTYPES[parameter.master.dtype]))
    block = parameter.block or parameter.key
    return Weight(parameter.name, parameter.type, storage, held, updated, hops, sent, block)


def _updated(comm: Groups, storage: Storage, held: Tensor) -> Tensor:
    """Returns the part of a tensor that this device updates; the tensor itself if all of it."""
    part = _part(comm, storage, held)
    return held if part.shape == held.shape else nn.Parameter(part)


def _part(comm: Groups, storage: Storage, held: Tensor) -> Tensor:
    """Returns a view of the part of the stored tensor that this device updates."""
    part = held.detach()
    for dim, (fine, coarse) in enumerate(zip(storage.updated.dims, storage.held.dims, strict=True)):
        if fine != coarse:
            part = part.narrow(dim, *comm.group(fine[len(coarse) :]).own(int(part.shape[dim])))
    return part


class Bucket:
    """Tensors to be sent, grouped with others that use the same collectives.

    Args:
        comm: the mesh.
        limit: bytes of a full buffer.
        when: part of a step; see `Hop`.
        order: id of an updated tensor -> number, equal on all ranks; only tensors with one number
            are sent together.
        room: returns a flat tensor for the results of some weights, in order, or None.
    """

    def __init__(
        self,
        comm: Groups,
        limit: int,
        when: str,
        order: Mapping[int, int] | None = None,
        room: Room = lambda weights: None,
    ) -> None:
        self._comm, self._limit, self._when = comm, limit, when
        self._order, self._room = order or {}, room
        self._waiting: dict[Way, list[tuple[Weight, Tensor]]] = {}
        self._filled: dict[Way, int] = {}  # bytes waiting

    def add(self, weight: Weight, tensor: Tensor) -> list[tuple[Weight, Tensor]]:
        """Adds a tensor; returns the received tensors, none until its buffer is full."""
        way = weight.way(self._when), self._order.get(id(weight.updated), 0)
        self._waiting.setdefault(way, []).append((weight, tensor))
        self._filled[way] = self._filled.get(way, 0) + self._nbytes(weight, tensor)
        kinds, device = {hop.call.kind for hop in weight.path(self._when)}, tensor.device
        del tensor  # drops the last reference to a tensor in transit
        if kinds == {"all_reduce"} and device.type == "cpu":
            return []  # sending it early gains nothing
        return self.send(way) if self._filled[way] >= self._limit else []

    def _nbytes(self, weight: Weight, tensor: Tensor) -> int:
        """Returns the bytes of the largest part of a rank, as all ranks must send together."""
        layout = weight.path(self._when)[0].src
        shape = layout.local_shape(weight.type.shape, self._comm.mesh)
        return math.prod(shape) * tensor.element_size()

    def empty(self) -> list[tuple[Weight, Tensor]]:
        """Sends everything that is waiting."""
        return [arrived for way in self.ways for arrived in self.send(way)]

    @property
    def ways(self) -> list[Way]:
        """Returns the keys under which tensors are waiting."""
        return list(self._waiting)

    def drop(self) -> None:
        """Discards waiting tensors."""
        self._waiting.clear()
        self._filled.clear()

    def send(self, way: Way) -> list[tuple[Weight, Tensor]]:
        """Sends the tensors waiting under one key; returns the received tensors."""
        together = self._waiting.pop(way)
        del self._filled[way]
        weights, tensors = [w for w, _ in together], [tensor for _, tensor in together]
        together.clear()
        arrived = travel(self._comm, weights, tensors, self._when, self._room(weights))
        return list(zip(weights, arrived, strict=True))


def travel(
    comm: Groups,
    weights: Sequence[Weight],
    tensors: list[Tensor],
    when: str,
    into: Tensor | None = None,
) -> list[Tensor]:
    """Returns tensors of parameters after their common collectives at one time of a step.

    Args:
        comm: the mesh.
        weights: the parameters.
        tensors: a part of each or of its gradient; emptied if another buffer is sent, to free it.
        when: see `Hop`.
        into: destination of gradient shards, if they fit; updated parameters go to `held`.
    """
    moved = tensors
    paths = list(zip(*(weight.path(when) for weight in weights), strict=True))
    for place, hops in enumerate(paths):
        last = place == len(paths) - 1
        if last and when == "update":
            moved = _gather(
                comm, weights, moved, hops, False, [weight.held for weight in weights]
            )()
        elif when not in REDUCED or not hops[0].call.compression:
            moved = _moved(comm, weights, moved, hops, into if last else None)
        elif not (place and paths[place - 1][0].further):  # the others are parts of the first
            group, memories = comm.group(hops[0].call.axes), [weight.memory for weight in weights]
            moved = reduce_compressed(group, moved, hops, memories, f"{when}{place}")
    return moved


def depart(
    comm: Groups, weights: Sequence[Weight], tensors: list[Tensor], when: str, ahead: bool
) -> Callable[[], list[Tensor]]:
    """Starts the collectives of `travel`; the returned function waits for them.

    If they are gathered `ahead`, computation of this device in between does not wait.
    """
    moved = tensors
    paths = list(zip(*(weight.path(when) for weight in weights), strict=True))
    gathers = [hops[0].call.kind == "all_gather" for hops in paths]
    if not ahead or not all(gathers):
        moved = travel(comm, weights, moved, when)
        return lambda: moved
    arrive = _gather(comm, weights, moved, paths[0], True)

    def rest() -> list[Tensor]:
        arrived = arrive()
        for hops in paths[1:]:
            arrived = _gather(comm, weights, arrived, hops, False)()
        return arrived

    return rest


def _moved(
    comm: Groups,
    weights: Sequence[Weight],
    tensors: list[Tensor],
    hops: Sequence[Hop],
    into: Tensor | None,
) -> list[Tensor]:
    """Returns tensors after one collective; `into` as in `travel`."""
    kind, group = hops[0].call.kind, comm.group(hops[0].call.axes)
    if kind == "all_reduce":
        return group.reduce_all(tensors)
    if kind == "reduce_scatter":
        return group.reduce_scatter_all(tensors, [hop.dim or 0 for hop in hops], into)
    return _gather(comm, weights, tensors, hops, False)()


def _gather(
    comm: Groups,
    weights: Sequence[Weight],
    tensors: list[Tensor],
    hops: Sequence[Hop],
    ahead: bool,
    into: Sequence[Tensor] = (),
) -> Callable[[], list[Tensor]]:
    dims = [hop.dim or 0 for hop in hops]
    extents = [
        comm.group(hop.dst.dims[dim]).own(weight.type.shape[dim])[1]
        for hop, dim, weight in zip(hops, dims, weights, strict=True)
    ]
    group, quantised = comm.group(hops[0].call.axes), bool(hops[0].call.quantised)
    return group.begin_gather(tensors, dims, extents, ahead, quantised, into)
