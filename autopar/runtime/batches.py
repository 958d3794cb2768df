"""What a call of a program is given: checked, alike on every rank, on this rank's device.

Before a call does anything ranks compare what it is, and checksums of what it was given, so that
one that calls something else, or whose data loader has parted from the others', is named and nobody
hangs. On accelerators that would wait for the device; there they do so in the first calls only.
A checksum of all calls so far also goes with the numbers that every step adds up before its update
(`step_check.py`), for which nothing waits.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, BatchError, RanksDifferError
from autopar.operators.interpret import tensor_type
from autopar.runtime.ranks.channel import Channel

_COMPARED_CALLS = 10  # on accelerators
_SMALL = 2**16  # bytes of which every one goes into a checksum
_ROW = 1021  # a prime, so that samples that change places change the sums
_BITS = 20  # of a token; see `step_check.py`
_KEPT = 64  # calls among which a difference is looked for
TOKEN = "%token"  # no input has such a name


@dataclass(frozen=True)
class _Call:
    """A call of the program: its kind, checksums of its inputs, and texts of what else it reads."""

    kind: str
    inputs: dict[str, int]
    options: dict[str, str]


class Intake:
    """Takes the batches of one program.

    Args:
        wanted: the types of the inputs by name, "i64[8, 16]".
        device: where this rank computes.
        everyone: what all ranks that take part call through; None for one alone.

    Attributes:
        overlaps: whether a call begins on a rank while others are not done with the one before, so
            that comparing would make them wait.
    """

    def __init__(
        self,
        wanted: Mapping[str, str],
        device: torch.device,
        everyone: Channel | None,
    ) -> None:
        self._wanted, self._device = dict(wanted), device
        self._everyone, self.overlaps = everyone, False
        self._forget()

    def _forget(self) -> None:
        """Begin to compare anew, after ranks that differed."""
        self._calls, self._host = 0, 0
        self._away = torch.zeros((), dtype=torch.int64, device=self._device)
        self._past: deque[_Call] = deque(maxlen=_KEPT)

    def take(
        self, batch: Mapping[str, Tensor], kind: str, options: Mapping[str, str] | None = None
    ) -> dict[str, Tensor]:
        """The batch on this device, and the token of all calls so far as `TOKEN`.

        Args:
            batch: whole tensors by name.
            kind: of call, "step".
            options: texts of what else is to be alike, by what it is.

        Raises:
            BatchError: it is not like the captured one, or not the same on every rank.
            RanksDifferError: the ranks make different calls, or with different options.
        """
        # Before any rank refuses its batch: the others must not wait for one that has stopped.
        self.meet(kind, batch, options)
        found = {name: str(tensor_type(value)) for name, value in batch.items()}
        for name in {**self._wanted, **found}:
            wanted, given = self._wanted.get(name), found.get(name)
            if wanted != given:
                raise BatchError(
                    f"the input {name!r} is {given or 'missing'}",
                    why=f"the program was compiled for {wanted or 'no such input'}",
                    todo="pass batches of one shape, or compile again for this one",
                )
        taken = {name: value.to(self._device) for name, value in batch.items()}
        return taken | {TOKEN: self._token()}

    def meet(
        self,
        kind: str,
        batch: Mapping[str, Tensor] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Compare a call with those of the other ranks; arguments and errors as of `take`."""
        if self._everyone is None:
            return
        self._calls += 1
        given = sorted((batch or {}).items())
        inputs = {name: self._checksum(name, value) for name, value in given}
        self._past.append(_Call(kind, inputs, dict(options or {})))
        self._host = zlib.crc32(f"{self._host} {self._past[-1]}".encode())
        often = self._device.type == "cpu" and not self.overlaps
        compared = often or self._calls <= _COMPARED_CALLS or batch is None
        if compared and not self._alike():
            raise self.differences()

    def _checksum(self, name: str, value: Tensor) -> int:
        """Of an input that is on the host; one on a device goes into the sum that is there."""
        value, start = value.detach(), zlib.crc32(f"{name} {tensor_type(value)}".encode())
        if value.device.type == "cpu":
            return _checksum(value, start)
        columns, rest = _sums(value)
        self._away = self._away * _ROW + (columns.sum() + rest.sum()).to(self._device)
        return start

    def _token(self) -> Tensor:
        """A number for all calls so far, f64[] on the device."""
        token: Tensor = (self._away + self._host) & (2**_BITS - 1)
        return token.double()

    def _alike(self) -> bool:
        """Whether all ranks have made the same calls."""
        assert self._everyone is not None
        number = (int(self._away) * _ROW + self._host) & (2**62 - 1)
        span = torch.tensor([number, -number], dtype=torch.int64, device=self._device)
        self._everyone.all_reduce(span, dist.ReduceOp.MAX)
        return int(span[0]) == -int(span[1])

    def gather(self, value: Any) -> list[Any]:
        """What every rank passes, by rank; all of them call it."""
        return [value] if self._everyone is None else self._everyone.all_gather_object(value)

    def differences(self) -> AutoparError:
        """How the ranks differ; all of them call it, and get the same."""
        ranks = self.gather(list(self._past))
        self._forget()
        for calls in zip(*ranks, strict=False):
            for rank, call in enumerate(calls):
                if call != calls[0]:
                    return _difference(rank, calls[0], call)
        return _of_batches("every rank takes its part of one global batch")


def _difference(rank: int, first: _Call, other: _Call) -> AutoparError:
    """How a rank's call differs from the first rank's."""
    where = f"rank {rank}"
    if first.kind != other.kind:
        return RanksDifferError(
            "the ranks make different calls",
            where=where,
            why=f"rank 0 calls {first.kind}, rank {rank} calls {other.kind}",
            todo="make the same calls in one order on every rank",
        )
    for name in {**first.inputs, **other.inputs}:
        if first.inputs.get(name) != other.inputs.get(name):
            return _of_batches(f"the input {name!r} of rank {rank} is not that of rank 0")
    names = {**first.options, **other.options}
    name = next(name for name in names if first.options.get(name) != other.options.get(name))
    mine, its = (call.options.get(name, "nothing") for call in (first, other))
    return RanksDifferError(
        f"the ranks differ in {name}",
        where=where,
        why=f"rank 0 has {mine}, rank {rank} has {its}",
        todo="change the optimizer's options, as schedulers do, alike on every rank",
    )


def _of_batches(why: str) -> BatchError:
    return BatchError(
        "the ranks hold different batches",
        why=why,
        todo="give every rank the same whole batch (the same seed, no DistributedSampler)",
    )


def _checksum(value: Tensor, start: int) -> int:
    """A checksum of a tensor on the CPU: of a small one's bytes, of a large one's sums."""
    parts = _sums(value) if value.nbytes > _SMALL else (_bytes(value),)
    for part in parts:
        start = zlib.crc32(part.numpy().tobytes(), start)
    return start


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums of a tensor's bytes, eight at a time, over rows of a prime length; the rest.

    They change with every single element, and with the places of elements.
    """
    flat = _bytes(value)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // (8 * _ROW) * (8 * _ROW)
    weights = torch.arange(1, 2 * _ROW, 2, device=value.device)
    columns = flat[:whole].view(torch.int64).view(-1, _ROW).sum(0) * weights
    return columns, flat[whole:]
