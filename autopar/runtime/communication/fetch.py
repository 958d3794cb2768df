"""Gathers sharded parameters block by block, as in FSDP.

The first use of a block's parameter gathers all that use the same collectives: one call gathers
them from one flat buffer, or a few calls if they fill several buckets (arXiv:2304.11277, section
4.2). Meanwhile the next block's are on their way: the one that came next in the last forward, or
the previous one if the backward recomputes blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.storage import rows
from autopar.runtime.parameters.shards import Weight, depart

if TYPE_CHECKING:
    from autopar.runtime.communication.communicator import Groups


@dataclass(frozen=True, eq=False)
class Row:
    """Parameters of one block that are gathered together."""

    weights: tuple[Weight, ...]

    @property
    def block(self) -> str:
        """The block that they belong to."""
        return self.weights[0].block


def block_rows(weights: Iterable[Weight], when: str, bucket: int, mesh: Mesh) -> list[Row]:
    """Groups each block's parameters by their collectives, in buckets of about `bucket` bytes."""
    grouped = rows(
        weights,
        lambda weight: weight.way(when),
        lambda weight: weight.storage.used.local_bytes(weight.type, mesh),
        bucket,
    )
    return [Row(tuple(row)) for row in grouped]


class Fetch:
    """Gathers parameters for the operators of the programs on one mesh.

    Args:
        comm: the mesh.
    """

    def __init__(self, comm: Groups) -> None:
        self._comm = comm
        self._row: dict[Weight, Row] = {}
        self._arrived: dict[Weight, Tensor] = {}
        self._coming: dict[Row, Callable[[], list[Tensor]]] = {}
        self._order: list[Row] = []  # order of the last forward
        self._places: dict[Row, int] = {}
        self._forward: list[Row] | None = None  # order of the current forward so far

    def add(self, weights: Sequence[Weight], bucket: int) -> None:
        """Adds the parameters of one program.

        Args:
            weights: the parameters.
            bucket: bytes that are gathered together, approximately.
        """
        blocks: dict[str, list[Weight]] = {}
        for weight in weights:
            if weight.path("forward"):
                blocks.setdefault(weight.block, []).append(weight)
        for members in blocks.values():
            for row in block_rows(members, "forward", bucket, self._comm.mesh):
                self._row.update(dict.fromkeys(row.weights, row))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Returns the context of a forward; recomputation of blocks in the backward is outside."""
        self.drop()
        self._forward = []
        try:
            yield
        except BaseException:
            self._coming.clear()  # nothing can wait for them
            self._forward = None
            raise
        self._order, self._forward = self._forward, None
        self._places = {row: place for place, row in enumerate(self._order)}
        self.drop()

    def take(self, weight: Weight) -> Tensor:
        """Returns a parameter as operators use it."""
        if weight not in self._arrived:
            self._arrive(self._row[weight])
        return self._arrived.pop(weight)

    def drop(self) -> None:
        """Drops gathered parameters that were not used, once they have arrived."""
        for arrive in self._coming.values():
            arrive()
        self._coming.clear()
        self._arrived.clear()

    def _arrive(self, row: Row) -> None:
        # A recomputed block may have stopped before its last parameter.
        for weight in [other for other in self._arrived if other.block != row.block]:
            del self._arrived[weight]
        arrive = self._coming.pop(row, None) or self._depart(row)
        self._arrived.update(zip(row.weights, arrive(), strict=True))
        if self._forward is not None:
            self._forward.append(row)
        following = self._following(row)
        if following is not None and following not in self._coming:
            self._coming[following] = self._depart(following)

    def _following(self, row: Row) -> Row | None:
        """Returns the row to gather next, None if unknown."""
        if row not in self._places:
            return None
        place = self._places[row] + (-1 if self._forward is None else 1)
        return self._order[place] if 0 <= place < len(self._order) else None

    def _depart(self, row: Row) -> Callable[[], list[Tensor]]:
        held = [weight.held.detach() for weight in row.weights]
        return depart(self._comm, row.weights, held, "forward", True)
