"""Checks the batches of a program, compares calls between ranks, and moves batches to the device.

Before each call, the ranks compare the kind of call and checksums of its inputs. An error can
therefore name a rank that makes a different call or whose data loader has diverged, instead of a
hang. On accelerators a comparison would wait for the device, so only the first calls are compared.
In addition, every step sums a checksum of all calls so far across ranks, before its update
(`step_check.py`). That sum adds no wait.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, BatchError, RanksDifferError
from autopar.operators.interpret import tensor_type
from autopar.runtime.calls.input_parts import WHOLE, Part
from autopar.runtime.ranks.channel import Channel

_COMPARED_CALLS = 10  # on accelerators
_SMALL = 2**16  # up to this size in bytes, a checksum covers the bytes themselves
_ROW = 1021  # a prime, so that reordered samples change the sums
_BITS = 20  # in a token; see `step_check.py`
_KEPT = 64  # calls that are compared one by one to find a difference
_MOST = 2**62 - 1
TOKEN = "%token"  # no input has such a name
OF_SHAPE = " of a new shape: "  # after the kind of a call that needs a program of its own


@dataclass(frozen=True)
class _Call:
    """A call of a program.

    Attributes:
        kind: such as "step".
        inputs: checksums of its inputs by name.
        options: texts of options that must agree, by name.
        part: the part of the batch that the rank passes.
        types: dtypes and shapes of its inputs by name.
        shared: names of the inputs that are not cut into parts.
    """

    kind: str
    inputs: dict[str, int]
    options: dict[str, str]
    part: int = 0
    types: tuple[tuple[str, str], ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def equal(self) -> dict[str, int]:
        """Checksums of the inputs that all ranks share, by name."""
        return {name: self.inputs[name] for name in self.shared}


class Intake:
    """Takes the batches of one executor.

    Args:
        device: the device of this rank.
        everyone: the channel of all participating ranks; None for a single rank.
        part: the part of a batch that this rank passes.

    Attributes:
        overlaps: whether a rank may begin a call while others are still in the previous one; a
            comparison would then make it wait.
        compared: number of calls that are compared in any case.
    """

    def __init__(
        self,
        device: torch.device,
        everyone: Channel | None,
        part: Part = WHOLE,
    ) -> None:
        self._device, self._part = device, part
        self._everyone, self.overlaps = everyone, False
        self.compared = _COMPARED_CALLS
        self._reset()

    def _reset(self) -> None:
        """Restarts the comparison after ranks have differed."""
        self._calls, self._host, self._own = 0, 0, 0
        # Checksums of tensors on the device, by whether all ranks share them.
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        self._away = {True: zero, False: zero}
        self._past: deque[_Call] = deque(maxlen=_KEPT)

    def take(
        self,
        batch: Mapping[str, Tensor],
        types: Mapping[str, str],
        kind: str,
        options: Mapping[str, str] | None = None,
        parted: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Checks a batch and moves it to this rank's device.

        Args:
            batch: whole tensors by name.
            types: dtypes and shapes of the program's inputs by name, "i64[8, 16]".
            kind: kind of the call, "step".
            options: texts of options that must agree, by name.
            parted: names of the inputs of which ranks pass parts.

        Returns:
            The batch by name, and the token of all calls so far as `TOKEN`.

        Raises:
            BatchError: it differs from the captured batch in type, or between ranks in value.
            RanksDifferError: the ranks make different calls, or have different options.
        """
        # Compare before any rank refuses its batch, so that the others do not wait for it.
        self.meet(kind, batch, options, parted)
        given_types = {name: str(tensor_type(value)) for name, value in batch.items()}
        for name in {**types, **given_types}:
            wanted, given = types.get(name), given_types.get(name)
            if wanted != given:
                raise BatchError(
                    f"the input {name!r} is {given or 'missing'}",
                    why=f"the program was compiled for {wanted or 'no such input'}",
                    todo="pass batches of one shape, or shapes=8 to compile, which then accepts up "
                    "to 8 shapes",
                )
        taken = {name: value.to(self._device) for name, value in batch.items()}
        return taken | {TOKEN: self._token()}

    def meet(
        self,
        kind: str,
        batch: Mapping[str, Tensor] | None = None,
        options: Mapping[str, str] | None = None,
        parted: Collection[str] = (),
    ) -> None:
        """Compares a call with those of the other ranks; arguments and errors as in `take`."""
        if self._everyone is None:
            return
        self._calls += 1
        given = sorted((batch or {}).items())
        shared = tuple(name for name, _ in given if name not in parted)
        inputs = {name: self._checksum(name, value, name in shared) for name, value in given}
        types = tuple((name, str(tensor_type(value))) for name, value in given)
        call = _Call(kind, inputs, dict(options or {}), self._part.rank, types, shared)
        self._past.append(call)
        self._host = zlib.crc32(f"{self._host} {kind} {call.options} {types} {call.equal}".encode())
        self._own = zlib.crc32(f"{self._own} {inputs}".encode())
        often = self._device.type == "cpu" and not self.overlaps
        compared = often or self._calls <= self.compared or batch is None
        if compared and not self._alike():
            raise self.differences()

    def _checksum(self, name: str, value: Tensor, shared: bool) -> int:
        """Returns the checksum of a CPU tensor; other tensors are summed on their device."""
        value, start = value.detach(), zlib.crc32(f"{name} {tensor_type(value)}".encode())
        if value.device.type == "cpu":
            return _checksum(value, start)
        columns, rest = _sums(value)
        total = (columns.sum() + rest.sum()).to(self._device)
        self._away[shared] = self._away[shared] * _ROW + total
        return start

    def _token(self) -> Tensor:
        """Returns a checksum of all calls so far, f64[] on the device."""
        token: Tensor = (self._away[True] + self._host) & (2**_BITS - 1)
        return token.double()

    def _alike(self) -> bool:
        """Returns whether all ranks make the same call, with equal inputs if they pass one part."""
        assert self._everyone is not None
        parts = self._part.world
        numbers: list[int | None] = [(int(self._away[True]) * _ROW + self._host) & _MOST]
        if parts > 1:
            own = (int(self._away[False]) * _ROW + self._own) & _MOST
            numbers += [own if n == self._part.rank else None for n in range(parts)]
        pairs = [(-_MOST, -_MOST) if n is None else (n, -n) for n in numbers]
        span = torch.tensor(pairs, dtype=torch.int64, device=self._device)
        self._everyone.all_reduce(span, dist.ReduceOp.MAX)
        return bool((span[:, 0] == -span[:, 1]).all())

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, in the order of ranks; every rank must call it."""
        return [value] if self._everyone is None else self._everyone.all_gather_object(value)

    def differences(self) -> AutoparError:
        """Returns the error that describes how the ranks differ; every rank must call it."""
        ranks = self.gather(list(self._past))
        self._reset()
        for calls in zip(*ranks, strict=False):
            first: dict[int, tuple[int, _Call]] = {}
            for rank, call in enumerate(calls):
                if (call.kind, call.options) != (calls[0].kind, calls[0].options):
                    return _difference(0, rank, calls[0], replace(call, inputs=calls[0].inputs))
                if self._part.world > 1 and call.types != calls[0].types:
                    return _of_sizes(rank, dict(calls[0].types), dict(call.types))
                if self._part.world > 1 and call.equal != calls[0].equal:
                    return _of_shared(rank, calls[0].equal, call.equal)
                other, alike = first.setdefault(call.part, (rank, call))
                if call != alike:
                    return _difference(other, rank, alike, call)
        return _of_batches("ranks that should pass the same part of a batch pass different ones")


def _difference(first_rank: int, rank: int, first: _Call, other: _Call) -> AutoparError:
    """Returns the error that describes how a rank's call differs from an earlier rank's."""
    where = f"rank {rank}"
    if first.kind != other.kind and _plain(first.kind) == _plain(other.kind):
        return BatchError(
            "the ranks pass batches of different shapes",
            where=where,
            why=f"it passes {_shape(other)}; rank {first_rank} passes {_shape(first)}",
            todo="pad the batches of all ranks to one length before you pass them, and drop a last "
            "batch that is smaller (drop_last=True)",
        )
    if first.kind != other.kind:
        return RanksDifferError(
            "the ranks make different calls",
            where=where,
            why=f"rank {first_rank} calls {first.kind}, rank {rank} calls {other.kind}",
            todo="make the same calls in the same order on every rank",
        )
    for name in {**first.inputs, **other.inputs}:
        if first.inputs.get(name) != other.inputs.get(name):
            return _of_batches(
                f"the input {name!r} of rank {rank} is not that of rank {first_rank}"
            )
    names = {**first.options, **other.options}
    name = next(name for name in names if first.options.get(name) != other.options.get(name))
    own, others = (call.options.get(name, "nothing") for call in (first, other))
    return RanksDifferError(
        f"the ranks differ in {name}",
        where=where,
        why=f"rank {first_rank} has {own}, rank {rank} has {others}",
        todo="change the optimizer's options in the same way on every rank",
    )


def _plain(kind: str) -> str:
    return kind.partition(OF_SHAPE)[0]


def _shape(call: _Call) -> str:
    """Returns the inputs of a call with their types, as text."""
    new = call.kind.partition(OF_SHAPE)[2]
    return new or ", ".join(f"{name} {kind}" for name, kind in call.types)


def _of_sizes(rank: int, first: Mapping[str, str], other: Mapping[str, str]) -> BatchError:
    """Returns the error for parts of different sizes."""
    name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
    types = (types.get(name, "missing") for types in (other, first))
    return BatchError(
        "the ranks pass parts of different sizes",
        where=f"rank {rank}",
        why="its input {!r} is {}, that of rank 0 is {}".format(name, *types),
        todo="pass parts of one size: drop the last batch (drop_last=True), or pad it",
    )


def _of_shared(rank: int, first: Mapping[str, int], other: Mapping[str, int]) -> BatchError:
    """Returns the error for tensors that do not belong to the batch and differ."""
    name = next(name for name in first if first[name] != other.get(name))
    return BatchError(
        f"the input {name!r} of rank {rank} is not that of rank 0",
        why="its first dimension is not that of the batch, so that all ranks share it",
        todo="pass the same tensor on every rank, or one with a row for each sample",
    )


def _of_batches(why: str) -> BatchError:
    return BatchError(
        "the ranks have different batches",
        why=why,
        todo="pass the same whole batch on every rank (the same seed, no DistributedSampler), or "
        'pass batches="local" to compile',
    )


def _checksum(value: Tensor, start: int) -> int:
    """Returns a checksum of a CPU tensor, of its bytes if small, of its sums if large."""
    parts = _sums(value) if value.nbytes > _SMALL else (_bytes(value),)
    for part in parts:
        start = zlib.crc32(part.numpy().tobytes(), start)
    return start


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weighted sums of a tensor's 8-byte words over rows of a prime length, and the rest.

    They change if any element changes, or if elements change places.
    """
    flat = _bytes(value)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // (8 * _ROW) * (8 * _ROW)
    weights = torch.arange(1, 2 * _ROW, 2, device=value.device)
    columns = flat[:whole].view(torch.int64).view(-1, _ROW).sum(0) * weights
    return columns, flat[whole:]
