"""Owners on ranks: sends whole parameters to the rank that updates them, and returns the results.

All ranks of a mesh take part in rounds. In a round each rank owns at most one parameter, so that
one all_to_all brings every owner a whole tensor, and another takes the results to all ranks. Of
ranks that hold the same part, each sends an equal share of it. Which rank owns what follows from
the shapes alone (`autopar.ir.update.deal`), so that ranks agree without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import ProgramError
from autopar.ir.update import Rule, Update, deal
from autopar.ir.update.ownership import is_dealt
from autopar.runtime.communication.communicator import Groups
from autopar.runtime.optimizers import replaced
from autopar.runtime.parameters.shards import Weight, Weights

Bounds = tuple[tuple[int, int], ...]  # (start, length) along every dimension


@dataclass(frozen=True, eq=False)
class OwnedWeight:
    """A parameter that one rank updates for all.

    Attributes:
        weight: the parameter on this rank.
        rule: how it is updated.
        owner: rank on the mesh of the one that updates it.
        bounds: part of each rank.
        shares: (start, length) of the elements that each rank sends of its part.
        whole: on the owner, the parameter in one piece, if its states are also whole.
    """

    weight: Weight
    rule: Rule
    owner: int
    bounds: tuple[Bounds, ...]
    shares: tuple[tuple[int, int], ...]
    whole: nn.Parameter | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.weight.type.shape


class Owners:
    """Updates that ranks of one mesh make for one another.

    Args:
        weights: parameters of a program.
        update: how they are updated.

    Attributes:
        items: the owned parameters, by the id of the tensor that the optimizer updates.

    Raises:
        ProgramError: the optimizer does not train a parameter, or the program stores one that it
            must update as a whole in several pieces.
    """

    def __init__(self, weights: Weights, update: Update) -> None:
        self._comm: Groups = weights.comm
        mesh = self._comm.mesh
        rows: list[tuple[Weight, Rule]] = []
        pieces = [weight.name for weight in weights.all]
        for weight in weights.all:
            if isinstance(weight.updated, nn.Parameter):
                rule = update.rule(weight.name, weight.type.shape)
                if rule.needs and pieces.count(weight.name) > 1:
                    raise ProgramError(
                        f"{update.optimizer} cannot train the pieces of {weight.name}",
                        why="its update mixes the elements of a tensor, and the program stores "
                        "this one in several pieces",
                        todo="plan again for this optimizer",
                    )
                if is_dealt(rule, weight.storage, mesh):
                    rows.append((weight, rule))
        owners = deal([rule.load(weight.type.shape) for weight, rule in rows], mesh.size)
        self.items = {
            id(weight.updated): self._dealt(weight, rule, owner)
            for (weight, rule), owner in zip(rows, owners, strict=True)
        }

    def _dealt(self, weight: Weight, rule: Rule, owner: int) -> OwnedWeight:
        mesh, layout = self._comm.mesh, weight.storage.updated
        bounds = tuple(
            layout.bounds(weight.type.shape, mesh, mesh.coordinate(rank))
            for rank in range(mesh.size)
        )
        shares = []
        for rank, own in enumerate(bounds):
            alike = [other for other, its in enumerate(bounds) if its == own]
            volume, place = math.prod(length for _, length in own), alike.index(rank)
            start, stop = (volume * at // len(alike) for at in (place, place + 1))
            shares.append((start, stop - start))
        whole = None
        if rule.keeps_whole and owner == self._comm.rank:
            whole = nn.Parameter(weight.updated.detach().new_empty(()).expand(weight.type.shape))
        return OwnedWeight(weight, rule, owner, bounds, tuple(shares), whole)

    def mine(self, item: OwnedWeight) -> bool:
        """Returns whether this rank owns a parameter."""
        return item.owner == self._comm.rank

    def rounds(self, items: Sequence[OwnedWeight]) -> list[list[OwnedWeight]]:
        """Returns some of the parameters in rows, with at most one of each owner in a row."""
        queues: list[list[OwnedWeight]] = [[] for _ in range(self._comm.mesh.size)]
        for item in items:
            queues[item.owner].append(item)
        return [[item for item in row if item is not None] for row in zip_longest(*queues)]

    def run(
        self,
        items: Sequence[OwnedWeight],
        given: Callable[[OwnedWeight], list[Tensor]],
        work: Callable[[OwnedWeight, list[Tensor]], Tensor],
        take: Callable[[OwnedWeight, Tensor], object],
    ) -> None:
        """Updates parameters by their owners; the messages of a round overlap with another's work.

        Args:
            items: equal on all ranks.
            given: returns this rank's parts of the tensors that an owner needs, all of one dtype.
            work: returns the whole result, on the owner.
            take: receives this rank's part of the result.
        """
        rows = self.rounds(items)
        coming = self.collect(rows[0], given) if rows else None
        going: Callable[[], None] | None = None
        for number, row in enumerate(rows):
            following = self.collect(rows[number + 1], given) if number + 1 < len(rows) else None
            wholes = coming() if coming is not None else None
            own = next((item for item in row if self.mine(item)), None)
            result = work(own, wholes) if own is not None and wholes is not None else None
            leaving = self.distribute(row, result, take)
            if going is not None:
                going()
            coming, going = following, leaving
        if going is not None:
            going()

    @torch.no_grad()
    def fill(self, items: Sequence[OwnedWeight]) -> None:
        """Sends whole parameters and gradients to their owners; frees the gradients of parts."""
        for row in self.rounds(items):
            wholes = self.collect(row, _value_and_gradient)()
            for item in row:
                item.weight.updated.grad = None
                if item.whole is not None and wholes is not None:
                    item.whole.data, item.whole.grad = wholes

    @torch.no_grad()
    def spread(self, items: Sequence[OwnedWeight]) -> None:
        """Takes whole parameters from their owners to all ranks."""
        for row in self.rounds(items):
            own = next((item.whole for item in row if item.whole is not None), None)
            result = None if own is None else own.detach()
            self.distribute(row, result, lambda item, part: item.weight.updated.copy_(part))()
            if own is not None:
                own.grad, own.data = None, own.new_empty(()).expand(own.shape)

    def collect(
        self, row: Sequence[OwnedWeight], given: Callable[[OwnedWeight], list[Tensor]]
    ) -> Callable[[], list[Tensor] | None]:
        """Starts to bring each owner its parameter of a row; see `run`.

        Returns:
            A function that waits, and returns the whole tensors of this rank's parameter, None if
            the row has none.
        """
        rank, size = self._comm.rank, self._comm.mesh.size
        takes = [0] * size
        blocks: list[Tensor | None] = [None] * size
        own: OwnedWeight | None = None
        like: list[Tensor] = []
        for item in row:
            tensors = given(item)
            start, length = item.shares[rank]
            parts = [t.detach().reshape(-1).narrow(0, start, length) for t in tensors]
            blocks[item.owner] = torch.cat(parts).view(torch.uint8)
            if self.mine(item):
                own, like = item, tensors
                each = sum(tensor.element_size() for tensor in tensors)
                takes = [share * each for _, share in item.shares]
        out, wait = self._exchange(blocks, takes)

        def arrive() -> list[Tensor] | None:
            wait()
            return None if own is None else _joined(own, out.split(takes), like)

        return arrive

    def distribute(
        self,
        row: Sequence[OwnedWeight],
        result: Tensor | None,
        take: Callable[[OwnedWeight, Tensor], object],
    ) -> Callable[[], None]:
        """Starts to bring all ranks their parts of a row's results; see `run`.

        Args:
            row: the parameters.
            result: of this rank's parameter of the row, None if there is none.
            take: receives this rank's part of every result.

        Returns:
            A function that waits, and passes the received results to `take`.
        """
        rank, size = self._comm.rank, self._comm.mesh.size
        blocks: list[Tensor | None] = [None] * size
        takes = [0] * size
        for item in row:
            dtype = _result_dtype(item)
            takes[item.owner] = _volume(item.bounds[rank]) * dtype.itemsize
            if self.mine(item) and result is not None:
                blocks = [
                    _cut(result.to(dtype), bounds).reshape(-1).view(torch.uint8)
                    for bounds in item.bounds
                ]
        out, wait = self._exchange(blocks, takes)

        def arrive() -> None:
            wait()
            parts = out.split(takes)
            for item in row:
                shape = [length for _, length in item.bounds[rank]]
                # A copy, since a part may begin anywhere in the buffer.
                take(item, parts[item.owner].clone().view(_result_dtype(item)).view(shape))

        return arrive

    def _exchange(
        self, blocks: Sequence[Tensor | None], takes: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Starts an all_to_all of bytes; returns the received tensor, and a function that waits."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        sent = [nothing if block is None else block for block in blocks]
        x = torch.cat(sent)
        out = torch.empty(sum(takes), dtype=torch.uint8, device=x.device)
        channel = self._comm.group(self._comm.mesh.names).calls
        waiting = channel.all_to_all_beside(out, x, takes, [block.numel() for block in sent])

        def wait() -> None:
            nonlocal x
            waiting.wait()
            x = nothing  # sent by now

        return out, wait

    @property
    def _device(self) -> torch.device:
        return next(iter(self.items.values())).weight.held.device


def whole_parameters(owners: Sequence[Owners]) -> dict[int, nn.Parameter]:
    """Returns this rank's whole parameters, by the ids of the parts that they replace."""
    return {
        key: item.whole
        for each in owners
        for key, item in each.items.items()
        if item.whole is not None
    }


