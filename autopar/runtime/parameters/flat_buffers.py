"""Flat buffers that the AdamW kernel reads and writes, for many parameters at once.

    parameters | a a a a a a | b b . | c c c c |
    moments    | a a a a a a | b b . | c c c c |      one launch: a, b and c
    gradients  | a a a a a a | b b . | c c c c |

Parameters are placed in the memory order of their gradients, so that those reduced in one buffer
are neighbours here as well, and one launch updates them all. Small gradients that autograd
allocated separately are copied next to one another; copying a large one would take longer than a
launch of its own. Shards from a reduce_scatter are written directly into one buffer for all of
them. On a CPU, where the torch reference runs, each launch covers a piece that stays in the cache.

Every tensor starts at a multiple of 16 bytes, as matrix products require of their operands.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.storage import COPIED
from autopar.runtime import torch_private

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names in AdamW
_PIECE = 2**16  # elements
_ALIGNED = 8  # elements: 16 bytes of 16 bits each
State = Mapping[Tensor, dict[str, Any]]  # state of an optimizer
Launch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def neighbours(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the same elements in as few flat tensors as possible, as views if contiguous."""
    rows: list[list[Tensor]] = []
    pieces = [tensor.contiguous() for tensor in tensors]
    for tensor in (pieces[place] for place in _in_memory(pieces)):
        last = rows[-1][-1] if rows else tensor
        if rows and last.dtype == tensor.dtype and _apart(last, tensor) == last.numel():
            rows[-1].append(tensor)
        else:
            rows.append([tensor])
    return [_flat(row[0], sum(tensor.numel() for tensor in row)) for row in rows]


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns copies of tensors in a dtype, of their shapes, in one buffer padded with zeros."""
    starts, total = _starts(tensors)
    gaps = total > sum(tensor.numel() for tensor in tensors)
    allocate = torch.zeros if gaps else torch.empty
    views = _views(allocate(total, dtype=dtype, device=tensors[0].device), starts, tensors)
    torch_private.copy_all(views, list(tensors))
    return views


@dataclass(frozen=True, eq=False)
class Flat:
    """Parameters in one buffer, with their moments and lower-precision copies.

    Attributes:
        parameters: the parameters in buffer order.
        starts: start of each in every buffer.
        buffers: parameters, first and second moments, and lower-precision copies if a step writes
            them.
    """

    parameters: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    buffers: tuple[Tensor, Tensor, Tensor, Tensor | None]

    @classmethod
    def of(
        cls, parameters: Iterable[nn.Parameter], state: State, held: Mapping[int, Tensor]
    ) -> Flat:
        """Moves parameters to buffers, with all their state.

        Args:
            parameters: parameters of one dtype.
            state: state of each; missing moments are zero.
            held: lower-precision copies by the parameter's id; of all parameters, or of none.
        """
        members = list(parameters)
        gradients = [p if p.grad is None else p.grad for p in members]
        # Parameters whose gradients are copied come last.
        places = sorted(_in_memory(gradients), key=lambda place: _small(gradients[place]))
        row = [members[place] for place in places]
        starts, total = _starts(row)

        def moved(tensors: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, list[Tensor]]:
            buffer = torch.zeros(total, dtype=like.dtype, device=like.device)
            views = _views(buffer, starts, row)
            for view, tensor in zip(views, tensors, strict=True):
                if tensor is not None:
                    view.copy_(tensor)
            return buffer, views

        def stored(tensors: Sequence[Tensor]) -> Tensor:
            buffer, views = moved([tensor.detach() for tensor in tensors], tensors[0])
            for tensor, view in zip(tensors, views, strict=True):
                tensor.data = view
            return buffer

        low = [held[id(parameter)] for parameter in row if id(parameter) in held]
        buffers = [stored(row)]
        for name in MOMENTS:
            buffer, views = moved([state[parameter].get(name) for parameter in row], row[0])
            buffers.append(buffer)
            for parameter, view in zip(row, views, strict=True):
                state[parameter][name] = view
        p, m, v = buffers
        return cls(tuple(row), starts, (p, m, v, stored(low) if low else None))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(parameter): place for place, parameter in enumerate(self.parameters)}

    def span(self, parameters: Sequence[nn.Parameter]) -> slice | None:
        """Returns the slice of consecutive parameters, None if they are not consecutive."""
        places = [self._places.get(id(parameter), -1) for parameter in parameters]
        first, end = places[0], 0
        if -1 in places:
            return None
        for place, parameter in zip(places, parameters, strict=True):
            if end not in (0, self.starts[place]):
                return None
            end = self.starts[place] + parameter.numel()
        return slice(self.starts[first], end)

    def stands(self, state: State) -> bool:
        """Returns whether parameters and moments are still in the buffers, and not loaded since."""
        return all(
            tensor is not None
            and tensor.data_ptr() == buffer.data_ptr() + start * buffer.element_size()
            for start, parameter in zip(self.starts, self.parameters, strict=True)
            for buffer, tensor in zip(
                self.buffers, (parameter, *map(state[parameter].get, MOMENTS)), strict=False
            )
            if buffer is not None
        )

    def gather_small(self) -> None:
        """Copies small gradients next to their neighbours', so that one launch covers them."""
        groups: list[list[int]] = [[]]
        for place, parameter in enumerate(self.parameters):
            small = parameter.grad is not None and _small(parameter.grad)
            if not small and groups[-1]:
                groups.append([])
            if small:
                groups[-1].append(place)
        for places in groups:
            if len(places) > 1:
                parameters = [self.parameters[place] for place in places]
                gradients = [_gradient(parameter) for parameter in parameters]
                together = side_by_side(gradients, gradients[0].dtype)
                for parameter, gradient in zip(parameters, together, strict=True):
                    parameter.grad = gradient

    def launches(self, wanted: Container[int]) -> Iterator[Launch]:
        """Yields flat parameters, moments, gradients and copies, each for one launch.

        Args:
            wanted: ids of the parameters to update; those without gradients are skipped.
        """
        p, m, v, low = self.buffers
        for row in self._rows(wanted):
            first, last = (self.parameters[place] for place in (row[0], row[-1]))
            start, end = self.starts[row[0]], self.starts[row[-1]] + last.numel()
            gradients = _flat(_gradient(first).contiguous(), end - start)
            length = _PIECE if p.is_cpu else end - start
            for piece in gradients.split(length):
                part = slice(start, start + piece.numel())
                yield p[part], m[part], v[part], piece, None if low is None else low[part]
                start = part.stop

    def _rows(self, wanted: Container[int]) -> list[list[int]]:
        """Returns indices of neighbours whose gradients are consecutive in memory too."""
        rows: list[list[int]] = []
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None or id(parameter) not in wanted:
                continue
            if rows and rows[-1][-1] == place - 1 and self._alike(place - 1, place):
                rows[-1].append(place)
            else:
                rows.append([place])
        return rows

    def _alike(self, one: int, other: int) -> bool:
        gradients = [_gradient(self.parameters[place]) for place in (one, other)]
        away = self.starts[other] - self.starts[one]
        return all(g.is_contiguous() for g in gradients) and _apart(*gradients) == away


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _small(gradient: Tensor) -> bool:
    """Returns whether it was allocated separately and is to be copied next to others."""
    return gradient.nbytes == _storage(gradient).nbytes() < COPIED


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _in_memory(tensors: Sequence[Tensor]) -> list[int]:
    """Returns indices in memory order within each storage, independent of addresses."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        first.setdefault(_storage(tensor).data_ptr(), place)

    def key(place: int) -> tuple[int, int]:
        tensor = tensors[place]
        return first[_storage(tensor).data_ptr()], int(tensor.storage_offset())

    return sorted(range(len(tensors)), key=key)


def _apart(one: Tensor, other: Tensor) -> int:
    """Returns the distance in elements between the starts; -1 if they share no storage."""
    if _storage(one).data_ptr() != _storage(other).data_ptr():
        return -1
    return int(other.storage_offset() - one.storage_offset())


def _flat(first: Tensor, length: int) -> Tensor:
    """Returns `length` elements from the first element of a tensor on."""
    return first.as_strided((length,), (1,))


def _starts(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], int]:
    """Returns the starts of tensors placed one after another, and the total elements."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
    return tuple(starts), end


def _views(buffer: Tensor, starts: Iterable[int], like: Iterable[Tensor]) -> list[Tensor]:
    pairs = zip(starts, like, strict=True)
    return [buffer[start : start + tensor.numel()].view(tensor.shape) for start, tensor in pairs]
