"""What AdamW's kernel reads and writes of many parameters, in flat buffers.

    parameters | a a a a a a | b b . | c c c c |
    moments    | a a a a a a | b b . | c c c c |      one launch: a, b and c
    gradients  | a a a a a a | b b . | c c c c |

Parameters stand in the order in which their gradients lie in memory. So those that were reduced in
one buffer are neighbours here as well, and one launch takes them all. Small gradients that autograd
made apart are copied beside one another; copying a large one would take longer than its own launch.
Parts that a reduce_scatter gives are put where they belong in a buffer for all of them at once.
On a CPU, where the reference in torch runs, a launch is of a piece that stays in its cache.

Every tensor begins at a multiple of 16 bytes, as products of matrices want what they read.
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

MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's AdamW calls them
_PIECE = 2**16  # elements
_ALIGNED = 8  # elements: 16 bytes of 16 bits each
State = Mapping[Tensor, dict[str, Any]]  # an optimizer's
Launch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def neighbours(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in as few flat tensors as they lie in; contiguous ones share memory."""
    rows: list[list[Tensor]] = []
    found = [tensor.contiguous() for tensor in tensors]
    for tensor in (found[place] for place in _in_memory(found)):
        last = rows[-1][-1] if rows else tensor
        if rows and last.dtype == tensor.dtype and _apart(last, tensor) == last.numel():
            rows[-1].append(tensor)
        else:
            rows.append([tensor])
    return [_flat(row[0], sum(tensor.numel() for tensor in row)) for row in rows]


def side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of tensors in a dtype, of their shapes, in one buffer; between them are zeros."""
    starts, total = _starts(tensors)
    gaps = total > sum(tensor.numel() for tensor in tensors)
    made = torch.zeros if gaps else torch.empty
    views = _views(made(total, dtype=dtype, device=tensors[0].device), starts, tensors)
    torch_private.copy_all(views, list(tensors))
    return views


@dataclass(frozen=True, eq=False)
class Flat:
    """Parameters in a row, with their moments and what is held of them in a lower precision.

    Attributes:
        parameters: in their order.
        starts: where each begins in every buffer.
        buffers: parameters, first and second moments, and what is held, where a step writes it.
    """

    parameters: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    buffers: tuple[Tensor, Tensor, Tensor, Tensor | None]

    @classmethod
    def of(
        cls, parameters: Iterable[nn.Parameter], state: State, held: Mapping[int, Tensor]
    ) -> Flat:
        """Move parameters to buffers, with all that belongs to them.

        Args:
            parameters: of one dtype.
            state: of each; moments that are missing are zero.
            held: what is held, by the parameter's id; of all of them, or of none.
        """
        found = list(parameters)
        gradients = [p if p.grad is None else p.grad for p in found]
        # Those last whose gradients are copied.
        places = sorted(_in_memory(gradients), key=lambda place: _small(gradients[place]))
        row = [found[place] for place in places]
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
        """Where parameters lie that stand in this order, without gaps; None if they do not."""
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
        """Whether parameters and moments are where they were put: none was loaded since."""
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
        """Copy small gradients beside those of their neighbours, so that one launch takes them."""
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
        """Flat parameters, moments, gradients and what is held, each for one launch.

        Args:
            wanted: ids of the parameters that are updated; without gradients they are not.
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
        """Places of neighbours whose gradients lie as they do."""
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
    """Whether it was made apart and is copied beside others."""
    return gradient.nbytes == _storage(gradient).nbytes() < COPIED


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _in_memory(tensors: Sequence[Tensor]) -> list[int]:
    """Their places in the order in which they lie in each storage, whatever address that has."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        first.setdefault(_storage(tensor).data_ptr(), place)

    def key(place: int) -> tuple[int, int]:
        tensor = tensors[place]
        return first[_storage(tensor).data_ptr()], int(tensor.storage_offset())

    return sorted(range(len(tensors)), key=key)


def _apart(one: Tensor, other: Tensor) -> int:
    """Elements from the beginning of one to that of the other; -1 where they share no storage."""
    if _storage(one).data_ptr() != _storage(other).data_ptr():
        return -1
    return int(other.storage_offset() - one.storage_offset())


def _flat(first: Tensor, length: int) -> Tensor:
    """So many elements from the first of a tensor on."""
    return first.as_strided((length,), (1,))


def _starts(tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], int]:
    """Where tensors in a row begin, and the elements of all."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
    return tuple(starts), end


def _views(buffer: Tensor, starts: Iterable[int], like: Iterable[Tensor]) -> list[Tensor]:
    pairs = zip(starts, like, strict=True)
    return [buffer[start : start + tensor.numel()].view(tensor.shape) for start, tensor in pairs]