def with_owners(optimizer: Optimizer, owners: tuple[Owners, ...]) -> Optimizer:
    """Returns the optimizer that replaces the user's, with its `owners` set if it has them."""
    used = replaced(optimizer)
    if hasattr(used, "owners"):
        used.owners = owners
    return used


def step_whole(optimizer: Optimizer, owners: Sequence[Owners]) -> None:
    """Makes a step of an optimizer, which owners of whole parameters make for all ranks."""
    rows = [
        [
            item
            for item in each.items.values()
            if item.rule.keeps_whole and item.weight.updated.grad is not None
        ]
        for each in owners
    ]
    for each, items in zip(owners, rows, strict=True):
        each.fill(items)
    optimizer.step()
    for each, items in zip(owners, rows, strict=True):
        each.spread(items)


def _value_and_gradient(item: OwnedWeight) -> list[Tensor]:
    value, gradient = item.weight.updated, item.weight.updated.grad
    assert gradient is not None
    return [value.detach(), gradient.to(value.dtype)]


def _volume(bounds: Bounds) -> int:
    return math.prod(length for _, length in bounds)


def _cut(whole: Tensor, bounds: Bounds) -> Tensor:
    for dim, (start, length) in enumerate(bounds):
        whole = whole.narrow(dim, start, length)
    return whole.contiguous()


def _result_dtype(item: OwnedWeight) -> torch.dtype:
    """Returns the dtype in which an owner sends its result: that of products of matrices."""
    products = item.rule.products
    low = products is not None and products.dtype == "bf16"
    return torch.bfloat16 if low else item.weight.updated.dtype


def _joined(item: OwnedWeight, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Returns whole tensors from the shares of all ranks."""
    wholes = [tensor.new_empty(item.shape) for tensor in like]
    rows = [
        part.view(like[0].dtype).split([length] * len(like))
        for part, (_, length) in zip(parts, item.shares, strict=True)
    ]
    for bounds in dict.fromkeys(item.bounds):
        ranks = [rank for rank, its in enumerate(item.bounds) if its == bounds]
        shape = [length for _, length in bounds]
        for number, whole in enumerate(wholes):
            value = torch.cat([rows[rank][number] for rank in ranks]).view(shape)
            target = whole
            for dim, (start, length) in enumerate(bounds):
                target = target.narrow(dim, start, length)
            target.copy_(value)
    return wholes
