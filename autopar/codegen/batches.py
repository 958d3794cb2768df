"""What a step is given: checked, alike on every rank, on this rank's device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import BatchError
from autopar.ir.interpret import tensor_type

# Batches are compared between ranks in the first steps only: it waits for the device.
_COMPARED_STEPS = 10


class Intake:
    """Takes the batches of one program.

    Args:
        wanted: the types of the inputs by name, "i64[8, 16]".
        device: where this rank computes.
        peers: how many ranks take part.
        group: their process group, None for torch's default one.
    """

    def __init__(
        self,
        wanted: Mapping[str, str],
        device: torch.device,
        peers: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._wanted, self._device = dict(wanted), device
        self._peers, self._group = peers, group
        self._calls = 0

    def take(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch on this device.

        Raises:
            BatchError: it is not like the captured one, or not the same on every rank.
        """
        found = {name: str(tensor_type(value)) for name, value in batch.items()}
        # Before any rank refuses its batch: the others must not wait for one that has stopped.
        alike = self._calls >= _COMPARED_STEPS or self._alike(batch, found)
        for name in {**self._wanted, **found}:
            wanted, given = self._wanted.get(name), found.get(name)
            if wanted != given:
                raise BatchError(
                    f"the input {name!r} is {given or 'missing'}",
                    why=f"the program was compiled for {wanted or 'no such input'}",
                    todo="pass batches of one shape, or compile again for this one",
                )
        if not alike:
            raise BatchError(
                "the ranks hold different batches",
                why="every rank takes its part of one global batch",
                todo="give every rank the same whole batch (the same seed, no DistributedSampler)",
            )
        self._calls += 1
        return {name: value.to(self._device) for name, value in batch.items()}

    def _alike(self, batch: Mapping[str, Tensor], types: Mapping[str, str]) -> bool:
        """Whether every rank holds the same batch, since each takes its own part of it."""
        if self._peers == 1:
            return True
        total = 0
        for name in sorted(batch):
            whole = batch[name].detach().cpu().contiguous().reshape(-1)
            total = zlib.crc32(f"{name} {types[name]}".encode(), total)
            total = zlib.crc32(whole.view(torch.uint8).numpy().tobytes(), total)
        span = torch.tensor([total, -total], dtype=torch.int64, device=self._device)
        dist.all_reduce(span, op=dist.ReduceOp.MAX, group=self._group)
        return int(span[0]) == -int(span[1])
