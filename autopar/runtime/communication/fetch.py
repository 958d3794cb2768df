"""Parameters that are held in parts are gathered block by block, as in FSDP.

The first of a block's parameters that is used brings the others that take the same way: one
collective gathers them all from one flat buffer, or a few where they fill several buckets
(arXiv:2304.11277, section 4.2). The next block's are on their way meanwhile: that is the one that
was next in the last forward, or the one before where the backward computes blocks again.
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
        """The block that they are of."""
        return self.weights[0].block


def block_rows(weights: Iterable[Weight], when: str, bucket: int, mesh: Mesh) -> list[Row]:
    """Parameters of one block by the way they take, in buckets of so many bytes or little more."""
    found = rows(
        weights,
        lambda weight: weight.way(when),
        lambda weight: weight.storage.used.local_bytes(weight.type, mesh),
        bucket,
    )
    return [Row(tuple(row)) for row in found]


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
        self._order: list[Row] = []  # of the last forward
        self._places: dict[Row, int] = {}
        self._forward: list[Row] | None = None  # so far, while there is one

    def add(self, weights: Sequence[Weight], bucket: int) -> None:
        """The parameters of one program.

        Args:
            weights: the parameters.
            bucket: bytes that go together, or little more.
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
        """Inside is a forward; what blocks compute again in the backward is outside."""
        self.drop()
        self._forward = []
        try:
            yield
        except BaseException:
            self._coming.clear()  # nobody can wait for them
            self._forward = None
            raise
        self._order, self._forward = self._forward, None
        self._places = {row: place for place, row in enumerate(self._order)}
        self.drop()

    def take(self, weight: Weight) -> Tensor:
        """A parameter as operators use it."""
        if weight not in self._arrived:
            self._arrive(self._row[weight])
        return self._arrived.pop(weight)

    def drop(self) -> None:
        """Forget what nobody took, once it is there."""
        for arrive in self._coming.values():
            arrive()
        self._coming.clear()
        self._arrived.clear()

    def _arrive(self, row: Row) -> None:
        # A block that is computed again may have stopped before its last parameter.
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
        """What is gathered next, as far as that is known."""
        if row not in self._places:
            return None
        place = self._places[row] + (-1 if self._forward is None else 1)
        return self._order[place] if 0 <= place < len(self._order) else None

    def _depart(self, row: Row) -> Callable[[], list[Tensor]]:
        held = [weight.held.detach() for weight in row.weights]
        return depart(self._comm, row.weights, held, "forward", True)
