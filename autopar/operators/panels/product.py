"""A matrix product whose operands and result are all split over a square grid of devices.

A device has a block of x, rows by contracted columns, of w and of the product. In every turn, the
devices of a row of the grid gather a panel of x from slices of their blocks, the devices of a
column gather a panel of w, and each device multiplies the two panels. This is SUMMA (van de Geijn &
Watts, 1997), except that a panel consists of a slice of every block instead of slices of one block.
The panels of the next turn are gathered meanwhile. The backward gathers the panels again, so that
only blocks are saved, and scatters the sums of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ir.tensor import part_of
from autopar.operators.panels import turns
from autopar.operators.peer_devices import Peers, widened

Waiting = Callable[[], Tensor]


@dataclass(frozen=True)
class Grid:
    """The devices of one row and of one column of a square grid, seen from one of them.

    Attributes:
        across: the devices with the same rows of x; they split its contracted columns.
        down: the devices with the same columns of w; they split its contracted rows.
    """

    across: Peers
    down: Peers

    def turns(self, contracted: int) -> int:
        """Returns the number of turns for blocks with `contracted` contracted elements."""
        return turns(self.across.size, contracted)


def product(x: Tensor, w: Tensor, grid: Grid) -> Tensor:
    """Returns this device's block of x @ w.

    Args:
        x: its block, [..., rows, contracted].
        w: its block, [contracted, columns], or with the leading dimensions of x.
        grid: the devices; all blocks have equally many contracted elements.
    """
    result: Tensor = _Product.apply(x, w, grid)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, grid: Grid) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.grid = grid
        total: Tensor | None = None
        for columns, rows in _panels(x, w, grid):
            part = widened(columns @ rows)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, w), grid, gradient = ctx.saved_tensors, ctx.grid, gradients[0]
        into_x, into_w = _PendingSlices(-1), _PendingSlices(-2)
        for columns, rows in _panels(x, w, grid, ctx.needs_input_grad):
            if rows is not None:
                into_x.add(_scattered(gradient @ rows.mT, -1, grid.across))
            if columns is not None:
                into_w.add(_scattered(_outer(columns, gradient, w.dim()), -2, grid.down))
        return into_x.whole(), into_w.whole(), None


class _PendingSlices:
    """Slices of a gradient; each is sent while the next one is computed."""

    def __init__(self, dim: int) -> None:
        self.dim, self.done = dim, list[Tensor]()
        self.waiting: Waiting | None = None

    def add(self, waiting: Waiting | None) -> None:
        """Waits for the previous slice, and keeps the function that waits for this one."""
        if self.waiting is not None:
            self.done.append(self.waiting())
        self.waiting = waiting

    def whole(self) -> Tensor | None:
        """Returns all slices as one tensor; None if there are no slices."""
        self.add(None)
        return torch.cat(self.done, self.dim) if self.done else None


def _panels(
    x: Tensor, w: Tensor, grid: Grid, gradients: tuple[bool, ...] = (True, True)
) -> Iterator[tuple[Any, Any]]:
    """Yields the panels of x and w of every turn, while the next turn's panels are sent.

    Args:
        x, w, grid: as for `product`.
        gradients: whether x and w need gradients. A panel is None if only the gradient of the other
            operand, which is not needed, would use it.
    """
    contracted = x.shape[-1]
    count = grid.turns(contracted)
    slices = [part_of(contracted, count, turn) for turn in range(count)]

    def begin(turn: int) -> tuple[Waiting | None, Waiting | None]:
        run = slices[turn]
        return (
            _gathered(x.narrow(-1, *run), -1, grid.across) if gradients[1] else None,
            _gathered(w.narrow(-2, *run), -2, grid.down) if gradients[0] else None,
        )

    ahead = begin(0)
    for turn in range(count):
        now, ahead = ahead, begin(turn + 1) if turn + 1 < count else (None, None)
        yield tuple(None if waiting is None else waiting() for waiting in now)  # type: ignore[misc]


def _outer(columns: Tensor, gradient: Tensor, dims: int) -> Tensor:
    """Returns the gradient of a panel of w, with `dims` dimensions."""
    if dims == 2:
        columns, gradient = columns.flatten(0, -2), gradient.flatten(0, -2)
    return columns.mT @ gradient


def _gathered(x: Tensor, dim: int, peers: Peers) -> Waiting:
    """Starts to send x to all devices; returns a function that concatenates what arrives."""
    wait = peers.deal([[x]] * peers.size, [x.numel()] * peers.size)

    def arrive() -> Tensor:
        parts = [x if at == peers.index else part.view(x.shape) for at, part in enumerate(wait())]
        return torch.cat(parts, dim)

    return arrive


def _scattered(x: Tensor, dim: int, peers: Peers) -> Waiting:
    """Starts to send each device its part of x; returns a function that sums the received parts."""
    parts = x.chunk(peers.size, dim)
    shape, dtype = parts[0].shape, x.dtype
    wait = peers.deal([[part] for part in parts], [parts[0].numel()] * peers.size)

    def arrive() -> Tensor:
        arrived = [
            parts[at] if at == peers.index else part.view(shape) for at, part in enumerate(wait())
        ]
        total, *others = map(widened, arrived)
        for other in others:
            total = total + other
        return total.to(dtype)

    return arrive
