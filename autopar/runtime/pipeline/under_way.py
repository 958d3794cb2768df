"""What is under way between two steps of a pipeline that does not flush, for its checkpoints.

Every part of a rank says its own with `saved(put)`, as plain values in which `put` replaces
tensors, and takes it again with `resume(saved, get)`: older versions of weights, gradients that no
update has taken, messages that have arrived, sums and reports. Of microbatches whose backward is
to come, the inputs are kept. Their forwards run again on the weights that they saw; where no
version is stashed, autograd gets in place of what it would keep what it kept then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.values import decode, encode

Put = Callable[[Tensor], Any]
Get = Callable[[Any], Tensor]


@dataclass
class UnderWay:
    """Plain values, and the tensors that they name by number.

    Attributes:
        tensors: each contiguous, and in memory of its own.
        values: where a tensor stood, its number, shape and strides.
    """

    tensors: list[Tensor] = field(default_factory=list)
    values: Any = None
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)

    def put(self, tensor: Tensor) -> Any:
        """Keeps a tensor; returns what stands in its place.

        Elements that repeat along a dimension are kept once, and so is a tensor that comes again.
        """
        size, stride = tuple(tensor.shape), tensor.stride()
        base = tensor.detach()
        for dim, step in enumerate(stride):
            if step == 0 and size[dim] > 1:
                base = base.narrow(dim, 0, 1)
        storage = base.untyped_storage().data_ptr()
        key = storage, base.storage_offset(), tuple(base.shape), base.stride(), base.dtype
        if key not in self._numbers or not storage:
            made = base.contiguous()
            # A file keeps no two tensors of one memory.
            shared = storage in self._storages and made.untyped_storage().data_ptr() == storage
            self._storages.add(storage)
            self._numbers[key] = len(self.tensors)
            self.tensors.append(made.clone() if shared else made)
        number = self._numbers[key]
        return {"tensor": number, "size": list(size), "stride": list(stride)}

    def get(self, entry: Any) -> Tensor:
        """Returns a tensor with the strides that it had, on which sums of a kernel depend."""
        stored = self.tensors[entry["tensor"]]
        size, stride = tuple(entry["size"]), tuple(entry["stride"])
        made = torch.empty_strided(
            tuple(stored.shape), stride, dtype=stored.dtype, device=stored.device
        )
        made.copy_(stored)
        return made.expand(size)

    @property
    def record(self) -> Tensor:
        """The values as bytes."""
        text = json.dumps(encode(self.values, "what is under way"))
        return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)

    @classmethod
    def of(cls, record: Tensor, tensors: Sequence[Tensor]) -> UnderWay:
        """Inverts `record`; CheckpointError if it is none."""
        try:
            values = decode(json.loads(bytes(record.tolist()).decode("utf-8")))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                "what was under way cannot be read", why=f"{type(error).__name__}: {error}"
            ) from error
        return cls(list(tensors), values)


def put_all(tensors: Sequence[Tensor | None], put: Put) -> list[Any]:
    """Returns what stands in place of tensors, None where there is none."""
    return [None if tensor is None else put(tensor) for tensor in tensors]


def get_all(entries: Sequence[Any], get: Get) -> list[Tensor | None]:
    """Inverts `put_all`."""
    return [None if entry is None else get(entry) for entry in entries]
