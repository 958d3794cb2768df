"""Weights and a batch for an emitted program, from files or drawn at random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.errors import BatchError, ModelFileError
from autopar.operators.interpret import tensor_type
from autopar.runtime.checkpoint.foreign_weights import weights_index
from autopar.runtime.checkpoint.index import Chunk, Stored
from autopar.runtime.checkpoint.tensor_names import Names
from autopar.session.published_names import PublishedNames

_SEED, _SPREAD = 0, 0.02


def weights_from(path: Path, model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """Returns a model's parameters and buffers from a folder of safetensors or a checkpoint.

    Published names of a model of transformers count as its own.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model.
        ModelFileError: a buffer that no file has has no value in the model either.
    """
    named = {k: captured.parameter_names.get(k, k) for k in model.state_dict()}
    tied = {name: stored for name, stored in named.items() if name != stored}
    shapes = {name: tuple(value.shape) for name, value in _stored(model, captured).items()}
    where, index, prefix = weights_index(path, PublishedNames(model))
    stored = index.under("model") if prefix else index.tensors
    matches = Names(tuple(named), tied).match(shapes, stored, str(path), strict=bool(prefix))
    values = _read(where, {name: stored[source] for name, source in matches.items()})
    return {**_buffers(captured, values), **values}


def random_weights(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """Returns weights to time a program with: matrices drawn at random, scales one, biases zero.

    Raises:
        ModelFileError: a buffer has no value.
    """
    draw = torch.Generator().manual_seed(_SEED)
    values = {}
    for name, value in model.named_parameters():
        drawn = torch.zeros(value.shape, dtype=value.dtype)
        if value.dim() > 1:
            drawn = torch.randn(value.shape, generator=draw).mul_(_SPREAD).to(value.dtype)
        elif name.endswith("weight"):
            drawn = torch.ones(value.shape, dtype=value.dtype)
        values[name] = drawn
    return {**_buffers(captured, values), **values}


def batch_from(path: Path, captured: Captured, microbatches: int) -> dict[str, Tensor]:
    """Returns the inputs in a safetensors file.

    Raises:
        BatchError: it cannot be read, or lacks an input, or one has another type.
    """
    try:
        given = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BatchError(
            "the batch cannot be read",
            where=str(path),
            why=str(error),
            todo="write it with safetensors.torch.save_file",
        ) from error
    return _checked(given, captured, microbatches, str(path))


def checked_inputs(
    inputs: Mapping[str, Tensor], captured: Captured, microbatches: int
) -> dict[str, Tensor]:
    """Returns a model's example inputs by name; BatchError if they have no values."""
    given = captured.inputs.flatten((), dict(inputs))
    for name, value in given.items():
        if value.is_meta:
            raise BatchError(
                f"the example input {name!r} has no values",
                why="it is on the meta device",
                todo="return tensors on the CPU beside the model, or pass --batch",
            )
    return _checked(given, captured, microbatches, "the example inputs")


def _checked(
    given: Mapping[str, Tensor], captured: Captured, microbatches: int, where: str
) -> dict[str, Tensor]:
    wanted = {}
    for leaf in captured.graph.leaves("input"):
        if leaf.target in captured.inputs.names:
            rows = tuple(size * microbatches for size in leaf.type.shape[:1])
            wanted[leaf.target] = f"{leaf.type.dtype}{[*rows, *leaf.type.shape[1:]]}"
    found = {name: str(tensor_type(value)) for name, value in given.items()}
    for name in {**wanted, **found}:
        if wanted.get(name) != found.get(name):
            raise BatchError(
                f"the input {name!r} is {found.get(name, 'missing')}",
                where=where,
                why=f"the program takes {wanted.get(name, 'no such input')}",
                todo="pass the inputs that the program names, in these types",
            )
    return dict(given)


def _stored(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """Returns the tensors of a state_dict by the names under which a program stores them."""
    state = model.state_dict()
    return {n: v for n, v in state.items() if captured.parameter_names.get(n, n) == n}


def _buffers(captured: Captured, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the buffers and constants of a program that `values` lack."""
    found = {name: value for name, value in captured.buffers.items() if name not in values}
    lacking = [name for name, value in found.items() if value.is_meta]
    if lacking:
        raise ModelFileError(
            f"the buffer {lacking[0]!r} has no value",
            why="the model is on the meta device, and no method of it sets the buffer",
            todo="pass --weights with a folder that has it",
        )
    return found


def _read(where: Path, wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Returns whole tensors of a folder by name."""
    files: dict[str, list[tuple[str, Chunk]]] = {}
    for name, stored in wanted.items():
        for chunk in stored.chunks:
            files.setdefault(chunk.file, []).append((name, chunk))
    values: dict[str, Tensor] = {}
    for file, parts in files.items():
        with safe_open(where / file, framework="pt") as opened:
            for name, chunk in parts:
                part = opened.get_tensor(chunk.key)
                if name not in values:
                    values[name] = torch.empty(wanted[name].shape, dtype=part.dtype)
                values[name][chunk.box.slices] = part
    return values
