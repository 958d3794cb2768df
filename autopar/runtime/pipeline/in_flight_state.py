"""Saves the state in flight between two steps of an asynchronous pipeline, for checkpoints.

Every component of a rank returns its state from `saved(put)`, as plain values in which `put`
replaces tensors, and restores it in `resume(saved, get)`: older versions of weights, gradients that
are not yet applied, received messages, sums and reports. For microbatches with a pending backward,
the inputs are saved. Their forwards run again on the same weights as before. If no version of these
weights is stashed, autograd saves the tensors that it had saved in the first run.
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
class PackedValues:
    """Plain values, and the tensors to which they refer by number.

    Attributes:
        tensors: contiguous tensors that share no memory.
        values: contain number, shape and strides in place of each tensor.
    """

    tensors: list[Tensor] = field(default_factory=list)
    values: Any = None
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _storages: set[int] = field(default_factory=set)

    def put(self, tensor: Tensor) -> Any:
        """Stores a tensor and returns a reference to it.

        Elements that repeat along a dimension are stored once, as is a tensor that recurs.
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
            # A file cannot store two tensors that share memory.
            shared = storage in self._storages and made.untyped_storage().data_ptr() == storage
            self._storages.add(storage)
            self._numbers[key] = len(self.tensors)
            self.tensors.append(made.clone() if shared else made)
        number = self._numbers[key]
        return {"tensor": number, "size": list(size), "stride": list(stride)}

    def get(self, entry: Any) -> Tensor:
        """Returns a tensor with its original strides, on which a kernel's rounding depends."""
        stored = self.tensors[entry["tensor"]]
        size, stride = tuple(entry["size"]), tuple(entry["stride"])
        made = torch.empty_strided(
            tuple(stored.shape), stride, dtype=stored.dtype, device=stored.device
        )
        made.copy_(stored)
        return made.expand(size)

    @property
    def record(self) -> Tensor:
        """Returns the values as bytes."""
        text = json.dumps(encode(self.values, "what is under way"))
        return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)

    @classmethod
    def of(cls, record: Tensor, tensors: Sequence[Tensor]) -> PackedValues:
        """Parses a `record`; raises CheckpointError if it is invalid."""
        try:
            values = decode(json.loads(bytes(record.tolist()).decode("utf-8")))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                "what was under way cannot be read", why=f"{type(error).__name__}: {error}"
            ) from error
        return cls(list(tensors), values)


def put_all(tensors: Sequence[Tensor | None], put: Put) -> list[Any]:
    """Stores tensors and returns references to them, None for None."""
    return [None if tensor is None else put(tensor) for tensor in tensors]


def get_all(entries: Sequence[Any], get: Get) -> list[Tensor | None]:
    """Returns the tensors of references from `put_all`."""
    return [None if entry is None else get(entry) for entry in entries]
