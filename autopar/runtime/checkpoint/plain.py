"""Reads a checkpoint as the state_dict of the plain model, without processes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.dcp import read_parts
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.safetensors_files import Reader
from autopar.runtime.checkpoint.values import DTYPES


def load_checkpoint(path: str | Path, *, average: bool = False) -> dict[str, Tensor]:
    """Returns a checkpoint's state_dict, for `model.load_state_dict`; executes no code.

    Args:
        path: the folder passed to `save_checkpoint`.
        average: return the averages of the parameters, if the program kept any.

    Returns:
        Whole tensors in host memory; tied names share one.

    Raises:
        CheckpointError: there is none, or it is incomplete, damaged, or without averages.
    """
    folder = Path(path).absolute()
    return publish.reading(lambda: publish.read(folder), lambda i: _state_dict(folder, i, average))


def _state_dict(folder: Path, index: Index, average: bool) -> dict[str, Tensor]:
    """Returns the whole tensors that an index names."""
    means = index.under("ema") if average else {}
    if average and not means:
        raise CheckpointError(
            f"the checkpoint {folder} has no averages",
            todo="train with ema=0.999, or load it without",
        )
    tensors: dict[str, Tensor] = {}

    def wanted() -> list[Part]:
        for name, stored in index.under("model").items():
            tensors[name] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        return [
            Part(f"{'ema' if name in means else 'model'}.{name}", value, Box.whole(shape), shape)
            for name, value in tensors.items()
            for shape in [tuple(value.shape)]
        ]

    read_parts(Reader(folder, index), wanted, None)
    tied = index.details["tied"]
    return {name: tensors[tied.get(name, name)] for name in index.details["names"]}
